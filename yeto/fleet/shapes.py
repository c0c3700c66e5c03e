"""Shapes: what becomes of an offer, one kind of island or a reason why not.

The rule: nothing is left out in silence. An offer's island has the fewest machines that hold the model; every
number of machines below it, and every offer that makes no island, stands in the list of those turned away,
with the figures that decided it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from attrs import evolve, frozen

from yeto.errors import ConfigError
from yeto.fleet.grammar import ISLANDS_MAX, Island
from yeto.fleet.memory import NODES_MAX, Training
from yeto.fleet.offers import Bucket, Offer, in_order
from yeto.fleet.value import HEAD_PRICE, goodput, island_cost, island_tflops, mfu


@frozen(kw_only=True)
class Limits:
    """What a plan has to keep; exactly one of budget and flops is given."""

    budget: Fraction | None = None
    """Dollars an hour, the head's among them."""
    flops: Fraction | None = None
    """TFLOPS that must reach the model."""
    max_islands: int = 16
    max_per_offer: int | None = None
    """Most islands of one offer."""

    def validated(self) -> Limits:
        """Return self.

        Raises:
            ConfigError: a limit is missing or out of range.
        """
        if (self.budget is None) == (self.flops is None):
            raise ConfigError("say one of --budget (dollars an hour) and --flops (TFLOPS)")
        if not 1 <= self.max_islands <= ISLANDS_MAX:
            raise ConfigError(f"--max-islands {self.max_islands}: must be from 1 to {ISLANDS_MAX}")
        if self.max_per_offer is not None and self.max_per_offer < 1:
            raise ConfigError(f"--max-per-offer {self.max_per_offer}: must be at least 1")
        return self

    def is_too_dear(self, shape: Shape) -> bool:
        """Tell whether one island of a shape is over the budget already."""
        return self.budget is not None and shape.cost + HEAD_PRICE > self.budget


@frozen(kw_only=True)
class Shape:
    """One kind of island that holds the model."""

    offer: Offer
    nodes: int
    mfu: Fraction
    goodput: Fraction
    tflops: Fraction
    """Of one island, as they reach the model."""
    cost: Fraction
    """Dollars an hour of one island, with the margin."""

    @property
    def gpus(self) -> int:
        """Accelerators of one island."""
        return self.nodes * self.offer.count

    @property
    def island(self) -> Island:
        """The island as ``--gpu`` names it."""
        return island_of(self.offer, self.nodes)


@frozen(kw_only=True)
class Rejected:
    """A shape that no plan can have."""

    island: Island
    is_spot: bool
    reason: str


def island_of(offer: Offer, nodes: int) -> Island:
    """Return the island that so many machines of an offer are."""
    return Island(cloud=offer.cloud, nodes=nodes, count=offer.count, gpu=offer.gpu, region=offer.region)


def find_shapes(
    training: Training, offers: Iterable[Offer], limits: Limits
) -> tuple[tuple[Shape, ...], tuple[Rejected, ...]]:
    """Return the shapes that hold a training, in the offers' fixed order, and those turned away.

    A shape that is over the budget alone is in both.
    """
    shapes: list[Shape] = []
    rejected: list[Rejected] = []
    for offer in _with_shared_quotas(in_order(offers)):
        few = training.smallest_nodes(offer.count, offer.gpu) if offer.gpu.has_bf16 else 1
        if few is None or few > 1:
            rejected += _too_few(training, offer, few or NODES_MAX + 1)
        if few is None:
            continue
        shape = Shape(
            offer=offer,
            nodes=few,
            mfu=mfu(offer.cloud, few, offer.count, offer.gpu),
            goodput=goodput(offer.score),
            tflops=island_tflops(offer.cloud, few, offer.count, offer.gpu, offer.score),
            cost=island_cost(few, offer.price),
        )
        reason = _reason_against(shape, training)
        if reason is None:
            shapes.append(shape)
            if limits.is_too_dear(shape):
                cost, head = float(shape.cost), float(HEAD_PRICE)
                reason = (
                    f"price: ${cost:,.2f} an hour with margin and ${head:.2f} for the head: over --budget"
                )
        if reason is not None:
            rejected.append(Rejected(island=shape.island, is_spot=offer.is_spot, reason=reason))
    return tuple(shapes), tuple(rejected)


def _with_shared_quotas(offers: Iterable[Offer]) -> list[Offer]:
    """Return the offers, each with the quota that its bucket has: the least that any of them says."""
    offers = list(offers)
    quotas: dict[Bucket, int] = {}
    for offer in offers:
        if offer.quota is not None:
            quotas[offer.bucket] = min(offer.quota, quotas.get(offer.bucket, offer.quota))
    return [evolve(offer, quota=quotas.get(offer.bucket)) for offer in offers]


def _too_few(training: Training, offer: Offer, nodes: int) -> list[Rejected]:
    """Return the islands of fewer machines than so many, which do not hold the model."""
    return [
        Rejected(
            island=island_of(offer, fewer),
            is_spot=offer.is_spot,
            reason=f"memory: {training.arithmetic(fewer * offer.count, offer.gpu)}",
        )
        for fewer in range(1, nodes)
    ]


def _reason_against(shape: Shape, training: Training) -> str | None:
    """Return why no plan can have an island that holds the model; None if one can."""
    offer, host = shape.offer, shape.offer.host_memory_gb
    if not offer.gpu.has_bf16:
        return f"{offer.gpu.name} has no bf16"
    if host is not None and host < training.host_memory_gb:
        need = training.host_memory_gb
        return f"host memory: anchors and copies take {need:.1f} GB, and a machine has {host:g} GB"
    if offer.quota is not None and offer.quota < shape.gpus:
        return f"quota: {offer.quota} accelerators, and an island takes {shape.gpus}"
    return None
