"""``yeto``: finds the command and hands the rest of the line to it.

Commands are registered by import path, so that ``yeto --help`` and ``yeto replay`` load neither torch nor
transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App

from yeto import __version__
from yeto.cli.common import run_app

HELP = """Fine-tune models across cheap, unreliable, far-apart GPU machines.

Learners (islands of GPUs) train on their own. A syncer merges what they learned and remembers every \
decision on a tape. It can lose anybody, itself too, without losing the run.

First steps: yeto run --role local --learners 2 --model MODEL --data rows.jsonl
"""


def build() -> App:
    """Return the app with every command, none of them imported yet."""
    # The plain formatter loads half as much as the framed one.
    app = App(name="yeto", help=HELP, version=__version__, help_format="plaintext", help_formatter="plain")
    app.command(
        "yeto.cli.run:run_command",
        name="run",
        help="Run a syncer, a learner, or a whole training on this machine (--role local).",
        # The role decides which flags there are, so the role's own app parses (and explains) them.
        help_flags=[],
        version_flags=[],
    )
    app.command(
        "yeto.cli.replay:replay_command",
        name="replay",
        help="Re-step a tape, verify every decision, and say what happened.",
        help_formatter="default",
    )
    app.command("yeto.cli.keys:keys_app", name="keys", help="Make the key that learners authenticate with.")
    return app


def main(tokens: Sequence[str] | None = None) -> None:
    """Entry point of the ``yeto`` script; exits with the command's code."""
    words = sys.argv[1:] if tokens is None else tokens
    # A role reads its own flags, and its own table of the --config file.
    sys.exit(run_app(build, words, passing_on=("run",)))


if __name__ == "__main__":
    main()
