"""``python -m ckptstore.cli``: the command where its script is not on the path."""

import sys

from ckptstore.cli import main

sys.exit(main())
