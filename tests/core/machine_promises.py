"""What must hold on every timeline, seen from outside: the tape's own words, no rule of how it comes about.

The oracle says what is due; this says what must never be. Most of it follows from the oracle being right,
which is the point: two ways to the same end.
"""

from __future__ import annotations

from attrs import define, field, fields_dict
from machine_learner import Work

from yeto.core import CoreConfig, Phase, State
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.core.parts import Round

Key = tuple[int, int]
STATE_FIELDS = set(fields_dict(State))
ROUND_FIELDS = set(fields_dict(Round))


@define
class Promises:
    """Remembers what the timeline promised, and holds the next record against it."""

    committed: int = 0
    members: dict[Key, set[tuple[int, str]]] = field(factory=dict)
    accepted: dict[Key, set[int]] = field(factory=dict)
    last_broadcast: int = 0
    works: dict[int, list[Work]] = field(factory=dict)
    """What is merged, by the round that merged it."""
    ledger: dict[int, dict[int, tuple[int, int]]] = field(factory=dict)
    """Steps and tokens of each learner, by the round that merged them."""

    def resume(self, step: int) -> None:
        """A new timeline begins at a checkpoint; later commits are superseded."""
        self.committed = self.last_broadcast = step
        self.members.clear()
        self.accepted.clear()
        self.works = {t: works for t, works in self.works.items() if t <= step}
        self.ledger = {t: rows for t, rows in self.ledger.items() if t <= step}

    def check(
        self, event: ev.Event, decisions: tuple[de.Decision, ...], state: State, config: CoreConfig
    ) -> None:
        for decision in decisions:
            self._see(decision, config)
        self._state(state)

    def _see(self, decision: de.Decision, config: CoreConfig) -> None:
        match decision:
            case de.AttemptOpened():
                key = (decision.step, decision.attempt)
                assert key not in self.members, "attempts of a timeline are new"
                self.members[key] = {(member.learner, member.generation) for member in decision.members}
                self.accepted[key] = set()
                assert len(decision.members) >= decision.quorum
            case de.PushAccepted():
                key = (decision.step, decision.attempt)
                assert (decision.learner, decision.generation) in self.members[key], "not a frozen member"
                assert decision.learner not in self.accepted[key], "answered twice"
                self.accepted[key].add(decision.learner)
            case de.GraceOpened():
                assert 0.0 <= decision.grace_seconds <= config.grace_cap_seconds
            case de.AttemptDiscarded():
                lost = self.accepted.pop((decision.step, decision.attempt))
                assert set(decision.lost) == lost, "a discard names what it loses"
            case de.RoundCommitted():
                self._commit(decision)
            case de.BroadcastOrdered() if len(decision.fragments) == 1 and decision.fragments[0].version:
                (ref,) = decision.fragments
                assert ref.version <= self.committed
                if self.last_broadcast < ref.version:
                    assert ref.version == self.last_broadcast + 1, "broadcasts leave in commit order"
                    self.last_broadcast = ref.version
            case _:
                pass

    def _commit(self, merge: de.RoundCommitted) -> None:
        assert merge.step == self.committed + 1, "commits have no gaps"
        self.committed = merge.step
        key = (merge.step, merge.attempt)
        learners = [one.learner for one in merge.responders]
        assert learners == sorted(set(learners))
        assert len(learners) >= merge.quorum, "a commit below the quorum"
        accepted = self.accepted.pop(key)
        assert set(learners) | set(merge.left_out) == accepted, "an answer was lost, or one is not an answer"
        assert {(one.learner, one.generation) for one in merge.responders} <= self.members[key]
        self.ledger[merge.step] = {one.learner: (one.c_steps, one.c_tokens) for one in merge.responders}

    def merge_work(self, merge: de.RoundCommitted, works: dict[tuple[int, int, int], Work]) -> None:
        """No unit of a learner's work is merged twice on one timeline."""
        merged: list[Work] = []
        for one in merge.responders:
            work = works.get((merge.step, merge.attempt, one.learner))
            if work is not None:
                merged.append(work)
                for step, earlier in self.works.items():
                    twice = [other for other in earlier if other.meets(work)]
                    assert not twice, f"{work} of round {merge.step} was merged in round {step}: {twice}"
        self.works[merge.step] = merged

    def _state(self, state: State) -> None:
        assert set(vars(state)) == STATE_FIELDS
        assert state.step == self.committed
        num_fragments = state.num_fragments
        for fragment, version in enumerate(state.versions):
            mine = [t for t in range(1, state.step + 1) if (t - 1) % num_fragments == fragment]
            assert version == (mine[-1] if mine else 0)
        assert [round_.step for round_ in state.rounds] == [
            state.step + 1 + i for i in range(len(state.rounds))
        ]
        assert len({round_.fragment for round_ in state.rounds}) == len(state.rounds) <= max(state.depth, 0)
        for round_ in state.rounds:
            assert set(vars(round_)) == ROUND_FIELDS
            assert round_.step <= state.target
        for fragment, version in enumerate(state.broadcast):
            assert version <= state.versions[fragment]
            if state.config.checkpoint_every == 1 and state.phase is not Phase.ENDED:
                assert version <= state.durable, "nothing leaves before it is durable"
        merges: dict[int, list[int]] = {}
        for rows in self.ledger.values():
            for learner, (steps, tokens) in rows.items():
                row = merges.setdefault(learner, [0, 0, 0])
                row[0] += 1
                row[1] += steps
                row[2] += tokens
        kept = {e.learner: [e.merges, e.c_steps, e.c_tokens] for e in state.ledger.values()}
        assert kept == merges, "the ledger is the sum of the commits that stand"
