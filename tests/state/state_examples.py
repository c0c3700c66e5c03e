"""A small run that commits, and disks that fail, for the tests of the checkpoint."""

import errno
import os
import shutil
from pathlib import Path

import attrs
import torch

from yeto.merge import tensor_digest
from yeto.state import Checkpoint, FragmentStore, FragmentVersion, LedgerEntry
from yeto.state.files import Disk
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

LAYOUT = Layout(
    fragments=(
        FragmentLayout(mode=MergeMode.AVG, tensors=(TensorSpec(name="", shape=(7,)),)),
        FragmentLayout(
            mode=MergeMode.RDA, tensors=(TensorSpec(name="", shape=()), TensorSpec(name="", shape=(2, 8)))
        ),
        FragmentLayout(mode=MergeMode.ISO, tensors=(TensorSpec(name="", shape=(5, 3)),)),
    )
)
COUNT = len(LAYOUT.fragments)


def version(fragment, number, timeline=0):
    """Return a fragment version whose values follow from its arguments."""
    generator = torch.Generator().manual_seed(1000 * timeline + 100 * fragment + number)
    size = LAYOUT.fragments[fragment].numel
    params, momentum = torch.randn(2, size, generator=generator).unbind()
    return FragmentVersion(
        fragment=fragment,
        version=number,
        params=params.clone(),
        momentum=momentum.clone() if number else torch.zeros(size),
        params_digest=tensor_digest(params),
        momentum_digest=tensor_digest(momentum if number else torch.zeros(size)),
    )


class Run:
    """A run whose commits make new fragment versions in round-robin order."""

    def __init__(self, timeline=0):
        self.timeline = timeline
        self.step = 0
        self.store = FragmentStore(COUNT)
        for fragment in range(COUNT):
            self.store.put(version(fragment, 0, timeline))

    @classmethod
    def resumed(cls, checkpoint, timeline):
        run = cls(timeline)
        run.step = checkpoint.step
        run.store = FragmentStore(COUNT)
        for part in checkpoint.fragments:
            run.store.put(part)
        return run

    def commit(self, count=1):
        for _ in range(count):
            self.step += 1
            self.store.put(version((self.step - 1) % COUNT, self.step, self.timeline))
        return self

    def checkpoint(self, **changes):
        return attrs.evolve(
            Checkpoint(
                step=self.step,
                fragments=self.store.snapshot(),
                layout=LAYOUT,
                ledger=(
                    LedgerEntry(learner=0, merges=self.step, c_steps=7, c_tokens=2**60),
                    LedgerEntry(learner=2, merges=1, c_steps=1, c_tokens=1),
                ),
                settings={"num_learners": 3, "num_fragments": None, "quorum": 2, "outer_lr": 0.7},
                dtype="bf16",
                iso_backend="scalar",
                fingerprint="ab" * 32,
                contract="cd" * 32,
                profile=None,
                training_manifest={"binding": {"model": "tiny é\u2028"}, "merge_alpha": 0.5},
                tape_file="events.jsonl",
                tape_seq=40 + self.step,
            ),
            **changes,
        )


def same(left, right):
    """Return whether two checkpoints state the same, tensors included."""
    ignored = {"fragments", "digest", "notices"}
    fields = [field.name for field in attrs.fields(Checkpoint) if field.name not in ignored]
    return all(getattr(left, name) == getattr(right, name) for name in fields) and all(
        (a.fragment, a.version, a.params_digest, a.momentum_digest)
        == (b.fragment, b.version, b.params_digest, b.momentum_digest)
        and torch.equal(a.params, b.params)
        and torch.equal(a.momentum, b.momentum)
        for a, b in zip(left.fragments, right.fragments, strict=True)
    )


class Crash(BaseException):
    """The process was killed here."""


class CountingDisk(Disk):
    """Counts the system calls; stops before the ``stop_at``-th, or fails it with an OSError.

    Writes come in two halves, so that a stop can fall between them. Nothing is really fsynced: a test that
    simulates what fsync is for need not wait for it.
    """

    def __init__(self, stop_at=None, error=None):
        self.calls = 0
        self.created = []
        self._stop_at = stop_at
        self._error = error
        self._halved = set()

    def _call(self):
        self.calls += 1
        if self.calls == self._stop_at:
            if self._error is not None:
                raise OSError(self._error, os.strerror(self._error))
            raise Crash

    def create(self, path):
        self._call()
        self.created.append(path.name)
        return super().create(path)

    def write(self, descriptor, data):
        self._call()
        if descriptor not in self._halved:
            self._halved.add(descriptor)
            data = data[: len(data) // 2]
        return super().write(descriptor, data)

    def sync(self, descriptor):
        self._call()

    def close(self, descriptor):
        self._halved.discard(descriptor)
        super().close(descriptor)

    def rename(self, source, target):
        self._call()
        super().rename(source, target)

    def remove(self, path):
        self._call()
        super().remove(path)

    def make_folder(self, path):
        self._call()
        super().make_folder(path)

    def sync_folder(self, path):
        self._call()


class VolatileDisk(CountingDisk):
    """Also remembers what a power cut would lose: contents and names that were not fsynced."""

    def __init__(self, stop_at=None):
        super().__init__(stop_at)
        self._paths = {}
        self._unsynced = set()
        self._undo = []

    def create(self, path):
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self._unsynced.add(path)
        return descriptor

    def sync(self, descriptor):
        super().sync(descriptor)
        self._unsynced.discard(self._paths[descriptor])

    def rename(self, source, target):
        before = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        if source in self._unsynced:
            self._unsynced.discard(source)
            self._unsynced.add(target)
        self._undo.append((target, source, before))

    def remove(self, path):
        before = path.read_bytes() if path.exists() else None
        super().remove(path)
        if before is not None:
            self._undo.append((path, None, before))

    def sync_folder(self, path):
        super().sync_folder(path)
        self._undo = [entry for entry in self._undo if entry[0].parent != path]

    def cut_power(self, *, names_survive):
        """Lose what is not durable; names in folders that were not fsynced may or may not survive."""
        for path in self._unsynced:
            if path.exists():
                path.write_bytes(b"")
        if not names_survive:
            for target, source, before in reversed(self._undo):
                if source is not None and target.exists():
                    shutil.move(target, source)
                if before is not None:
                    target.write_bytes(before)


NO_SPACE = errno.ENOSPC


def flip(path: Path, place: int):
    """Change one bit of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
