"""The merge: what it takes from M pushes on the wire to the bytes of the broadcast.

Two parts, as in the syncer. The *arrival pass* examines each push when it is here (digest, finiteness, norms,
dot products with the momentum). *Sealing* is what everybody then waits for: correct and reduce (RDA), then
the outer step with its digests and the encoding of the broadcast.

The limit is memory. The bytes that must move are each input read once and each output written once: for an
arrival its payload and the momentum; for the sealing all payloads, momentum and parameters, then the new
momentum, the new parameters and the broadcast. Whatever is read or written besides (the merged gradient, a
second look for a digest) is overhead, not work. The peer copies memory with as many threads as the merge,
between two buffers far larger than the caches.

A digest is no question of memory: a core hashes fewer bytes in a second than it moves. So there are three
figures of the whole: as it is, the same without digests, and how fast it would be if digesting were all there
is to do, which no merge with digests can exceed.

Two more peers do the same job as others would (``benchmarks.peers``), on the same pushes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import fmean

import numpy as np
import torch
from attrs import evolve, field, frozen

from benchmarks.figures import Figure, Report, Target, figure_of
from benchmarks.peers import AllReduce, StackAndMean
from benchmarks.timing import (
    Spent,
    cpu_clock,
    peak_bytes,
    rates,
    reset_peak,
    settle_memory,
    take_turns,
    timed,
    wall_clock,
)
from yeto.merge import (
    MergedGradient,
    PushFacts,
    PushInput,
    commit_fragment,
    compile_kernels,
    examine_push,
    measure_agreement,
    merge_fragment,
)
from yeto.merge.blocks import plan
from yeto.merge.memory import empty_floats, empty_halves
from yeto.merge.passes import examine, step
from yeto.merge.sources import of_payload
from yeto.wire.digest import digest
from yeto.wire.layout import FragmentLayout, MergeMode, TensorSpec

PUSHES = 4
GROWTH_PUSHES = (2, 4, 8, 16)
TENSORS = 16
LR, MU = 0.7, 0.9
F32, BF16 = 4, 2
"""Bytes of an element."""
CORES = os.cpu_count() or 1

TOGETHER = Target(sense="at least", number=0.6, of="ratio")
LINEAR = Target(sense="at most", number=1.0, of="ratio")
FASTER = Target(sense="at most", number=1.0, of="ratio")
MEMORY = Target(sense="at most", number=2.0, of="value")


@frozen(kw_only=True, eq=False)
class Round:
    """One fragment and the pushes of one sealed attempt, all of them to be corrected."""

    layout: FragmentLayout
    params: torch.Tensor
    momentum: torch.Tensor
    pushes: tuple[PushInput, ...]
    threads: int = field(default=CORES)
    digests: bool = field(default=True)

    @classmethod
    def random(cls, num_pushes: int, elements: int) -> Round:
        """Make a round of normally distributed values: such deltas are sideways to the momentum."""
        generator = torch.Generator().manual_seed(0)
        sizes = [elements // TENSORS] * TENSORS
        sizes[-1] += elements % TENSORS
        layout = FragmentLayout(
            mode=MergeMode.RDA, tensors=tuple(TensorSpec(name="", shape=(size,)) for size in sizes)
        )
        return cls(
            layout=layout,
            params=empty_floats(elements).normal_(generator=generator),
            momentum=empty_floats(elements).normal_(generator=generator),
            pushes=tuple(
                PushInput(
                    payload=_empty_as_received(elements)
                    .copy_(torch.randn(elements, generator=generator))
                    .view(torch.uint8)
                    .numpy(),
                    dtype="bf16",
                    weight=1000.0 + learner,
                    correct=True,
                )
                for learner in range(num_pushes)
            ),
        )

    @property
    def elements(self) -> int:
        """Elements of the fragment."""
        return self.layout.numel

    @property
    def arrival_bytes(self) -> int:
        """Bytes that must move for the arrival passes of all pushes."""
        return len(self.pushes) * (BF16 + F32) * self.elements

    @property
    def sealing_bytes(self) -> int:
        """Bytes that must move for the sealing."""
        return (len(self.pushes) * BF16 + 2 * F32 + 2 * F32 + BF16) * self.elements

    @property
    def moved_bytes(self) -> int:
        """Bytes that must move for the whole round."""
        return self.arrival_bytes + self.sealing_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of inputs that must be read for the whole round, digests left out."""
        return self.arrival_bytes + (len(self.pushes) * BF16 + 2 * F32) * self.elements

    @property
    def digested_bytes(self) -> int:
        """Bytes that are digested: every payload, the new parameters and the new momentum."""
        return (len(self.pushes) * BF16 + 2 * F32) * self.elements

    def arrive(self) -> Round:
        """Examine every push, side by side as the syncer does; return the round with what was found."""
        with ThreadPoolExecutor(self.threads) as pool:
            found = list(pool.map(self._examine, self.pushes))
        return evolve(
            self,
            pushes=tuple(evolve(push, facts=facts) for push, facts in zip(self.pushes, found, strict=True)),
        )

    def seal(self) -> dict[str, Spent]:
        """Merge, make the outer step and encode the broadcast; return what each of the two took."""
        merged, merging = timed(self._merge)
        assert len(merged.corrected) == len(self.pushes), "every push was to be corrected"
        _, committing = timed(partial(self._commit, merged))
        return {"merge": merging, "commit": committing}

    def _merge(self) -> MergedGradient:
        """Merge, and tell whether the learners agree, as the syncer does."""
        merged = merge_fragment(self.pushes, self.layout, self.momentum, mu=MU, threads=self.threads)
        assert measure_agreement(self.pushes, self.layout, self.momentum, merged) is not None
        return merged

    def digest(self) -> None:
        """Digest as much as a whole round does, the longest first, and do nothing else."""
        buffers = [self.params.numpy(), self.momentum.numpy(), *(push.payload for push in self.pushes)]
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(digest, buffers))

    def _examine(self, push: PushInput) -> PushFacts:
        if self.digests:
            return examine_push(
                push.payload, push.dtype, self.elements, self.momentum, self.layout, threads=self.threads
            )
        source = of_payload(push.payload, push.dtype, self.elements)
        cut = plan(tuple(tensor.numel for tensor in self.layout.tensors))
        tensors = examine(source, self.momentum, cut, threads=self.threads)
        return PushFacts(digest="", finite=True, norm=None, cosine_to_momentum=None, tensors=tensors)

    def _commit(self, merged: MergedGradient) -> None:
        if self.digests:
            result = commit_fragment(
                self.params, self.momentum, merged, lr=LR, mu=MU, encode=True, threads=self.threads
            )
            assert result.encoded is not None
            return
        elements, factors, cut = merged.take()
        step(
            elements,
            factors,
            self.params,
            self.momentum,
            cut,
            lr=LR,
            mu=MU,
            new_params=elements,
            new_momentum=empty_floats(self.elements),
            halves=empty_halves(self.elements),
            digests=False,
            threads=self.threads,
        )


def _empty_as_received(elements: int) -> torch.Tensor:
    """Return a bf16 tensor in memory of the kind that the syncer receives its pushes in."""
    return torch.from_numpy(np.empty(elements * BF16, dtype=np.uint8)).view(torch.bfloat16)


class Copy:
    """The peer: copies between two buffers that are in memory already."""

    BYTES = 2 * 256 * 2**20
    """Read and written."""

    def __init__(self) -> None:
        self._source = np.ones(self.BYTES // 2, dtype=np.uint8)
        self._target = np.ones(self.BYTES // 2, dtype=np.uint8)
        self._pool = ThreadPoolExecutor(CORES)

    def __call__(self, threads: int) -> Spent:
        """Copy once, each thread its part."""
        sources, targets = (np.array_split(each, threads) for each in (self._source, self._target))
        return timed(lambda: list(self._pool.map(np.copyto, targets, sources)))[1]


class Read:
    """The other peer: reads a buffer once and writes nothing, as an arrival pass does."""

    BYTES = 512 * 2**20

    def __init__(self) -> None:
        self._source = np.ones(self.BYTES // 8, dtype=np.int64)
        self._pool = ThreadPoolExecutor(CORES)

    def __call__(self, threads: int) -> Spent:
        """Read once, each thread its part."""
        return timed(lambda: list(self._pool.map(np.max, np.array_split(self._source, threads))))[1]


def extra_memory(round_: Round) -> tuple[float, float]:
    """Return the peak memory of arrival and sealing, above the inputs, and above inputs and outputs.

    To be measured first in a process: memory that was freed but not given back would hide what is taken.

    Returns:
        Both in units of one fragment in f32.
    """
    # What is loaded or made on first use must not count.
    Round.random(2, 1 << 16).arrive().seal()
    settle_memory()
    before = reset_peak()
    round_.arrive().seal()
    above_inputs = (peak_bytes() - before) / (F32 * round_.elements)
    outputs = (2 * F32 + BF16) / F32
    return above_inputs, max(0.0, above_inputs - outputs)


def measure(*, repeats: int, elements: int, growth_elements: int) -> Report:
    """Measure the merge.

    Args:
        repeats: samples of each figure.
        elements: size of the fragment of 4 pushes.
        growth_elements: size of the fragment that 2 to 16 pushes are merged into.
    """
    compile_kernels()
    round_ = Round.random(PUSHES, elements)
    above_inputs, above_outputs = extra_memory(round_)
    return Report(
        benchmark="merge",
        what=f"{PUSHES} bf16 pushes, RDA, each push corrected; {CORES} threads by the wall",
        settings={"elements": elements, "growth_elements": growth_elements, "repeats": repeats},
        figures=(
            *_passes(repeats, round_),
            *_beside_others(repeats, round_),
            *_growth(repeats, growth_elements),
            figure_of(
                "peak_fragments_above_inputs", "peak memory above the inputs", "fragments", [above_inputs]
            ),
            figure_of(
                "peak_fragments_above_outputs",
                "of it neither input nor output",
                "fragments",
                [above_outputs],
                target=MEMORY,
            ),
        ),
    )


def _passes(repeats: int, round_: Round) -> list[Figure]:
    """Measure against a copy: on all cores by the wall, with one thread in its CPU seconds."""
    copy, read = Copy(), Read()
    figures = []
    for suffix, text, threads, seconds in (
        ("", "", CORES, lambda spent: spent.wall),
        ("_one_thread", ", one thread (CPU)", 1, lambda spent: spent.cpu),
    ):
        figures += _moved(repeats, evolve(round_, threads=threads), copy, read, suffix, text, seconds)
    return figures


@frozen
class _Samples:
    """Seconds of the parts of a round, one sample of each a repeat."""

    arrival: list[float] = field(factory=list)
    merge: list[float] = field(factory=list)
    commit: list[float] = field(factory=list)

    def take(self, round_: Round, seconds: Callable[[Spent], float]) -> None:
        """Make the whole round once."""
        arrived, arrival = timed(round_.arrive)
        parts = arrived.seal()
        self.arrival.append(seconds(arrival))
        self.merge.append(seconds(parts["merge"]))
        self.commit.append(seconds(parts["commit"]))

    @property
    def sealing(self) -> list[float]:
        """Seconds of both parts of the sealing."""
        return [merge + commit for merge, commit in zip(self.merge, self.commit, strict=True)]

    @property
    def together(self) -> list[float]:
        """Seconds of arrival and sealing."""
        return [arrival + sealing for arrival, sealing in zip(self.arrival, self.sealing, strict=True)]


def _moved(
    repeats: int,
    round_: Round,
    copy: Copy,
    read: Read,
    suffix: str,
    text: str,
    seconds: Callable[[Spent], float],
) -> list[Figure]:
    without = evolve(round_, digests=False)
    whole, bare = _Samples(), _Samples()
    digesting: list[float] = []
    copied: list[float] = []
    reading: list[float] = []
    round_.arrive().seal()  # the first round has no memory to take again
    for _ in range(repeats):
        # A copy before, between and after: the machine is not the same machine ten seconds later.
        copies = [copy(round_.threads)]
        whole.take(round_, seconds)
        copies.append(copy(round_.threads))
        reads = [read(round_.threads)]
        bare.take(without, seconds)
        reads.append(read(round_.threads))
        copies.append(copy(round_.threads))
        digesting.append(seconds(timed(round_.digest)[1]))
        copies.append(copy(round_.threads))
        copied.append(1e-9 * copy.BYTES / fmean(seconds(each) for each in copies))
        reading.append(1e-9 * read.BYTES / fmean(seconds(each) for each in reads))

    def moved(key: str, name: str, size: int, values: list[float], target: Target | None = None) -> Figure:
        return figure_of(
            f"{key}{suffix}_gb_per_second",
            f"{name}{text}",
            "GB/s",
            rates(1e-9 * size, values),
            peer="copy",
            peer_values=copied,
            target=target,
        )

    def passes(key: str, name: str, samples: _Samples) -> list[Figure]:
        return [
            moved(f"arrival{key}", f"arrival pass{name}", round_.arrival_bytes, samples.arrival),
            moved(f"sealing{key}", f"sealing{name}", round_.sealing_bytes, samples.sealing),
            moved(
                f"together{key}",
                f"both{name}",
                round_.moved_bytes,
                samples.together,
                None if suffix else TOGETHER,
            ),
        ]

    return [
        *passes("", "", whole),
        *passes("_undigested", ", no digests", bare),
        figure_of(
            f"read_undigested{suffix}_gb_per_second",
            f"both, no digests, what is read{text}",
            "GB/s",
            rates(1e-9 * round_.read_bytes, bare.together),
            peer="read",
            peer_values=reading,
            target=None if suffix else TOGETHER,
        ),
        moved("together_digests_alone", "both, if digests were all", round_.moved_bytes, digesting),
        figure_of(
            f"digest{suffix}_gb_per_second",
            f"BLAKE3 of the same bytes{text}",
            "GB/s",
            rates(1e-9 * round_.digested_bytes, digesting),
        ),
        figure_of(f"merge{suffix}_seconds", f"correct and reduce{text}", "s", whole.merge),
        figure_of(f"commit{suffix}_seconds", f"outer step, digests, encode{text}", "s", whole.commit),
        figure_of(f"commit_undigested{suffix}_seconds", f"outer step, encode{text}", "s", bare.commit),
    ]


def _beside_others(repeats: int, round_: Round) -> list[Figure]:
    """Measure the whole job, arrival and sealing, beside what others would write."""
    payloads = [push.payload for push in round_.pushes]
    with AllReduce(round_.params, round_.momentum, payloads, lr=LR, mu=MU) as all_reduce:
        plain = StackAndMean(round_.params, round_.momentum, payloads, lr=LR, mu=MU)
        ours, reduced, stacked = take_turns(
            repeats, lambda: round_.arrive().seal(), all_reduce, plain, clock=wall_clock
        )
    return [
        figure_of(
            f"job_beside_{key}_seconds",
            "arrival and sealing",
            "s",
            ours,
            peer=name,
            peer_values=theirs,
            target=FASTER,
        )
        for key, name, theirs in (
            ("all_reduce", "gloo all-reduce, SGD", reduced),
            ("stack_and_mean", "torch mean, SGD", stacked),
        )
    ]


def _growth(repeats: int, elements: int) -> list[Figure]:
    everything = Round.random(max(GROWTH_PUSHES), elements).arrive()
    rounds = [evolve(everything, pushes=everything.pushes[:number]) for number in GROWTH_PUSHES]
    latency = take_turns(repeats, *(each.seal for each in rounds), clock=wall_clock)
    seconds = take_turns(
        repeats,
        *(partial(merge_fragment, each.pushes, each.layout, each.momentum, mu=MU) for each in rounds),
        clock=cpu_clock,
    )
    per_push = [
        [1e3 * value / number for value in values]
        for number, values in zip(GROWTH_PUSHES, seconds, strict=True)
    ]
    return [
        *(
            figure_of(
                f"milliseconds_per_push_{number}",
                f"correct and reduce, M = {number} (CPU)",
                "ms/push",
                values,
                peer=f"M = {GROWTH_PUSHES[0]}",
                peer_values=per_push[0],
                target=LINEAR if number == GROWTH_PUSHES[-1] else None,
            )
            for number, values in zip(GROWTH_PUSHES, per_push, strict=True)
        ),
        *(
            figure_of(
                f"seal_to_broadcast_{number}_milliseconds",
                f"seal to encoded broadcast, M = {number}",
                "ms",
                [1e3 * value for value in values],
            )
            for number, values in zip(GROWTH_PUSHES, latency, strict=True)
        ),
    ]
