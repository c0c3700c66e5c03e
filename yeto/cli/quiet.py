"""What a process prints: our own lines for people, and nothing of the libraries' chatter.

transformers, datasets, PEFT and the hub's client draw bars, warn their own developers and repeat failed
requests aloud. They read the environment once, when they are imported, so it is set before that; what a user
has set prevails. Their errors still come, as exceptions.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

LIBRARIES = (
    "transformers",
    "datasets",
    "diffusers",
    "peft",
    "huggingface_hub",
    "accelerate",
    "torch",
    "tokenizers",
)
"""Whose warnings a user of ours can do nothing about."""

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
}
_NO_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def silence_libraries() -> None:
    """Ask the libraries to be quiet; call it before any of them is imported."""
    wanted = _QUIET if sys.stderr.isatty() else _QUIET | _NO_BARS
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        for library in LIBRARIES:
            warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")


class StderrHandler(logging.Handler):
    """Prints records to whatever ``sys.stderr`` is by then: a redrawn line puts itself in between."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record as one line."""
        print(self.format(record), file=sys.stderr, flush=True)


class _Lines(logging.Formatter):
    """``WHO: message``, with the level where it is more than news."""

    def __init__(self, who: str) -> None:
        super().__init__("%(message)s")
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{self._who}: {level}{super().format(record)}"


def configure_logging(who: str, *, is_head: bool = True) -> None:
    """Have our own records printed to stderr from INFO on, everybody else's from ERROR on.

    Args:
        who: stands in front of every line.
        is_head: of several ranks one says what they all have to say; the others their errors only.
    """
    handler = StderrHandler()
    handler.setFormatter(_Lines(who))
    logging.basicConfig(level=logging.ERROR, handlers=[handler], force=True)
    logging.getLogger("yeto").setLevel(logging.INFO if is_head else logging.ERROR)
