"""Which islands a budget buys, or what a wanted speed costs: the best plan, and what limits it.

The rule: a plan is exact. It is the best of all choices of shapes, to the last unit, and a limit is called
binding only when there is a better plan without it, which is tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from attrs import evolve, frozen

from yeto.fleet.grammar import ISLANDS_MAX, Island
from yeto.fleet.memory import Training
from yeto.fleet.offers import Bucket, Offer
from yeto.fleet.shapes import Limits, Rejected, Shape, find_shapes
from yeto.fleet.solve import Row, choose, least
from yeto.fleet.value import HEAD_PRICE


@frozen(kw_only=True)
class Part:
    """So many islands of one shape."""

    shape: Shape
    islands: int


@frozen(kw_only=True)
class Plan:
    """The best plan."""

    parts: tuple[Part, ...]
    """In the offers' fixed order."""
    tflops: Fraction
    cost: Fraction
    """Dollars an hour, with margin and head."""
    binding: tuple[str, ...]
    """The limits without which there is a better plan, for people."""

    @property
    def islands(self) -> tuple[Island, ...]:
        """Every island, as ``--gpu`` names them."""
        return tuple(part.shape.island for part in self.parts for _ in range(part.islands))

    @property
    def on_demand(self) -> tuple[int, ...]:
        """The numbers, from 0, of those islands whose offers are not spot."""
        spot = [part.shape.offer.is_spot for part in self.parts for _ in range(part.islands)]
        return tuple(number for number, is_spot in enumerate(spot) if not is_spot)


@frozen(kw_only=True)
class Answer:
    """A plan or the reason why there is none, and all shapes."""

    plan: Plan | None
    why_none: str | None
    shapes: tuple[Shape, ...]
    """Shapes that a plan may have, in fixed order."""
    rejected: tuple[Rejected, ...]


def make_plan(training: Training, offers: Iterable[Offer], limits: Limits) -> Answer:
    """Return the best plan for a training: most TFLOPS for a budget, or the least cost for some TFLOPS.

    Of equal plans the cheaper (with ``flops``: the faster) one is taken, then the one with fewer islands,
    then the one that has most of the first offer in the fixed order, of the second, and so on.

    Raises:
        ConfigError: the limits are out of range, or scipy is not installed.
        YetoError: the solver failed.
    """
    shapes, rejected = find_shapes(training, offers, limits.validated())
    # Those that are too dear are in the program, too: they tell whether the budget binds.
    program = _Program(shapes=shapes, limits=limits)
    chosen = program.solve()
    return Answer(
        plan=None if chosen is None else program.plan(chosen),
        why_none=program.why_none() if chosen is None else None,
        shapes=tuple(shape for shape in shapes if not limits.is_too_dear(shape)),
        rejected=rejected,
    )


@frozen(kw_only=True)
class _Program:
    """The shapes as columns of an integer program."""

    shapes: tuple[Shape, ...]
    limits: Limits
    lifted: Bucket | None = None
    """A bucket whose quota is taken to have no end."""

    def solve(self) -> tuple[int, ...] | None:
        """Return how many islands of each shape the best plan has; None when there is no plan."""
        costs, speeds = _whole([shape.cost for shape in self.shapes]), self._slowness()
        objectives = [speeds, costs] if self.limits.flops is None else [costs, speeds]
        chosen = choose(self._caps(), self._rows(), objectives)
        return chosen if chosen is not None and any(chosen) else None

    def best(self) -> int | None:
        """Return the best value of what matters most, the lower the better; None when there is no plan."""
        costs = _whole([shape.cost for shape in self.shapes])
        return least(self._caps(), self._rows(), costs if self.limits.flops is not None else self._slowness())

    def plan(self, chosen: Sequence[int]) -> Plan:
        """Return a choice as a plan, with the limits that bind it."""
        parts = tuple(
            Part(shape=shape, islands=count)
            for shape, count in zip(self.shapes, chosen, strict=True)
            if count
        )
        return Plan(
            parts=parts,
            tflops=sum((part.islands * part.shape.tflops for part in parts), Fraction(0)),
            cost=sum((part.islands * part.shape.cost for part in parts), HEAD_PRICE),
            binding=tuple(self._binding(parts)),
        )

    def why_none(self) -> str:
        """Return why there is no plan."""
        if self.limits.flops is None or not self.shapes:
            return "no offer makes an island within the limits; each one's reason is in the list"
        fastest = evolve(self, limits=evolve(self.limits, flops=None)).best()
        assert fastest is not None, "no island at all is a choice"
        reached = Fraction(-fastest) / _unit([shape.tflops for shape in self.shapes])
        wanted = float(self.limits.flops)
        return f"at most {float(reached):,.1f} TFLOPS can be had, and --flops wants {wanted:,.1f}"

    def _binding(self, parts: Sequence[Part]) -> Iterable[str]:
        """Yield the limits without which there is a better plan."""
        limits, best = self.limits, self.best()
        islands = sum(part.islands for part in parts)

        def gains(**changes: Any) -> bool:
            return evolve(self, limits=evolve(limits, **changes)).best() != best

        if limits.budget is None:
            assert limits.flops is not None
            yield f"--flops: {float(limits.flops):,.1f} TFLOPS are wanted"
        elif gains(budget=None):
            cost = sum((part.islands * part.shape.cost for part in parts), HEAD_PRICE)
            yield f"--budget: ${float(cost):,.2f} of ${float(limits.budget):,.2f} an hour"
        if gains(max_islands=ISLANDS_MAX):
            yield f"--max-islands: {islands} of {limits.max_islands}"
        if limits.max_per_offer is not None and gains(max_per_offer=None):
            yield f"--max-per-offer: {limits.max_per_offer}"
        used: Counter[Bucket] = Counter()
        for part in parts:
            used[part.shape.offer.bucket] += part.islands * part.shape.gpus
        quotas = self._quotas()
        for bucket, count in used.items():
            if bucket in quotas and evolve(self, lifted=bucket).best() != best:
                cloud, region, gpu = bucket
                place = f"{cloud} {region}" if region else cloud
                yield f"quota of {gpu} at {place}: {count} of {quotas[bucket]} accelerators"

    def _slowness(self) -> list[int]:
        return [-value for value in _whole([shape.tflops for shape in self.shapes])]

    def _quotas(self) -> dict[Bucket, int]:
        """Return the quotas that hold; offers of one bucket that say none share the one that another says."""
        return {
            shape.offer.bucket: shape.offer.quota
            for shape in self.shapes
            if shape.offer.quota is not None and shape.offer.bucket != self.lifted
        }

    def _caps(self) -> list[int]:
        """Return the most islands of each shape that its own limits allow."""
        limits, quotas = self.limits, self._quotas()
        caps = []
        for shape in self.shapes:
            most = [limits.max_islands]
            if limits.max_per_offer is not None:
                most.append(limits.max_per_offer)
            if shape.offer.bucket in quotas:
                most.append(quotas[shape.offer.bucket] // shape.gpus)
            if limits.budget is not None:
                most.append(max(0, math.floor((limits.budget - HEAD_PRICE) / shape.cost)))
            caps.append(min(most))
        return caps

    def _rows(self) -> list[Row]:
        """Return the limits that several shapes share."""
        limits, shapes = self.limits, self.shapes
        rows = [Row(coefficients=(1,) * len(shapes), high=limits.max_islands)]
        if limits.budget is not None:
            costs = [shape.cost for shape in shapes]
            most = math.floor((limits.budget - HEAD_PRICE) * _unit(costs))
            rows.append(Row(coefficients=tuple(_whole(costs)), high=most))
        if limits.flops is not None:
            speeds = [shape.tflops for shape in shapes]
            rows.append(Row(coefficients=tuple(_whole(speeds)), low=math.ceil(limits.flops * _unit(speeds))))
        sharing = Counter(shape.offer.bucket for shape in shapes)
        for bucket, quota in self._quotas().items():
            if sharing[bucket] == 1:
                continue  # its own cap says it
            gpus = tuple(shape.gpus if shape.offer.bucket == bucket else 0 for shape in shapes)
            rows.append(Row(coefficients=gpus, high=quota))
        return rows


def _unit(values: Sequence[Fraction]) -> int:
    """Return the number that makes all of these whole."""
    return math.lcm(*(value.denominator for value in values))


def _whole(values: Sequence[Fraction]) -> list[int]:
    unit = _unit(values)
    return [value.numerator * (unit // value.denominator) for value in values]
