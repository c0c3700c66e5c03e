"""One outer round of a whole system, beside what others do for the same: seconds, and bytes of a learner.

A round makes the weights of M learners one: every parameter once. Yeto takes P global steps for it, of which
two are open at a time. All parties run on this machine, over loopback, with learners that train for no time
at all, so that nothing but the exchange is left; they take turns. Loopback is no wide-area network: what is
measured is work, and the bytes say what a line would add.

What Yeto does beyond its peers is in its figure: a checkpoint and a tape that are durable before anything is
broadcast, the examination and correction of each push. A second run leaves the checkpoints out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.figures import Figure, Report, figure_of
from benchmarks.outer_flower import MISSING, Flower
from benchmarks.outer_gloo import Gloo
from benchmarks.outer_party import Party
from benchmarks.outer_yeto import FRAGMENTS, Yeto
from benchmarks.timing import take_turns, wall_clock

MIB = 1 << 20
NOT_COUNTED = "This system does not tell what a socket has moved, so there are no figures about bytes"


def measure(
    *, repeats: int, learners: Sequence[int], elements: int, folder: Path, flower_python: Path | None = None
) -> Report:
    """Measure rounds of all parties in turn.

    Args:
        repeats: rounds of each.
        learners: numbers of learners, one after the other.
        elements: of the whole model.
        folder: on the disk that holds Yeto's tape and checkpoint.
        flower_python: of an environment with Flower; None leaves that out.
    """
    figures = [
        figure for number in learners for figure in _figures(repeats, number, elements, folder, flower_python)
    ]
    notes = [] if flower_python is not None else [MISSING]
    if not any(figure.unit == "MiB" for figure in figures):
        notes.append(NOT_COUNTED)
    return Report(
        benchmark="peers",
        what="one outer round of every parameter, by the wall; what learner 0 sends and receives in it",
        settings={"elements": elements, "fragments": FRAGMENTS, "repeats": repeats},
        figures=tuple(figures),
        notes=tuple(notes),
    )


def _figures(
    repeats: int, learners: int, elements: int, folder: Path, flower_python: Path | None
) -> list[Figure]:
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="peers-", dir=folder) as name, ExitStack() as stack:
        durable, free = (
            _yeto(Path(name) / word, learners, elements, every)
            for word, every in (("durable", 1), ("free", 0))
        )
        gloo = Gloo(learners=learners, elements=elements)
        started: list[Yeto | Gloo | Flower] = [durable, free, gloo]
        parties: dict[str, Party] = {"yeto": durable, "free": free}
        parties |= {dtype: gloo.in_dtype(dtype) for dtype in ("bf16", "f32")}
        if flower_python is not None:
            flower = Flower(flower_python, Path(name), learners=learners, elements=elements)
            started.append(flower)
            parties["flower"] = flower
        # All of them start at once; then each is waited for.
        for party in started:
            stack.enter_context(party)
        return _taken(repeats, learners, parties)


def _yeto(folder: Path, learners: int, elements: int, checkpoint_every: int) -> Yeto:
    folder.mkdir()
    return Yeto(folder, learners=learners, elements=elements, checkpoint_every=checkpoint_every)


NAMES = {
    "bf16": "gloo all-reduce, bf16",
    "f32": "gloo all-reduce, f32",
    "free": "Yeto without checkpoints",
    "flower": "Flower FedAvg",
}


def _taken(repeats: int, learners: int, parties: dict[str, Party]) -> list[Figure]:
    moved: dict[str, list[int | None]] = {name: [] for name in parties}

    def one(name: str) -> None:
        moved[name].append(parties[name].round())

    seconds = dict(
        zip(
            parties,
            take_turns(repeats, *(lambda name=name: one(name) for name in parties), clock=wall_clock),
            strict=True,
        )
    )
    figures = []
    for name in parties:
        if name == "yeto":
            continue
        figures.append(
            figure_of(
                f"outer_round_{learners}_beside_{name}_milliseconds",
                f"a round of {learners} learners",
                "ms",
                [1e3 * spent for spent in seconds["yeto"]],
                peer=NAMES[name],
                peer_values=[1e3 * spent for spent in seconds[name]],
            )
        )
    for name in parties:
        if name in ("yeto", "free"):
            continue
        # The first round warms up.
        ours, theirs = ([count / MIB for count in moved[of][1:] if count] for of in ("yeto", name))
        if len(ours) == len(theirs) == repeats:
            figures.append(
                figure_of(
                    f"outer_round_{learners}_beside_{name}_mib_per_learner",
                    f"the same, of one of {learners} learners",
                    "MiB",
                    ours,
                    peer=NAMES[name],
                    peer_values=theirs,
                )
            )
    return figures
