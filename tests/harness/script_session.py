"""The session behind a scenario script: the coordinator, a tape of it all, and a shadow that reads the tape.

Every event and decision is written as a line of a tape, and a second coordinator reads that line at once.
After each command both must stand at the same place; at the end both, and a third one that folds the bare
events, must be the same byte for byte. So a script that passes has also shown that its story can be told
again.
"""

from __future__ import annotations

import json
from typing import Any

from attrs import asdict, evolve, frozen
from core_fleet import Session

from yeto.core import CoreConfig, Phase, State, initial_state, step
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.resume import version_at
from yeto.core.values import FragmentMark, LedgerEntry, OuterMark, SessionTerms
from yeto.tape import Header, Replayer, encode, round_at, state_to_json


@frozen(kw_only=True)
class Saved:
    """What a checkpoint holds, as far as the coordinator knows."""

    fragments: tuple[FragmentMark, ...]
    ledger: tuple[LedgerEntry, ...] = ()
    finish_target: int | None = None
    outer_marks: tuple[OuterMark, ...] | None = None


def state_bytes(state: State) -> bytes:
    """A state as bytes, so that two can be compared with nothing overlooked (1 is not 1.0 here)."""
    return json.dumps(state_to_json(state)).encode()


class TapedSession(Session):
    """A session whose every event is also written to a tape, and whose tape is replayed line by line."""

    def __init__(self, settings: CoreConfig, terms: SessionTerms) -> None:
        super().__init__(settings, num_fragments=terms.num_fragments)
        self.terms = terms
        self.saved: dict[int, Saved] = {}
        """What each ordered checkpoint holds, by its step."""
        self.told: list[tuple[ev.Event, Phase]] = []
        """Every event with the phase it came in."""
        self._seq = 0
        self._shadow = Replayer("script")
        self._write(
            Header(
                software_version="0", wall_clock="2030-01-01T00:00:00Z", session_id="script", config=settings
            )
        )

    def feed(self, event: ev.Event) -> tuple[de.Decision, ...]:
        event = evolve(event, at=round_at(event.at))
        before = self.state
        self.state, self.last = step(before, event)
        self.at = event.at
        self.told.append((event, before.phase))
        self.events.append(event)
        self.decisions.extend(self.last)
        self._write(event)
        because = self._seq - 1
        for decision in self.last:
            self._write(decision, because)
            if isinstance(decision, de.CheckpointOrdered):
                self.saved[decision.step] = Saved(
                    fragments=self.state.marks,
                    ledger=tuple(self.state.ledger[learner] for learner in sorted(self.state.ledger)),
                    finish_target=decision.finish_target,
                    outer_marks=self.state.outer_marks,
                )
        if isinstance(event, ev.SessionResumed):
            self.config = event.config
        return self.last

    def _write(self, body: Header | ev.Event | de.Decision, because: int | None = None) -> None:
        at = self.state.at
        self._shadow.feed(encode(seq=self._seq, at=at, body=body, because=because))
        self._seq += 1

    def check_shadow(self) -> None:
        """The tape so far gives this very state, and nothing on it differs from what the rules give."""
        assert self._shadow.divergence is None, self._shadow.divergence
        assert self._shadow.due == 0
        assert self._shadow.state == self.state

    def check_again(self) -> None:
        """The tape, and all events once more from the beginning, give this state byte for byte."""
        state = initial_state(self._shadow.header.config)
        decisions: list[de.Decision] = []
        for event in self.events:
            state, some = step(state, event)
            decisions.extend(some)
        assert decisions == self.decisions
        assert state_bytes(state) == state_bytes(self.state) == state_bytes(self._shadow.state)

    def resumption(self, at_step: int | None, settings: CoreConfig, **changes: Any) -> ev.SessionResumed:
        """A start from the checkpoint of a step: of this session, or one made up for the script."""
        if at_step is None:
            at_step = max(self.state.durable, 0)
        saved = self.saved.get(at_step) or self._made_up(at_step)
        fields: dict[str, Any] = {
            "at": self.at,
            "wall_clock": "2030-01-01T00:00:00Z",
            "config": settings,
            "terms": self.terms,
            "step": at_step,
            "checkpoint_seq": None,
            **asdict(saved, recurse=False),
        }
        if self.state.step == at_step and self.state.ack_deadline is not None:
            # The cut of this very step is on the tape: who was awaited, guests not included, and who has it.
            held = self.state.awaited
            fields["awaited"] = tuple(sorted(learner for learner in held if not held[learner]))
            fields["acked"] = tuple(sorted(self.state.acked))
        fields.update(changes)
        return ev.SessionResumed(**fields)

    def _made_up(self, at_step: int) -> Saved:
        return Saved(
            fragments=tuple(
                FragmentMark(
                    fragment=p,
                    version=version_at(at_step, p, self.terms.num_fragments),
                    params_digest=f"{p:032x}",
                    momentum_digest=f"{p:032x}",
                )
                for p in range(self.terms.num_fragments)
            )
        )
