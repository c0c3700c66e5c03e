"""What is wrong with a command line: every mistake in one line of our own words, ``FLAG VALUE: must be ...``.

Values are looked at before they are converted: what cyclopts would make something else of is refused here.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from cyclopts import CoercionError, CycloptsError, MissingArgumentError, ValidationError
from cyclopts.exceptions import (
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from yeto.errors import ConfigError

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument, ArgumentCollection
    from cyclopts.token import Token

KINDS = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path", str: "a text"}


def in_our_words(error: CycloptsError) -> str:
    """Return what was wrong with a command line, in one line and without the names of Python's types."""
    argument = error.argument
    match error:
        case MissingArgumentError() if error.keyword is not None:
            return f"{error.keyword} needs a value"
        case MissingArgumentError() if argument is not None:
            return _mistyped(error) or f"{argument.name} is missing"
        case UnknownOptionError():
            known = [name for other in error.argument_collection for name in other.names]
            return _unknown("flag", error.token.keyword or error.token.value, known)
        case UnknownCommandError() if error.unused_tokens:
            word = error.unused_tokens[0]
            known = [] if error.app is None else [name for name in error.app if not name.startswith("-")]
            return _unknown("flag" if word.startswith("-") else "command", word, known)
        case UnusedCliTokensError() if error.unused_tokens:
            return f"{' '.join(error.unused_tokens)}: more than this command takes"
        case RepeatArgumentError():
            return f"{error.token.keyword} is given twice"
        case CoercionError() if argument is not None and error.token is not None:
            wanted = error.msg or f"must be {_kind(argument.hint)}{_near(error.token.value, argument.hint)}"
            return f"{_place(argument, error.token)} {error.token.value}: {wanted}"
        case ValidationError() if argument is not None and argument.tokens:
            token = argument.tokens[-1]
            wanted = error.exception_message.replace(">=", "at least").replace("<=", "at most")
            return f"{_place(argument, token)} {token.value}: {wanted[:1].lower()}{wanted[1:].rstrip('.')}"
    return " ".join(str(error).split())


def refused(program: str, error: CycloptsError) -> int:
    """Say what was wrong with the command line of a program that is not ``yeto``; return its exit code."""
    print(f"{program}: {in_our_words(error)} (see {program} --help)", file=sys.stderr)
    return ConfigError.exit_code


def refuse_what_would_be_changed(_: App, __: Sequence[str], arguments: ArgumentCollection) -> None:
    """Refuse 1.5 for a whole number, and a value without a letter; it goes among the sources of an app.

    cyclopts would round the one to 2, and make the present folder of the other, which as a rule is a variable
    of a script that was never set.

    Raises:
        CycloptsError: a flag has such a value.
    """
    from cyclopts.utils import UNSET

    for argument in arguments:
        for token in argument.tokens:
            if token.implicit_value is not UNSET:
                continue
            if not token.value:
                raise CycloptsError(
                    msg=f"{_place(argument, token)} is empty; give it a value, or leave it out"
                )
            is_whole = int in (argument.hint, *get_args(argument.hint))
            if is_whole and "." in token.value and not _is_whole(token.value):
                raise CycloptsError(msg=f"{_place(argument, token)} {token.value}: must be a whole number")


def _is_whole(text: str) -> bool:
    try:
        return float(text).is_integer()
    except ValueError:
        return True  # no number at all, which is refused in better words


def _mistyped(error: CycloptsError) -> str | None:
    """Return what is wrong with a flag that there is not: it may be the one that is missed."""
    word = next((word for word in error.unused_tokens or () if re.match("--?[a-zA-Z]", word)), None)
    if word is None or error.app is None:
        return None
    arguments = error.app.assemble_argument_collection()
    return _unknown("flag", word, [name for argument in arguments for name in argument.names])


def _unknown(what: str, word: str, known: Sequence[str]) -> str:
    word = word.partition("=")[0]
    # Without the dashes, which are alike in all flags.
    names = {name.lstrip("-"): name for name in known}
    bare = word.lstrip("-")
    near = difflib.get_close_matches(bare, names, n=1) or [name for name in names if name.startswith(bare)]
    return f"{word}: there is no such {what}" + (f"; did you mean {names[near[0]]}?" if near else "")


def _place(argument: Argument, token: Token) -> str:
    """Return where a value stands: its flag, its variable of the environment, or its place in a file."""
    return token.keyword or argument.name


def _kind(hint: Any) -> str:
    """Return what a value of a type looks like: ``a number or auto``."""
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if hint in KINDS:
        return KINDS[hint]
    parts = [part for part in get_args(hint) if part is not NoneType and part is not Ellipsis]
    return " or ".join(map(_kind, parts)) or "something else"


def _near(value: str, hint: Any) -> str:
    choices = [
        str(choice)
        for part in (hint, *get_args(hint))
        if get_origin(part) is Literal
        for choice in get_args(part)
    ]
    near = difflib.get_close_matches(value, choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""
