"""Fields that joined a record after tapes had been written without them.

Such a field has a default, which is what every older record means by not having it. On a tape it stands only
where its value is another one, so a record that says nothing new is written as it always was, and one that
does is refused by nobody who knows the field.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
from attrs import field

_LATER: Final = "yeto.later"


def later(default: Any = None) -> Any:
    """Return the definition of a field that joined later; it stands behind all others of its class.

    Args:
        default: a plain value, of the field's own type; what a record without the field means.
    """
    return field(default=default, metadata={_LATER: True})


def later_fields(cls: Any) -> dict[str, Any]:
    """Return the names of the fields of an attrs class that joined later, with their defaults."""
    return {each.name: each.default for each in attrs.fields(cls) if _LATER in each.metadata}
