#!/usr/bin/env python3
"""Does it train as well as one synchronous group? See docs/LM_BENCHMARK.md, and --help for what there is."""

import sys

if __name__ == "__main__":
    from comparing.command import main

    sys.exit(main())
