"""What the tests of the view share: tapes, and what the coordinator itself says of them."""

from pathlib import Path

from yeto.core import initial_state, step, waiting_for
from yeto.core.pacing import root_of
from yeto.core.parts import Status
from yeto.tape import Header, Record, Replayer, complete_lines, open_tape

ROOT = Path(__file__).parents[2]
TAPES = sorted((ROOT / "fixtures" / "tapes").glob("*.jsonl"))


def replayed(path):
    """Yield every record of a tape with the replayer behind it."""
    replayer = Replayer(str(path))
    with open_tape(path) as file:
        for line in complete_lines(file, str(path)):
            yield replayer.feed(line), replayer
    assert replayer.divergence is None


def stepped(session):
    """Yield the records of a script's session, and the state where all decisions of an event are out."""
    config = session._shadow.header.config
    header = Header(software_version="0", wall_clock="2030-01-01T00:00:00Z", session_id="s", config=config)
    yield Record(seq=0, at=0.0, kind="header", because=None, body=header), None
    state, seq = initial_state(config), 1
    for event in session.events:
        state, decisions = step(state, event)
        because, last = seq, len(decisions)
        for index, body in enumerate((event, *decisions)):
            cause = because if index else None
            record = Record(seq=seq, at=event.at, kind=body.kind, because=cause, body=body)
            yield record, state if index == last else None
            seq += 1


def differences(state, shadow):
    """Return what the coordinator's state and its shadow say differently."""
    fields = {
        "phase": (state.phase, shadow.phase),
        "exit_code": (state.exit_code if state.phase == "ended" else None, shadow.exit_code),
        "step": (state.step, shadow.step),
        "target": (state.target, shadow.target),
        "current": ({learner: one.generation for learner, one in state.current.items()}, shadow.current),
        "strangers": (dict(state.strangers), shadow.strangers),
        "versions": (dict(enumerate(state.versions)), shadow.versions),
        "durable": (state.durable, shadow.durable),
        "writing": (state.writing, shadow.writing),
        "gated": ([(one.step, one.fragment, one.gate) for one in state.gated], list(shadow.gated)),
        "pace": (
            {learner: link.xi_step for learner, link in state.links.items()},
            {learner: shadow.seats[learner].xi_step for learner in shadow.current},
        ),
        "throttle": (
            (
                root_of(state.slowest),
                state.last_open,
                state.blind_opened,
                state.blind_until,
                state.blind_over,
            ),
            (
                shadow.throttle.slowest(shadow.seats),
                shadow.throttle.last_open,
                shadow.throttle.blind_opened,
                shadow.throttle.blind_until,
                shadow.throttle.blind_over,
            ),
        ),
        "rounds": (
            [_round(one, state.at) for one in state.rounds],
            [_round(one.as_core(), state.at) for one in shadow.rounds],
        ),
        "reports": (set(state.reports), shadow.reports),
        "awaited": (dict(state.awaited), shadow.awaited),
    }
    for later in (0.0, 3.7, 1000.0):
        at = state.at + later
        fields[f"sentence after {later} s"] = waiting_for(state, at), waiting_for(shadow.state(), at)
    return {name: both for name, both in fields.items() if both[0] != both[1]}


def _round(one, at):
    gathering, retry = one.status is Status.GATHERING, one.status is Status.RETRY
    return (
        *(one.step, one.fragment, one.attempt, one.status, one.quorum, one.base_version, one.sweep),
        *(sorted(one.members), sorted(one.answers), dict(one.gone), one.deadline),
        one.grace_deadline if gathering else None,
        # A wait that is over is None in the one and in the past in the other; the sentence is the same.
        one.retry_at if retry and one.retry_at is not None and one.retry_at > at else None,
    )
