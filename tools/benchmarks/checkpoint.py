"""The checkpoint: how much of the disk's speed is left when a commit is made durable.

A commit changes one fragment, so a checkpoint writes one fragment file and a manifest, with an fsync for each
file and each folder that changed, and removes what is no longer needed. The peer writes the same tensors into
one file in the same folder and fsyncs it.

What that costs a whole run is in ``benchmarks.checkpoint_rounds``.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.checkpoint_rounds import round_figures
from benchmarks.figures import Report, Target, figure_of
from benchmarks.timing import rates, take_turns, wall_clock
from yeto.merge import tensor_digest
from yeto.state import Checkpoint, FragmentStore, FragmentVersion, LedgerEntry, write_checkpoint
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

FRAGMENTS = 2
THROUGHPUT = Target(sense="at least", number=0.8, of="ratio")


class Run:
    """A run that commits and writes a checkpoint for each commit."""

    def __init__(self, folder: Path, elements: int) -> None:
        self._folder = folder
        generator = torch.Generator().manual_seed(0)
        self.params, self.momentum = torch.randn(2, elements, generator=generator).unbind()
        self._digests = tensor_digest(self.params), tensor_digest(self.momentum)
        fragment = FragmentLayout(mode=MergeMode.RDA, tensors=(TensorSpec(name="", shape=(elements,)),))
        self._layout = Layout(fragments=(fragment,) * FRAGMENTS)
        self._store = FragmentStore(FRAGMENTS)
        self._step = 0
        for number in range(FRAGMENTS):
            self._put(number, 0)
        self._write()

    def commit(self) -> int:
        """Make the next step durable; return the bytes written."""
        self._step += 1
        self._put((self._step - 1) % FRAGMENTS, self._step)
        return self._write()

    def _put(self, fragment: int, version: int) -> None:
        params_digest, momentum_digest = self._digests
        self._store.put(
            FragmentVersion(
                fragment=fragment,
                version=version,
                params=self.params,
                momentum=self.momentum,
                params_digest=params_digest,
                momentum_digest=momentum_digest,
            )
        )

    def _write(self) -> int:
        ledger = tuple(
            LedgerEntry(learner=learner, merges=self._step, c_steps=24, c_tokens=98304)
            for learner in range(8)
        )
        return write_checkpoint(
            self._folder,
            Checkpoint(
                step=self._step,
                fragments=self._store.snapshot(),
                layout=self._layout,
                ledger=ledger,
                settings={"num_learners": 8, "quorum": 5},
                dtype="bf16",
                iso_backend="scalar",
                fingerprint="f" * 64,
                contract="c" * 64,
                tape_file="events.jsonl",
                tape_seq=self._step,
            ),
        )


def write_plainly(path: Path, tensors: tuple[torch.Tensor, ...]) -> None:
    """Write tensors one after the other into a new file and fsync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for tensor in tensors:
            rest = tensor.numpy().view(np.uint8).data
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure(*, repeats: int, elements: int, folder: Path, runs: int, rounds: int, free_rounds: int) -> Report:
    """Measure the checkpoint.

    Args:
        repeats: samples of each figure.
        elements: of the fragment that each commit changes; it takes 8 bytes for each.
        folder: on the disk to be measured; made if there is none, and left empty.
        runs: whole runs of each kind.
        rounds: global steps of a run with a pace.
        free_rounds: global steps of a run without.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="bench-", dir=folder) as scratch:
        run = Run(Path(scratch, "yeto-state.ckpt"), elements)
        written = run.commit()
        plain = iter(Path(scratch, f"plain-{number}") for number in range(repeats + 1))
        ours, theirs = take_turns(
            repeats,
            run.commit,
            lambda: write_plainly(next(plain), (run.params, run.momentum)),
            clock=wall_clock,
        )
    run_elements = elements // 4
    rows = round_figures(
        repeats=runs, elements=run_elements, rounds=rounds, free_rounds=free_rounds, folder=folder
    )
    return Report(
        benchmark="checkpoint",
        what=f"one fragment of {FRAGMENTS} changed, until all is fsynced; then whole runs. Wall seconds",
        settings={
            "fragment_bytes": 8 * elements,
            "repeats": repeats,
            "fragment_bytes_of_a_run": 8 * run_elements,
            "runs": runs,
            "rounds": rounds,
            "unthrottled_rounds": free_rounds,
        },
        figures=(
            figure_of(
                "checkpoint_mb_per_second",
                "write_checkpoint",
                "MB/s",
                rates(1e-6 * written, ours),
                peer="one plain file",
                peer_values=rates(8e-6 * elements, theirs),
                target=THROUGHPUT,
            ),
            *rows,
        ),
    )
