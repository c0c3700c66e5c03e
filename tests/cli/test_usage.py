"""Wrong command lines: what holds for one command is tried on every command, with the flags that it has."""

import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from yeto.cli import checkpoint, data, diffusion_export, export, keys, main, run

GROUPS = {"checkpoint": checkpoint.checkpoint_app, "data": data.data_app, "keys": keys.keys_app}
COMMANDS = {
    **{
        (name,): main.build()[name]
        for names in main.COMMANDS.values()
        for name in names
        if name not in {"run", *GROUPS}
    },
    **{(group, name): app[name] for group, app in GROUPS.items() for name in app if name[0] != "-"},
    **{("run", "--role", role): run._role_app(role) for role in run.ROLES},
}
PROGRAMS = {("yeto-export",): export, ("yeto-diffusion-export",): diffusion_export}
WRONG = {
    int: [("nan", "must be a whole number"), ("1.5", "must be a whole number"), ("", "is empty")],
    float: [("much", "must be a number")],
    bool: [("=perhaps", "must be true or false")],
    Path: [("", "is empty")],
    str: [("", "is empty")],
    Literal: [("nosuch", "must be one of"), ("", "is empty")],
}


def flags_by_kind(app):
    """Return one flag of each kind that a command has."""
    found = {}
    for argument in app.assemble_argument_collection():
        parts = [part for part in (argument.hint, *get_args(argument.hint)) if part is not type(None)]
        kinds = {get_origin(part) if get_origin(part) is Literal else part for part in parts}
        for kind in kinds & WRONG.keys():
            if argument.name.startswith("--") and argument.parameter.converter is None and len(kinds) < 3:
                found.setdefault(kind, argument.name)
    return found


def said(program, words, monkeypatch, capsys):
    """Run a program; return its one line without what stands around it."""
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as ended:
        program()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1), printed
    assert printed.err.startswith("yeto: ")
    return printed.err.removeprefix("yeto: ").removesuffix("\n")


def needed(app, *, but=None):
    """Return words for what a command cannot do without, but for one flag."""
    words = []
    for argument in app.assemble_argument_collection():
        if argument.required and argument.name != but:
            value = "2" if argument.hint is int else "x"
            words += [argument.name, value] if argument.name.startswith("-") else [value]
    return words


@pytest.mark.parametrize("words", [*COMMANDS, *PROGRAMS], ids=" ".join)
def test_every_wrong_value_is_one_line_of_one_form(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    if words in PROGRAMS:
        app, before, program = PROGRAMS[words].build(), [], PROGRAMS[words].main
        page = f"(see {words[0]} --help)"
    else:
        app, before, program = COMMANDS[words], words, main.main
        page = f"(see yeto {' '.join(words)} --help)"
    # Told before what is missing: it may be that, with a letter wrong.
    told = said(program, [*before, "--nosuch", "x"], monkeypatch, capsys)
    assert told == f"--nosuch: there is no such flag {page}"
    for kind, flag in flags_by_kind(app).items():
        for value, wanted in WRONG[kind]:
            line = [f"{flag}{value}"] if value.startswith("=") else [flag, value]
            told = said(program, [*before, *needed(app, but=flag), *line], monkeypatch, capsys)
            assert told.startswith(f"{flag} {value.removeprefix('=')}".rstrip())
            assert wanted in told
            assert told.endswith(page)
    assert list(tmp_path.iterdir()) == []
