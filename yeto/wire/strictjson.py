"""JSON read strictly: what two readers could understand differently is refused, not bent.

Python's reader keeps the last of two equal keys and takes ``NaN``, ``Infinity`` and ``1e999``. Whatever is
hashed, compared or believed later must not come in that way, from a peer or from a disk.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from yeto.wire.frames import BytesLike


def parse_json(data: BytesLike) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: it is none, is nested too deeply, or has doubled keys, NaN or a number beyond f64.
    """
    try:
        return json.loads(
            str(data, "utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value
