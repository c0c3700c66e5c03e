"""Templates of public model families, in our own words, with conversations and tokenizers of every kind.

For every one of them the table says what must carry loss, or the words of the refusal.
"""

import re

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import BYTE_LEVEL, KINDS, LOSSLESS
from transformers.utils.chat_template_utils import render_jinja_template

from yeto.errors import DataError
from yeto.text import marked
from yeto.text.blocks_in_text import BlockFinder
from yeto.text.formats import conversation
from yeto.text.marked import marking, render_marked
from yeto.text.masks import ChatEncoder
from yeto.text.templates import writes_in_order

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}
JSON_CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def turns(*texts, first=None):
    messages = [] if first is None else [{"role": first, "content": "Be brief."}]
    messages += [
        {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)
    ]
    return {"messages": messages}


CHATS = {
    "one turn": turns("What is the capital of France?", "It is Paris, of course."),
    "several turns": turns("a", "One.", "b", "Two. \n\nAnd more.", "c", "Three."),
    "emoji": turns("🙂?", "naïve e\u0301 👩‍👩‍👧 ok 🗼", "And?", "🙂"),
    "cjk": turns("日本語", "日本語のテスト。", "東京?", "テスト Tōkyō 日本"),
    "outer spaces": turns(" a ", "trailing spaces   ", "b  ", "\n\nleading lines\t"),
    "empty reply": turns("a", "", "b", "Two."),
    "system": turns("a", "One.", first="system"),
    "developer": turns("a", "One.", first="developer"),
    "thinking": turns("a", "<think>\nhm\n</think>\n\nOne.", "b", "<think>\nah\n</think>\n\nTwo."),
    "tools": {
        "messages": [
            {"role": "user", "content": "What is 1 and 2?"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "Three."},
        ],
        "tools": TOOLS,
    },
}


def replies(chat):
    return [message for message in CHATS[chat]["messages"] if message["role"] == "assistant"]


def text_of(end, *, strip=False, call="", before=""):
    """Return what makes the supervised texts of a chat: before, the call if there is one, the reply, end."""

    def supervised(chat):
        found = []
        for message in replies(chat):
            text = message["content"].strip() if strip else message["content"]
            found.append(before + (call if "tool_calls" in message else "") + text + end)
        return found

    return supervised


def after_think(chat):
    return [message["content"].split("</think>")[-1] for message in replies(chat)]


def qwen3(chat):
    if chat == "tools":
        # Both come after the last question.
        block = "<think>\n\n</think>\n\n"
        call = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
        return [f"{block}{call}<|im_end|>", f"{block}Three.<|im_end|>"]
    *earlier, last = [text.lstrip("\n") for text in after_think(chat)]
    thought = "ah" if chat == "thinking" else ""
    return [
        *(f"{text}<|im_end|>" for text in earlier),
        f"<think>\n{thought}\n</think>\n\n{last}<|im_end|>",
    ]


def deepseek(chat):
    end = "<｜end▁of▁sentence｜>"
    if chat == "tools":
        call = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>'
        return [call + end, "Three." + end]
    return [text + end for text in after_think(chat)]


SUPERVISED = {
    "chatml": text_of("<|im_end|>"),
    "llama3": text_of("<|eot_id|>", strip=True, call='{"name": "add", "parameters": {"a": 1, "b": 2}}'),
    "mistral": text_of("</s>", call=f"[TOOL_CALLS][{JSON_CALL}]"),
    "gemma": text_of("<end_of_turn>", strip=True),
    "qwen3": qwen3,
    "phi": text_of("<|end|>"),
    "deepseek": deepseek,
    "zephyr": text_of("</s>\n"),
    "llama2": text_of(" </s>", strip=True, before=" "),
    "granite": text_of("<|end_of_text|>\n", call=f"<|tool_call|>[{JSON_CALL}]"),
    "vicuna": text_of("</s>"),
}

NAMES = [*SUPERVISED, "macro", "trimmed", "untagged"]

NO_TAGS = r"the chat template has no \{% generation %\} blocks"
OFF = "the assistant mask is off"
REFUSED = {
    **{("untagged", chat): NO_TAGS for chat in CHATS},
    # The tokenizer counts these blocks in a text that stands somewhere else in the end.
    **{(name, chat): OFF for name in ("macro", "trimmed") for chat in CHATS},
    ("mistral", "developer"): "the chat template failed: only user, assistant and tool may speak here",
    ("gemma", "system"): "the chat template failed: this model knows no role system",
    ("gemma", "developer"): "the chat template failed: this model knows no role developer",
    ("gemma", "tools"): "the chat template failed: this model knows no role tool",
    ("deepseek", "developer"): "the chat template failed: unknown role developer",
    ("llama2", "developer"): "the chat template failed: no place for a message of role developer",
    ("llama2", "tools"): "the chat template failed: no place for a message of role tool",
}


SPACE_BEFORE = ("vicuna",)
"""Here a token can hold the template's space and the reply's first letters; nobody can cut it in two."""


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in KINDS.items()}


@pytest.fixture
def prepare(tokenizers, fixtures):
    """Return a function that gives a tokenizer a template and returns it."""

    def prepared(kind, name):
        tokenizer = tokenizers[kind]
        path = fixtures / "templates" / f"{name}.jinja"
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        return tokenizer

    return prepared


OTHER_WAYS = ("one turn", "cjk", "thinking")
"""Conversations for templates that do not say what a reply is."""


def without_tags(template):
    """Return a template with the same text, white space included, that says nothing of replies."""
    template = re.sub(r"\{%([-+]?)\s*generation\s*([-+]?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}", r"{%\1 endif \2%}", template)


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@pytest.mark.parametrize("name", SUPERVISED)
def test_every_way_out_of_a_template_without_tags_leads_out(tokenizers, fixtures, name, kind):
    """Replies only, whatever the template: by a file with tags or by the synthetic format; or all tokens."""
    tokenizer = tokenizers[kind]
    path = fixtures / "templates" / f"{name}.jinja"
    tagged = path.read_text(encoding="utf-8")
    bare = without_tags(tagged)
    rows = [row_of(chat) for chat in OTHER_WAYS]
    tokenizer.chat_template = tagged
    oracle = [ChatEncoder(tokenizer).encode(row) for row in rows]
    tokenizer.chat_template = bare
    refusal = f"{NO_TAGS}.*ways out: --chat-template FILE.*--assistant-mask-mode legacy, or --train-on all"
    for row in rows:
        with pytest.raises(DataError, match=refusal):
            ChatEncoder(tokenizer).encode_many([row])
    everything = ChatEncoder(tokenizer, train_on="all").encode_many(rows)
    legacy = ChatEncoder(tokenizer, mask_mode="legacy").encode_many(rows)
    for row, masked, whole, plain in zip(rows, oracle, everything, legacy, strict=True):
        # Tags change what carries loss, and nothing of the text.
        assert tokenizer.decode(masked.ids) in tokenizer.decode(whole.ids)
        assert whole.weights.all()
        for encoded in (whole, plain):
            assert (encoded.ids[:2] == tokenizer.bos_token_id).tolist() == [True, False]
        texts = [message["content"] for message in row.messages if message["role"] == "assistant"]
        *others, last = (text + "\n" for text in texts)
        assert runs(tokenizer, plain) == [*others, last + "</s>"]


def row_of(chat):
    return conversation(CHATS[chat], "rows.jsonl line 3")


def runs(tokenizer, encoded):
    """Return the decoded text of each supervised stretch."""
    found, previous = [], 0
    for token, weight in zip(encoded.ids.tolist(), encoded.weights.tolist(), strict=True):
        if weight:
            found = [*found, []] if not previous else found
            found[-1].append(token)
        previous = weight
    return [tokenizer.decode(run) for run in found]


def as_kept(tokenizer, text):
    """Return what a tokenizer keeps of a text; how it spaces that depends on where the text stood."""
    return "".join(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]).split())


def test_the_table_has_every_template(fixtures):
    assert {path.stem for path in (fixtures / "templates").glob("*.jinja")} == set(NAMES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMES)
def test_the_replies_carry_loss_or_the_row_is_refused(prepare, name, chat, kind):
    tokenizer = prepare(kind, name)
    row = row_of(chat)
    encoder = ChatEncoder(tokenizer)
    if (name, chat) in REFUSED:
        for encode in (encoder.encode, lambda row: encoder.encode_many([row])):
            with pytest.raises(DataError, match=f"^rows.jsonl line 3: {REFUSED[name, chat]}.*ways out"):
                encode(row)
        return
    encoded = encoder.encode(row)
    text = tokenizer.apply_chat_template(row.messages, tools=row.tools, tokenize=False)
    assert encoded.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoded.ids.tolist().count(tokenizer.bos_token_id) == text.count("<s>")
    assert encoded.ids[1] != tokenizer.bos_token_id
    found, expected = runs(tokenizer, encoded), SUPERVISED[name](chat)
    if kind in BYTE_LEVEL and name not in SPACE_BEFORE:
        assert found == expected
    elif kind in LOSSLESS:
        # One decodes ▁ of a control token to a space.
        assert [run.removeprefix(" ") for run in found] == [
            text.removeprefix(" ") if kind in BYTE_LEVEL else text.removeprefix(" ").replace("▁", " ")
            for text in expected
        ]
    else:
        assert ["".join(run.split()) for run in found] == [as_kept(tokenizer, text) for text in expected]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SUPERVISED)
def test_rows_together_are_what_they_are_one_by_one(prepare, name, kind):
    tokenizer = prepare(kind, name)
    rows = [row_of(chat) for chat in CHATS if (name, chat) not in REFUSED] * 2
    encoder = ChatEncoder(tokenizer)
    for _ in range(2):
        for row, one in zip(rows, encoder.encode_many(rows), strict=True):
            alone = encoder.encode(row)
            assert one.ids.dtype == alone.ids.dtype
            assert one.weights.dtype == alone.weights.dtype
            assert one.ids.tolist() == alone.ids.tolist()
            assert one.weights.tolist() == alone.weights.tolist()


@pytest.mark.parametrize("kind", [*LOSSLESS, "word-piece"])
@pytest.mark.parametrize("name", NAMES)
def test_the_short_way_is_for_templates_in_order_and_lossless_tokenizers(prepare, name, kind):
    tokenizer = prepare(kind, name)
    chats = [row_of(chat) for chat in CHATS if REFUSED.get((name, chat), OFF) == OFF]
    found = BlockFinder(tokenizer).find(chats, [tokenizer.chat_template] * len(chats))
    short = kind in LOSSLESS and name not in ("macro", "trimmed", "untagged")
    assert [one is not None for one in found] == [short] * len(chats)


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.lists(TEXT, min_size=2, max_size=4), min_size=1, max_size=4),
    kind=st.sampled_from(sorted(KINDS)),
    name=st.sampled_from(["chatml", "llama3", "qwen3", "llama2", "vicuna"]),
)
def test_any_texts_together_are_what_they_are_one_by_one(tokenizers, fixtures, rows, kind, name):
    tokenizer = tokenizers[kind]
    tokenizer.chat_template = (fixtures / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    encoder = ChatEncoder(tokenizer)
    chats = [conversation(turns(*texts), f"row {number}") for number, texts in enumerate(rows)]
    try:
        alone = [encoder.encode(chat) for chat in chats]
    except DataError as refusal:
        with pytest.raises(DataError, match=f"^{re.escape(str(refusal))}$"):
            encoder.encode_many(chats)
        return
    for _ in range(2):
        for one, other in zip(encoder.encode_many(chats), alone, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            assert one.weights.tolist() == other.weights.tolist()


def test_a_short_way_that_once_disagrees_is_not_taken_again(prepare, monkeypatch):
    tokenizer = prepare("byte-level", "chatml")
    encoder = ChatEncoder(tokenizer)
    rows = [row_of("one turn"), row_of("several turns")]
    expected = [encoder.encode(row).weights.tolist() for row in rows]
    find = BlockFinder.find

    def off_by_one(*args):
        return [evolve(one, weights=np.roll(one.weights, 1)) for one in find(*args)]

    monkeypatch.setattr(BlockFinder, "find", off_by_one)
    for _ in range(2):
        assert [one.weights.tolist() for one in encoder.encode_many(rows)] == expected


def test_a_tokenizer_that_was_told_to_cut_and_pad_does_neither(prepare):
    tokenizer = prepare("byte-level", "chatml")
    rows = [row_of("one turn"), row_of("several turns")]
    expected = [one.ids.tolist() for one in ChatEncoder(tokenizer).encode_many(rows)]
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=7)
    encoder = ChatEncoder(tokenizer)
    for _ in range(2):
        assert [one.ids.tolist() for one in encoder.encode_many(rows)] == expected


GENERATION = "{% generation %}x{% endgeneration %}"


@pytest.mark.parametrize(
    ("text", "in_order"),
    [
        (GENERATION, True),
        ("{%- generation -%}x{%- endgeneration -%}", True),
        ("{% for m in messages %}{% if m %}" + GENERATION + "{% else %}y{% endif %}{% endfor %}", True),
        ("{% for m in x %}{% if m %}{% continue %}{% endif %}" + GENERATION + "{% endfor %}", True),
        ("{% generation %}{% for c in x %}{{ c }}{% endfor %}{% endgeneration %}", True),
        ("{% with a = 1 %}" + GENERATION + "{% endwith %}", True),
        ("{% set a %}" + GENERATION + "{% endset %}{{ a }}", False),
        ("{% macro f() %}" + GENERATION + "{% endmacro %}{{ f() }}", False),
        ("{% filter trim %}" + GENERATION + "{% endfilter %}", False),
        ("{% call f() %}" + GENERATION + "{% endcall %}", False),
        ("{% for m in messages recursive %}" + GENERATION + "{% endfor %}", False),
        ("{% generation %}" + GENERATION + "{% endgeneration %}", False),
        ("{% generation %}{{ caller is defined }}{% endgeneration %}", False),
        (GENERATION + "{% set a %}" + GENERATION + "{% endset %}", False),
        ("no blocks", False),
        ("{% for %}" + GENERATION, False),
    ],
)
def test_which_templates_write_in_order(text, in_order):
    assert writes_in_order(text) == in_order


@pytest.mark.parametrize(
    "block",
    [
        "{% generation %}{{ text }}{% endgeneration %}",
        "\n  {%- generation -%}  \n {{ text }} \n {%- endgeneration -%} \n",
        "\n  {% generation %}\n  {{ text }}\n  {% endgeneration %}\n",
        "{%+ generation +%} {{ text }} {%+ endgeneration +%}\n",
        "{% set a = 1 %}{% generation %}{{ a }}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
        "{% generation %}{{ loop.index }}{{ bos_token }}{{ none }}{% endgeneration %}{{ loop.last }}",
        "{% generation %}{% for letter in text %}{{ loop.index }}{{ letter }}{% endfor %}{% endgeneration %}",
        "{% generation %}{% endgeneration %}{{ text | upper | tojson }}{% generation %}{% endgeneration %}",
    ],
)
def test_marked_blocks_are_what_the_library_writes_and_counts(block):
    template = "{% for m in messages %}{% set text = m.content %}<{{ m.role }}>" + block + "\n{% endfor %}end"
    special = {"bos_token": "<s>"}
    # Texts that look like marks are texts.
    marks = " ".join(
        constant for constant in vars(marked).values() if isinstance(constant, str) and "\ufdd0" in constant
    )
    for chat in (turns("a", "One."), turns("", " \n ", "🙂", "日本"), turns(marks, marks)):
        texts, spans = render_jinja_template(
            [chat["messages"]], chat_template=template, return_assistant_tokens_mask=True, **special
        )
        assert writes_in_order(template)
        assert render_marked(marking(template), chat["messages"], special) == (texts[0], spans[0])
