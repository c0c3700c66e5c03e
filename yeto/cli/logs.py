"""``yeto logs``: what the parts of a launched run print."""

from __future__ import annotations

import os
import time
from typing import Annotated

from cyclopts import Parameter

from yeto.errors import ConfigError
from yeto.fleet.launch import island_name
from yeto.fleet.registry import find_run, runs_folder

LOOK_SECONDS = 0.3
"""Between two looks at a log that is followed."""


def logs_command(
    name: Annotated[str, Parameter(help="The run; yeto status lists them.")],
    part: Annotated[
        str, Parameter(help="head, island-0, island-1, ..., or (of a run on this machine) controller.")
    ] = "head",
    /,
    *,
    follow: Annotated[bool, Parameter(help="Go on with what is added until the run is over.")] = True,
) -> int:
    """Print what a part of a launched run says; of a rented one through SkyPilot.

    Ctrl-C ends the looking, never the run.
    """
    run = find_run(runs_folder(os.environ), name)
    launch = run.launch()
    parts = [
        "head",
        *map(island_name, range(len(launch.parsed()))),
        *(["controller"] if launch.is_local else []),
    ]
    if part not in parts:
        raise ConfigError(f"{part}: {name} has no such part; it has {', '.join(parts)}")
    try:
        if launch.is_local:
            from yeto.cli.launch_follow import AddedLines
            from yeto.fleet.detached import present_state

            lines = AddedLines(run.log(part))
            while True:
                over = present_state(run).over
                for line in lines.new():
                    print(line, flush=True)
                if not lines.behind and (over or not follow):
                    return 0
                if not lines.behind:
                    time.sleep(LOOK_SECONDS)
        from yeto.fleet import skypilot

        skypilot.do(skypilot.logs_words(name, part, follow=follow))
    except KeyboardInterrupt:
        pass  # whoever follows a log ends it so
    return 0
