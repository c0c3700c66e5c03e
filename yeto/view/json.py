"""The one JSON of a run: what ``yeto status --json`` prints, a report embeds and a dashboard serves.

docs/VIEW.md describes it. It is plain: objects, lists, numbers, strings, null; NaN and Infinity, which JSON
lacks, become null. What a moment consists of becomes an object with the names of its type's fields.
"""

from __future__ import annotations

import math
from typing import Any

import attrs

from yeto.view.model import FORMAT, Moment


def moment_json(moment: Moment) -> dict[str, Any]:
    """Return a moment as plain JSON values."""
    return {"format": FORMAT, **plain(moment)}


def moment_of(value: Any) -> Moment:
    """Return the moment that such JSON values are of; keys that it does not know are passed over.

    Raises:
        ValueError: they are of no moment, or of another format.
    """
    # Only who asks another machine needs it.
    import cattrs

    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"not a moment of format {FORMAT}")
    try:
        return cattrs.structure(value, Moment)
    except Exception as error:  # cattrs raises groups of whatever its parts raise
        raise ValueError(f"not a moment of format {FORMAT}") from error


def plain(value: Any) -> Any:
    """Return a value of ours as plain JSON values."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        # A microsecond is the tape's grid, so nothing that it said is lost by nine digits behind the point.
        return round(value, 9) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    assert attrs.has(type(value)), f"no JSON for a {type(value).__name__}"
    return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
