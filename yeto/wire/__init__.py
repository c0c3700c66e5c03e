"""The wire protocol, sans-I/O: bytes to messages and back.

Nothing here opens a socket, reads a clock or knows a model: bytes come in, checked messages go out, and every
byte that a peer can get wrong ends as a ``ProtocolError``. NumPy is the only dependency of weight.
"""

from yeto.wire import bf16, codecs, f32, q4
from yeto.wire.digest import digest
from yeto.wire.errors import AuthenticationError, NonFiniteError

__all__ = ["AuthenticationError", "NonFiniteError", "bf16", "codecs", "digest", "f32", "q4"]
