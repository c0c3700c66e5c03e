"""A syncer process with the bounds of tests: what the command line starts, only sooner out of patience.

Usage: python tests/harness/syncer_child.py FLAGS, where FLAGS is a JSON object of the syncer's flags as their
fields are called.
"""

import json
import logging
import sys
from pathlib import Path

import attrs

from yeto.cli.run_syncer import SyncerFlags
from yeto.syncer.app import run_syncer
from yeto.syncer.config import Bounds

BOUNDS = Bounds(handshake_seconds=5.0, manifest_seconds=0.5, farewell_seconds=1.0, progress_seconds=0.2)
PATHS = ("ready_file", "checkpoint_path", "event_tape")


def main():
    flags = json.loads(sys.argv[1])
    flags |= {name: Path(flags[name]) for name in PATHS}
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)-7s %(message)s")
    sys.exit(run_syncer(attrs.evolve(SyncerFlags(**flags).config(), bounds=BOUNDS)))


if __name__ == "__main__":
    main()
