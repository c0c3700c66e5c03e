"""A process that has loaded everything once, and forks learners and ranks of islands from what it has loaded.

A process that starts from nothing spends seconds on imports, and these tests need many. Reads one JSON object
a line. ``{"load": [module, …]}`` imports what not every test needs, and answers ``{"loaded": N}``.
``{"call": "module:function", "args": […], "env": {…}, "output": FILE}`` answers ``{"started": PID}``, and
``{"ended": PID, "code": N}`` follows when that process is gone (minus the signal if one ended it). Ends with
its input, and takes what still runs with it.
"""

import importlib
import json
import os
import select
import signal
import sys

PRELOADED = ("learner_fakes", "yeto.learner.app")


def main():
    load(PRELOADED)
    say(ready=True)
    children = set()
    pending = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            read = os.read(0, 65536)
            if not read:
                break
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                job = json.loads(line)
                if "load" in job:
                    load(job["load"])
                    say(loaded=len(job["load"]))
                else:
                    children.add(start(job))
        for child in tuple(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                children.discard(pid)
                say(ended=pid, code=os.waitstatus_to_exitcode(status))
    for child in children:
        os.kill(child, signal.SIGKILL)


def load(names):
    for name in names:
        importlib.import_module(name)


def start(job):
    pid = os.fork()
    if pid:
        say(started=pid)
        return pid
    with open(job["output"], "ab", 0) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(job["env"])
    module, function = job["call"].split(":")
    code = 1
    try:
        code = getattr(importlib.import_module(module), function)(*job["args"])
    except SystemExit as error:
        code = error.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def say(**what):
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
