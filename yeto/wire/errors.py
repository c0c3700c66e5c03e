"""The two protocol errors that callers treat apart from all others.

Everything else malformed is a plain ``ProtocolError``: the peer sent bytes that are not allowed, its group
is closed and one line is logged. These two have a consequence of their own.
"""

from __future__ import annotations

from yeto.errors import ProtocolError


class AuthenticationError(ProtocolError):
    """The mac of a HELLO is wrong or missing; answered with an ERROR on that connection only."""


class NonFiniteError(ProtocolError):
    """A tensor's encoding states a value that is not a finite number; becomes the ``non_finite`` refusal."""
