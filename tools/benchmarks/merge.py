"""The merge: what it takes from M pushes on the wire to the bytes of the broadcast.

Two parts, as in the syncer. The *arrival pass* examines each push when it is here (digest, finiteness, norms,
dot products with the momentum). *Sealing* is what everybody then waits for: correct and reduce (RDA), the
outer step with its digests, and the encoding of the broadcast.

The limit is memory. The bytes that must move are each input read once and each output written once: for an
arrival its payload and the momentum; for the sealing all payloads, momentum and parameters, then the new
momentum, the new parameters and the broadcast. Whatever is read or written besides (the merged gradient, a
second look for a digest) is overhead, not work. The peer copies memory, in one thread like the merge, between
two buffers far larger than the caches.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean

import numpy as np
import torch
from attrs import evolve, frozen

from benchmarks.figures import Figure, Report, Target, figure_of
from benchmarks.timing import (
    Spent,
    cpu_clock,
    peak_bytes,
    rates,
    reset_peak,
    settle_memory,
    take_turns,
    timed,
)
from yeto.merge import PushFacts, PushInput, apply_outer_step, examine_push, merge_fragment
from yeto.wire import bf16
from yeto.wire.layout import FragmentLayout, MergeMode, TensorSpec

PUSHES = 4
GROWTH_PUSHES = (2, 4, 8, 16)
TENSORS = 16
LR, MU = 0.7, 0.9
F32, BF16 = 4, 2
"""Bytes of an element."""

TOGETHER = Target(sense="at least", number=0.6, of="ratio")
LINEAR = Target(sense="at most", number=1.0, of="ratio")
MEMORY = Target(sense="at most", number=2.0, of="value")


@frozen(kw_only=True, eq=False)
class Round:
    """One fragment and the pushes of one sealed attempt, all of them to be corrected."""

    layout: FragmentLayout
    params: torch.Tensor
    momentum: torch.Tensor
    pushes: tuple[PushInput, ...]

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
            params=torch.randn(elements, generator=generator),
            momentum=torch.randn(elements, generator=generator),
            pushes=tuple(
                PushInput(
                    payload=torch.randn(elements, generator=generator).bfloat16().view(torch.uint8).numpy(),
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

    def arrive(self) -> Round:
        """Examine every push; return the round with what was found."""
        return evolve(self, pushes=tuple(evolve(push, facts=self._examine(push)) for push in self.pushes))

    def seal(self) -> dict[str, float]:
        """Merge, make the outer step, encode the broadcast; return the CPU seconds of each."""
        merged, merging = timed(partial(merge_fragment, self.pushes, self.layout, self.momentum, mu=MU))
        assert len(merged.corrected) == len(self.pushes), "every push was to be corrected"
        result, stepping = timed(
            partial(apply_outer_step, self.params, self.momentum, merged.gradient, lr=LR, mu=MU)
        )
        del merged  # the syncer forgets the gradient here, too
        _, encoding = timed(partial(bf16.encode, result.params.numpy()))
        return {"merge": merging.cpu, "outer": stepping.cpu, "encode": encoding.cpu}

    def _examine(self, push: PushInput) -> PushFacts:
        return examine_push(push.payload, push.dtype, self.elements, self.momentum, self.layout)


class Copy:
    """The peer: copies between two buffers that are in memory already."""

    BYTES = 2 * 256 * 2**20
    """Read and written."""

    def __init__(self) -> None:
        self._source = np.ones(self.BYTES // 2, dtype=np.uint8)
        self._target = np.ones(self.BYTES // 2, dtype=np.uint8)

    def __call__(self) -> Spent:
        """Copy once."""
        return timed(lambda: np.copyto(self._target, self._source))[1]


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
    # torch has threads of its own for whatever is large; the merge must do with one, like the copy.
    torch.set_num_threads(1)
    round_ = Round.random(PUSHES, elements)
    above_inputs, above_outputs = extra_memory(round_)
    return Report(
        benchmark="merge",
        what=f"{PUSHES} bf16 pushes, RDA, each push corrected; one thread, CPU seconds unless it says wall",
        settings={"elements": elements, "growth_elements": growth_elements, "repeats": repeats},
        figures=(
            *_passes(repeats, round_),
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
    copy = Copy()
    arrivals: list[Spent] = []
    sealings: list[Spent] = []
    copies: list[tuple[Spent, ...]] = []
    parts: list[dict[str, float]] = []
    for _ in range(repeats):
        # A copy before, between and after: the machine is not the same machine ten seconds later.
        before = copy()
        arrived, arrival = timed(round_.arrive)
        between = copy()
        seconds, sealing = timed(arrived.seal)
        copies.append((before, between, copy()))
        arrivals.append(arrival)
        sealings.append(sealing)
        parts.append(seconds)
    copied = [1e-9 * copy.BYTES / fmean(each.cpu for each in three) for three in copies]
    both = [first.cpu + second.cpu for first, second in zip(arrivals, sealings, strict=True)]

    def moved(key: str, name: str, size: int, seconds: list[float], target: Target | None = None) -> Figure:
        return figure_of(
            f"{key}_gb_per_second",
            f"{name}: bytes that must move",
            "GB/s",
            rates(1e-9 * size, seconds),
            peer="copy",
            peer_values=copied,
            target=target,
        )

    return [
        moved("arrival", "arrival pass", round_.arrival_bytes, [each.cpu for each in arrivals]),
        moved("sealing", "sealing", round_.sealing_bytes, [each.cpu for each in sealings]),
        moved("together", "both", round_.arrival_bytes + round_.sealing_bytes, both, TOGETHER),
        *(
            figure_of(f"{key}_seconds", name, "s", [seconds[key] for seconds in parts])
            for key, name in (
                ("merge", "of the sealing: correct and reduce"),
                ("outer", "of the sealing: outer step, digests"),
                ("encode", "of the sealing: encode"),
            )
        ),
        figure_of(
            "seal_to_broadcast_seconds",
            "seal to broadcast (wall)",
            "s",
            [each.wall for each in sealings],
            peer="copying as much (wall)",
            peer_values=[
                round_.sealing_bytes / copy.BYTES * (between.wall + after.wall) / 2
                for _, between, after in copies
            ],
        ),
    ]


def _growth(repeats: int, elements: int) -> list[Figure]:
    everything = Round.random(max(GROWTH_PUSHES), elements).arrive()
    rounds = [evolve(everything, pushes=everything.pushes[:number]) for number in GROWTH_PUSHES]

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
        figure_of(
            f"milliseconds_per_push_{number}",
            f"correct and reduce, M = {number}",
            "ms/push",
            values,
            peer=f"M = {GROWTH_PUSHES[0]}",
            peer_values=per_push[0],
            target=LINEAR if number == GROWTH_PUSHES[-1] else None,
        )
        for number, values in zip(GROWTH_PUSHES, per_push, strict=True)
    ]
