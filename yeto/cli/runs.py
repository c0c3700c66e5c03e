"""Launched runs, as ``yeto status`` shows them: all in a table, or one in its own words."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import attrs

from yeto.errors import ConfigError, YetoError
from yeto.fleet.launch import check_name
from yeto.fleet.registry import Run, RunState, all_runs, runs_folder

SSH_SECONDS = 60.0
"""Longest time for an answer of a rented head."""


def run_named(source: str) -> Run | None:
    """Return the launched run that a word of ``yeto status`` names; None when it is a tape.

    Raises:
        ConfigError: it looks like the name of a run, and there is neither such a run nor such a tape.
    """
    if Path(source).exists():
        return None
    try:
        run = Run(folder=runs_folder(os.environ) / check_name(source))
    except ConfigError:
        return None
    if not run.folder.is_dir():
        raise ConfigError(
            f"{source}: neither a run (yeto status lists those in {run.folder.parent}) nor a tape; "
            f"of a tape that is not there yet write ./{source}"
        )
    return run


def present(run: Run) -> RunState:
    """Return how far a run is, as far as this machine knows."""
    from yeto.fleet.detached import present_state

    return present_state(run) if run.launch().is_local else run.state()


def print_runs(*, as_json: bool) -> int:
    """Print every run of the registry; return the exit code."""
    folder = runs_folder(os.environ)
    rows = []
    for run in all_runs(folder):
        try:
            launch, state = run.launch(), present(run)
            rows.append((run.name, state.phase, launch.islands, state.changed, state.why))
        except YetoError as error:
            # One that cannot be read hides no other.
            rows.append((run.name, "unreadable", "", "", str(error)))
    keys = ("name", "phase", "islands", "changed", "why")
    if as_json:
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=1))
        return 0
    if not rows:
        print(f"no runs in {folder}, and no events.jsonl here; yeto launch --help says how to begin one")
        return 0
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"runs in {folder}", title_justify="left")
    for key in keys:
        table.add_column(key, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
    return 0


def print_rented(run: Run, *, as_json: bool) -> int:
    """Print what SkyPilot and the head say of a rented run; return the exit code."""
    from yeto.fleet import skypilot

    state = run.state()
    clusters, jobs = skypilot.clusters(run.name), skypilot.live_jobs(run.name)
    if as_json:
        fields = attrs.asdict(state) | {"name": run.name, "clusters": clusters, "jobs": jobs}
        print(json.dumps(fields, indent=1))
        return 0
    print(f"{run.name}: {state.phase}: {state.why}")
    for entry in state.rented:
        if entry.cluster is not None:
            status = clusters.get(entry.cluster, "gone")
            print(f"{entry.name}: cluster {entry.cluster}: {status}, {entry.address or 'no address yet'}")
        elif entry.job is not None:
            print(f"{entry.name}: job {entry.job}: {jobs.get(entry.job, 'not live any more')}")
    if clusters:
        print(_said_by_head(run))
    return 0


def _said_by_head(run: Run) -> str:
    """Return what ``yeto status`` says on the head's machine, or why nothing is heard."""
    from yeto.fleet.skypilot import head_cluster
    from yeto.fleet.tasks import on_head
    from yeto.tape import printable

    # SkyPilot keeps the names of its clusters in the configuration of ssh.
    words = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", head_cluster(run.name)]
    asked = on_head(["yeto", "status", "events.jsonl", "--once"])
    try:
        done = subprocess.run(
            [*words, asked], stdin=subprocess.DEVNULL, capture_output=True, timeout=SSH_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the head does not answer: {error}"
    if done.returncode != 0:
        why = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return f"the head does not answer: {printable(' '.join(why)) or shlex.join(words)}"
    return "\n".join(printable(line) for line in done.stdout.decode("utf-8", "replace").splitlines())
