"""Many rows at once: ids, and the tokens of each generation block, by place instead of by decoding.

One rendering gives text and places of blocks, one call of the tokenizer the ids of all texts. What is not
plain in any manner (a template that raises, tokens that do not spell the text, one token in two blocks) gives
nothing here, and the caller proves that row at length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
from attrs import field, frozen
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from yeto.text.formats import Conversation
from yeto.text.marked import marking, render_marked
from yeto.text.templates import writes_in_order
from yeto.text.token_bytes import TokenBytes


@frozen(eq=False)
class Found:
    """A row whose blocks were found."""

    ids: np.ndarray = field(repr=False)
    """Token ids, int32, shape (n,)."""
    weights: np.ndarray = field(repr=False)
    """1 for the tokens of blocks, uint8, shape (n,)."""
    blocks: list[str]
    """Texts of the blocks."""


@frozen
class _Rendered:
    text: str
    spans: list[tuple[int, int]]
    """First letter of each block and the one behind its last."""


class BlockFinder:
    """Finds the blocks of rows for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a tokenizer of transformers for which :meth:`can_read` says yes."""
        self._tokenizer = tokenizer
        self._token_bytes: TokenBytes | None = None

    @staticmethod
    def can_read(tokenizer: Any) -> bool:
        """Tell whether this tokenizer renders and reads as all do; others are asked for their own mask."""
        kind = type(tokenizer)
        return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
            getattr(kind, name) is getattr(PreTrainedTokenizerFast, name)
            for name in ("apply_chat_template", "__call__", "_encode_plus")
        )

    def find(self, chats: Sequence[Conversation], templates: Sequence[str]) -> list[Found | None]:
        """Render and tokenize rows, each with its template.

        Returns:
            For each row what was found, or None where the short way does not do.
        """
        rendered = self._render(chats, templates)
        whole = [one for one in rendered if one is not None]
        located = iter(self._locate(whole, self._ids([one.text for one in whole])))
        return [None if one is None else next(located) for one in rendered]

    def _render(self, chats: Sequence[Conversation], templates: Sequence[str]) -> list[_Rendered | None]:
        """Render rows, neighbours with the same template and without tools by one call."""
        special = self._tokenizer.special_tokens_map
        rendered: list[_Rendered | None] = []
        alike = groupby(zip(chats, templates, strict=True), lambda row: (row[1], row[0].tools is None))
        for (template, without_tools), rows in alike:
            neighbours = [chat for chat, _ in rows]
            if not writes_in_order(template):
                rendered += [None] * len(neighbours)
                continue
            together = _rendered(neighbours, template, special) if without_tools else None
            if together is None:
                for chat in neighbours:
                    rendered += _rendered([chat], template, special) or [None]
            else:
                rendered += together
        return rendered

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # Sets the backend to neither cut nor pad, and to put special tokens as the tokenizer is told to.
        self._tokenizer("", add_special_tokens=False)
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _locate(self, rows: list[_Rendered], ids: list[list[int]]) -> list[Found | None]:
        """Find the tokens of rows that are joined to one text; if that fails, of each row by itself."""
        if not rows:
            return []
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(self._tokenizer)
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        joined = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
        data = [row.text.encode() for row in rows]
        ends = self._token_bytes.ends(joined, b"".join(data))
        if ends is None and len(rows) == 1:
            return [None]
        if ends is None:
            return [self._locate([row], [one])[0] for row, one in zip(rows, ids, strict=True)]
        return _found(rows, list(map(len, data)), joined, lengths, ends)


def _found(
    rows: list[_Rendered], sizes: list[int], ids: np.ndarray, lengths: np.ndarray, ends: np.ndarray
) -> list[Found | None]:
    """Return the tokens of each row of a joined text; None where a block does not begin and end with tokens.

    Args:
        rows: as rendered.
        sizes: bytes of each row's text.
        ids: tokens of all rows.
        lengths: tokens of each row.
        ends: place behind each token in the joined text.
    """
    # Places and numbers with a zero in front: an empty row, or one at the beginning, ends at it.
    edges = np.concatenate(([0], ends))
    behind = np.cumsum(lengths)
    places = np.cumsum(sizes)
    ends_whole = edges[behind] == places
    is_whole = (ends_whole & np.concatenate(([True], ends_whole[:-1]))).tolist()
    spans = np.array(list(_spans_in_bytes(rows, sizes)), dtype=np.int64).reshape(-1, 3)
    owner, start, stop = spans[:, 0], spans[:, 1], spans[:, 2]
    # Every token that has a byte of the block, also one that lies across an end of it.
    first = ends.searchsorted(start, side="right")
    last = ends.searchsorted(stop - 1, side="right")
    is_empty = start == stop
    # A block without text stands between two tokens.
    amiss = is_empty & (edges[edges.searchsorted(start).clip(max=len(ends))] != start)
    owner_of, first_of, last_of = owner[~is_empty], first[~is_empty], last[~is_empty]
    # One token in two blocks belongs to neither.
    shared = first_of[1:] <= last_of[:-1]
    for row in (*owner[amiss].tolist(), *owner_of[1:][shared].tolist()):
        is_whole[row] = False
    change = np.zeros(len(ids) + 1, dtype=np.int32)
    np.add.at(change, first_of, 1)
    np.subtract.at(change, last_of + 1, 1)
    weights = (np.cumsum(change[:-1]) > 0).astype(np.uint8)
    found: list[Found | None] = []
    for row, whole, begin, end in zip(
        rows, is_whole, (behind - lengths).tolist(), behind.tolist(), strict=True
    ):
        blocks = [row.text[slice(*span)] for span in row.spans]
        found.append(Found(ids[begin:end], weights[begin:end], blocks) if whole else None)
    return found


def _spans_in_bytes(rows: list[_Rendered], sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the row's number, the first byte and that behind the last of each block, in the joined text."""
    place = 0
    for number, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        text = row.text
        for start, stop in row.spans:
            if size != len(text):
                start, stop = len(text[:start].encode()), len(text[:stop].encode())
            yield number, place + start, place + stop
        place += size


def _rendered(
    chats: list[Conversation], template: str, special: dict[str, Any]
) -> list[_Rendered | None] | None:
    """Render rows that share template and tools; None if one of them raises."""
    try:
        if all(map(_is_plain, chats)) and (compiled := marking(template)) is not None:
            written = [render_marked(compiled, chat.messages, special) for chat in chats]
        else:
            texts, spans = chat_template_utils.render_jinja_template(
                conversations=[chat.messages for chat in chats],
                tools=chats[0].tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **special,
            )
            written = list(zip(texts, spans, strict=True))
        "".join(text for text, _ in written).encode()
    except Exception:
        # Whatever is wrong, rendering that row once more the long way says it.
        return None
    return [_Rendered(text, spans) for text, spans in written]


def _is_plain(chat: Conversation) -> bool:
    """Tell whether all that a template sees of a chat is roles and texts."""
    return chat.tools is None and all(
        len(message) == 2 and type(message["role"]) is type(message["content"]) is str
        for message in chat.messages
    )
