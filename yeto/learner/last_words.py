"""What the syncer says that no new connection would change."""

from __future__ import annotations

from yeto.errors import YetoError
from yeto.wire.auth import REFUSAL
from yeto.wire.messages import ErrorMessage


class PermanentFailure(YetoError):
    """The syncer said ERROR, or contradicted itself: nothing that a new connection would mend."""


class SessionReleased(YetoError):
    """The syncer said SHUTDOWN: this learner's part is done."""


def refusal(payload: bytes) -> PermanentFailure:
    """Return what an ERROR means for this learner."""
    text = ErrorMessage.decode(payload).text
    if text == REFUSAL:
        # The protocol fixes the words, so that they tell a stranger nothing; our user needs the remedy.
        text += "; --auth-key-file must hold the syncer's key on every learner"
    return PermanentFailure(f"refused by the syncer: {text}")
