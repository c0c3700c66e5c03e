"""The codecs by name, and which of them a message uses.

A session has one dtype: deltas travel in it, initial values and broadcasts in the *bulk* dtype, which is the
same except that q4 becomes bf16 (four bits are enough for a difference, not for a parameter). The final cut
is always f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, cast

from yeto.errors import ConfigError
from yeto.wire import bf16, f32, q4
from yeto.wire.tensorbytes import Payload, Values

DTYPE_NUMBERS: Final[Mapping[str, int]] = {"f32": 1, "bf16": 2, "q4": 3}
"""The wire value of each session dtype."""


class Codec(Protocol):
    """What each codec module offers; see ``yeto.wire.bf16`` for the contract of each function."""

    NAME: str

    def encoded_size(self, numel: int) -> int: ...  # noqa: D102

    def encode(self, values: Values) -> bytes: ...  # noqa: D102

    def encode_into(self, values: Values, out: bytearray | memoryview) -> None: ...  # noqa: D102

    def decode(self, data: Payload, numel: int, out: Values | None = None) -> Values: ...  # noqa: D102


_CODECS: Final[Mapping[str, Codec]] = {
    "f32": cast(Codec, f32),
    "bf16": cast(Codec, bf16),
    "q4": cast(Codec, q4),
}


def by_name(name: str) -> Codec:
    """Return the codec ``f32``, ``bf16`` or ``q4``.

    Raises:
        ConfigError: there is no such codec.
    """
    codec = _CODECS.get(name)
    if codec is None:
        raise ConfigError(f"--wire-dtype {name}: must be one of {', '.join(_CODECS)}")
    return codec


def bulk_dtype(session_dtype: str) -> str:
    """Return the dtype of INIT and BCAST tensors in a session of this dtype."""
    return "bf16" if session_dtype == "q4" else by_name(session_dtype).NAME
