"""``python -m fleet_stand_in head|island [HOW...]``: a head or an island that trains nothing.

What a controller does with its children does not depend on what they do; these are there in no time. HOW is
nothing (it stays until SIGTERM), ``ends CODE SECONDS``, or ``deaf`` (to SIGTERM). ``controller RUN`` is a
controller with such children.
"""

import json
import signal
import sys
import time
from pathlib import Path


def be(part, *how):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4 if part == "head" else 0))
    if part == "head":
        # As a syncer does: only once it is there.
        Path("ready.new").write_text(json.dumps({"host": "127.0.0.1", "port": 29400, "pid": 1}))
        Path("ready.new").replace("ready.json")
    print(f"{part} is up", flush=True)
    if how[:1] == ("ends",):
        time.sleep(float(how[2]))
        print(f"yeto: {part} says why", file=sys.stderr, flush=True)
        sys.exit(int(how[1]))
    if how[:1] == ("deaf",):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def control(folder):
    from yeto.fleet import controller

    controller.head_command = lambda *_: ["fleet_stand_in", "head"]
    controller.island_command = lambda *_: ["fleet_stand_in", "island"]
    sys.exit(controller.main([folder]))


if __name__ == "__main__":
    control(*sys.argv[2:]) if sys.argv[1] == "controller" else be(*sys.argv[1:])
