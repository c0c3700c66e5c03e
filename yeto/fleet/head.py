"""``python -m yeto.fleet.head``: the head of a fleet, from an empty disk to a verified result at its place.

The rule: whatever was done before is taken up, so the same command is right at every start. An empty disk is
filled from the mirror, the syncer goes on from its checkpoint, a run that is over is only exported. A syncer
or a mirror that a signal killed is started again; a syncer that says it cannot go on ends the head with its
own words and its own exit code. SIGTERM stops the syncer in order; nothing is exported then.

It works in the folder it is started in. What its children print goes where its own words go.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import trio
from attrs import frozen

from yeto.errors import EXIT_STOPPED, YetoError, first_of
from yeto.fleet.children import Child
from yeto.fleet.commands import CHECKPOINT, KEY, READY, RESULT, TAPE, YETO_RUN
from yeto.fleet.keeper import Keeper
from yeto.fleet.launch import is_remote
from yeto.fleet.store import Store

ENDED = (0, 3)
"""Exit codes of a syncer whose run is over; with 3 some learner never confirmed that it holds the result."""

MIRROR_SECONDS = 900.0
"""Longest time that the mirror's last copy may take."""
PATIENCE_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL for a child whose work is not wanted any more."""

EXPORTS = {"text": "yeto.cli.export", "diffusion": "yeto.cli.diffusion_export"}
"""What exports the result of a kind of task."""

LAST = "yeto-export.json"
"""File of a result that is copied last: where it is, the others are."""


@frozen(kw_only=True)
class HeadSettings:
    """What a head has to do."""

    host: str
    port: int
    """0 takes any free one; the one that was taken before is taken again."""
    model: str
    output: str
    """Where the result goes: a folder of this machine, or a URI."""
    task: str
    mirror: str | None
    export_words: tuple[str, ...]
    syncer_words: tuple[str, ...]


class Head:
    """The head's children, one after the other and beside each other."""

    def __init__(self, settings: HeadSettings) -> None:
        """Describe the head; nothing runs before ``run``."""
        self._settings = settings
        self._keeper = Keeper(
            say=_say, stop=lambda: self._tell(signal.SIGTERM), kill=lambda: self._tell(signal.SIGKILL)
        )
        self._child: Child | None = None
        self._mirror: Child | None = None

    async def run(self) -> int:
        """Restore, coordinate, export; return the exit code.

        Raises:
            YetoError: something cannot be done; the cause was printed.
        """
        try:
            return await self._keeper.run(self._live)
        finally:
            with trio.CancelScope(shield=True):
                for child in (self._child, self._mirror):
                    if child is not None:
                        await child.stop(PATIENCE_SECONDS)

    async def _live(self) -> int:
        if self._settings.mirror is not None:
            # It does nothing where a run is, and ends what a restore that was cut off began.
            await self._do("restore", self._mirror_words("restore"))
        if self._keeper.stopping.is_set():
            return EXIT_STOPPED
        async with trio.open_nursery() as nursery:
            if self._settings.mirror is not None:
                self._mirror = _child("mirror", self._mirror_words("push"))
                self._mirror.start()
                nursery.start_soon(self._keep_mirror, self._mirror)
            code = await self._coordinate()
            nursery.cancel_scope.cancel()
        if self._mirror is not None:
            # It copies what came after its last look, and ends.
            await self._mirror.stop(MIRROR_SECONDS)
        if code not in ENDED:
            return code
        if self._keeper.stopping.is_set():
            return EXIT_STOPPED
        await self._do("replay", ["yeto", "replay", TAPE, f"--checkpoint={CHECKPOINT}"])
        await self._export()
        return EXIT_STOPPED if self._keeper.stopping.is_set() else code

    async def _coordinate(self) -> int:
        """Keep the syncer alive until it ends by itself; return its exit code."""
        self._child = _child("syncer", ())
        self._child.start(self._syncer_words())
        code = await self._keeper.keep(
            self._child, "the syncer", origin=" from its checkpoint", again=self._syncer_words
        )
        return code if code >= 0 else EXIT_STOPPED

    async def _keep_mirror(self, mirror: Child) -> None:
        while True:
            code = await mirror.wait()
            try:
                _say(f"the mirror ended ({code}); starting it again: the run goes on meanwhile")
                await mirror.relaunch()
            except YetoError as error:
                # A run without a copy is better than none; its end says where the copy stands.
                _say(f"no copy of checkpoint and tape is made any more: {error}")
                return

    async def _export(self) -> None:
        output = self._settings.output
        folder = RESULT if is_remote(output) else output.removeprefix("file://")
        words = [
            EXPORTS[self._settings.task],
            f"--checkpoint={CHECKPOINT}",
            f"--model={self._settings.model}",
        ]
        # It may be there from a start of this head that was killed right afterwards.
        words += [f"--output-dir={folder}", "--overwrite", *self._settings.export_words]
        await self._do("export", words)
        if is_remote(output):
            await trio.to_thread.run_sync(publish, Path(folder), output)
        _say(f"the result is in {output}")

    async def _do(self, name: str, words: Sequence[str]) -> None:
        """Run one child to its end.

        Raises:
            YetoError: it failed.
        """
        if self._keeper.stopping.is_set():
            return
        self._child = _child(name, words)
        self._child.start()
        code = await self._child.wait()
        if code != 0 and not self._keeper.stopping.is_set():
            raise YetoError(f"the head's {name} failed with {code}; what it said stands above")

    def _syncer_words(self) -> list[str]:
        settings = self._settings
        return [
            *(*YETO_RUN, "--role=syncer", f"--host={settings.host}"),
            *(f"--port={_port_before() or settings.port}", f"--ready-file={READY}"),
            *("--resume-or-start", f"--auth-key-file={KEY}"),
            *(f"--checkpoint-path={CHECKPOINT}", f"--event-tape={TAPE}"),
            *settings.syncer_words,
        ]

    def _mirror_words(self, what: str) -> list[str]:
        words = ["yeto.fleet.mirror", what, f"--checkpoint={CHECKPOINT}", f"--event-tape={TAPE}"]
        return [*words, f"--to={self._settings.mirror}"]

    def _tell(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._child.send_signal(number)


def publish(folder: Path, uri: str) -> None:
    """Copy a result to a URI and look whether all of it arrived.

    Raises:
        YetoError: the store refuses, or a file has another size there.
    """
    store = Store(uri)
    files = sorted(
        (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()),
        key=lambda name: (name == LAST, name),
    )
    for name in files:
        store.put_file(name, folder / name)
    for name in files:
        if store.size(name) != (folder / name).stat().st_size:
            raise YetoError(
                f"{uri}: {name} did not arrive whole; start the head again to copy the result anew"
            )


def _port_before() -> int | None:
    """Return the port of the syncer's last start, so that learners find it where it was."""
    try:
        port = json.loads(Path(READY).read_text(encoding="utf-8"))["port"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return port if type(port) is int and 0 < port < 65536 else None


def _child(name: str, words: Sequence[str]) -> Child:
    # At once: when this head is killed, the next one takes over the files.
    return Child(name, words, None, death_signal=signal.SIGKILL)


def _say(line: str) -> None:
    print(f"head: {line}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run the head that a command line describes; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m yeto.fleet.head", description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--task", choices=sorted(EXPORTS), default="text")
    parser.add_argument("--mirror")
    parser.add_argument("--export-word", action="append", default=[], help="one more word for the export")
    parser.add_argument("syncer", nargs="+", help="after --: flags of the syncer")
    flags = parser.parse_args(words)
    settings = HeadSettings(
        host=flags.host,
        port=flags.port,
        model=flags.model,
        output=flags.output,
        task=flags.task,
        mirror=flags.mirror,
        export_words=tuple(flags.export_word),
        syncer_words=tuple(flags.syncer),
    )
    try:
        return trio.run(Head(settings).run)
    except* YetoError as group:
        print(f"yeto: {first_of(group)}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
