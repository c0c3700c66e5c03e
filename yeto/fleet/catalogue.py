"""Offers from SkyPilot's catalogue: what the clouds say they have, on demand and spot.

The rule: a catalogue is prices, not promises. It knows no quotas and no placement scores: both are unknown
here. Of several machines with the same accelerators in one place the cheapest is the offer: the line that
launches an island does not tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_UP, Decimal
from typing import Any

from yeto.errors import ConfigError, YetoError
from yeto.fleet.gpus import GPUS
from yeto.fleet.grammar import CLOUDS, COUNT_MAX
from yeto.fleet.offers import PRICE_MAX, PRICE_STEP, Offer, in_order, is_region
from yeto.fleet.streams import stdout_to_stderr

WITHOUT_PRICES = ("kubernetes", "slurm", "ssh", "vsphere")
"""Machines that their user has already: SkyPilot knows what is there, and no price."""
GIB_GB = 2**30 / 1e9


def catalogue_offers() -> tuple[tuple[Offer, ...], dict[str, str]]:
    """Return the offers of all clouds that have prices, and why others are missing, by cloud.

    Raises:
        ConfigError: SkyPilot is not installed.
        YetoError: no cloud's catalogue can be had.
    """
    try:
        with stdout_to_stderr():
            from sky import catalog
    except ImportError as error:
        raise ConfigError(
            "no --offers, and SkyPilot's catalogue is not installed: name a file with --offers, "
            "or pip install 'yeto[fleet]'"
        ) from error
    offers: list[Offer] = []
    missing: dict[str, str] = {}
    for cloud in CLOUDS:
        if cloud in WITHOUT_PRICES:
            continue
        try:
            # It says on stdout what it fetches.
            with stdout_to_stderr():
                listed = catalog.list_accelerators(gpus_only=True, clouds=cloud, all_regions=True)
        except Exception as error:
            # Each cloud fetches in its own way and fails in its own way; the others are none the worse.
            missing[cloud] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        offers += offers_of(info for infos in listed.values() for info in infos)
    if not offers:
        cloud, reason = next(iter(missing.items()), ("every cloud", "nothing that can train"))
        raise YetoError(
            f"SkyPilot's catalogue gives no offers ({cloud}: {reason}); name a file with --offers"
        )
    return in_order(offers), missing


def offers_of(infos: Iterable[Any]) -> tuple[Offer, ...]:
    """Return the offers that entries of the catalogue (SkyPilot's ``InstanceTypeInfo``) make.

    Accelerators that we do not know, parts of one, prices that are missing, and regions that no line could
    name make none.
    """
    gpus = {gpu.name: gpu for gpu in GPUS}
    cheapest: dict[tuple[str, str, str, int, bool], Offer] = {}
    for info in infos:
        gpu, cloud = gpus.get(info.accelerator_name), str(info.cloud).lower()
        count, region = info.accelerator_count, info.region
        if gpu is None or cloud not in CLOUDS or not (region is None or is_region(str(region))):
            continue
        if not _is_number(count) or count != int(count) or not 1 <= count <= COUNT_MAX:
            continue
        for price, is_spot in ((info.spot_price, True), (info.price, False)):
            if not _is_number(price) or not 0 < price <= PRICE_MAX:
                continue
            offer = Offer(
                cloud=cloud,
                region=None if region is None else str(region),
                gpu=gpu,
                count=int(count),
                # By its digits: 2.448 is meant, and not the next double above it.
                price=Decimal(str(price)).quantize(PRICE_STEP, ROUND_UP),
                is_spot=is_spot,
                host_memory_gb=info.memory * GIB_GB if _is_number(info.memory) else None,
            )
            before = cheapest.get(offer.order)
            if before is None or offer.price < before.price:
                cheapest[offer.order] = offer
    return in_order(cheapest.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
