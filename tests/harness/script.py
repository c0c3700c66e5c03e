"""Scenario scripts: commands, each followed by the text that must come of it. The whole text is compared.

A script is a story that people read: what happens to a session, line by line, and what the coordinator
decides. Running one gives its text anew, with the commands as they stand and what really came of them; a
script passes when that text is its own, byte for byte. ``fixtures/scripts/README.md`` explains the
language.

Nothing may go unnoticed: text that no command gave, a command that does not exist or has words too many,
a script without commands or without the comment that says what it shows are errors, and a rewrite keeps
none of them.
"""

from __future__ import annotations

import difflib
from typing import NoReturn

from script_commands import QUESTIONS, ScriptError, Stage
from script_session import TapedSession, state_bytes
from script_text import sentence, state_line

from yeto.errors import ConfigError, CoordinatorError

INDENT = "    "
_QUIET = "quiet: "
_ILLEGAL = "illegal: "


def run_script(text: str, name: str = "script") -> tuple[str, tuple[TapedSession, ...]]:
    """Carry out a script.

    Args:
        text: The script.
        name: Its name in messages.

    Returns:
        The text as it should be, and the sessions it told.

    Raises:
        ScriptError: The script is wrong in itself; names the line.
    """
    runner = _Runner(name)
    for line in text.splitlines():
        runner.take(line)
    return runner.end(), tuple(runner.sessions)


def difference(expected: str, found: str, name: str) -> str:
    """A unified diff of two texts of a script, empty when they are one."""
    lines = difflib.unified_diff(
        expected.splitlines(keepends=True), found.splitlines(keepends=True), f"{name} says", "came of it"
    )
    return "".join(lines)


class _Runner:
    """Takes a script line by line and writes down what it should be."""

    def __init__(self, name: str) -> None:
        self.sessions: list[TapedSession] = []
        self._name = name
        self._number = 0
        self._out: list[str] = []
        self._stage = Stage()
        self._expecting = False
        """Whether expected text may stand here: behind a command, up to the next empty line."""

    def take(self, line: str) -> None:
        """Take one line; what comes of a command replaces the expected text below it."""
        self._number += 1
        if line.startswith(INDENT):
            if not self._expecting:
                self._fail("expected text without a command above it")
            return
        if not self._out and not line.startswith("# "):
            self._fail("a script begins with a comment that says what it shows")
        self._out.append(line)
        self._expecting = bool(line) and not line.startswith("#")
        if self._expecting:
            self._out += [INDENT + shown for shown in self._command(line)]

    def end(self) -> str:
        """Check what is left to check; return the text."""
        if not self.sessions:
            self._fail("a script without commands shows nothing")
        self.sessions[-1].check_again()
        return "\n".join(self._out) + "\n"

    def _command(self, line: str) -> list[str]:
        try:
            if line.startswith(_ILLEGAL):
                shown = self._illegal(line.removeprefix(_ILLEGAL))
            elif line.startswith(_QUIET):
                self._stage.run(line.removeprefix(_QUIET))
                shown = []
            else:
                shown = self._stage.run(line)
        except (ScriptError, ConfigError, CoordinatorError) as error:
            self._fail(f"{line}: {error}")
        session = self._stage.session
        if session is None:
            return shown
        if not self.sessions or self.sessions[-1] is not session:
            self.sessions.append(session)
        session.check_shadow()
        return shown if line in QUESTIONS else [*shown, state_line(session.state, session.at)]

    def _illegal(self, text: str) -> list[str]:
        """A command that must raise and change nothing."""
        session = self._stage.session
        state = None if session is None else session.state
        before = None if state is None else state_bytes(state)
        try:
            self._stage.run(text)
        except (ConfigError, CoordinatorError) as error:
            if session is not None and state is not None:
                assert self._stage.session is session
                assert session.state is state, "an illegal event gave another state"
                assert state_bytes(state) == before, "an illegal event changed the state"
            return [f"{type(error).__name__}: {sentence(str(error))}"]
        raise ScriptError("it is legal")

    def _fail(self, why: str) -> NoReturn:
        raise ScriptError(f"{self._name}:{self._number}: {why}") from None
