#!/usr/bin/env python3
"""Record the tapes in fixtures/tapes, each with the coordinator's state at its end.

A recorded tape is a promise to open for ever: a new version of the format or of the rules gets new files, and
an existing one is never overwritten. ``two-learners`` is the real coordinator in the obedient world of
tests/harness, so it comes out the same each time. All the others are real syncer processes with fake learners
on real sockets; see tests/harness/recorded_faults.py for what happens in each.

Usage: python tools/record_tape.py [NAME ...] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import trio

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "harness"))

from recorded_faults import STORIES  # noqa: E402 - needs the path above
from recorded_run import record_with_restart  # noqa: E402

from yeto.tape import FORMAT_VERSION, replay, state_to_json  # noqa: E402

NAMES = ("two-learners", *STORIES)


def record(name: str, output: Path) -> None:
    """Record one tape and verify it before it gets its name."""
    with tempfile.TemporaryDirectory() as folder:
        if name in STORIES:
            tape = trio.run(STORIES[name], Path(folder))
        else:
            tape = Path(folder) / "events.jsonl"
            record_with_restart(tape)
        result = replay(tape)
        if result.divergence is not None:
            raise SystemExit(f"{name}: {result.divergence}")
        state = json.dumps(state_to_json(result.state), indent=2)
        output.with_suffix(".state.json").write_text(state + "\n", encoding="ascii")
        shutil.copyfile(tape, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "fixtures" / "tapes")
    words = parser.parse_args()
    for name in words.names:
        if name not in NAMES:
            raise SystemExit(f"{name}: there is no such story; record one of {', '.join(NAMES)}")
    outputs = {name: words.folder / f"{name}-v{FORMAT_VERSION}.jsonl" for name in words.names or NAMES}
    for output in outputs.values():
        if output.exists():
            raise SystemExit(f"{output} exists; a recorded tape is never overwritten, name another folder")
    words.folder.mkdir(parents=True, exist_ok=True)
    for name, output in outputs.items():
        record(name, output)
        print(output)


if __name__ == "__main__":
    main()
