"""What a learner keeps on disk to go on after its process or its machine is gone.

One *set* is one moment between two optimizer steps, whole: the weights and the optimizer's moments, what the
book says of every fragment, where the rows go on, and every random generator. A part from another moment
would not show at once: the loss would only be a little worse. So a set is written as a whole and read as a
whole, and every byte of it is under a digest:

    tensors.safetensors   every array, by a name that says what it is
    state.json            everything else, and the digest of the tensors
    digest                the digest of state.json; written last

The formats are open ones that run no code when they are read. The tensors are written from where they lie, in
the layout of safetensors, because the library would copy all of them once more.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from yeto.errors import ConfigError, YetoError
from yeto.learner.chance import Chance
from yeto.learner.pages import SavedBook, SavedFragment
from yeto.learner.saved_files import Tensors, digest_of, write_all, write_file, write_tensors
from yeto.storage import sync_folder
from yeto.wire.contract import first_difference, from_where_they_part
from yeto.wire.digest import digest
from yeto.wire.strictjson import parse_json

FORMAT: Final = 1
TENSORS, STATE, DIGEST = "tensors.safetensors", "state.json", "digest"


class DamagedState(YetoError):
    """A saved set is torn or was changed; there may be an older one that is whole."""


@frozen(kw_only=True, eq=False)
class SavedRank:
    """What each rank of an island has of its own."""

    position: Any = field(repr=False)
    """Where its rows go on; of the task's own making, as JSON holds it."""
    chance: Chance = field(repr=False)


@frozen(kw_only=True, eq=False)
class SavedLoop:
    """The inner loop's part: everything that decides the next optimizer step."""

    steps: int
    tokens: int
    empty_groups: int
    ranks: tuple[SavedRank, ...]
    parameters: Tensors = field(repr=False)
    """Trained parameters by canonical name."""
    optimizer: Mapping[str, Tensors] = field(repr=False)
    """The optimizer's state of each parameter, by the optimizer's own words (``exp_avg`` and so on)."""


@frozen(kw_only=True, eq=False)
class SavedState:
    """One set. Its arrays belong to it alone, or are never written to."""

    settings: Mapping[str, Any]
    """What must be as it was when a learner goes on; keys are the flags or fields to name."""
    loop: SavedLoop
    book: SavedBook

    def require_settings(self, now: Mapping[str, Any], where: Path) -> None:
        """Refuse to go on with other settings than those that led here.

        Raises:
            ConfigError: one differs; names it, both values, and ``where`` the state lies.
        """
        difference = first_difference(self.settings, now)
        if difference is not None:
            name, *values = difference
            before, after = map(_shown, from_where_they_part(*map(str, values)))
            raise ConfigError(
                f"--state-dir {where}: it was saved with {name} {before}, now it is {after}; "
                "give the same as before, or remove the folder to begin anew"
            )

    def write(self, folder: Path) -> None:
        """Write the set into a new folder, which is there with all of it or not at all.

        Args:
            folder: must not exist; its name with ``.tmp`` is used on the way.

        Raises:
            OSError: the system refuses, and then nothing is left.
        """
        aside = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            tensors = self._tensors()
            hashed = write_tensors(aside / TENSORS, tensors)
            body = json.dumps(self._body() | {"tensors": hashed}, allow_nan=False).encode()
            write_file(aside / STATE, lambda descriptor: write_all(descriptor, memoryview(body)))
            mark = memoryview(digest(body).encode())
            write_file(aside / DIGEST, lambda descriptor: write_all(descriptor, mark))
            sync_folder(aside)
            os.rename(aside, folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_folder(folder.parent)

    @classmethod
    def read(cls, folder: Path) -> SavedState:
        """Read a set that ``write`` has written, every byte of it checked.

        Raises:
            DamagedState: it is not whole.
            ConfigError: another version of the software wrote it in a format that is not known here.
        """
        try:
            body = (folder / STATE).read_bytes()
            if (folder / DIGEST).read_text("ascii") != digest(body):
                raise DamagedState(f"{folder / STATE} was changed or cut off")
            state = parse_json(body)
            if state["format"] != FORMAT:
                raise ConfigError(
                    f"{folder}: saved in format {state['format']}, this version knows {FORMAT}; go on with "
                    "the version that wrote it, or give another --state-dir to begin anew"
                )
            if digest_of(folder / TENSORS) != state["tensors"]:
                raise DamagedState(f"{folder / TENSORS} was changed or cut off")
            return _from_parts(state, load_file(folder / TENSORS))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DamagedState(f"{folder}: {type(error).__name__}: {error}") from error

    def _body(self) -> dict[str, Any]:
        """Return everything that is no array; see ``_from_parts``."""
        return {
            "format": FORMAT,
            "settings": dict(self.settings),
            "steps": self.loop.steps,
            "tokens_trained": self.loop.tokens,
            "empty_groups": self.loop.empty_groups,
            "ranks": [_rank_to_json(rank) for rank in self.loop.ranks],
            "frozen_work": self.book.frozen_work,
            "fragments": [_fragment_to_json(fragment) for fragment in self.book.fragments],
        }

    def _tensors(self) -> dict[str, NDArray[Any]]:
        found = {f"parameter/{name}": array for name, array in self.loop.parameters.items()}
        for name, parts in self.loop.optimizer.items():
            found |= {f"optimizer/{word}/{name}": array for word, array in parts.items()}
        for number, fragment in enumerate(self.book.fragments):
            pending = None if fragment.pending is None else fragment.pending[1]
            for word, array in (("anchor", fragment.anchor), ("due", fragment.due), ("pending", pending)):
                if array is not None:
                    found[f"{word}/{number}"] = array
        for number, rank in enumerate(self.loop.ranks):
            found[f"numpy/{number}"] = rank.chance.numpy[1]
            for place, state in enumerate(rank.chance.torch_states):
                found[f"torch/{number}/{place}"] = state
        return found


# -- to and from JSON ---------------------------------------------------------------------------------


def _rank_to_json(rank: SavedRank) -> dict[str, Any]:
    name, _, *rest = rank.chance.numpy
    return {
        "position": rank.position,
        "python": rank.chance.python,
        "numpy": [name, *rest],
        "generators": len(rank.chance.torch_states),
    }


def _fragment_to_json(fragment: SavedFragment) -> dict[str, Any]:
    return {
        "version": fragment.version,
        "digest": fragment.digest,
        "is_own_init": fragment.is_own_init,
        "c_steps": fragment.c_steps,
        "c_tokens": fragment.c_tokens,
        "pushed_step": fragment.pushed_step,
        "pending_step": None if fragment.pending is None else fragment.pending[0],
    }


def _from_parts(body: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> SavedState:
    optimizer: dict[str, dict[str, NDArray[Any]]] = {}
    for key, array in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            word, _, name = rest.partition("/")
            optimizer.setdefault(name, {})[word] = array
    work = body["frozen_work"]
    return SavedState(
        settings=body["settings"],
        loop=SavedLoop(
            steps=body["steps"],
            tokens=body["tokens_trained"],
            empty_groups=body["empty_groups"],
            ranks=tuple(_rank_from_json(rank, number, tensors) for number, rank in enumerate(body["ranks"])),
            parameters=_part(tensors, "parameter/"),
            optimizer=optimizer,
        ),
        book=SavedBook(
            fragments=tuple(
                _fragment_from_json(fragment, number, tensors)
                for number, fragment in enumerate(body["fragments"])
            ),
            frozen_work=None if work is None else (work[0], work[1]),
        ),
    )


def _rank_from_json(body: dict[str, Any], number: int, tensors: dict[str, NDArray[Any]]) -> SavedRank:
    version, words, left_over = body["python"]
    name, *rest = body["numpy"]
    return SavedRank(
        position=body["position"],
        chance=Chance(
            python=(version, tuple(words), left_over),
            numpy=(name, tensors[f"numpy/{number}"], *rest),
            torch_states=tuple(tensors[f"torch/{number}/{place}"] for place in range(body["generators"])),
        ),
    )


def _fragment_from_json(body: dict[str, Any], number: int, tensors: dict[str, NDArray[Any]]) -> SavedFragment:
    step = body["pending_step"]
    return SavedFragment(
        anchor=tensors.get(f"anchor/{number}"),
        version=body["version"],
        digest=body["digest"],
        is_own_init=body["is_own_init"],
        c_steps=body["c_steps"],
        c_tokens=body["c_tokens"],
        pushed_step=body["pushed_step"],
        due=tensors.get(f"due/{number}"),
        pending=None if step is None else (step, tensors.get(f"pending/{number}")),
    )


def _part(tensors: dict[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {key.removeprefix(prefix): array for key, array in tensors.items() if key.startswith(prefix)}


def _shown(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
