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
from yeto.fleet.streams import stdout_to_stderr


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
    found: tuple[int, ...] = ()
    for objective in [*objectives, [1] * len(caps)]:
        reduced = _reduced(objective)
        best = _minimise(reduced, nothing, caps, _Limits.of(held))
        if best is None:
            return None
        held.append(Row(coefficients=reduced, high=_sum(reduced, best)))
        found = best
    return _first_in_order(caps, _Limits.of(held), found)


def least(caps: Sequence[int], rows: Sequence[Row], objective: Sequence[int]) -> int | None:
    """Return the least value of one objective, or None when the rows allow none; otherwise as ``choose``."""
    if not caps:
        return 0 if all(_holds(row, ()) for row in rows) else None
    held = [_reduced_row(row) for row in rows]
    found = _minimise(_reduced(objective), [0] * len(caps), caps, _Limits.of(held))
    return None if found is None else _sum(objective, found)


def _first_in_order(caps: Sequence[int], limits: _Limits, found: tuple[int, ...]) -> tuple[int, ...]:
    """Return, of all choices that hold, the one whose columns are largest in their order.

    All of them have as many things as ``found``, which is one of them: fewer would have been better, and the
    limits allow no more. So the work is done when the columns before some place have as many.

    Args:
        caps: most of each column.
        limits: what every choice has to keep, the best of every objective among it.
        found: one of these choices.
    """
    lows, highs = [0] * len(caps), list(caps)
    start = 0
    while sum(lows) < sum(found):
        first = next(column for column in range(start, len(caps)) if found[column])
        if first > start:
            # Is there a choice with something before it? The earlier, the better.
            weights = [0] * len(caps)
            weights[start:first] = range(start - first, 0)
            earlier = _again(weights, lows, highs, limits)
            if any(earlier[start:first]):
                found = earlier
                continue
            highs[start:first] = [0] * (first - start)
        if found[first] < highs[first]:
            found = _again([-(column == first) for column in range(len(caps))], lows, highs, limits)
        lows[first] = highs[first] = found[first]
        start = first + 1
    return tuple(lows)


def _again(
    objective: Sequence[int], lows: Sequence[int], highs: Sequence[int], limits: _Limits
) -> tuple[int, ...]:
    """Return a best choice where there is known to be one."""
    found = _minimise(objective, lows, highs, limits)
    if found is None:
        raise YetoError("the solver lost the answer that it had; ask with fewer offers")
    return found


@frozen(kw_only=True, eq=False)
class _Limits:
    """Rows, for the solver too."""

    rows: tuple[Row, ...]
    constraint: Any
    """Of scipy; None without rows."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Limits:
        try:
            import numpy as np
            from scipy.optimize import LinearConstraint
            from scipy.sparse import csr_array
        except ImportError as error:
            raise ConfigError("a plan needs scipy: pip install 'yeto[fleet]'") from error
        constraint = None
        if rows:
            constraint = LinearConstraint(
                csr_array(np.array([row.coefficients for row in rows], dtype=np.float64)),
                np.array([-np.inf if row.low is None else row.low for row in rows], dtype=np.float64),
                np.array([np.inf if row.high is None else row.high for row in rows], dtype=np.float64),
            )
        return cls(rows=tuple(rows), constraint=constraint)


def _minimise(
    objective: Sequence[int], lows: Sequence[int], highs: Sequence[int], limits: _Limits
) -> tuple[int, ...] | None:
    """Return a best choice by one objective, verified; None when there is none at all."""
    import numpy as np
    from scipy.optimize import Bounds, milp

    # HiGHS now and then prints a line for its developers.
    with stdout_to_stderr():
        answer = milp(
            np.array(objective, dtype=np.float64),
            integrality=np.ones(len(highs)),
            bounds=Bounds(np.array(lows, dtype=np.float64), np.array(highs, dtype=np.float64)),
            constraints=limits.constraint,
            options={"mip_rel_gap": 0.0},
        )
    if answer.status == 2:
        return None
    if answer.status != 0 or answer.x is None:
        raise YetoError(f"the solver gave up: {answer.message}; ask with fewer offers")
    chosen = tuple(round(value) for value in answer.x)
    exact = (
        all(low <= value <= high for low, value, high in zip(lows, chosen, highs, strict=True))
        and all(_holds(row, chosen) for row in limits.rows)
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
