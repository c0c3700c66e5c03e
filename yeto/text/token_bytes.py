"""Where in a text each token stands, counted in bytes and proved.

Character offsets that a tokenizer reports have been wrong for byte-level vocabularies, so they are not asked
for. A token of a lossless vocabulary stands for certain bytes. Put side by side, the bytes of all tokens of a
text must be the text: then lengths, summed up, are places, and a place cannot be wrong. A tokenizer that
lowers case, joins or strips spaces, or puts one in front fails this comparison and gets no places.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from tokenizers import decoders

SPACE = "\u2581"
"""How vocabularies that do not work on bytes write a space."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[int, int]:
    """Return the letter that byte-level vocabularies write for each byte, as letter to byte.

    Printable bytes stand for themselves, the others for the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + place: byte for place, byte in enumerate(others)}


_LETTERS = _byte_letters()


class TokenBytes:
    """The bytes that each token of a vocabulary stands for."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a tokenizer of transformers with a ``backend_tokenizer``."""
        backend = tokenizer.backend_tokenizer
        read = _byte_level if isinstance(backend.decoder, decoders.ByteLevel) else _plain
        words = {token: read(word) for word, token in backend.get_vocab(with_added_tokens=False).items()}
        # Added tokens are matched in the text itself, so they are written in plain letters.
        words |= {token: added.content.encode() for token, added in tokenizer.added_tokens_decoder.items()}
        in_order = [words.get(token, b"") for token in range(max(words, default=-1) + 1)]
        self._sizes = np.fromiter(map(len, in_order), dtype=np.int64, count=len(in_order))
        self._begins = np.cumsum(self._sizes) - self._sizes
        self._bytes = np.frombuffer(b"".join(in_order), dtype=np.uint8)

    def ends(self, ids: np.ndarray, text: bytes) -> np.ndarray | None:
        """Return the place behind each token in the text's UTF-8 bytes, int64, shape (n,).

        None when the tokens do not spell the text byte for byte.
        """
        if len(ids) and int(ids.max()) >= len(self._sizes):
            return None
        sizes = self._sizes[ids]
        ends = np.cumsum(sizes)
        if (int(ends[-1]) if len(ends) else 0) != len(text):
            return None
        # For each byte of the text, where its token has it: the token's first byte and how far behind it.
        places = np.arange(len(text)) + np.repeat(self._begins[ids] - (ends - sizes), sizes)
        spelled = self._bytes[places]
        return ends if np.array_equal(spelled, np.frombuffer(text, dtype=np.uint8)) else None


def _byte_level(word: str) -> bytes:
    try:
        return word.translate(_LETTERS).encode("latin-1")
    except UnicodeEncodeError:
        return b""  # spells nothing, so no text with this token is located


def _plain(word: str) -> bytes:
    byte = _BYTE.fullmatch(word)
    return bytes.fromhex(byte[1]) if byte else word.replace(SPACE, " ").encode()
