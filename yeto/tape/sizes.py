"""How many learners and fragments a tape may speak of.

Whoever folds a tape keeps something for each of them from the first line on. A number that no run can have is
therefore damage, and found to be damage before anything is made for it.
"""

from __future__ import annotations

from yeto.core.config import FRAGMENTS_MAX, LEARNERS_MAX
from yeto.core.decisions import SessionOpened
from yeto.core.events import HelloReceived, SessionResumed
from yeto.errors import TapeError
from yeto.tape.records import HEADER_KIND

SIZED = frozenset({HEADER_KIND, HelloReceived.kind, SessionOpened.kind, SessionResumed.kind})
"""Kinds of records that speak of settings or of a session's terms."""


def check_sizes(body: object, name: str, line: int) -> None:
    """Look at a record of one of the kinds in ``SIZED``, or at as much as was read of one.

    Args:
        body: the record's.
        name: the tape's name in messages.
        line: the record's.

    Raises:
        TapeError: it speaks of more learners or fragments than there can be; names line and field.
    """
    config, terms = getattr(body, "config", None), getattr(body, "terms", None)
    for field, value, most in (
        ("config.num_learners", getattr(config, "num_learners", None), LEARNERS_MAX),
        ("config.num_fragments", getattr(config, "num_fragments", None), FRAGMENTS_MAX),
        ("terms.num_fragments", getattr(terms, "num_fragments", None), FRAGMENTS_MAX),
    ):
        if value is not None and value > most:
            raise TapeError(f"{name}: line {line}: field {field}: {value} is more than any run has ({most})")
