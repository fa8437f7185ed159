"""``python -m ckptstore`` is the command ``ckptstore``, of just this Python."""

import sys

from ckptstore.cli import main

if __name__ == "__main__":
    sys.exit(main())
