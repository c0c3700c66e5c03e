"""Which tokens of a conversation carry loss.

The rule: the model's own chat template decides, and nobody has to believe it. ``{% generation %}`` blocks in
a template say what the assistant would generate; the tokenizer turns them into a mask. That mask can be
wrong in silence (a template without blocks gives zeros, spans are counted in a text that is stripped
afterwards, character offsets are off for some byte-level tokenizers), and a run trained on a wrong mask
looks healthy. So every row is proved, in one of two ways.

At length: the tokenizer makes ids and mask, the template is rendered a second time with visible marks around
its blocks, the masked tokens are decoded, and the two texts must be the same. What cannot be proved is
refused, with the three ways out.

In short, for many rows at once: the template is rendered once, the tokens of the text must spell it byte for
byte, and then the places of the blocks say which tokens they are. That holds for templates that write their
blocks straight to the output (their syntax tree tells) and for lossless tokenizers. The first row of each
template goes both ways and must come out the same; every row that is odd in any manner goes the long way,
which alone may refuse.

Nothing is added after the template: exactly the control tokens it writes, hence one BOS. Only ``--train-on
all`` and the ``legacy`` format, which have no template that could have written them, add BOS and EOS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
from attrs import field, frozen

from yeto.errors import DataError
from yeto.text.blocks_in_text import BlockFinder, Found
from yeto.text.formats import Conversation
from yeto.text.legacy import legacy_parts
from yeto.text.templates import has_generation, with_marks

WAYS_OUT = (
    "ways out: --chat-template FILE (a template with {% generation %} tags), --assistant-mask-mode legacy, "
    "or --train-on all"
)
WAYS_OUT_FOR_ALL = "ways out: --chat-template FILE (another template), or --assistant-mask-mode legacy"
"""Where every token is trained on already."""


@frozen(kw_only=True, eq=False)
class Encoded:
    """One tokenized conversation."""

    ids: np.ndarray = field(repr=False)
    """Token ids, int32, shape (n,)."""
    weights: np.ndarray = field(repr=False)
    """1 where a token carries loss, else 0; uint8, shape (n,)."""

    @classmethod
    def of(cls, ids: list[int], weights: list[int]) -> Encoded:
        """Make arrays of two lists of equal length."""
        return cls(ids=np.asarray(ids, dtype=np.int32), weights=np.asarray(weights, dtype=np.uint8))

    def __reduce__(self) -> tuple[Any, ...]:
        # Many short rows go from process to process with each block; as bytes they are sent in half the time.
        return _from_bytes, (self.ids.tobytes(), self.weights.tobytes())


def _from_bytes(ids: bytes, weights: bytes) -> Encoded:
    return Encoded(ids=np.frombuffer(ids, dtype=np.int32), weights=np.frombuffer(weights, dtype=np.uint8))


class ChatEncoder:
    """Turns conversations into token ids and loss weights."""

    def __init__(self, tokenizer: Any, *, train_on: str = "assistant", mask_mode: str = "native") -> None:
        """Take a tokenizer and say what carries loss.

        Args:
            tokenizer: of transformers, with the chat template to use.
            train_on: ``assistant`` or ``all``.
            mask_mode: ``native`` (the template) or ``legacy`` (the ``<|role|>`` format).
        """
        self.tokenizer = tokenizer
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self._train_on = train_on
        self._mask_mode = mask_mode
        self._finder = BlockFinder(tokenizer) if BlockFinder.can_read(tokenizer) else None
        self._agreed: dict[str, bool] = {}

    def encode_many(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        """Tokenize conversations; the result is that of :meth:`encode` for each, in less time.

        Raises:
            DataError: as :meth:`encode` for one of them.
        """
        if self._mask_mode == "legacy":
            return self._legacy(conversations)
        if self._train_on == "all":
            return self._all_tokens(conversations)
        return self._native_many(conversations)

    def encode(self, conversation: Conversation) -> Encoded:
        """Tokenize one conversation.

        Raises:
            DataError: the template or the tokenizer cannot be trusted with this row; the message names the
                row, the tokenizer, and the ways out.
        """
        if self._mask_mode == "legacy":
            return self._legacy([conversation])[0]
        if self._train_on == "all":
            return self._all_tokens([conversation])[0]
        return self._native(conversation)

    def decode(self, ids: Any) -> str:
        """Return the text of token ids, control tokens included, nothing cleaned up."""
        text = self.tokenizer.decode(
            [int(token) for token in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one list of ids has one text"
        return text

    # The template's own mask, proved in short.

    def _native_many(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        if self._finder is None:
            return [self._native(conversation) for conversation in conversations]
        # Which of its templates the tokenizer takes depends on whether there are tools, and on nothing else.
        first = {conversation.tools is None: conversation for conversation in reversed(conversations)}
        chosen = {without: self._template(conversation) for without, conversation in first.items()}
        templates = [chosen[conversation.tools is None] for conversation in conversations]
        found = self._finder.find(conversations, templates)
        encoded = []
        for conversation, template, one in zip(conversations, templates, found, strict=True):
            short = None if one is None else _taken(one, conversation)
            if short is None or not self._agreed.get(template):
                proved = self._native(conversation)
                if short is not None:
                    self._agreed.setdefault(template, _equal(short, proved))
                short = proved
            encoded.append(short)
        return encoded

    # The template's own mask, proved at length.

    def _native(self, conversation: Conversation) -> Encoded:
        template = self._template(conversation)
        if not has_generation(template):
            raise self._refusal(conversation, "the chat template has no {% generation %} blocks")
        output = self._render(
            conversation,
            template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        ids = output["input_ids"]
        if "assistant_masks" not in output:
            raise self._refusal(conversation, "the tokenizer returned no assistant mask")
        mask = output["assistant_masks"]
        if len(mask) != len(ids):
            raise self._refusal(conversation, f"assistant mask of {len(mask)} entries for {len(ids)} tokens")
        if not set(mask) <= {0, 1}:
            raise self._refusal(conversation, "the assistant mask has values other than 0 and 1")
        replies = _replies(conversation)
        if replies and not any(mask):
            raise self._refusal(conversation, "the assistant mask is all zero although there is a reply")
        self._prove(conversation, template, ids, mask, replies)
        return Encoded.of(ids, mask)

    def _prove(
        self, conversation: Conversation, template: str, ids: list[int], mask: list[int], replies: list[str]
    ) -> None:
        opening, closing = _marks(conversation)
        marked = self._render(
            conversation,
            with_marks(template),
            tokenize=False,
            yeto_opening=opening,
            yeto_closing=closing,
        )
        between = re.compile(re.escape(opening) + "(.*?)" + re.escape(closing), re.DOTALL)
        # Blocks with nothing between them count as one, as their tokens do.
        blocks = [block for block in between.findall(marked.replace(closing + opening, "")) if block]
        runs = _runs(ids, mask)
        if len(runs) == len(blocks):
            proved = all(self._is_text_of(run, block) for run, block in zip(runs, blocks, strict=True))
        else:
            # A token can lie across the gap between two blocks and join their runs.
            proved = _squeeze("".join(self.decode(run) for run in runs)) == _squeeze("".join(blocks))
        if not proved:
            supervised = " ".join(repr(self.decode(run)) for run in runs)
            raise self._refusal(
                conversation,
                f"the assistant mask is off: it selects {_shorten(supervised)} where the template generates "
                f"{_shorten(' '.join(map(repr, blocks)))}",
            )
        inside, outside = "\n".join(blocks), between.sub("\n", marked)
        missing = [reply for reply in replies if reply not in inside]
        # A template may choose to train on some turns only: then the other replies stand outside, whole.
        lost = [reply for reply in missing if reply not in outside]
        if replies and (lost or len(missing) == len(replies)):
            raise self._refusal(
                conversation,
                f"the template's generation blocks do not hold the reply {_shorten(repr(missing[0]))}",
            )

    def _is_text_of(self, run: list[int], block: str) -> bool:
        """Tell whether tokens are a block's, allowing only for tokens that lie across its two ends."""
        text = self.decode(run)
        if text == block:
            return True
        start = text.find(block)
        if start >= 0:
            after = len(text) - start - len(block)
            return start < len(self.decode(run[:1])) and after < len(self.decode(run[-1:]))
        # Some tokenizers lose letters, case or spaces; compare with what is left of the block then.
        rest = self.decode(self._ids([block])[0])
        return rest != block and _squeeze(text) == _squeeze(rest)

    # Every token.

    def _all_tokens(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        texts = [
            self._render(conversation, self._template(conversation), tokenize=False)
            for conversation in conversations
        ]
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        encoded = []
        for ids in self._ids(texts):
            if bos is not None and not self._meets(ids, bos):
                ids = [bos, *ids]
            if eos is not None and not self._meets(reversed(ids), eos):
                ids = [*ids, eos]
            encoded.append(Encoded.of(ids, [1] * len(ids)))
        return encoded

    def _meets(self, ids: Iterable[int], token: int) -> bool:
        """Tell whether ``token`` comes first but for white space, as a newline behind ``<|im_end|>`` is."""
        for one in ids:
            if one == token:
                return True
            if self.decode([one]).strip():
                return False
        return False

    # The synthetic format.

    def _legacy(self, conversations: Sequence[Conversation]) -> list[Encoded]:
        rows = [legacy_parts(conversation) for conversation in conversations]
        tokens = iter(self._ids([text for parts in rows for text, _ in parts]))
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        encoded = []
        for parts in rows:
            ids: list[int] = [] if bos is None else [bos]
            weights = [0] * len(ids)
            for _, weight in parts:
                part = next(tokens)
                ids += part
                weights += [weight] * len(part)
            if eos is not None:
                ids.append(eos)
                weights.append(1)
            encoded.append(Encoded.of(ids, [1] * len(ids) if self._train_on == "all" else weights))
        return encoded

    # The tokenizer.

    def _template(self, conversation: Conversation) -> str:
        try:
            template = self.tokenizer.get_chat_template(None, tools=conversation.tools)
        except ValueError as error:
            raise self._refusal(conversation, "the tokenizer has no chat template") from error
        assert isinstance(template, str)
        return template

    def _render(self, conversation: Conversation, template: str, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                conversation.messages, tools=conversation.tools, chat_template=template, **options
            )
        except Exception as error:
            # A template is a program of somebody else's: whatever it raises is a fact about this row.
            cause = " ".join(str(error).split()) or type(error).__name__
            raise self._refusal(conversation, f"the chat template failed: {cause}") from error

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _refusal(self, conversation: Conversation, problem: str) -> DataError:
        ways_out = WAYS_OUT if self._train_on == "assistant" else WAYS_OUT_FOR_ALL
        return DataError(f"{conversation.origin}: {problem} (tokenizer {self.name}); {ways_out}")


def highlight(encoder: ChatEncoder, encoded: Encoded, opening: str = "⟦", closing: str = "⟧") -> str:
    """Return a row's text with its supervised stretches between two marks, for a person to look at."""
    parts = []
    start = 0
    for end in range(1, len(encoded.ids) + 1):
        if end == len(encoded.ids) or encoded.weights[end] != encoded.weights[start]:
            text = encoder.decode(encoded.ids[start:end])
            parts.append(f"{opening}{text}{closing}" if encoded.weights[start] else text)
            start = end
    return "".join(parts)


def _taken(found: Found, conversation: Conversation) -> Encoded | None:
    """Return a found row's tokens, or None if its blocks lack a reply."""
    inside = "\n".join(found.blocks)
    if all(reply in inside for reply in _replies(conversation)):
        return Encoded(ids=found.ids, weights=found.weights)
    return None


def _equal(first: Encoded, second: Encoded) -> bool:
    return np.array_equal(first.ids, second.ids) and np.array_equal(first.weights, second.weights)


def _replies(conversation: Conversation) -> list[str]:
    """Return the texts that must be supervised: of each reply what follows its thinking, stripped.

    Templates drop or move the thinking of earlier turns, and strip; what follows they must not touch.
    """
    texts = (
        message["content"].rpartition("</think>")[2].strip()
        for message in conversation.messages
        if message["role"] == "assistant"
    )
    return [text for text in texts if text]


def _marks(conversation: Conversation) -> tuple[str, str]:
    """Return two marks that nothing in the row contains: Unicode noncharacters with a number."""
    row = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False, default=str)
    numbered = ((f"\ufdd0{number}(", f"){number}\ufdd1") for number in count())
    return next(marks for marks in numbered if not any(mark in row for mark in marks))


def _runs(ids: list[int], mask: list[int]) -> list[list[int]]:
    """Return the maximal stretches of masked tokens."""
    runs: list[list[int]] = []
    previous = 0
    for token, flag in zip(ids, mask, strict=True):
        if flag and not previous:
            runs.append([])
        if flag:
            runs[-1].append(token)
        previous = flag
    return runs


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _shorten(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
