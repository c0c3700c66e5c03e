"""The corpus: a text file for each target, one input a line, in hex.

Text, because inputs are small and many, and because a diff then shows what was added.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "fixtures" / "wire" / "corpus"


def path_of(target: str, folder: Path = FOLDER) -> Path:
    """Where the corpus of a target lies."""
    return folder / f"{target}.hex"


def read(target: str, folder: Path = FOLDER) -> list[bytes]:
    """Return the inputs of a target; none when there is no file."""
    path = path_of(target, folder)
    if not path.exists():
        return []
    return [bytes.fromhex(line) for line in path.read_text(encoding="ascii").splitlines()]


def write(target: str, inputs: Iterable[bytes], folder: Path = FOLDER) -> None:
    """Keep these inputs, each once, shortest first."""
    lines = sorted({data.hex() for data in inputs}, key=lambda line: (len(line), line))
    folder.mkdir(parents=True, exist_ok=True)
    path_of(target, folder).write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
