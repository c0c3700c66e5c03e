"""Which points there are: counted on runs without a fault, not written down by hand.

A dry run lists the calls of a whole run; each call gives a point for every kind of fault that can happen to
it, and a write gives one more for a kill half-way. Every kill is followed by a second one while the next
syncer recovers, at a call that moves on from point to point; and for a few first kills, all calls of the
recovery are tried. How often the tape is flushed is chance, so a run may end before its point: that is said,
and no failure.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from crashing.calls import ANY, FULL, KINDS, Call, Fault

RUN, EXPORT, REPLACE = "run", "export", "replace"


@frozen(kw_only=True)
class Point:
    """One thing to try: what happens to the first syncer, and to the second."""

    kind: str
    """A kind of fault; ``twice`` for the kills that try a whole recovery."""
    faults: tuple[Fault, ...]
    of: str = RUN
    """What is hit: a run's syncers, an export, or an export that replaces an earlier one."""

    def __str__(self) -> str:
        text = "+".join(map(str, self.faults))
        return text if self.of == RUN else f"{self.of}/{text}"

    @property
    def part(self) -> str:
        """Whose call is hit first."""
        return self.faults[0].part


def parse_point(text: str) -> Point:
    """Return the point that a text stands for.

    Raises:
        ValueError: it stands for none.
    """
    of, _, words = text.rpartition("/")
    faults = []
    for word in words.split("+"):
        kind, part, number, *rest = word.split(":")
        if kind not in (*KINDS, FULL) or rest not in ([], ["half"]):
            raise ValueError(word)
        faults.append(Fault(kind=kind, part=part, number=int(number), half=bool(rest)))
    if (of or RUN) not in (RUN, EXPORT, REPLACE):
        raise ValueError(of)
    return Point(kind=faults[0].kind, faults=tuple(faults), of=of or RUN)


def points_of(calls: Sequence[Call], recovery: int, kinds: Sequence[str] = KINDS) -> list[Point]:
    """Return the points of a run, one fault each; of kills, with one more while the next syncer recovers.

    Args:
        calls: of the dry run.
        recovery: calls of a recovery, about.
        kinds: of faults.
    """
    points = []
    for kind in kinds:
        turn = 0
        for call in calls:
            if not call.suffers(kind):
                continue
            halves = (False, True) if kind == "kill" and call.op == "write" else (False,)
            for half in halves:
                faults = [Fault(kind=kind, part=call.part, number=call.number, half=half)]
                if kind == "kill":
                    turn += 1
                    faults.append(_again(1 + turn % recovery, half=turn % 2 == 0))
                points.append(Point(kind=kind, faults=tuple(faults)))
    return points


def twice(first: Fault, recovery: int) -> list[Point]:
    """Return the points that kill the recovery from one first kill at each of its calls."""
    return [Point(kind="twice", faults=(first, _again(n, half=n % 2 == 0))) for n in range(1, recovery + 1)]


def full_disks(pages: int) -> list[Point]:
    """Return the points that play a run on a disk of too few pages, from one on."""
    return [Point(kind=FULL, faults=(Fault(kind=FULL, part="disk", number=n),)) for n in range(1, pages + 1)]


def exports(calls: Sequence[Call], of: str, kinds: Sequence[str] = KINDS) -> list[Point]:
    """Return the points of an export, one fault each."""
    return [
        Point(kind=kind, of=of, faults=(Fault(kind=kind, part=call.part, number=call.number),))
        for kind in kinds
        for call in calls
        if call.suffers(kind)
    ]


def interesting(calls: Sequence[Call]) -> list[Fault]:
    """Return first kills that leave different work to a recovery.

    A torn record of the tape; a fragment that no manifest names; a manifest written aside; a new manifest
    beside files to be tidied; a final cut without its marker.
    """
    last = {(call.part, call.op, _stem(call.name)): call for call in calls}

    def kill(part: str, op: str, stem: str, *, half: bool = False) -> Fault:
        return Fault(kind="kill", part=part, number=last[part, op, stem].number, half=half)

    middle = [call for call in calls if call.part == "tape" and call.op == "write"]
    torn = middle[2 * len(middle) // 3]
    return [
        Fault(kind="kill", part="tape", number=torn.number, half=True),
        kill("checkpoint", "create", "manifest-"),
        kill("checkpoint", "rename", "manifest-"),
        kill("checkpoint", "remove", "manifest-"),
        kill("marker", "rename", "yeto-state.ckpt.final"),
    ]


def _stem(name: str) -> str:
    base = name.rsplit("/", 1)[-1]
    return "manifest-" if base.startswith("manifest-") else base.split(".tmp")[0]


def _again(number: int, *, half: bool) -> Fault:
    return Fault(kind="kill", part=ANY, number=number, half=half)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most so many of the points, spread evenly over each kind."""
    kept: list[Point] = []
    kinds = list(dict.fromkeys(point.kind for point in points))
    for place, kind in enumerate(kinds):
        some = [point for point in points if point.kind == kind]
        share = (most - len(kept)) // (len(kinds) - place)
        count = min(share, len(some))
        kept += [some[(2 * n + 1) * len(some) // (2 * count)] for n in range(count)]
    return kept
