"""What all commands share: where flags come from, how errors look, which exit code they give.

A flag is taken from the command line, else from ``YETO_<FLAG>``, else from the file named by ``--config``.
Errors are one line on stderr saying cause and remedy; ``--debug`` adds the traceback. That holds for errors
that nobody foresaw, too: they know no remedy, but they need not bury their cause under forty lines.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
import tomllib
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yeto.errors import EXIT_INTERRUPTED, ConfigError, YetoError, first_of

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import ArgumentCollection


def take_flag(tokens: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """Remove ``flag VALUE`` or ``flag=VALUE`` from tokens; return the rest and the value.

    Raises:
        ConfigError: the flag is the last token, without its value.
    """
    rest: list[str] = []
    value: str | None = None
    pending = iter(tokens)
    for token in pending:
        if token == flag:
            value = next(pending, None)
            if value is None:
                raise ConfigError(f"{flag} needs a value")
        elif token.startswith(flag + "="):
            value = token[len(flag) + 1 :]
        else:
            rest.append(token)
    return rest, value


def run_app(
    build: Callable[[], App],
    tokens: Sequence[str],
    *,
    table: str | None = None,
    passing_on: Collection[str] = (),
    below: Sequence[Any] = (),
) -> int:
    """Parse tokens for the app that ``build`` makes, run its command, return the exit code.

    Args:
        build: makes the cyclopts App; called after ``--debug`` was seen, so its imports are covered too.
        tokens: command-line words after the command's name.
        table: name of the table of the ``--config`` file that holds this command's flags; None reads
            the table named after the command.
        passing_on: commands that call this function again with their words, ``--config`` and ``--debug``
            among them.
        below: further sources of flags, which are asked after all others.

    Returns:
        What the command returned (None counts as 0), or the exit code of the error that ended it.
    """
    _show_what_stdout_cannot()
    words = list(tokens)
    debug = "--debug" in words or os.environ.get("YETO_DEBUG", "") not in ("", "0")
    try:
        from cyclopts import CycloptsError
        from cyclopts.config import Toml

        from yeto.cli.usage import in_our_words, refuse_what_would_be_changed

        app = build()
        if not words or words[0] not in passing_on:
            words = [word for word in words if word != "--debug"]
            words, config_path = take_flag(words, "--config")
            sources: list[Any] = [_from_environment]
            if config_path is not None:
                _check_config_file(Path(config_path), table)
                roots = () if table is None else (table,)
                sources.append(Toml(config_path, root_keys=roots, use_commands_as_keys=table is None))
            # Last, so that it sees what every source before it said.
            app.config = [*sources, *below, refuse_what_would_be_changed]
        # It would end the process in silence.
        app.suppress_keyboard_interrupt = False
        try:
            result = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        except CycloptsError as error:
            command = " ".join([*app.name, *(error.command_chain or ())])
            raise ConfigError(f"{in_our_words(error)} (see {command} --help)") from error
        return int(result or 0)
    except YetoError as error:
        return fail(error, debug=debug)
    except KeyboardInterrupt:
        print("yeto: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) went away; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        return fail(unforeseen(error))


def _show_what_stdout_cannot() -> None:
    """Have characters escaped that the terminal's encoding lacks, as on stderr: a path may hold any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _from_environment(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give flags that the line does not have the values of ``YETO_<FLAG>``.

    What has its place on the line, such as the name of the run that ``yeto down`` ends, is said there.
    """
    from cyclopts.config import Env

    flags = [argument for argument in arguments if argument.name.startswith("-")]
    Env("YETO_", command=False)(app, commands, type(arguments)(flags))


def _check_config_file(path: Path, table: str | None) -> None:
    """Refuse a file that is not TOML, or that has nothing to say to this command."""
    try:
        data = path.read_bytes()
        if data.startswith(codecs.BOM_UTF8):
            raise ConfigError(f"--config {path}: begins with a byte-order mark; save it as UTF-8 without one")
        tables = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from error
    if table is not None and not isinstance(tables.get(table), dict):
        raise ConfigError(f"--config {path}: has no table [{table}]; this command's flags belong there")


def unforeseen(error: BaseException) -> YetoError:
    """Return what to tell a person about an error that is none of ours."""
    error = first_of(error)
    if isinstance(error, FileNotFoundError) and error.filename is None and not _is_somewhere():
        return YetoError("the folder this was started in is gone; change to one that is there")
    if isinstance(error, OSError):
        # The system's own sentence says the cause, and of which file.
        place = "" if error.filename is None else f"{error.filename}: "
        return YetoError(f"{place}{error.strerror or error}; --debug shows where it happened")
    return YetoError(
        f"unexpected {type(error).__name__}: {error}; this should not happen: --debug shows where it did"
    )


def _is_somewhere() -> bool:
    """Return whether the working folder is there: someone may have removed it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Have SIGTERM end the block as Ctrl-C does, so that what it began to write is removed."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def fail(error: YetoError, *, debug: bool = False) -> int:
    """Print an error as one line (with ``debug`` after its traceback); return its exit code."""
    if debug:
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    if not text.isprintable():
        # It quotes a file name or a tape, and those may hold what a terminal would act upon.
        from yeto.tape import printable

        text = printable(text)
    print(f"yeto: {text}", file=sys.stderr)
    return error.exit_code
