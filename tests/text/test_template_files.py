"""Templates without generation blocks are seen in the files of a model, and nothing else is refused."""

import json

import pytest

from yeto.errors import ConfigError
from yeto.text.config import TextConfig
from yeto.text.template_files import check_template

TAGGED = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
UNTAGGED = "{{ messages[0].content }}"
NONE = "no {% generation %} blocks"


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": UNTAGGED},
        {"tokenizer_config.json": json.dumps({"chat_template": UNTAGGED})},
        {"tokenizer_config.json": json.dumps({"chat_template": [{"name": "default", "template": UNTAGGED}]})},
        {"additional_chat_templates/tool_use.jinja": UNTAGGED, "chat_template.jinja": UNTAGGED},
    ],
)
def test_templates_without_blocks_are_refused_with_the_ways_out(tmp_path, files):
    write(tmp_path, files)
    with pytest.raises(
        ConfigError, match=f"^--model org/name: its chat template has {NONE}, .*--train-on all"
    ):
        check_template(tmp_path, TextConfig(model="org/name"))
    check_template(tmp_path, TextConfig(model="org/name", train_on="all"))
    check_template(tmp_path, TextConfig(model="org/name", assistant_mask_mode="legacy"))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"chat_template.jinja": TAGGED},
        # Which of them is taken is for the tokenizer to say.
        {"chat_template.jinja": UNTAGGED, "tokenizer_config.json": json.dumps({"chat_template": TAGGED})},
        {"chat_template.jinja": UNTAGGED, "additional_chat_templates/tool_use.jinja": TAGGED},
        {"tokenizer_config.json": json.dumps({"chat_template": [{"name": "a", "template": TAGGED}, 3]})},
        {"tokenizer_config.json": "{"},
        {"tokenizer_config.json": "[]"},
        {"tokenizer_config.json": json.dumps({"chat_template": None})},
    ],
)
def test_what_may_do_is_left_to_the_tokenizer(tmp_path, files):
    write(tmp_path, files)
    check_template(tmp_path, TextConfig(model="org/name"))


def test_a_given_template_replaces_those_of_the_model(tmp_path):
    write(tmp_path, {"chat_template.jinja": TAGGED, "mine.jinja": UNTAGGED})
    with pytest.raises(ConfigError, match=f"^--chat-template .*mine.jinja: it has {NONE}"):
        check_template(tmp_path, TextConfig(model="m", chat_template=str(tmp_path / "mine.jinja")))
    write(tmp_path, {"chat_template.jinja": UNTAGGED, "mine.jinja": "\ufeff" + TAGGED})
    check_template(tmp_path, TextConfig(model="m", chat_template=str(tmp_path / "mine.jinja")))
