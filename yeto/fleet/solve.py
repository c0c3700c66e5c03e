"""The choice of islands as a mixed-integer program, solved to the last unit.

The rule: the answer is a function of the question alone. All coefficients are whole numbers (a sum is then
right or wrong by at least 1, which no tolerance of a solver hides), the gap is closed to 0, and every answer
is verified in integers: each row, and that the solver's bound leaves no room for a better one. Of several
best answers the objectives that follow decide, each solved with those before it held at their best; what they
leave open is decided by the order of the columns: the first takes as much as it can, then the second, and so
on. That answer is unique, so neither the solver's version nor its luck can change it.

HiGHS is called through ``scipy.optimize.milp`` (extra ``fleet``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from yeto.errors import ConfigError, YetoError

PLACES_MAX = 10**7
"""Largest weight of the last objectives, which put several columns into one number: far below what doubles
hold exactly."""


@frozen(kw_only=True)
class Row:
    """A limit: the sum of coefficient times column is at least ``low`` and at most ``high``."""

    coefficients: tuple[int, ...]
    low: int | None = None
    high: int | None = None


def choose(
    caps: Sequence[int], rows: Sequence[Row], objectives: Sequence[Sequence[int]]
) -> tuple[int, ...] | None:
    """Return the one best choice: how many of each column, or None when the rows allow none.

    Args:
        caps: most of each column, none negative.
        rows: limits that all hold.
        objectives: what is minimised, the most important first; whole numbers. Behind them all comes the
            number of things chosen, and then the order of the columns.

    Raises:
        ConfigError: scipy is not installed.
        YetoError: the solver gave up, or its answer is not exact.
    """
    if not caps:
        return () if all(_holds(row, ()) for row in rows) else None
    held = [_reduced_row(row) for row in rows]
    nothing = [0] * len(caps)
    count = 0
    for objective in [*objectives, [1] * len(caps)]:
        reduced = _reduced(objective)
        found = _minimise(reduced, nothing, caps, held)
        if found is None:
            return None
        held.append(Row(coefficients=reduced, high=_sum(reduced, found)))
        count = sum(found)
    return _first_in_order(caps, held, count)


def least(caps: Sequence[int], rows: Sequence[Row], objective: Sequence[int]) -> int | None:
    """Return the least value of one objective, or None when the rows allow none; otherwise as ``choose``."""
    if not caps:
        return 0 if all(_holds(row, ()) for row in rows) else None
    held = [_reduced_row(row) for row in rows]
    found = _minimise(_reduced(objective), [0] * len(caps), caps, held)
    return None if found is None else _sum(objective, found)


def _first_in_order(caps: Sequence[int], rows: Sequence[Row], count: int) -> tuple[int, ...]:
    """Return, of all choices of ``count`` things that hold, the one whose columns are largest in their order.

    Several columns are asked for at a time, as the digits of one number. Once ``count`` is reached, the rest
    is 0: the rows allow no more, and no choice has fewer.
    """
    base = max(caps) + 1
    width = max(1, int(math.log(PLACES_MAX, max(base, 2))))
    lows, highs = [0] * len(caps), list(caps)
    for start in range(0, len(caps), width):
        if sum(lows[:start]) == count:
            break
        columns = range(start, min(start + width, len(caps)))
        weights = [0] * len(caps)
        for place, column in enumerate(reversed(columns)):
            weights[column] = -(base**place)
        found = _minimise(weights, lows, highs, rows)
        if found is None:
            raise YetoError("the solver lost the answer that it had; ask with fewer offers")
        for column in columns:
            lows[column] = highs[column] = found[column]
    return tuple(lows)


def _minimise(
    objective: Sequence[int], lows: Sequence[int], highs: Sequence[int], rows: Sequence[Row]
) -> tuple[int, ...] | None:
    """Return a best choice by one objective, verified; None when there is none at all."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise ConfigError("a plan needs scipy: pip install 'yeto[fleet]'") from error
    limits: Any = None
    if rows:
        limits = LinearConstraint(
            csr_array(np.array([row.coefficients for row in rows], dtype=np.float64)),
            np.array([-np.inf if row.low is None else row.low for row in rows], dtype=np.float64),
            np.array([np.inf if row.high is None else row.high for row in rows], dtype=np.float64),
        )
    answer = milp(
        np.array(objective, dtype=np.float64),
        integrality=np.ones(len(highs)),
        bounds=Bounds(np.array(lows, dtype=np.float64), np.array(highs, dtype=np.float64)),
        constraints=limits,
        options={"mip_rel_gap": 0.0},
    )
    if answer.status == 2:
        return None
    if answer.status != 0 or answer.x is None:
        raise YetoError(f"the solver gave up: {answer.message}; ask with fewer offers")
    chosen = tuple(round(value) for value in answer.x)
    exact = (
        all(low <= value <= high for low, value, high in zip(lows, chosen, highs, strict=True))
        and all(_holds(row, chosen) for row in rows)
        # Any other choice differs by at least 1.
        and _sum(objective, chosen) - answer.mip_dual_bound < 0.5
    )
    if not exact:
        raise YetoError("the solver's answer is not exact; ask with fewer offers, or with rounder prices")
    return chosen


def _holds(row: Row, chosen: Sequence[int]) -> bool:
    total = _sum(row.coefficients, chosen)
    return (row.low is None or total >= row.low) and (row.high is None or total <= row.high)


def _sum(coefficients: Sequence[int], chosen: Sequence[int]) -> int:
    return sum(one * count for one, count in zip(coefficients, chosen, strict=True))


def _reduced(objective: Sequence[int]) -> tuple[int, ...]:
    """Return an objective in its coarsest unit: smaller numbers, the same order."""
    unit = math.gcd(*objective) or 1
    return tuple(value // unit for value in objective)


def _reduced_row(row: Row) -> Row:
    """Return a row in its coarsest unit; the limits are rounded inwards, where all sums are."""
    unit = math.gcd(*row.coefficients) or 1
    return Row(
        coefficients=_reduced(row.coefficients),
        low=None if row.low is None else -(-row.low // unit),
        high=None if row.high is None else row.high // unit,
    )
