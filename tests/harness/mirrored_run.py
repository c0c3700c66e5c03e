"""Runs for the tests of the mirror: their files at several moments, and a store that breaks on demand."""

import shutil
from typing import ClassVar

import fsspec
import trio
from fsspec.implementations.memory import MemoryFileSystem
from syncer_runs import fakes, make_config, running, until

from yeto.fleet.mirror_push import Pusher
from yeto.fleet.mirror_restore import restore
from yeto.fleet.store import Store
from yeto.state import read_checkpoint
from yeto.state.manifest import manifest_steps

CHECKPOINT, TAPE = "state.ckpt", "events.jsonl"
TOTAL = 14


class Killed(BaseException):
    """The process ended here."""


class BreakingStore(MemoryFileSystem):
    """Objects in memory; each write can be the last thing that its process did, or fail."""

    protocol = "breaking"
    cachable = False
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    writes: ClassVar = []
    """Names of the objects written or removed, in order."""
    kill_at: ClassVar = None
    """Number of the write that is not made any more, counted from 0."""
    refusals: ClassVar = []
    """Exceptions that the next asks end with."""
    on_write: ClassVar = None

    def __init__(self, **options):
        super().__init__(**options)

    @classmethod
    def reset(cls):
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.writes, cls.kill_at, cls.refusals, cls.on_write = [], None, [], None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("breaking:"))

    def _write(self, path):
        cls = type(self)
        if cls.kill_at is not None and len(cls.writes) == cls.kill_at:
            raise Killed
        self._refuse()
        cls.writes.append(path)
        if cls.on_write is not None:
            cls.on_write(path)

    def _refuse(self):
        if type(self).refusals:
            raise type(self).refusals.pop(0)

    def put_file(self, lpath, rpath, *rest, **options):
        self._write(rpath)
        return super().put_file(lpath, rpath, *rest, **options)

    def pipe_file(self, path, value, *rest, **options):
        self._write(path)
        return super().pipe_file(path, value, *rest, **options)

    def rm_file(self, path):
        self._write(path)
        return super().rm_file(path)

    def ls(self, path, *rest, **options):
        self._refuse()
        return super().ls(path, *rest, **options)


fsspec.register_implementation("breaking", BreakingStore, clobber=True)


def objects(uri):
    """Return the objects of a mirror by name."""
    store = Store(uri)
    names = [name for folder in ("fragments", "manifests", "tape", "copies") for name in store.sizes(folder)]
    return {name: store.get(name, 1 << 30) for name in sorted(names)}


def has_step(checkpoint, step):
    """Return whether a checkpoint of a step, or of a later one, is durable."""
    return max(manifest_steps(checkpoint), default=-1) >= step


def make_stages(folder, steps, **core):
    """Run a syncer in several starts, to these steps and to its end; return the folders of its files then."""
    config = make_config(folder / "live", total_steps=TOTAL, **core)
    (folder / "live").mkdir(parents=True)
    places = []

    async def start(resume, until_step):
        this = make_config(folder / "live", resume=resume, total_steps=TOTAL, **core)
        async with running(this, *fakes(reconnects=True)) as run:
            if until_step is None:
                assert await run.end() == 0
            else:
                await until(lambda: has_step(this.checkpoint_path, until_step))
                run.stop()
                await run.ended.wait()

    for number, until_step in enumerate([*steps, None]):
        trio.run(start, number > 0, until_step)
        places.append(folder / f"stage-{number}")
        shutil.copytree(folder / "live", places[-1])
    assert config.event_tape.exists()
    return places


def pusher(uri, place, say=lambda line: None):
    """Return a process that mirrors a folder, as if it had just been started."""
    return Pusher(Store(uri), place / CHECKPOINT, place / TAPE, say)


def brought_back(uri, place, say=lambda line: None):
    """Restore to a folder."""
    place.mkdir(parents=True, exist_ok=True)
    return restore(Store(uri), place / CHECKPOINT, place / TAPE, say)


def same_run(left, right):
    """Return whether two folders have the same tape, and the same newest checkpoint."""
    one, other = read_checkpoint(left / CHECKPOINT), read_checkpoint(right / CHECKPOINT)
    return one.digest == other.digest and (left / TAPE).read_bytes() == (right / TAPE).read_bytes()
