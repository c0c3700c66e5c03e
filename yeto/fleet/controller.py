"""``python -m yeto.fleet.controller RUN``: keeps the head and the islands of a run on this machine alive.

It is to such a run what SkyPilot is to a rented one, and like that it trains nothing and decides nothing
about the training. What dies by accident is started again with the words it had: an island rejoins with the
same id, a head goes on from its files at the same port. What says that it cannot go on is not. The run
lasts as long as the islands that are left make a quorum.

It belongs to no terminal, so everything it knows is in the registry: how far the run is, and which processes
there are. SIGTERM ends the run in order: the head first, so that it writes a checkpoint, then the islands.
When it is killed itself, the kernel tells its children (on Linux), which end in order, too.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import trio
from attrs import evolve

from yeto.errors import EXIT_STOPPED, ConfigError, YetoError, first_of
from yeto.fleet.children import Child, clear_finished, stop_all
from yeto.fleet.commands import ADDRESS, HERE, KEY, READY, head_command, island_command
from yeto.fleet.head import ENDED
from yeto.fleet.keeper import FAREWELL_SECONDS, STOP_SECONDS, Keeper
from yeto.fleet.launch import island_name
from yeto.fleet.processes import RUN_VARIABLE, Process, written_down
from yeto.fleet.registry import (
    DONE,
    FAILED,
    LAUNCHING,
    RUNNING,
    STOPPED,
    STOPPING,
    Run,
    RunState,
    now,
    write_secret,
)
from yeto.state.strict import parse_json
from yeto.storage import hold

HEAD_SECONDS = 90.0
"""Longest time that a head has to end in order: several times what its syncer may take."""
LOOK_SECONDS = 0.05
"""Between two looks for the head's sign that learners can connect."""


class Controller:
    """The processes of one run, and what is known of them."""

    def __init__(self, run: Run) -> None:
        """Read what was launched; nothing runs before ``run``.

        Raises:
            YetoError: the registry's file cannot be read.
        """
        self._run = run
        self._launch = run.launch()
        islands = len(self._launch.parsed())
        self._head = Child("head", (), run.log("head"), folder=run.head, speaks_as="head")
        self._islands = [
            Child(
                island_name(number),
                island_command(self._launch, number, HERE),
                run.log(island_name(number)),
                folder=run.island(number),
                speaks_as=f"learner {number}",
            )
            for number in range(islands)
        ]
        self._failed: dict[str, YetoError] = {}
        self._keeper = Keeper(say=self._say, stop=self._stop, kill=self._kill)
        self._state = RunState(phase=LAUNCHING, why="the head is starting", changed=now())

    async def run(self) -> RunState:
        """Keep the run alive to its end; return its last state."""
        own = written_down("controller", os.getpid())
        assert own is not None, "we run"
        self._note(controller=own)
        try:
            last = self._verdict(await self._keeper.run(self._live))
        except* YetoError as group:
            failure = first_of(group)
            last = {"phase": FAILED, "why": str(failure), "exit_code": getattr(failure, "exit_code", 1)}
        finally:
            with trio.CancelScope(shield=True):
                await self._head.stop(HEAD_SECONDS)
                await stop_all(self._islands, STOP_SECONDS)
        # Said first: whoever follows the log looks at the state to know when to stop.
        self._say(f"{last['phase']}: {last['why']}")
        self._note(children=(), **last)
        return self._state

    async def _live(self) -> int:
        # A port of an earlier start may be another program's by now; this one is told when it is bound.
        before = self._ready_at()
        self._head.start(head_command(self._launch, HERE))
        self._note()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._start_islands, before, nursery)
            code = await self._keep_head()
            if code in ENDED:
                # None is there where the run was over, and there was only the result to make anew.
                with trio.move_on_after(FAREWELL_SECONDS):
                    for child in self._islands:
                        if child.running:
                            await child.wait()
            self._keeper.stopping.set()
            nursery.cancel_scope.cancel()
        return code

    async def _start_islands(self, before: int | None, nursery: trio.Nursery) -> None:
        """Start the islands once learners can connect."""
        while self._ready_at() in (None, before):
            await trio.sleep(LOOK_SECONDS)
        if self._keeper.stopping.is_set():
            return
        for number, child in enumerate(self._islands):
            self._give_address(number)
            child.start()
            nursery.start_soon(self._keep_island, child)
        self._note(phase=RUNNING, why=f"the head and {len(self._islands)} islands are up")

    async def _keep_head(self) -> int:
        code = await self._keeper.keep(self._head, "the head", origin=" from its files", started=self._note)
        if code < 0:
            return EXIT_STOPPED
        if code in (*ENDED, EXIT_STOPPED):
            return code
        raise self._head.failure(code)

    async def _keep_island(self, child: Child) -> None:
        while True:
            self._note()
            code = await child.wait()
            if code in ENDED or self._keeper.stopping.is_set():
                return
            try:
                if code == ConfigError.exit_code:
                    raise child.failure(code)
                died = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                self._say(f"{child.name} {died}; starting it again")
                await child.relaunch()
            except YetoError as error:
                self._give_up(child, error)
                return

    def _give_up(self, child: Child, error: YetoError) -> None:
        """Go on without an island; fail when too few are left for any round.

        Raises:
            YetoError: they are.
        """
        self._failed[child.name] = error
        left = len(self._islands) - len(self._failed)
        if left < self._launch.quorum:
            raise error
        self._note(why=f"{left} islands go on without {', '.join(sorted(self._failed))}: {error}")
        self._say(f"{error}; {left} islands go on")

    def _give_address(self, number: int) -> None:
        """Tell an island where the head is; it stays there."""
        ready = parse_json((self._run.head / READY).read_bytes())
        address = f"{HERE.host}:{int(ready['port'])}\n"
        (self._run.island(number) / ADDRESS).write_text(address, encoding="ascii")

    def _ready_at(self) -> int | None:
        try:
            return (self._run.head / READY).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def _verdict(self, code: int) -> dict[str, Any]:
        """Return the last state of a run whose head ended by itself."""
        if code == EXIT_STOPPED:
            why = f"stopped before the final cut; yeto launch --resume {self._run.name} goes on"
            return {"phase": STOPPED, "why": why, "exit_code": code}
        why = f"the result is in {self._launch.output}"
        if self._failed:
            why += f"; without {', '.join(sorted(self._failed))}"
        if code != 0:
            why += "; some island never confirmed that it holds it"
        return {"phase": DONE, "why": why, "exit_code": code}

    def _note(self, **changes: Any) -> None:
        """Write down how far the run is, and which processes it has now."""
        children = []
        for child in (self._head, *self._islands):
            process: Process | None = written_down(child.name, child.pid) if child.running else None
            children += [] if process is None else [process]
        known: dict[str, Any] = {"children": tuple(children), "changed": now()}
        self._state = evolve(self._state, **(known | changes))
        self._run.write_state(self._state)

    def _say(self, line: str) -> None:
        print(line, flush=True)

    def _stop(self) -> None:
        self._say("stopping: the head writes a checkpoint first")
        self._note(phase=STOPPING, why="the head writes a checkpoint, then the islands end")
        self._head.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        for child in (self._head, *self._islands):
            child.send_signal(signal.SIGKILL)


def prepare(run: Run) -> None:
    """Make the folders of head and islands, each with its copy of the key."""
    launch, key = run.launch(), run.key.read_text(encoding="ascii")
    logs = run.head / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    write_secret(run.head / KEY, key)
    for number in range(len(launch.parsed())):
        folder = run.island(number)
        folder.mkdir(exist_ok=True)
        write_secret(folder / KEY, key)
        # The views look for what learners say beside the tape.
        beside = logs / f"learner-{number}.jsonl"
        if not beside.is_symlink():
            beside.symlink_to(folder / "learner.jsonl")


def main(words: list[str]) -> int:
    """Be the controller of the run in a folder; return the run's exit code."""
    run = Run(folder=Path(words[0]))
    os.environ[RUN_VARIABLE] = str(run.folder)
    try:
        lock = hold(run.controller_lock, YetoError(f"{run.name}: another controller runs it"))
    except YetoError as error:
        print(f"yeto: {error}", file=sys.stderr)
        return error.exit_code
    try:
        with lock:
            prepare(run)
            for number in range(len(run.launch().parsed())):
                clear_finished(run.island(number) / "state")
            state = trio.run(Controller(run).run)
    except YetoError as error:
        print(f"yeto: {error}", file=sys.stderr)
        run.change(phase=FAILED, why=str(error), exit_code=error.exit_code)
        return error.exit_code
    return state.exit_code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
