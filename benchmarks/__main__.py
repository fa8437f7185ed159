"""``python -m benchmarks``: the comparison of ``save_restore.py``, which is what ``make bench`` runs."""

from benchmarks.save_restore import main

if __name__ == "__main__":
    main()
