"""The same for ``yeto-export``: whatever happens to it, its folder is there whole, or as it was before.

Its weights are written by a library, below what can be counted here; but they are written aside, so what
counts is the order of the calls around them: making files, fsync, the rename, the removal of what was
replaced.
"""

from __future__ import annotations

import os
import shutil
from multiprocessing.context import ForkServerContext
from pathlib import Path

import text_checkpoints
import trio
from breaking import Broken

import yeto.text.export  # noqa: F401
from crashing.calls import Call, Calls, Fault, read_calls, snapshot
from crashing.plan import REPLACE, Point
from crashing.process import KILLED, end_with_parent, speak_to
from yeto.cli.common import run_app
from yeto.cli.export import build
from yeto.text.config import TextConfig

MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-llama"


def live_export(words: list[str], root: Path, calls: Path, said: Path, fault: Fault | None) -> None:
    """Run an export in this process and end with its exit code."""
    end_with_parent()
    speak_to(said)
    counted = Calls(root, calls, fault)
    counted.install()
    counted.watch_opens()
    os._exit(run_app(build, words, table="export"))


class Exports:
    """A checkpoint, what an export makes of it, and exports that are hit."""

    def __init__(self, folder: Path, context: ForkServerContext) -> None:
        self._folder = folder
        self._context = context
        self._checkpoint = folder / "yeto-state.ckpt"
        self._whole: dict[str, bytes] = {}
        self._before: dict[str, bytes] = {}
        self._scenes = 0

    async def begin(self) -> dict[str, tuple[Call, ...]]:
        """Make the checkpoint; return the calls of an export, and of one that replaces another."""
        self._folder.mkdir()
        config = TextConfig(model=str(MODEL), lora_r=4, lora_alpha=8)
        text_checkpoints.make_checkpoint(self._checkpoint, config)
        root = self._folder / "dry"
        root.mkdir()
        code, fresh, said = await self._export(root, None)
        if code:
            raise Broken(f"an export without a fault ended with {code}: {said}")
        self._whole = snapshot(root / "out")
        (root / "out" / "mine.txt").write_text("an earlier export, with something of mine")
        self._before = snapshot(root / "out")
        code, replaced, said = await self._export(root, None, "--overwrite")
        if code or snapshot(root / "out") != self._whole:
            raise Broken(f"an export that replaces one ended with {code} and another folder: {said}")
        return {"export": fresh, REPLACE: replaced}

    async def play(self, point: Point) -> tuple[str, int]:
        """Hit an export, judge what it left, export again; return how it went and how many exports that took.

        Raises:
            Broken: a rule does not hold.
        """
        self._scenes += 1
        root = self._folder / f"scene-{self._scenes}"
        root.mkdir()
        if point.of == REPLACE:
            for name, data in self._before.items():
                (root / "out" / name).parent.mkdir(parents=True, exist_ok=True)
                (root / "out" / name).write_bytes(data)
        (fault,) = point.faults
        over = ["--overwrite"] if point.of == REPLACE else []
        state = snapshot(self._checkpoint)
        code, calls, said = await self._export(root, fault, *over)
        if not any((call.part, call.number) == (fault.part, fault.number) for call in calls):
            return "not reached", 1
        if code not in {"kill": (KILLED,), "short": (0,)}.get(fault.kind, (0, 1)) or "Traceback" in said:
            raise Broken(f"an export ended with {code}: {said}")
        there = snapshot(root / "out") if (root / "out").exists() else {}
        if (code == 0 and there != self._whole) or there not in ({}, self._whole, self._before):
            raise Broken(f"an export that ended with {code} left {sorted(there)}")
        if not there and point.of == REPLACE:
            raise Broken(f"an export that ended with {code} lost the folder that it was to replace")
        if code == 1 and any(path.name.startswith(".") for path in root.iterdir()):
            raise Broken(f"an export that ended with a line left {sorted(p.name for p in root.iterdir())}")
        exports = 1
        if code:
            exports, (code, _, said) = 2, await self._export(root, None, "--overwrite")
            left = [path.name for path in root.iterdir()]
            if code or snapshot(root / "out") != self._whole or left != ["out"]:
                raise Broken(f"the next export ended with {code} and left {left}: {said}")
        if snapshot(self._checkpoint) != state:
            raise Broken("an export changed the checkpoint")
        shutil.rmtree(root)
        return {KILLED: "killed"}.get(code, "went on") if exports == 1 else _word(fault), exports

    async def _export(self, root: Path, fault: Fault | None, *more: str) -> tuple[int, tuple[Call, ...], str]:
        words = ["--checkpoint", str(self._checkpoint), "--model", str(MODEL)]
        words += ["--output-dir", str(root / "out"), *more]
        calls, said = (self._folder / f"{root.name}-{name}" for name in ("calls", "said"))
        process = self._context.Process(
            target=live_export, args=(words, root, calls, said, fault), daemon=True
        )
        process.start()
        await trio.lowlevel.wait_readable(process.sentinel)
        process.join()
        code = process.exitcode
        process.close()
        assert code is not None
        return code, tuple(read_calls(calls)), " | ".join(said.read_text(errors="replace").splitlines()[-3:])


def _word(fault: Fault) -> str:
    return "killed" if fault.kind == "kill" else "ended with a line"
