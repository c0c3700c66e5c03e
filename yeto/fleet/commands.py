"""The commands of a fleet's machines: one head, and a learner on each island.

The rule: they are made here, once, for islands on this machine and for rented ones alike. What differs
between the two (where inputs lie, on which address the head listens) is in :class:`Place`; everything else a
command needs is in its own folder under a fixed name. So a run on this machine goes the way that a rented
one goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import frozen

from yeto.fleet.launch import Launch

YETO_RUN: Final = ("yeto", "run", "--debug")
"""How commands of syncers and learners begin: a log has room for the traceback that a terminal is spared."""

KEY: Final = "auth.key"
"""The run's key, in the folder of the head and of every island; mode 0600."""
ADDRESS: Final = "syncer.address"
"""File of an island with the head's ``HOST:PORT``; learners read it at every dial, so a head may move."""
CHECKPOINT: Final = "yeto-state.ckpt"
"""A run's checkpoint, in the folder of its syncer."""
TAPE: Final = "events.jsonl"
"""And its tape."""
READY: Final = "ready.json"
"""Where the head's syncer says that learners can connect, and at which port."""
RESULT: Final = "result"
"""Where the head writes a result before it is copied to a URI."""

PORT: Final = 29400
"""Where a rented head listens."""
RANKS_PORT: Final = 29500
"""Where the ranks of an island of several machines meet; torchrun's own default."""


@frozen(kw_only=True)
class Place:
    """What is peculiar to where a command runs."""

    host: str
    """Address that the head listens on."""
    port: int
    """And its port; 0 takes any free one."""
    input: Callable[[str], str]
    """Gives the name of a model or of rows there."""
    device: str | None = None
    """Device of the learners; None leaves it to them."""


HERE: Final = Place(host="127.0.0.1", port=0, input=lambda name: name, device="cpu")
"""This machine: ``local:`` islands."""


def head_command(launch: Launch, place: Place) -> list[str]:
    """Return the words after ``python -m`` of the head; it runs in the head's folder."""
    return [
        *("yeto.fleet.head", f"--host={place.host}", f"--port={place.port}"),
        *(f"--model={place.input(launch.model)}", f"--output={launch.output}"),
        *([] if launch.task == "text" else [f"--task={launch.task}"]),
        *([] if launch.mirror is None else [f"--mirror={launch.mirror}"]),
        *(f"--export-word={word}" for word in launch.export_words),
        "--",
        f"--learners={len(launch.parsed())}",
        *launch.syncer_words,
    ]


def island_command(launch: Launch, number: int, place: Place) -> list[str]:
    """Return the words after ``python -m`` of one island's machines; they run in the island's folder.

    Of an island of several machines each runs the same words; PET_NODE_RANK and PET_MASTER_ADDR tell torchrun
    which one it is, and where the first is.
    """
    islands = launch.parsed()
    island = islands[number]
    words = [
        *(*YETO_RUN, "--role=learner", f"--syncer=@{ADDRESS}"),
        *(f"--learner-id={number}", f"--num-learners={len(islands)}", f"--auth-key-file={KEY}"),
        *("--output-dir=out", "--state-dir=state", "--log-jsonl=learner.jsonl"),
        *(f"--model={place.input(launch.model)}", f"--data={place.input(launch.data)}"),
        *([] if launch.eval_data is None else [f"--eval-data={place.input(launch.eval_data)}"]),
        *([] if launch.chat_template is None else [f"--chat-template={place.input(launch.chat_template)}"]),
        *([] if place.device is None else [f"--device={place.device}"]),
        *([] if launch.torch_threads is None else [f"--torch-threads={launch.torch_threads}"]),
        *launch.learner_words,
    ]
    if island.ranks == 1:
        return words
    machines = (
        ["--standalone"] if island.nodes == 1 else [f"--nnodes={island.nodes}", f"--master-port={RANKS_PORT}"]
    )
    return ["torch.distributed.run", *machines, f"--nproc-per-node={island.count}", "-m", *words]
