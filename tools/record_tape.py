#!/usr/bin/env python3
"""Record fixtures/tapes/two-learners-v1.jsonl: a small run of two learners with one restart of the syncer.

The coordinator is the real one; the world around it is the obedient one of tests/harness, so the tape comes
out the same each time. A recorded tape is a promise to open for ever: a new format version gets a new file,
and an existing one is never overwritten.

Usage: python tools/record_tape.py [OUTPUT]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "harness"))

from recorded_run import record_with_restart  # noqa: E402 - needs the path above


def main() -> None:
    default = ROOT / "fixtures" / "tapes" / "two-learners-v1.jsonl"
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    if output.exists():
        raise SystemExit(f"{output} exists; a recorded tape is never overwritten, name another file")
    output.parent.mkdir(parents=True, exist_ok=True)
    record_with_restart(output)
    output.with_name(output.name + ".lock").unlink(missing_ok=True)
    print(output)


if __name__ == "__main__":
    main()
