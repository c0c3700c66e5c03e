"""``python -m crashing``. Small: every process that is hit reads it once more."""

import sys

if __name__ == "__main__":
    from crashing.campaign import main

    sys.exit(main())
