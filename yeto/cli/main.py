"""``yeto``: finds the command and hands the rest of the line to it.

Commands are registered by import path, so that ``yeto --help`` and ``yeto replay`` load neither torch nor
transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from yeto import __version__
from yeto.cli.common import fail, run_app
from yeto.cli.help import COMMON, house_app
from yeto.errors import ConfigError

if TYPE_CHECKING:
    from cyclopts import App

HELP = """Fine-tune models across cheap, unreliable, far-apart GPU machines.

Learners (islands of GPUs) train on their own. A syncer merges what they learned and remembers every \
decision on a tape. It can lose anybody, itself too, without losing the run.

First steps: yeto run --role local --learners 2 --model MODEL --data rows.jsonl

yeto COMMAND --help explains a command, and yeto --version says which version this is. The model comes out \
of a checkpoint with yeto-export, adapters of a diffusers pipeline with yeto-diffusion-export.
"""

SIMULATE_EXAMPLES = """A day of 16 learners on spot machines, each preempted every 6 hours:

    yeto simulate --learners 16 --mean-up-hours 6 --repair-minutes 5

Which quorum, which grace? Each combination with three seeds, as table and
picture:

    yeto simulate --learners 8 --mean-up-hours 6 --duration 6h \\
        --sweep quorum=1,4,8 --sweep grace-ms=0,1000 --seeds 3 --plot sweep.svg

Two of four learners slower and behind a thin link; keep the tape, and read it:

    yeto simulate --learners 4 --learner "count=2,step-seconds=1.5,up-mbps=20" \\
        --total-steps 400 --event-tape sim.jsonl
    yeto replay sim.jsonl

How near do the models come to what was published?

    yeto simulate --published

"""

LAUNCH_EXAMPLES = """The whole way on this machine, a head and two islands as processes; you may
kill any of them:

    yeto launch --gpu local:1xcpu,local:1xcpu --model MODEL \\
        --data rows.jsonl --output result --name trial
    yeto status trial
    yeto logs trial island-0
    yeto down trial

The same on rented machines (pip install 'yeto[fleet]', then sky check). See
first what would be done:

    yeto launch --gpu aws:8xa100@us-east-2,runpod:8xh100 --model gemma4 \\
        --data rows.jsonl --output s3://bucket/run --dry-run

A head or a controller was lost, or the machine was switched off:

    yeto launch --resume trial

The exit code is also 0 when the run was handed over: rented islands, --detach,
and Ctrl-C, which ends the watching and never the run.

"""

SHAPE_EXAMPLES = """The fastest fleet for 60 dollars an hour, from a file of offers:

    yeto shape --model gemma4 --budget 60 --offers offers.csv

The cheapest that brings 5,000 TFLOPS to the model, from SkyPilot's catalogue:

    yeto shape --model Qwen/Qwen3-32B --tuning full --flops 5000 --max-per-offer 2

A file of offers has a line for each machine that can be had. price is dollars
an hour of one machine with count GPUs; quota counts the GPUs that its cloud,
region and gpu may use together (nothing: no limit); score is a placement score
from 1 to 10 (nothing: unknown). One more column, host_memory in GB, may be
there.

    cloud,region,gpu,count,price,spot,quota,score
    aws,us-east-2,a100-80gb,8,12.30,true,32,5

"""


COMMANDS = {
    "Train": {
        "run": ("run:run_command", "Run a syncer, a learner, or all on one machine (--role local)."),
        "launch": (
            "launch:launch_command",
            "Train on a fleet: rented islands through SkyPilot, or islands on this machine.",
        ),
    },
    "See what a run does": {
        "status": (
            "status:status_command",
            "Show what a run is doing: learners, rounds, what is waited for.",
        ),
        "dashboard": ("dashboard:dashboard_command", "Show a run in a browser as it goes on."),
        "report": ("report:report_command", "Show a run as one HTML page that needs no network."),
        "replay": (
            "replay:replay_command",
            "Re-step a tape, verify every decision, and say what happened.",
        ),
        "logs": ("logs:logs_command", "Print what the head or an island of a launched run says."),
        "down": ("down:down_command", "End a launched run and give back every machine."),
    },
    "Choose settings before paying": {
        "simulate": ("simulate:simulate_command", "Run the coordinator itself on a simulated fleet."),
        "shape": (
            "shape:shape_command",
            "Choose the islands to rent: the fastest for a budget, or the cheapest for a speed.",
        ),
    },
    "Files": {
        "data": ("data:data_app", "Prepare rows for training."),
        "checkpoint": ("checkpoint:checkpoint_app", "Look into checkpoints."),
        "keys": ("keys:keys_app", "Make the key that learners authenticate with, and certificates."),
    },
}
"""Every command by heading: where it is, and what the list of commands says of it."""

EXAMPLES = {"simulate": SIMULATE_EXAMPLES, "launch": LAUNCH_EXAMPLES, "shape": SHAPE_EXAMPLES}


def build(called: str | None = None) -> App:
    """Return the app with every command, none of them imported yet.

    Args:
        called: the command on the line. It explains itself by its docstring; the list need not wait for it.
    """
    # Not above: Ctrl-C is answered in a line only once the command line is read.
    from cyclopts import Group

    app = house_app("yeto", help=HELP, version=__version__)
    for place, (heading, commands) in enumerate(COMMANDS.items()):
        group = Group(heading, sort_key=place)
        for order, (name, (function, text)) in enumerate(commands.items()):
            more: dict[str, Any] = {"group": group, "sort_key": order}
            if name in EXAMPLES:
                more["help_epilogue"] = EXAMPLES[name] + COMMON
            if name == "run":
                # The role decides which flags there are, so the role's own app parses (and explains) them.
                more |= {"help_flags": [], "version_flags": []}
            if name != called:
                more["help"] = text
            app.command(f"yeto.cli.{function}", name=name, **more)
    return app


def main(tokens: Sequence[str] | None = None) -> None:
    """Entry point of the ``yeto`` script; exits with the command's code."""
    words = sys.argv[1:] if tokens is None else tokens
    if words[:1] in (["export"], ["diffusion-export"]):
        # A program of its own; the nearest command by its letters would be "report".
        program = f"yeto-{words[0]}"
        sys.exit(fail(ConfigError(f"the command is {program}, in one word (see {program} --help)")))
    # A role reads its own flags, and its own table of the --config file.
    sys.exit(run_app(lambda: build(words[0] if words else None), words, passing_on=("run",)))


if __name__ == "__main__":
    main()
