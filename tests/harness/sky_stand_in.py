"""A program ``sky`` that rents nothing: it writes down what it is asked, and knows its clusters and jobs.

SkyPilot itself needs an account at a cloud. That its command line takes these words, and its parser these
tasks, is shown by tools/check-sky; here it is about what is done with its answers.
"""

import json
import os
import sys
from pathlib import Path

PROGRAM = """#!{python}
import sys
sys.path.insert(0, {harness!r})
from sky_stand_in import be
be({folder!r})
"""


class Sky:
    """The program in a folder, and what it did."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.know()
        program = folder / "sky"
        program.write_text(
            PROGRAM.format(python=sys.executable, harness=str(Path(__file__).parent), folder=str(folder))
        )
        program.chmod(0o755)

    def know(self, *, clusters=None, jobs=None, address="192.0.2.1:29400", failing=(), stubborn=(), head=101):
        """Say what it answers: what there is, which commands fail, what does not go away."""
        value = {"clusters": clusters or {}, "jobs": jobs or {}, "address": address, "head": head}
        value |= {"failing": list(failing), "stubborn": list(stubborn)}
        (self.folder / "known.json").write_text(json.dumps(value))

    def change(self, **changes):
        path = self.folder / "known.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    @property
    def known(self):
        return json.loads((self.folder / "known.json").read_text())

    def asked(self):
        """Return what it was asked since the last time."""
        path = self.folder / "asked.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


def value_of(words, flag):
    return words[words.index(flag) + 1]


def answer(words, known):
    """Do what the words ask for; return what is printed."""
    what = " ".join(words[:2]) if words[0] == "jobs" else words[0]
    match what:
        case "launch":
            known["clusters"][value_of(words, "--cluster")] = "UP"
        case "jobs launch":
            known["jobs"][value_of(words, "--name")] = "STARTING"
        case "jobs cancel":
            name = value_of(words, "--name")
            if name not in known["stubborn"]:
                known["jobs"].pop(name, None)
        case "down":
            if words[-1] not in known["stubborn"]:
                known["clusters"].pop(words[-1], None)
        case "status" if "--endpoint" in words:
            return known["address"]
        case "status":
            return json.dumps(
                [{"name": name, "status": status} for name, status in known["clusters"].items()]
            )
        case "jobs queue":
            return "asking...\n" + json.dumps(
                [
                    {"job_name": name, "status": status, "job_id": number}
                    for name, statuses in known["jobs"].items()
                    # Several jobs may have one name.
                    for number, status in enumerate([statuses] if isinstance(statuses, str) else statuses)
                ]
            )
        case "logs" if "--status" in words:
            sys.exit(known["head"])
        case "logs" | "jobs logs":
            return "said by " + (words[1] if what == "logs" else value_of(words, "--name"))
    return ""


def be(folder):
    """Answer one command line."""
    here, words = Path(folder), sys.argv[1:]
    with (here / "asked.jsonl").open("a") as asked:
        asked.write(json.dumps({"words": words, "token": os.environ.get("HF_TOKEN")}) + "\n")
    known = json.loads((here / "known.json").read_text())
    if any(" ".join(words).startswith(failing) for failing in known["failing"]):
        sys.exit("sky: the cloud says no")
    print(answer(words, known))
    (here / "known.json").write_text(json.dumps(known))
