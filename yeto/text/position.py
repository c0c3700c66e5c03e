"""Where a learner stands in its text rows, as JSON and back (:mod:`yeto.tuning.position` has the rule)."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from yeto.text.config import TextConfig
from yeto.text.loader import LoaderState
from yeto.text.masks import Encoded
from yeto.text.stream import Position
from yeto.tuning.position import SEAT_SETTINGS, RowsRead, cursor_from_json, cursor_to_json

SETTINGS: Final = {
    **SEAT_SETTINGS,
    "data_format": "--data-format",
    "columns": "--columns",
    "train_on": "--train-on",
    "assistant_mask_mode": "--assistant-mask-mode",
    "seq_len": "--seq-len",
    "packing": "--packing",
    "tokenize": "--tokenize",
    "stream_workers": "--stream-workers",
    "shuffle_buffer": "--shuffle-buffer",
}
"""Fields of ``TextConfig`` that decide which block is the next one, and what people call them."""


class Positions:
    """Translates the states of one process's loader to JSON and back."""

    def __init__(self, config: TextConfig, first_row: str) -> None:
        """Describe the rows.

        Args:
            config: how they are read.
            first_row: digest of the first row of the share; tells another file from the same one elsewhere.
        """
        self._rows = RowsRead(
            settings={name: getattr(config, name) for name in SETTINGS}, first_row=first_row
        )

    def to_json(self, state: LoaderState, micro_batch_size: int) -> dict[str, Any]:
        """Return what a batch carries; made for every batch, so it must cost little beside one.

        Args:
            state: where the loader stands behind the batch.
            micro_batch_size: blocks of a batch; one that was probed must not be probed differently.
        """
        return {
            **self._rows.to_json(),
            "micro_batch_size": micro_batch_size,
            "turn": state.turn,
            "streams": [_stream_to_json(position) for position in state.positions],
        }

    def from_json(self, value: Mapping[str, Any]) -> LoaderState:
        """Return the state again.

        Raises:
            ConfigError: it was reached with other settings, or in other rows.
        """
        self._rows.require_same(value, SETTINGS)
        positions = tuple(_stream_from_json(stream) for stream in value["streams"])
        return LoaderState(positions=positions, turn=value["turn"])


def _stream_to_json(position: Position) -> dict[str, Any]:
    carry = position.carry
    return {
        "epoch": position.epoch,
        "window": position.window,
        "start": cursor_to_json(position.start),
        "taken": position.taken,
        "skip": position.skip,
        # In base64: a list of a block's numbers would take longer to make than many a block takes to train.
        "lengths": [len(piece.ids) for piece in carry],
        "ids": _packed([piece.ids for piece in carry]),
        "weights": _packed([piece.weights for piece in carry]),
    }


def _stream_from_json(value: Mapping[str, Any]) -> Position:
    ends = np.cumsum(value["lengths"])[:-1]
    ids = np.split(np.frombuffer(b64decode(value["ids"]), dtype=np.int32), ends)
    weights = np.split(np.frombuffer(b64decode(value["weights"]), dtype=np.uint8), ends)
    carry = zip(ids, weights, strict=True) if value["lengths"] else ()
    return Position(
        epoch=value["epoch"],
        window=value["window"],
        start=cursor_from_json(value["start"]),
        taken=value["taken"],
        skip=value["skip"],
        carry=tuple(Encoded(ids=some, weights=same) for some, same in carry),
    )


def _packed(arrays: list[np.ndarray]) -> str:
    return b64encode(np.concatenate(arrays).tobytes()).decode("ascii") if arrays else ""
