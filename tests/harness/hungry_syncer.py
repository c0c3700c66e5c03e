"""A syncer process with few file descriptors, which SIGUSR1 takes all of and SIGUSR2 gives back.

Usage: python tests/harness/hungry_syncer.py LIMIT FLAGS; FLAGS as of ``syncer_child.py``.
"""

import os
import resource
import signal
import sys

from syncer_child import main

HELD = []


def take_all(*_):
    try:
        while True:
            HELD.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        print(f"took {len(HELD)} descriptors", file=sys.stderr, flush=True)


def give_back(*_):
    while HELD:
        os.close(HELD.pop())
    print("gave all descriptors back", file=sys.stderr, flush=True)


if __name__ == "__main__":
    limit = int(sys.argv.pop(1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    signal.signal(signal.SIGUSR1, take_all)
    signal.signal(signal.SIGUSR2, give_back)
    main()
