"""The wire protocol, sans-I/O: bytes to messages and back.

Nothing here opens a socket, reads a clock or knows a model: bytes come in, checked messages go out, and every
byte that a peer can get wrong ends as a ``ProtocolError``. NumPy is the only dependency of weight.
"""

from yeto.wire import bf16, codecs, f32, q4
from yeto.wire.contract import TrainingManifest, canonical_json, first_difference, session_contract
from yeto.wire.digest import digest
from yeto.wire.errors import AuthenticationError, NonFiniteError
from yeto.wire.fingerprint import layout_fingerprint
from yeto.wire.frames import FrameHeader, MessageType, decode_header, encode_header
from yeto.wire.hello import Hello, HelloFragment, HelloLayout
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec

__all__ = [
    "AuthenticationError",
    "FragmentLayout",
    "FrameHeader",
    "Hello",
    "HelloFragment",
    "HelloLayout",
    "Layout",
    "MergeMode",
    "MessageType",
    "NonFiniteError",
    "TensorSpec",
    "TrainingManifest",
    "bf16",
    "canonical_json",
    "codecs",
    "decode_header",
    "digest",
    "encode_header",
    "f32",
    "first_difference",
    "layout_fingerprint",
    "q4",
    "session_contract",
]
