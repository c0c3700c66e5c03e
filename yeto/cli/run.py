"""``yeto run --role syncer | learner | local``: each role is its own set of flags."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated, Any

from cyclopts import App, Parameter

from yeto.cli.common import run_app, take_flag
from yeto.cli.help import house_app, print_page
from yeto.cli.preset import fill_from_preset
from yeto.errors import ConfigError
from yeto.learner.ranks import LAUNCHED

ROLES: dict[str, tuple[str, str, str]] = {
    "local": (
        "yeto.cli.run_local",
        "run_local_command",
        "A whole training on this machine: a syncer and N learners as child processes, then the export.",
    ),
    "syncer": (
        "yeto.cli.run_syncer",
        "run_syncer_command",
        "The syncer: pulls fragments from the learners, merges, commits, checkpoints, broadcasts.",
    ),
    "supervisor": (
        "yeto.cli.run_supervisor",
        "run_supervisor_command",
        "A syncer through both phases of a learner budget, verified, with the final marker as its proof.",
    ),
    "learner": (
        "yeto.cli.run_learner",
        "run_learner_command",
        "One island's learner: trains on its own data and exchanges fragments with the syncer.",
    ),
}


def run_command(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
) -> int:
    """Run one role; ``yeto run --role ROLE --help`` lists its flags."""
    words, role = take_flag(tokens, "--role")
    if role is None:
        if not words or {"--help", "-h"} & set(words):
            print_page(
                "yeto run --role ROLE [FLAGS]",
                "Run a part of a training, or all of it. yeto run --role ROLE --help lists a role's flags.",
                "Roles",
                [(f"--role {name}", text) for name, (_, _, text) in ROLES.items()],
            )
            return 0
        raise ConfigError(f"say which part to run with --role {' | '.join(ROLES)}")
    if role not in ROLES:
        raise ConfigError(f"--role {role}: must be one of {', '.join(ROLES)}")
    if role != "learner" and LAUNCHED in os.environ:
        raise ConfigError(f"--role {role} is one process; torchrun is for --role learner")
    return run_app(lambda: _role_app(role), words, table=role, below=(fill_from_preset,))


def _role_app(role: str) -> App:
    module, function, _ = ROLES[role]
    command: Any = getattr(import_module(module), function)
    app = house_app(f"yeto run --role {role}", version_flags=[])
    app.default(command)
    return app
