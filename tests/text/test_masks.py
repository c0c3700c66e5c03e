import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_helpers import WITH_TAGS, WITHOUT_TAGS, chat, make_tokenizer

from yeto.errors import DataError
from yeto.text.formats import conversation
from yeto.text.legacy import LEGACY_TEMPLATE
from yeto.text.masks import ChatEncoder, highlight

REPLIES = [
    "\ufdd00( a mark of the proof )0\ufdd1",
    "It is Paris, of course.",
    "🙂 naïve e\u0301 日本語 👩‍👩‍👧 ok",
    "trailing spaces   ",
    "\n\nleading lines and a tab\t",
    "a\u2028b",
    "x",
]


def encode(tokenizer, row, **options):
    return ChatEncoder(tokenizer, **options).encode(conversation(row, "rows.jsonl line 3"))


def supervised(tokenizer, encoded):
    """Return the decoded text of each supervised stretch."""
    runs, previous = [], 0
    for token, weight in zip(encoded.ids.tolist(), encoded.weights.tolist(), strict=True):
        if weight:
            runs = [*runs, []] if not previous else runs
            runs[-1].append(token)
        previous = weight
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("reply", REPLIES)
def test_supervised_text_is_the_reply_and_its_end_token(tokenizer, reply):
    row = chat("What is the capital of France?", reply, "And 日本?", "Tōkyō 🗼")
    assert supervised(tokenizer, encode(tokenizer, row)) == [reply + "<|im_end|>", "Tōkyō 🗼<|im_end|>"]


def test_ids_are_the_templates_own_rendering_with_one_bos(tokenizer):
    row = chat("a", "b", system="s")
    encoded = encode(tokenizer, row)
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert encoded.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoded.ids.tolist().count(tokenizer.bos_token_id) == 1
    assert encoded.ids[0] == tokenizer.bos_token_id


def test_the_end_token_is_supervised_even_if_it_is_the_padding_token():
    tokenizer = make_tokenizer(pad_token="<|im_end|>", eos_token="<|im_end|>")
    row = conversation(chat("a", "b"), "r")
    encoder = ChatEncoder(tokenizer)
    for encoded in (encoder.encode(row), *encoder.encode_many([row, row])):
        (last,) = [place for place, weight in enumerate(encoded.weights) if weight][-1:]
        assert encoded.ids[last] == tokenizer.pad_token_id == tokenizer.eos_token_id


def test_an_empty_reply_has_its_end_token_only(tokenizer):
    assert supervised(tokenizer, encode(tokenizer, chat("a", ""))) == ["<|im_end|>"]


def test_a_row_without_a_reply_has_no_target(tokenizer):
    assert not encode(tokenizer, chat("a")).weights.any()


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12), min_size=2, max_size=4
    )
)
def test_any_text_is_supervised_to_the_letter(shared_tokenizer, texts):
    shared_tokenizer.chat_template = WITH_TAGS
    replies = [text + "<|im_end|>" for text in texts[1::2]]
    assert supervised(shared_tokenizer, encode(shared_tokenizer, chat(*texts))) == replies


TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)


def test_tool_calls_and_the_templates_tool_variant(tokenizer):
    tokenizer.chat_template = {"default": WITHOUT_TAGS, "tool_use": TOOL_TEMPLATE}
    row = {
        "messages": [
            {"role": "user", "content": "1+2?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"name": "add", "arguments": '{"a": 1, "b": 2}'}],
            },
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "Three."},
        ],
        "tools": [{"name": "add"}],
    }
    assert supervised(tokenizer, encode(tokenizer, row)) == [
        '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call><|im_end|>',
        "Three.<|im_end|>",
    ]
    with pytest.raises(DataError, match=r"no \{% generation %\} blocks"):
        encode(tokenizer, {"messages": row["messages"]})


@pytest.mark.parametrize("mark", ["\ufdd00(", ")0\ufdd1", "\ufdd00(x)0\ufdd1"])
def test_a_mark_of_the_proof_is_a_text_wherever_it_stands(tokenizer, mark):
    tokenizer.chat_template = TOOL_TEMPLATE
    call = {"name": "add", "arguments": {"a": mark}}
    row = {
        "messages": [
            {"role": "user", "content": mark},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "tools": [{"name": "add", "description": mark}],
    }
    (reply,) = supervised(tokenizer, encode(tokenizer, row))
    assert reply == f"<call>{json.dumps(call, ensure_ascii=False)}</call><|im_end|>"


THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% set text = message.content if loop.last else message.content.split('</think>')[-1].lstrip() %}"
    "{% generation %}{{ text }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)


def test_a_template_may_drop_the_thinking_of_earlier_turns(tokenizer):
    tokenizer.chat_template = THINKING
    row = chat("q", "<think>hm</think>\nOne.", "q", "<think>ah</think>\nTwo.")
    assert supervised(tokenizer, encode(tokenizer, row)) == [
        "One.<|im_end|>",
        "<think>ah</think>\nTwo.<|im_end|>",
    ]


def test_a_template_may_train_on_the_last_turn_only(tokenizer):
    tokenizer.chat_template = WITH_TAGS.replace(
        "{% if message['role'] == 'assistant' %}", "{% if message['role'] == 'assistant' and loop.last %}"
    )
    row = chat("q", "One.", "q", "Two.")
    assert supervised(tokenizer, encode(tokenizer, row)) == ["Two.<|im_end|>"]


WAYS_OUT = re.escape("ways out: --chat-template FILE") + ".*legacy.*--train-on all"


def refused(tokenizer, row, problem):
    with pytest.raises(DataError, match=f"^rows.jsonl line 3: .*{problem}.*tokenizer .*{WAYS_OUT}"):
        encode(tokenizer, row)


def test_a_template_without_generation_blocks_is_refused(tokenizer):
    tokenizer.chat_template = WITHOUT_TAGS
    refused(tokenizer, chat("a", "b"), "no {% generation %} blocks")


def test_no_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    refused(tokenizer, chat("a", "b"), "no chat template")
    with pytest.raises(DataError, match=r"no chat template.*; ways out: --chat-template FILE .*legacy$"):
        encode(tokenizer, chat("a", "b"), train_on="all")


@pytest.mark.parametrize(
    "statement",
    ["{{ raise_exception('no system\nrole') }}", "{{ messages[99].role.x }}", "{{ 1 / 0 }}", "{% for %}"],
)
def test_a_template_that_raises_is_refused_in_one_line(tokenizer, statement):
    tokenizer.chat_template = WITH_TAGS + statement
    with pytest.raises(DataError, match="chat template failed") as caught:
        encode(tokenizer, chat("a", "b"))
    assert "\n" not in str(caught.value)


class Lying:
    """A tokenizer whose template call tells something else about the mask."""

    def __init__(self, tokenizer, change):
        self._tokenizer = tokenizer
        self._change = change

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **options):
        return self._tokenizer(*args, **options)

    def apply_chat_template(self, *args, **options):
        output = self._tokenizer.apply_chat_template(*args, **options)
        if isinstance(output, str):
            return output
        output = dict(output)
        output["assistant_masks"] = self._change(output["assistant_masks"])
        return {name: value for name, value in output.items() if value is not None}


def shifted(places):
    return lambda mask: mask[places:] + mask[:places] if places else mask


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda mask: None, "returned no assistant mask"),
        (lambda mask: mask[:-1], "entries for"),
        (lambda mask: [2 * flag for flag in mask], "values other than 0 and 1"),
        (lambda mask: [0] * len(mask), "all zero although there is a reply"),
        (shifted(1), "mask is off"),
        (shifted(-1), "mask is off"),
        (shifted(-2), "mask is off"),
        (lambda mask: [1] * len(mask), "mask is off"),
        (lambda mask: [int(any(mask[: place + 1])) for place in range(len(mask))], "mask is off"),
        (lambda mask: [flag * (place % 2) for place, flag in enumerate(mask)], "mask is off"),
    ],
    ids=[
        "missing",
        "short",
        "not binary",
        "zero",
        "early",
        "late",
        "later",
        "all",
        "runs on to the end",
        "full of holes",
    ],
)
def test_a_wrong_mask_is_refused(tokenizer, change, problem):
    refused(Lying(tokenizer, change), chat("What is it?", "Natalia sold clips to her friends", "ok"), problem)


def test_a_span_that_was_stripped_afterwards_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}{% set text %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
        "{% endset %}<|im_start|>{{ message.role }}\n{{ text | trim }}<|im_end|>{% endfor %}"
    )
    refused(tokenizer, chat("a", "Paris   ", "b", "It is   "), "mask is off")


def test_blocks_around_the_wrong_turn_are_refused(tokenizer):
    tokenizer.chat_template = WITH_TAGS.replace("== 'assistant'", "== 'user'")
    refused(tokenizer, chat("Question?", "Answer."), "blocks do not hold the reply 'Answer.'")


def test_half_a_reply_in_a_block_is_refused(tokenizer):
    tokenizer.chat_template = WITH_TAGS.replace(
        "{% generation %}{{ message['content'] }}",
        "{{ message.content[:3] }}{% generation %}{{ message.content[3:] }}",
    )
    refused(tokenizer, chat("Question?", "Natalia sold clips", "q", "Paris"), "do not hold the reply")


def test_a_token_across_the_edge_of_a_block_is_no_defect(tokenizer):
    # The space before the reply is the template's; "It" with its space is one token.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %} {% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    encoded = encode(tokenizer, chat("a", "is Paris"))
    assert supervised(tokenizer, encoded) == [" is Paris"]


def test_a_lossy_tokenizer_is_compared_by_what_it_keeps(tokenizer):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "paris": 1, "it": 2, "is": 3, "user": 4, "assistant": 5, ":": 6}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
    lossy.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
    )
    encoded = encode(lossy, chat("it is", "It is Paris, friends"))
    assert encoded.weights.sum() == 5
    refused(Lying(lossy, shifted(1)), chat("it is", "It is Paris, friends"), "mask is off")


# Every token, and the synthetic format.


@pytest.mark.parametrize(
    ("template", "bos", "eos"),
    [
        (WITH_TAGS, 1, 1),
        (WITH_TAGS.replace("{{ bos_token }}", ""), 1, 1),
        (WITH_TAGS + "{{ eos_token }}", 1, 1),
        (WITH_TAGS + "{{ eos_token }}\n\n", 1, 1),
        ("\n " + WITH_TAGS, 1, 1),
    ],
)
def test_all_tokens_have_one_bos_and_one_eos(tokenizer, template, bos, eos):
    tokenizer.chat_template = template
    encoded = encode(tokenizer, chat("a", "b"), train_on="all")
    ids = encoded.ids.tolist()
    assert encoded.weights.all()
    assert not tokenizer.decode(ids[: ids.index(tokenizer.bos_token_id)]).strip()
    assert ids.count(tokenizer.bos_token_id) == bos
    assert ids.count(tokenizer.eos_token_id) == eos


def test_all_tokens_of_a_tokenizer_without_bos():
    tokenizer = make_tokenizer(WITHOUT_TAGS.replace("{{ bos_token }}", ""), bos_token=None)
    encoded = encode(tokenizer, chat("a", "b"), train_on="all")
    assert tokenizer.decode(encoded.ids) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n</s>"
    )


def test_the_legacy_format(tokenizer):
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}]},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"é": 1}}]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "Three."},
        ],
        "tools": [{"name": "add"}],
    }
    tokenizer.chat_template = None
    encoded = encode(tokenizer, row, mask_mode="legacy")
    call = '<|tool_calls|>[{"type":"function","function":{"name":"add","arguments":{"é":1}}}]\n'
    assert tokenizer.decode(encoded.ids) == (
        '<s><|system|>\n[{"name":"add"}]\n<|user|>\n1+2?\n<|assistant|>\n' + call + "<|tool|>\n3\n"
        "<|assistant|>\nThree.\n</s>"
    )
    assert supervised(tokenizer, encoded) == [call, "Three.\n</s>"]
    assert encode(tokenizer, row, mask_mode="legacy", train_on="all").weights.all()
    # What is saved beside a model that was trained on it writes the same, and asks for a reply in it.
    tokenizer.chat_template = LEGACY_TEMPLATE
    native = encode(tokenizer, row)
    assert tokenizer.decode(native.ids) == tokenizer.decode(encoded.ids)
    assert supervised(tokenizer, native) == supervised(tokenizer, encoded)
    question = [{"role": "user", "content": "1?"}]
    asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert asked == "<s><|user|>\n1?\n<|assistant|>\n"


@pytest.mark.parametrize("options", [{"train_on": "all"}, {"mask_mode": "legacy"}])
def test_rows_together_are_what_they_are_one_by_one(tokenizer, options):
    encoder = ChatEncoder(tokenizer, **options)
    rows = [conversation(chat("a", reply, "b"), "r") for reply in REPLIES]
    for one, row in zip(encoder.encode_many(rows), rows, strict=True):
        alone = encoder.encode(row)
        assert one.ids.tolist() == alone.ids.tolist()
        assert one.weights.tolist() == alone.weights.tolist()
    assert encoder.encode_many([]) == []


def test_a_row_that_is_refused_is_named_among_others(tokenizer):
    tokenizer.chat_template = WITH_TAGS + "{{ raise_exception('no') if messages | length == 3 }}"
    rows = [
        conversation(chat(*texts), f"line {number}") for number, texts in enumerate(["ab", "ab", "abc", "ab"])
    ]
    with pytest.raises(DataError, match=r"^line 2: the chat template failed: no"):
        ChatEncoder(tokenizer).encode_many(rows)


def test_a_person_can_see_the_mask(tokenizer):
    encoder = ChatEncoder(tokenizer)
    encoded = encoder.encode(conversation(chat("a", "b"), "r"))
    assert highlight(encoder, encoded, "[[", "]]") == (
        "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]\n"
    )
