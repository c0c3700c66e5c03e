"""How a help page looks: plain text, the same for every command, on a terminal and in a pipe.

A page is made of what its command says itself: the docstring, the flags under their headings, and examples.
What holds for all commands stands once at the end.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

LABEL_COLUMNS = 28
"""Longest label that has its explanation beside it; that of a longer one begins below."""
COLUMNS_MIN, COLUMNS_MAX = 40, 110
"""Narrower than this nothing can be read, and wider lines are hard to."""


COMMON = """Every flag can be given in the environment, too (--grace-ms as YETO_GRACE_MS),
or in a TOML file (--config FILE), in a table with the name of the command or
role ([simulate], [syncer]). The command line prevails, then the environment.

An error is one line on stderr; --debug shows where it came from. Exit codes:
0 done; 1 failed, or what was checked is wrong; 2 wrong usage; 3 a learner never
confirmed the result; 4 stopped before the end; 130 interrupted by Ctrl-C."""
"""The end of every page."""


def house_app(name: str, **more: Any) -> App:
    """Return an app whose pages, and those of its commands, look like all others."""
    from cyclopts import App

    more = {"help_epilogue": COMMON, **more}
    app = App(name=name, help_format="plaintext", help_formatter=PlainHelp(), **more)
    for flag in (*app.help_flags, *app.version_flags):
        # Everybody knows them, and no page of a command of ours lists them.
        app[flag].show = False
    return app


class PlainHelp:
    """Prints a page, part by part, as cyclopts hands it over."""

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print the line that shows the form of the command."""
        words = _text(usage).removeprefix("Usage: ").replace("[OPTIONS]", "[FLAGS]")
        _print(console, _wrapped(f"Usage: {words}", _columns(options), hanging="    "))

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        """Print what the command does."""
        _print(console, _filled(_text(description), _columns(options)))

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print the entries under one heading."""
        if not panel.entries:
            return
        rows = [(_label(entry), _explanation(entry)) for entry in panel.entries]
        title = "Flags" if panel.title == "Parameters" else panel.title
        _print(console, ["", f"{title}:", *rows_lines(rows, _columns(options))])


def rows_lines(rows: Sequence[tuple[str, str]], columns: int) -> list[str]:
    """Return labels with their explanations beside them, or below where a label is long."""
    fitting = [len(label) for label, _ in rows if len(label) <= LABEL_COLUMNS]
    indent = max(fitting, default=LABEL_COLUMNS) + 4
    lines = []
    for label, explanation in rows:
        told = _wrapped(explanation, columns - indent)
        if len(label) + 4 > indent:
            lines.append(f"  {label}")
        else:
            lines.append((f"  {label}".ljust(indent) + "".join(told[:1])).rstrip())
            told = told[1:]
        lines += [" " * indent + line for line in told]
    return lines


def _filled(text: str, columns: int) -> list[str]:
    """Return a text with its paragraphs filled anew, a blank line before each; what is indented stays."""
    lines: list[str] = []
    for paragraph in re.split(r"\n[ \t]*\n", text.strip()) if text.strip() else []:
        lines.append("")
        if paragraph.startswith(" "):
            lines += paragraph.split("\n")
        else:
            lines += _wrapped(" ".join(paragraph.split()), columns)
    return lines


def print_page(usage: str, description: str, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a page that no app has."""
    import shutil

    columns = _within(shutil.get_terminal_size().columns)
    lines = [f"Usage: {usage}", *_filled(description, columns), "", f"{heading}:", *rows_lines(rows, columns)]
    print("\n".join([*lines, "", COMMON]))


def _label(entry: HelpEntry) -> str:
    """Return a flag with what its value is, the word for an argument, or the name of a command."""
    if entry.positional_label:
        return entry.positional_label
    names = ", ".join(sorted(entry.all_options, key=len) if entry.positive_shorts else entry.all_options)
    value = entry.metavar
    if value and entry.choices:
        value = value.replace("CHOICE", "|".join(entry.choices))
    return f"{names} {value}" if value else names


def _explanation(entry: HelpEntry) -> str:
    """Return what an entry is for, and what holds where it is left out."""
    words = " ".join(_text(entry.description).split())
    if entry.required:
        return f"{words} [required]"
    default = entry.default
    if default in (None, "()"):
        return words
    if default in ("True", "False"):
        # A switch is off unless it has a word that turns it off.
        return f"{words} [default: on]" if default == "True" else words
    return f"{words} [default: {re.sub(r'[.]0$', '', str(default))}]"


def _text(part: Any) -> str:
    """Return the text of what may be a string, or a renderable that holds one."""
    return str(getattr(part, "primary_renderable", part) or "").strip("\n")


def _columns(options: ConsoleOptions) -> int:
    return _within(options.max_width)


def _within(columns: int) -> int:
    return min(max(columns, COLUMNS_MIN), COLUMNS_MAX)


def _wrapped(text: str, columns: int, *, hanging: str = "") -> list[str]:
    return textwrap.wrap(text, columns, break_on_hyphens=False, subsequent_indent=hanging)


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
