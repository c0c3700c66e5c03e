"""Offers: machines that can be had, from a file or from SkyPilot's catalogue.

The rule: an offer that is not clear is refused with its line and column, because a plan that rests on a
misread price costs money. A quota counts accelerators and belongs to a bucket (cloud, region, accelerator):
all offers of the bucket share it, spot or not.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from decimal import ROUND_UP, Decimal
from pathlib import Path

from attrs import frozen

from yeto.errors import ConfigError
from yeto.fleet.gpus import CPU, Gpu, gpu_of
from yeto.fleet.grammar import CLOUDS, COUNT_MAX

COLUMNS = ("cloud", "region", "gpu", "count", "price", "spot", "quota", "score")
EXTRA_COLUMNS = ("host_memory",)
OFFERS_MAX = 5_000
FILE_BYTES_MAX = 4 << 20
ERRORS_SHOWN = 10
PRICE_STEP = Decimal("0.0001")
"""Prices are rounded up to it, so that sums are exact and never too low."""
PRICE_MAX = 100_000
"""Far above any machine, as the two bounds below: a column of something else is noticed."""
SCORE_STEP = Decimal("0.01")
SCORE_MIN, SCORE_MAX = 1, 10
QUOTA_MAX = 1_000_000
HOST_MEMORY_MAX = 100_000
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20}")
_REGION = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")

Bucket = tuple[str, str | None, str]
"""Cloud, region and accelerator: what shares a quota."""


@frozen(kw_only=True)
class Offer:
    """Machines of one kind in one place."""

    cloud: str
    region: str | None
    """None when the offer holds anywhere in the cloud."""
    gpu: Gpu
    count: int
    """Accelerators of one machine."""
    price: Decimal
    """Dollars an hour of one machine, a multiple of ``PRICE_STEP``."""
    is_spot: bool
    quota: int | None = None
    """Accelerators that all offers of the bucket may use together; None when nobody said."""
    score: Decimal | None = None
    """Placement score from 1 (hard to get) to 10; None when nobody said."""
    host_memory_gb: float | None = None
    """Main memory of one machine; None when nobody said."""

    @property
    def bucket(self) -> Bucket:
        """What it shares its quota with."""
        return self.cloud, self.region, self.gpu.name

    @property
    def order(self) -> tuple[str, str, str, int, bool]:
        """Its place among all offers: also the order in which ties are broken."""
        return self.cloud, self.region or "", self.gpu.name, self.count, not self.is_spot


def read_offers(path: Path) -> tuple[Offer, ...]:
    """Return the offers of a CSV file, in their fixed order.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; the message names up to ten wrong lines with
            their columns.
    """
    where = f"--offers {path}"
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f"{where}: has more than {FILE_BYTES_MAX} bytes; leave out what is not for you")
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{where}: is no CSV in UTF-8: {error}") from error
    rows = [(line, [cell.strip() for cell in row]) for line, row in rows if any(cell.strip() for cell in row)]
    if not rows:
        raise ConfigError(f"{where}: is empty; its first line names the columns {','.join(COLUMNS)}")
    header = [name.lower() for name in rows[0][1]]
    _check_header(where, rows[0][0], header)
    if len(rows) - 1 > OFFERS_MAX:
        raise ConfigError(f"{where}: has more than {OFFERS_MAX} offers; leave out what is not for you")
    offers: list[tuple[int, Offer]] = []
    wrong: list[str] = []
    for line, row in rows[1:]:
        if len(row) != len(header):
            wrong.append(f"line {line}: has {len(row)} columns, and the first line {len(header)}")
            continue
        try:
            offers.append((line, _read(dict(zip(header, row, strict=True)))))
        except ConfigError as error:
            wrong.append(f"line {line}, {error}")
    wrong += _contradictions(offers)
    if wrong:
        more = f"; and {len(wrong) - ERRORS_SHOWN} more" if len(wrong) > ERRORS_SHOWN else ""
        raise ConfigError(f"{where}: {'; '.join(wrong[:ERRORS_SHOWN])}{more}")
    if not offers:
        raise ConfigError(f"{where}: has no offers, only the names of the columns")
    return in_order(offer for _, offer in offers)


def is_region(text: str) -> bool:
    """Return whether a region can be named in ``--gpu``."""
    return _REGION.fullmatch(text) is not None


def in_order(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """Return offers in their fixed order, whatever order they came in."""
    return tuple(sorted(offers, key=lambda offer: offer.order))


def _check_header(where: str, line: int, header: list[str]) -> None:
    missing = [name for name in COLUMNS if name not in header]
    unknown = [name for name in header if name not in (*COLUMNS, *EXTRA_COLUMNS)]
    if missing or unknown or len(set(header)) < len(header):
        problem = (
            f"no column {', '.join(missing)}"
            if missing
            else f"an unknown column {unknown[0]!r}"
            if unknown
            else "a column twice"
        )
        raise ConfigError(
            f"{where}: line {line}: {problem}; the columns are {','.join(COLUMNS)}, "
            f"and {EXTRA_COLUMNS[0]} if known"
        )


def _read(row: Mapping[str, str]) -> Offer:
    """Return the offer of one line; an error names the column."""
    cloud = row["cloud"].lower()
    if cloud not in CLOUDS:
        raise ConfigError(f"cloud {row['cloud']!r}: no known cloud; known are {', '.join(CLOUDS)}")
    if row["region"] and not is_region(row["region"]):
        raise ConfigError(
            f"region {row['region']!r}: letters, digits, dots, dashes; or nothing for any region"
        )
    try:
        gpu = gpu_of(row["gpu"])
    except ConfigError as error:
        raise ConfigError(f"gpu {error}") from None
    if gpu is CPU:
        raise ConfigError("gpu 'cpu': is of no use in a plan")
    spot = row["spot"].lower()
    if spot not in (*_TRUE, *_FALSE):
        raise ConfigError(f"spot {row['spot']!r}: say true or false")
    price = _number(row["price"], "price", 0, PRICE_MAX)
    if price <= 0:
        raise ConfigError(f"price {row['price']!r}: must be above 0")
    host = row.get("host_memory", "")
    return Offer(
        cloud=cloud,
        region=row["region"] or None,
        gpu=gpu,
        count=_whole(row["count"], "count", 1, COUNT_MAX),
        price=price.quantize(PRICE_STEP, ROUND_UP),
        is_spot=spot in _TRUE,
        quota=_whole(row["quota"], "quota", 0, QUOTA_MAX) if row["quota"] else None,
        score=_number(row["score"], "score", SCORE_MIN, SCORE_MAX).quantize(SCORE_STEP)
        if row["score"]
        else None,
        host_memory_gb=float(_number(host, "host_memory", 0, HOST_MEMORY_MAX)) if host else None,
    )


def _number(text: str, column: str, least: int, most: int) -> Decimal:
    # Decimal reads more: 1_0, other scripts' digits, exponents of any size.
    if not _NUMBER.fullmatch(text) or not least <= Decimal(text) <= most:
        raise ConfigError(f"{column} {text!r}: must be a number from {least} to {most}")
    return Decimal(text)


def _whole(text: str, column: str, least: int, most: int) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ConfigError(f"{column} {text!r}: must be a whole number from {least} to {most}")
    return int(text)


def _contradictions(offers: Iterable[tuple[int, Offer]]) -> list[str]:
    """Return what lines say against each other: an offer twice, two quotas of one bucket."""
    wrong = []
    lines: dict[tuple[str, str, str, int, bool], int] = {}
    quotas: dict[Bucket, tuple[int, int]] = {}
    for line, offer in offers:
        before = lines.setdefault(offer.order, line)
        if before != line:
            wrong.append(f"line {line}: is the offer of line {before} again; keep one of them")
        if offer.quota is not None:
            first, quota = quotas.setdefault(offer.bucket, (line, offer.quota))
            if quota != offer.quota:
                wrong.append(
                    f"line {line}, quota '{offer.quota}': line {first} says {quota} for the same cloud, "
                    f"region and gpu, which share it"
                )
    return wrong
