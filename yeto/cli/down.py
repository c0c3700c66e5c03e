"""``yeto down``: a launched run ends, and nothing of it stays behind."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import Parameter

from yeto.errors import YetoError
from yeto.fleet.registry import Run, find_run, forget, runs_folder


def down_command(
    name: Annotated[str, Parameter(help="The run; yeto status lists them.")],
    /,
    *,
    forget_: Annotated[
        bool,
        Parameter(
            name="--forget",
            negative=(),
            help="Remove its folder, too: of a run on this machine with checkpoint and tape. Not the result.",
        ),
    ] = False,
) -> int:
    """End everything of a launched run: its processes here, or its machines and jobs at SkyPilot.

    In order where that is possible, so that yeto launch --resume NAME can go on. Works after a failure and on
    a run whose launch or controller died, as often as you like. What could not be ended is listed; the exit
    code is 1 then.
    """
    run = find_run(runs_folder(os.environ), name)
    left = _left_of(run)
    if left:
        raise YetoError(f"{name}: left over: {'; '.join(left)}; run yeto down {name} again")
    print(f"{name}: nothing of it runs any more")
    if forget_:
        forget(run)
        print(f"{name}: forgotten; {run.folder} is removed")
    return 0


def _left_of(run: Run) -> list[str]:
    launch = run.launch()
    if launch.is_local:
        from yeto.fleet.detached import end

        return [f"process {process.pid} ({process.name})" for process in end(run, _say)]
    from yeto.fleet.skypilot import tear_down

    left = tear_down(run, _say)
    if not left:
        run.torn_down()
    return left


def _say(line: str) -> None:
    print(line, flush=True)
