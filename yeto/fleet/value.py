"""What an island is worth and what it costs, in exact numbers: two plans that tie do so to the last digit.

Worth is the compute that reaches the model: peak, times the share of it that training uses, times the share
of the time that the machines are there.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

from yeto.fleet.gpus import Gpu

HEAD_PRICE = Fraction(40, 100)
"""Dollars an hour of the syncer's machine: small, and on demand."""
PRICE_MARGIN = Fraction(115, 100)
"""What an offer's price is taken times: spot prices move."""
MFU_ONE_NODE = Fraction(35, 100)
MFU_RDMA = Fraction(30, 100)
MFU_NO_RDMA = Fraction(20, 100)
GOODPUT_UNKNOWN = Fraction(85, 100)
GOODPUT_MAX = Fraction(98, 100)
RDMA_COUNT = 8
"""Accelerators of a machine that has such a network: whole machines alone."""
RDMA = {
    "aws": ("A100", "A100-80GB", "H100", "H200", "B200"),
    "azure": ("A100", "A100-80GB", "H100", "H200"),
    "gcp": ("H200", "B200"),
    "nebius": ("H100", "H200", "B200"),
    "oci": ("A100", "A100-80GB", "H100", "H200", "B200"),
}
"""Whose machines of 8 reach each other's memory over the network (EFA, InfiniBand, RoCE)."""


def mfu(cloud: str, nodes: int, count: int, gpu: Gpu) -> Fraction:
    """Return the share of its peak that an island trains with."""
    if nodes == 1:
        return MFU_ONE_NODE
    has_rdma = count == RDMA_COUNT and gpu.name in RDMA.get(cloud, ())
    return MFU_RDMA if has_rdma else MFU_NO_RDMA


def goodput(score: Decimal | None) -> Fraction:
    """Return the share of the time that machines of a placement score (1 to 10) are there."""
    if score is None:
        return GOODPUT_UNKNOWN
    return min(GOODPUT_MAX, Fraction(1, 2) + Fraction(5, 100) * Fraction(score))


def island_tflops(cloud: str, nodes: int, count: int, gpu: Gpu, score: Decimal | None) -> Fraction:
    """Return what an island is worth, in TFLOPS that reach the model."""
    return nodes * count * Fraction(gpu.tflops) * mfu(cloud, nodes, count, gpu) * goodput(score)


def island_cost(nodes: int, price: Decimal) -> Fraction:
    """Return dollars an hour that are counted for an island of machines of this price each."""
    return nodes * Fraction(price) * PRICE_MARGIN
