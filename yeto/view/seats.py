"""The learners of a run, as their records tell them: who is linked, how fast each steps, what it gave last.

The step time of a learner is smoothed by the coordinator's own function from the same reports, so what is
shown is what grace and throttle are computed from.
"""

from __future__ import annotations

from attrs import define

from yeto.core.pacing import step_estimate
from yeto.core.state import NO_ESTIMATE


@define
class Seat:
    """What is known of one configured learner."""

    generation: str | None = None
    """Of its live connection."""
    link: str = "expected"
    link_since: float | None = None
    link_why: str = ""
    local_step: int | None = None
    report_at: float = 0.0
    report_step: int | None = None
    """Local step of the last report of this connection that advanced."""
    xi_step: float | None = None
    """Smoothed seconds of one inner step; None until this connection has reported twice."""
    c_steps: int = 0
    c_tokens: int = 0
    """Of its last offered push: they tell how many tokens a step has."""
    bytes_in: int = 0
    answered_at: float | None = None
    staleness: int | None = None
    missed_in_a_row: int = 0

    def join(self, generation: str, at: float) -> None:
        """A group of it is complete."""
        self.generation = generation
        self.link, self.link_since, self.link_why = "connected", at, ""
        self.report_at, self.report_step, self.xi_step = 0.0, None, None

    def part(self, link: str, at: float, why: str) -> None:
        """Its connection is gone, and with it what was known of its pace."""
        self.generation = None
        self.link, self.link_since, self.link_why = link, at, why
        self.report_step = self.xi_step = None

    def report(self, local_step: int, at: float) -> bool:
        """Work in a local step that its connection reported; return whether there is a new estimate."""
        if self.report_step is None:
            self.report_at, self.report_step, self.local_step = at, local_step, local_step
            return False
        elapsed, steps = at - self.report_at, local_step - self.report_step
        if steps <= 0 or elapsed <= 0.0:
            return False
        self.xi_step = step_estimate(self.xi_step, elapsed, steps)
        self.report_at, self.report_step, self.local_step = at, local_step, local_step
        return True

    @property
    def steps_per_second(self) -> float | None:
        """Return the pace that the coordinator sees."""
        return 1.0 / self.xi_step if self.xi_step else None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the pace in raw tokens, by what its last push says that a step has."""
        if not self.xi_step or not self.c_steps:
            return None
        return self.c_tokens / self.c_steps / self.xi_step


@define
class Throttle:
    """What the coordinator's throttle goes by: the slowest estimate, and openings without any."""

    last_open: float | None = None
    blind_opened: int = 0
    blind_until: float | None = None
    blind_over: bool = False
    paced: tuple[int, ...] = ()
    """Learners that were frozen at the last opening."""

    def slowest(self, seats: dict[int, Seat]) -> float:
        """Return the greatest step time among the learners last frozen; -1 without any."""
        return max(
            (xi for learner in self.paced if (xi := seats[learner].xi_step) is not None),
            default=NO_ESTIMATE,
        )

    def see(self, seats: dict[int, Seat]) -> None:
        """With an estimate there, the next loss of all estimates starts afresh."""
        if self.blind_until is not None and self.slowest(seats) >= 0.0:
            self.blind_opened, self.blind_until, self.blind_over = 0, None, False
