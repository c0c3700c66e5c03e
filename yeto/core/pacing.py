"""Pace: smoothed times of the fleet, the grace they allow, and the throttle they ask for.

Three times are estimated, each an exponential moving average with weight one half on the new sample, the
first sample seeding it (the adaptive grace of Decoupled DiLoCo, arXiv 2604.21428):

* ``xi_step``, per learner: seconds of one inner step, from reports whose local step advanced. One long
  pause must not look like a slow machine, so a sample counts at most four times the estimate.
* ``xi_quorum``, per learner: seconds from the pull to its accepted answer.
* ``xi_sync``, one for the session: seconds of a merge, its outer step and its checkpoint.

After the quorum, stragglers get ``gamma * (tau * xi_step - xi_quorum - xi_sync)``: the compute slack that
the fleet has anyway. Between two openings lie at least ``H * xi_step / P`` seconds, so that each fragment
is merged about every H inner steps however fast the network is.

The throttle needs the slowest estimate among the members last frozen after each report. A tournament tree
over learner ids gives it: its root is the maximum, a report rebuilds one path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from yeto.core.config import CoreConfig
from yeto.core.parts import Link, replace
from yeto.core.state import NO_ESTIMATE, Draft, Fields, Slowest, moment

EMA_WEIGHT = 0.5
SAMPLE_CAP = 4.0
"""A step-time sample counts at most this many times the estimate."""
FIRST_ESTIMATE_SECONDS = 10.0
"""How long openings wait for a first step-time estimate: two heartbeats of ordinary steps."""


def smoothed(estimate: float | None, sample: float) -> float:
    """The estimate after one more sample; the first sample is the estimate."""
    return sample if estimate is None else EMA_WEIGHT * sample + (1.0 - EMA_WEIGHT) * estimate


def step_estimate(estimate: float | None, seconds: float, steps: int) -> float:
    """``xi_step`` after a report that ``steps`` inner steps took ``seconds``.

    10 steps in 5 s give 0.5; 2 steps in 10 s then count as 2.0 instead of 5.0 and give 1.25.
    """
    sample = seconds / steps
    if estimate is None:
        return sample
    most = SAMPLE_CAP * estimate
    return smoothed(estimate, sample if sample <= most else most)


def grace_seconds(
    *,
    gamma: float,
    tau: float,
    xi_step: float | None,
    xi_quorum: float,
    xi_sync: float,
    cap: float,
) -> float:
    """Seconds that stragglers get after the quorum, in ``[0, cap]``; ``cap`` without an estimate."""
    if xi_step is None:
        return cap
    return min(max(gamma * (tau * xi_step - xi_quorum - xi_sync), 0.0), cap)


def open_interval(config: CoreConfig, num_fragments: int, xi_step: float | None) -> float:
    """Seconds between two openings: the manual floor, or what keeps H steps between merges."""
    floor = config.min_round_interval_seconds
    if xi_step is None:
        return floor
    paced = config.sync_interval_steps * xi_step / num_fragments
    return paced if paced >= floor else floor


def build_slowest(values: Sequence[float]) -> Slowest:
    """A tournament tree over ``values``; linear."""
    size = len(values)
    if size == 1:
        return values[0]
    if size == 2:
        one, other = values
        return (one if one >= other else other, one, other)
    left, right = build_slowest(values[: size // 2]), build_slowest(values[size // 2 :])
    return (max(root_of(left), root_of(right)), left, right)


def put_slowest(tree: Slowest, size: int, index: int, value: float) -> Slowest:
    """The tree over ``size`` values with the one at ``index`` changed; logarithmic."""
    if not isinstance(tree, tuple):
        return value
    _, left, right = tree
    middle = size // 2
    if index < middle:
        left = put_slowest(left, middle, index, value)
    else:
        right = put_slowest(right, size - middle, index - middle, value)
    # root_of, twice, without the calls: half of all events come by here, once for each level.
    one = left[0] if isinstance(left, tuple) else left
    other = right[0] if isinstance(right, tuple) else right
    return (one if one >= other else other, left, right)


def root_of(tree: Slowest) -> float:
    """The greatest value of a tournament tree."""
    return tree[0] if isinstance(tree, tuple) else tree


def throttle_step(state: Fields) -> float | None:
    """``xi_step`` of the slowest member last frozen; None without any estimate."""
    tree = state.slowest
    root = tree[0] if isinstance(tree, tuple) else tree
    return None if root < 0.0 else root


def absorb_report(draft: Draft, learner: int, link: Link, local_step: int) -> Link:
    """Work in the local step that a current learner reported, and return its link.

    A report that does not advance says nothing about the pace. Nor does one without elapsed time: the
    older report stays the reference.
    """
    if link.report_step is None:
        link = replace(link, report_at=draft.at, report_step=local_step)
        draft.links = draft.links.set(learner, link)
        return link
    elapsed, steps = draft.at - link.report_at, local_step - link.report_step
    if steps <= 0 or elapsed <= 0.0:
        return link
    xi_step = step_estimate(link.xi_step, elapsed, steps)
    link = replace(link, report_at=draft.at, report_step=local_step, xi_step=xi_step)
    draft.links = draft.links.set(learner, link)
    _set_pace(draft, learner, xi_step)
    return link


def forget_pace(draft: Draft, learner: int) -> None:
    """Drop the step estimate of a learner whose generation is gone."""
    _set_pace(draft, learner, NO_ESTIMATE)


def freeze_pace(draft: Draft) -> None:
    """Make the current learners the ones that the throttle looks at; linear, once per opening."""
    values = [NO_ESTIMATE] * draft.config.num_learners
    for learner, link in draft.links.items():
        if link.xi_step is not None:
            values[learner] = link.xi_step
    draft.paced = draft.current
    draft.slowest = build_slowest(values)
    _see(draft)


def gate(state: Fields) -> float:
    """The moment from which the throttle lets the next round open; infinite while it waits to see."""
    config = state.config
    xi_step = throttle_step(state) if _throttled(config) else None
    if xi_step is None and state.blind_opened >= state.depth and not state.blind_over:
        return math.inf
    last_open = state.last_open
    if last_open is None:
        return state.at
    return moment(last_open + open_interval(config, state.num_fragments, xi_step))


def note_blind_opening(draft: Draft) -> None:
    """Count a round that was opened without any step estimate, so that a start does not over-sync."""
    if not _throttled(draft.config) or throttle_step(draft) is not None:
        return
    draft.blind_opened += 1
    if draft.blind_until is None:
        draft.blind_until = moment(draft.at + FIRST_ESTIMATE_SECONDS)


def _throttled(config: CoreConfig) -> bool:
    """Whether H counts at all: frozen learners of a budget finish take no steps."""
    return config.sync_interval_steps > 0.0 and not config.budget_finish


def _set_pace(draft: Draft, learner: int, value: float) -> None:
    if learner in draft.paced:
        draft.slowest = put_slowest(draft.slowest, draft.config.num_learners, learner, value)
        if draft.blind_until is not None:
            _see(draft)


def _see(draft: Draft) -> None:
    """With an estimate there, the next loss of all estimates starts afresh."""
    if draft.blind_until is not None and root_of(draft.slowest) >= 0.0:
        draft.blind_opened, draft.blind_until, draft.blind_over = 0, None, False
