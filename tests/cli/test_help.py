"""The pages of --help: what holds for every command is tried on every command."""

import re
import sys
from pathlib import Path

import pytest

from yeto.cli import diffusion_export, export
from yeto.cli.help import COMMON, rows_lines
from yeto.cli.main import COMMANDS, main
from yeto.cli.run import ROLES
from yeto.errors import EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, YetoError

NAMES = [name for commands in COMMANDS.values() for name in commands]
PAGES = [
    [],
    *[[name] for name in NAMES],
    *[["run", "--role", role] for role in ROLES],
    ["keys", "new"],
    ["checkpoint", "inspect"],
    ["data", "cache-latents"],
]


def page(words, capsys, monkeypatch, *, program=main, columns="80"):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ended:
        program([*words, "--help"]) if program is main else program()
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    return said.out


def check(text):
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line != line.rstrip()]
    assert not re.search(r"\n\n\n|\x1b|env var|STR\.\.\.\.", text)
    assert lines[0].startswith("Usage: ")
    assert text.endswith(COMMON + "\n")
    # A sentence for each flag and each command, beside it or below.
    for number, line in enumerate(lines):
        if re.match(r"  [-a-zA-Z]", line):
            assert "  " in line.strip() or lines[number + 1].startswith("      "), line


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_every_page_is_plain_and_narrow_and_explains_every_flag(words, capsys, monkeypatch):
    check(page(words, capsys, monkeypatch))


@pytest.mark.parametrize("module", [export, diffusion_export])
def test_so_are_those_of_the_other_programs(module, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module.__name__, "--help"])
    check(page([], capsys, monkeypatch, program=module.main))


def test_a_wide_terminal_gets_no_wider_lines_than_can_be_read(capsys, monkeypatch):
    text = page(["run", "--role", "syncer"], capsys, monkeypatch, columns="300")
    assert 80 < max(map(len, text.splitlines())) <= 110


def test_the_list_of_commands_has_each_of_them_once(capsys, monkeypatch):
    text = page([], capsys, monkeypatch)
    assert re.findall(r"^  (\w+)  ", text, re.MULTILINE) == NAMES


def test_a_command_says_on_its_page_what_its_docstring_says(capsys, monkeypatch):
    for command, words in (
        ("status", "Ctrl-C ends the looking"),
        ("replay", "The exit code is 0 when every"),
    ):
        assert words in " ".join(page([command], capsys, monkeypatch).split())


def test_the_exit_codes_of_a_page_are_those_of_the_errors():
    said = dict(re.findall(r"(\d+) (\w+)", " ".join(COMMON.partition("Exit codes:")[2].split())))
    assert said == {"0": "done", "1": "failed", "2": "wrong", "3": "a", "4": "stopped", "130": "interrupted"}
    table = Path(__file__).parents[2].joinpath("docs/OPERATIONS.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \| (\w+)", table, re.MULTILINE) == [
        *(("0", "done"), ("1", "failed"), ("2", "wrong")),
        *(("3", "the"), ("4", "stopped"), ("130", "interrupted")),
    ]
    assert (YetoError.exit_code, ConfigError.exit_code, EXIT_STOPPED, EXIT_INTERRUPTED) == (1, 2, 4, 130)


def test_a_long_label_has_its_explanation_below():
    assert rows_lines([("--short N", "one two"), ("--" + "x" * 40, "three")], 40) == [
        "  --short N  one two",
        "  --" + "x" * 40,
        "             three",
    ]
