"""``yeto launch``: a fleet from one line, on rented machines or on this one, watched until it is done.

What is needed to find everything again is in the registry before anything is started or rented.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from yeto.cli.launch_flags import LaunchFlags, LearnerPart, SyncerPart, make_launch
from yeto.errors import ConfigError
from yeto.fleet.grammar import join_islands
from yeto.fleet.launch import Launch
from yeto.fleet.registry import Run, create_run, find_run, runs_folder

NO_PLAN = 1
"""Exit code when no plan keeps the budget."""


def launch_command(
    *,
    flags: LaunchFlags = LaunchFlags(),  # noqa: B008 - frozen
    syncer: Annotated[SyncerPart, Parameter(name="*")] = SyncerPart(),  # noqa: B008 - frozen
    learner: Annotated[LearnerPart, Parameter(name="*")] = LearnerPart(),  # noqa: B008 - frozen
) -> int:
    """Train on islands: rent them through SkyPilot, or start them here (local:), and export the result.

    The head (a small machine with the syncer) and every island are started on their own, and come back on
    their own. Ctrl-C ends the watching, never the run.
    """
    if flags.resume is not None:
        return _resume(flags, flags.resume)
    if flags.budget is not None:
        planned = _plan(flags, learner)
        if planned is None:
            return NO_PLAN
        flags, learner = planned
        if not flags.confirm:
            print("nothing is rented yet; to launch this plan, give the same command with --confirm")
            return 0
    elif flags.confirm:
        raise ConfigError("--confirm goes with --budget; what --gpu names is launched without it")
    launch = make_launch(flags, syncer, learner)
    if flags.dry_run:
        return _dry_run(launch)
    if not launch.is_local:
        from yeto.fleet.skypilot import sky_program

        # Before a name is taken.
        sky_program()
    run = create_run(runs_folder(os.environ), launch, secrets.token_hex(32) + "\n")
    print(f"{launch.name}: {launch.islands}, {_steps(launch)}; everything is in {run.folder}", flush=True)
    return _start(run, launch, detach=flags.detach)


def _plan(flags: LaunchFlags, learner: Any) -> tuple[LaunchFlags, Any] | None:
    """Print the best plan for the budget; return the flags that launch it, or None if there is no plan."""
    from yeto.cli.shape import LimitFlags, TrainingFlags, find_plan
    from yeto.cli.shape_print import print_answer

    if flags.gpu is not None:
        raise ConfigError("--gpu and --budget: give one of them")
    if flags.model is None:
        raise ConfigError("--model is missing (see yeto launch --help)")
    if learner.task != "text":
        raise ConfigError("--budget plans for --task text only; name the islands with --gpu")
    rows = 1 if learner.micro_batch_size == "auto" else learner.micro_batch_size
    training = TrainingFlags(
        model=flags.model,
        weights_gb=flags.weights_gb,
        tuning=learner.tuning,
        lora_r=learner.lora_r,
        seq_len=learner.seq_len,
        micro_batch_size=rows,
    )
    answer, wanted, limits = find_plan(training, LimitFlags(budget=flags.budget), flags.offers)
    print_answer(answer, wanted, limits, None)
    if answer.plan is None:
        print(f"yeto: no plan: {answer.why_none}", file=sys.stderr)
        return None
    islands = answer.plan.islands
    # The plan's memory is that of weights which the accelerators of an island share.
    shared = "fsdp" if any(island.ranks > 1 for island in islands) else learner.shard
    numbers = ",".join(map(str, answer.plan.on_demand)) or None
    return (
        attrs.evolve(flags, gpu=join_islands(islands), on_demand=numbers),
        attrs.evolve(learner, shard=shared, micro_batch_size=rows),
    )


def _steps(launch: Launch) -> str:
    return f"{launch.syncer_words[0].partition('=')[2]} global steps"


def _start(run: Run, launch: Launch, *, detach: bool) -> int:
    if launch.is_local:
        from yeto.cli.launch_follow import follow
        from yeto.fleet.detached import start_controller

        log = run.controller_log
        since = log.stat().st_size if log.exists() else 0
        start_controller(run)
        if detach:
            print(come_back(run.name))
            return 0
        return follow(run, since=since)
    from yeto.fleet.registry import FAILED, RUNNING
    from yeto.fleet.skypilot import launch_all
    from yeto.fleet.tasks import installed_software, make_tasks, wanted_extras

    tasks = make_tasks(launch, run, installed_software(wanted_extras(launch)), os.environ)
    run.tasks.mkdir(exist_ok=True)
    for task in tasks:
        (run.tasks / f"{task.name}.yaml").write_text(task.text, encoding="utf-8")
    try:
        launch_all(run, tasks, lambda line: print(line, flush=True))
    except BaseException as error:
        # Ctrl-C, too: what was rented so far costs money and is known by name.
        run.change(
            phase=FAILED, why=f"the launch was not finished: {error or type(error).__name__}", exit_code=1
        )
        print(
            f"yeto: the launch of {run.name} was not finished; yeto launch --resume {run.name} goes on, "
            f"yeto down {run.name} gives back what was rented",
            file=sys.stderr,
        )
        raise
    run.change(phase=RUNNING, why="the head and every island were handed to SkyPilot", exit_code=None)
    print(f"the result will be in {launch.output}\n{come_back(run.name)}")
    return 0


def _resume(flags: LaunchFlags, name: str) -> int:
    given = [
        f"--{field.name.replace('_', '-')}"
        for field in attrs.fields(LaunchFlags)
        if field.name not in ("resume", "detach") and getattr(flags, field.name) != field.default
    ]
    if given:
        raise ConfigError(
            f"--resume {name} goes on with the run as it was launched; leave out {', '.join(given)}"
        )
    from yeto.fleet.detached import present_state
    from yeto.fleet.registry import DONE

    run = find_run(runs_folder(os.environ), name)
    launch = run.launch()
    state = present_state(run) if launch.is_local else run.state()
    if state.phase == DONE:
        raise ConfigError(f"--resume {name}: the run is over: {state.why}")
    return _start(run, launch, detach=flags.detach)


def come_back(name: str) -> str:
    """Return how to see a run again."""
    return f"yeto status {name}   yeto logs {name}   yeto down {name}"


def _dry_run(launch: Launch) -> int:
    from yeto.fleet.commands import HERE, head_command, island_command
    from yeto.fleet.launch import island_name

    islands = range(len(launch.parsed()))
    if launch.is_local:
        print("# each in a folder of its own; islands as soon as the head is ready")
        for words in (head_command(launch, HERE), *(island_command(launch, i, HERE) for i in islands)):
            print(shlex.join(["python", "-m", *words]))
        return 0
    from yeto.fleet import skypilot
    from yeto.fleet.tasks import installed_software, make_tasks, wanted_extras

    # Written as the launch would, but for the folder: the name is not taken.
    run = Run(folder=runs_folder(os.environ) / launch.name)
    tasks = make_tasks(launch, run, installed_software(wanted_extras(launch)), os.environ)
    folder = Path(f"{launch.name}-tasks")
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"--dry-run: cannot make the folder {folder}: {error.strerror}") from error
    paths = [folder / f"{task.name}.yaml" for task in tasks]
    for task, path in zip(tasks, paths, strict=True):
        path.write_text(task.text, encoding="utf-8")
    print(f"# a key is made at the launch and lies in {run.key}")
    print(shlex.join(["sky", *skypilot.launch_head_words(launch.name, tasks[0], paths[0])]))
    print(
        shlex.join(["sky", *skypilot.endpoint_words(launch.name)])
        + "   # HOST:PORT of the head, for the islands"
    )
    for number in islands:
        words = skypilot.launch_island_words(launch.name, tasks[number + 1], paths[number + 1], "HOST:PORT")
        print(shlex.join(["sky", *words]) + f"   # {island_name(number)}: {launch.parsed()[number]}")
    return 0
