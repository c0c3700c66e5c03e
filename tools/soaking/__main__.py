"""``python -m soaking``. Small: every learner's process reads it once more."""

import sys

if __name__ == "__main__":
    from soaking.run import main

    sys.exit(main())
