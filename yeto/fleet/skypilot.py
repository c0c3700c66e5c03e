"""SkyPilot, by its own commands: launch, look, cancel, tear down.

Its command line is what its manual describes and what a person would type, so a dry run can print exactly
what a launch does. It is looked for when it is needed only: planning, and runs on this machine, do without.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from yeto.errors import ConfigError, YetoError
from yeto.fleet.commands import PORT
from yeto.fleet.registry import Rented, Run
from yeto.fleet.tasks import ADDRESS_VARIABLE, Task

ASK_SECONDS: Final = 300.0
"""Longest time that a question may take; launching and tearing down have none."""
ANSWER_BYTES_MAX: Final = 64 << 20
"""Of an answer in JSON."""

CANCELLING: Final = "CANCELLING"
LIVE_JOBS: Final = frozenset(
    ("PENDING", "SUBMITTED", "STARTING", "RUNNING", "WINDING_DOWN", "RECOVERING", CANCELLING)
)
"""Statuses of a managed job that has, or will have, machines."""
JOB_NOT_FINISHED: Final = 101
"""Exit code of ``sky logs --status`` for a job that is waiting or running."""

_ADDRESS = re.compile(r"(?:https?://)?(?P<address>(?:\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):\d{1,5})/?")


def head_cluster(name: str) -> str:
    """Return the name of the head's cluster."""
    return f"{name}-head"


def job_name(name: str, island: str) -> str:
    """Return the name of an island's managed job."""
    return f"{name}-{island}"


def launch_head_words(name: str, task: Task, path: Path | str) -> list[str]:
    """Return the words after ``sky`` that rent the head and start it."""
    words = ["launch", "--cluster", head_cluster(name), "--yes", "--detach-run"]
    return [*words, *_secrets(task), str(path)]


def endpoint_words(name: str) -> list[str]:
    """Return the words after ``sky`` that tell where the head can be reached."""
    return ["status", head_cluster(name), "--endpoint", str(PORT)]


def launch_island_words(name: str, task: Task, path: Path | str, address: str) -> list[str]:
    """Return the words after ``sky`` that hand an island to SkyPilot's managed jobs."""
    words = ["jobs", "launch", "--name", job_name(name, task.name), "--yes", "--detach-run"]
    return [*words, "--env", f"{ADDRESS_VARIABLE}={address}", *_secrets(task), str(path)]


def logs_words(name: str, part: str, *, follow: bool) -> list[str]:
    """Return the words after ``sky`` that print what ``head`` or ``island-N`` says."""
    which = (
        ["logs", head_cluster(name)] if part == "head" else ["jobs", "logs", "--name", job_name(name, part)]
    )
    return [*which, "--follow" if follow else "--no-follow"]


def _secrets(task: Task) -> list[str]:
    # The name alone: the value is taken from the environment, and never seen in a list of processes.
    return [word for name in task.secrets for word in ("--secret", name)]


def sky_program() -> str:
    """Return the program ``sky``.

    Raises:
        ConfigError: it is not installed.
    """
    # In the environment of this Python also when that is not activated.
    found = shutil.which("sky") or shutil.which("sky", path=str(Path(sys.executable).parent))
    if found is None:
        raise ConfigError(
            "--gpu: rented islands need SkyPilot, which is not installed: pip install 'yeto[fleet]'"
        )
    return found


def do(words: Sequence[str]) -> None:
    """Run a command of SkyPilot, with its output on the terminal.

    Raises:
        YetoError: it failed.
    """
    program = sky_program()
    code = subprocess.run([program, *words], stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise YetoError(f"sky {shlex.join(words)} failed ({code}); what it said stands above")


def ask(words: Sequence[str]) -> str:
    """Run a command of SkyPilot; return what it printed.

    Raises:
        YetoError: it failed, or did not answer.
    """
    done = _asked(words)
    if done.returncode != 0 or len(done.stdout) > ANSWER_BYTES_MAX:
        said = done.stderr.decode("utf-8", "replace").split("\n")
        why = next((line for line in reversed(said) if line.strip()), f"exit code {done.returncode}")
        raise YetoError(f"sky {shlex.join(words)} failed: {why}")
    return done.stdout.decode("utf-8", "replace")


def head_is_working(name: str) -> bool:
    """Return whether the head's job is waiting or running.

    Raises:
        YetoError: SkyPilot does not answer.
    """
    return _asked(["logs", head_cluster(name), "--status"]).returncode == JOB_NOT_FINISHED


def _asked(words: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            [sky_program(), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise YetoError(f"sky {shlex.join(words)} did not answer for {ASK_SECONDS:.0f} s") from None


def head_address(name: str) -> str:
    """Return ``HOST:PORT`` of the head.

    Raises:
        YetoError: SkyPilot does not know it, or says no address.
    """
    said = ask(endpoint_words(name)).strip()
    line = said.splitlines()[-1].strip() if said else ""
    match = _ADDRESS.fullmatch(line)
    if match is None:
        raise YetoError(f"sky {shlex.join(endpoint_words(name))} said no address but {line[:200]!r}")
    return match["address"]


def live_jobs(name: str) -> dict[str, str]:
    """Return the status of every managed job of a run that has, or will have, machines.

    Raises:
        YetoError: SkyPilot does not answer, or in another form.
    """
    jobs = _answer(["jobs", "queue", "--all", "--output", "json"], ("job_name", "status"))
    live: dict[str, str] = {}
    for job, status in jobs:
        # One that is on its way out has its name still, beside the one that took its place.
        is_new = live.get(job, CANCELLING) == CANCELLING
        if job.startswith(f"{name}-island-") and status in LIVE_JOBS and is_new:
            live[job] = status
    return live


def clusters(name: str) -> dict[str, str]:
    """Return the status of every cluster of a run.

    Raises:
        YetoError: SkyPilot does not answer, or in another form.
    """
    words = ["status", "--refresh", "--output", "json"]
    return {
        cluster: status
        for cluster, status in _answer(words, ("name", "status"))
        if cluster == head_cluster(name)
    }


def _answer(words: list[str], keys: tuple[str, str]) -> list[tuple[str, str]]:
    text = ask(words)
    try:
        # What it says of its own work goes before.
        rows: Any = json.loads(text[text.index("[") :])
        return [(str(row[keys[0]] or ""), str(row[keys[1]]).rpartition(".")[2]) for row in rows]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise YetoError(
            f"sky {shlex.join(words)} answered in an unknown form ({type(error).__name__}: {error}); "
            "Yeto knows SkyPilot 0.14"
        ) from error


def launch_all(run: Run, tasks: Sequence[Task], say: Callable[[str], None]) -> None:
    """Rent the head and then every island that is not there; what is there is left alone.

    What was asked for is in the registry before it is asked for.

    Raises:
        YetoError: SkyPilot failed; what was rented before is still there.
    """
    head, *islands = tasks
    name = run.name
    rented = {entry.name: entry for entry in run.state().rented}

    def note(entry: Rented) -> None:
        rented[entry.name] = entry
        run.change(rented=tuple(rented.values()))

    before = rented.get(head.name)
    note(before or Rented(name=head.name, cluster=head_cluster(name)))
    if before is not None and head_is_working(name):
        say("the head is there and works")
    else:
        do(launch_head_words(name, head, run.tasks / f"{head.name}.yaml"))
    address = head_address(name)
    note(Rented(name=head.name, cluster=head_cluster(name), address=address))
    say(f"the head is at {address}")
    there = live_jobs(name) if before is not None else {}
    for task in islands:
        job = job_name(name, task.name)
        known = rented.get(task.name)
        # One that is on its way out leaves its place to another.
        if job in there and there[job] != CANCELLING:
            if known is not None and known.address == address:
                say(f"{task.name} is there ({there[job]})")
                continue
            # It dials the head that was, at an address that was given to its task.
            do(["jobs", "cancel", "--name", job, "--yes"])
        note(Rented(name=task.name, job=job, address=address))
        do(launch_island_words(name, task, run.tasks / f"{task.name}.yaml", address))


def tear_down(run: Run, say: Callable[[str], None]) -> list[str]:
    """Cancel every island's job and give the head's machine back; return what is left, in words.

    Everything is tried, whatever fails.

    Raises:
        YetoError: SkyPilot cannot say what is left.
    """
    failures = []
    commands = [
        ["jobs", "cancel", "--name", entry.job, "--yes"]
        for entry in run.state().rented
        if entry.job is not None
    ]
    commands += [
        ["down", "--yes", entry.cluster] for entry in run.state().rented if entry.cluster is not None
    ]
    for words in commands:
        say(f"sky {shlex.join(words)}")
        try:
            do(words)
        except YetoError as error:
            failures.append(error)
    left = [f"job {job} ({status})" for job, status in live_jobs(run.name).items() if status != CANCELLING]
    left += [f"cluster {cluster} ({status})" for cluster, status in clusters(run.name).items()]
    for failure in failures if left else ():
        say(str(failure))
    return left
