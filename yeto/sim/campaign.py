"""The fault campaign: from one whole number a small fleet, all that can go wrong with it, and the proof.

A seed gives a configuration and a schedule of faults, drawn so that every rule meets every fault somewhere.
The run is watched fact by fact (:mod:`yeto.sim.invariants`), every unit of work is accounted for
(:mod:`yeto.sim.account`), and from the moment when faults stop it must come to an end within a bounded time.

``python -m yeto.sim.campaign --seeds 300 --first 0`` runs many; a seed that fails is run again alone with the
command that it prints.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import TypeVar

from attrs import evolve, frozen

from yeto.core import CoreConfig, waiting_for
from yeto.learner.anchors import FragmentBook
from yeto.sim.agenda import chance
from yeto.sim.config import Faults, LearnerSpec, Operator, SimConfig, SimResult, SyncerSpec
from yeto.sim.invariants import Invariants
from yeto.sim.run import Simulation

_T = TypeVar("_T")

PUSH_BYTES = 1_000_000

KINDS = frozenset(
    {
        "broken_upload",
        "budget_finish",
        "carried",
        "checkpoint_failed",
        "crash",
        "died",
        "discarded_budget",
        "discarded_merge_failed",
        "discarded_not_finite",
        "discarded_quorum_timeout",
        "discarded_stopping",
        "discarded_unreachable",
        "duplicate",
        "fresh_restart",
        "frozen",
        "half_open",
        "joined_late",
        "late",
        "link_lost",
        "merge_failed",
        "merge_not_finite",
        "not_finite",
        "older_checkpoint",
        "outer_not_finite",
        "overtaken",
        "pull_held",
        "refused",
        "resend",
        "restart_after_1",
        "restart_after_4",
        "restored",
        "resumed",
        "rolled_back",
        "stop",
    }
)
"""Kinds of faults, and of what they lead to, that a campaign must have met."""


class CampaignError(AssertionError):
    """A seed failed; the message says how to run it again."""


@frozen(kw_only=True)
class Outcome:
    """What came of one seed."""

    seed: int
    result: SimResult
    happened: Counter[str]


def draw(seed: int) -> SimConfig:
    """Return the configuration and the faults that a seed stands for."""
    rng = chance(seed, "campaign")
    num_learners, num_fragments = rng.randint(1, 6), rng.choice((1, 1, 2, 2, 3, 4, 5))
    quorum = rng.randint(1, num_learners)
    budget = rng.randint(5, 40) if rng.random() < 0.15 else None
    faults_until = rng.uniform(10.0, 60.0)
    core = CoreConfig(
        num_learners=num_learners,
        total_steps=rng.randint(2, 16),
        quorum=quorum,
        wait_for=rng.randint(quorum, num_learners),
        start_timeout_seconds=rng.choice((40.0, 90.0, 300.0)),
        quorum_timeout_seconds=rng.choice((5.0, 20.0, 60.0)),
        final_ack_timeout_seconds=rng.choice((40.0, 120.0)),
        grace_cap_seconds=rng.choice((0.0, 0.2, 1.0, 5.0)),
        pipeline=rng.randint(1, 4),
        sync_interval_steps=rng.choice((0.0, 2.0, 8.0)),
        min_round_interval_seconds=rng.choice((0.0, 0.0, 0.5)),
        closing_sweep=rng.choice(("plain", "off")),
        learner_weight=rng.choice(("tokens2-over-steps", "equal")),
        delta_correction=rng.choice(("heloco", "heloco-all", "none")),
        max_base_lag=rng.choice((None, None, 0, 1, num_fragments, 2 * num_fragments)),
        max_norm_ratio=rng.choice((None, None, 1.5, 3.0)),
        checkpoint_every=rng.choice((0, 1, 1, 3)),
        mark_final_checkpoint=rng.random() < 0.5,
        stop_budget_seconds=rng.choice((0.0, 1.0, 20.0)),
        learner_budget_steps=budget,
        svd_pool=rng.random() < 0.2,
    )
    # Without these the run may still end, but with an error, and not because of a bug.
    may_leave = num_learners - quorum if budget is None else 0
    learners = [_learner(rng) for _ in range(num_learners)]
    if rng.random() < 0.8:
        # Otherwise most crashes come before there is anything to resume.
        learners[0] = evolve(learners[0], joins_at=0.0, up_rate=PUSH_BYTES / 0.02)
    if budget is not None:
        learners = [evolve(spec, lockstep=False) for spec in learners]
    for number in rng.sample(range(num_learners), rng.randint(0, may_leave)):
        if number and rng.random() < 0.2:
            learners[number] = _leaving(learners[number], rng, faults_until)
    stops = rng.randint(1, 2) if rng.random() < 0.2 else 0
    faults = _faults(rng, faults_until)
    if rng.random() < 0.1 and budget is None:
        # Rounds that follow each other faster than a late broadcast: versions overtake each other, too.
        faults = evolve(faults, late=0.5, late_seconds=8.0)
        core = evolve(
            core, total_steps=16, quorum=1, wait_for=1, sync_interval_steps=0.0, grace_cap_seconds=0.2
        )
        num_fragments = 1
    return SimConfig(
        core=core,
        learners=tuple(learners),
        num_fragments=num_fragments,
        push_bytes=PUSH_BYTES,
        broadcast_bytes=PUSH_BYTES,
        merge_alpha=rng.choice((0.0, 0.25, 0.5)),
        # Chance of its own, so that all else of a seed is what it would be without.
        carries=chance(seed, "carry").random() < 0.4,
        syncer=_syncer(rng),
        faults=faults,
        operator=Operator(
            stops_at=tuple(sorted(rng.uniform(1.0, faults_until) for _ in range(stops))),
            restarts_after=rng.choice(((4,), (1, 4), (1, 3, 4))),
            restarts_max=8,
            budget_finish=budget is not None and rng.random() < 0.7,
        ),
        seed=seed,
        until_seconds=faults_until + calm_seconds(core),
    )


def calm_seconds(core: CoreConfig) -> float:
    """Return the most that a session may take to its end once nothing goes wrong any more.

    What the last faults have left: repairs and outages, back-offs of learners and retries, a start, a quorum
    deadline held back by an upload to four times its length, a wait for ACKs; then the rounds themselves. All
    of it again for each start that an operator's schedule may still bring.
    """
    left = 600.0 + core.start_timeout_seconds + 4.0 * core.quorum_timeout_seconds
    rounds = core.total_steps * (10.0 + core.min_round_interval_seconds)
    budget = 4.0 * (core.learner_budget_steps or 0)
    return 3.0 * (left + core.final_ack_timeout_seconds + rounds + budget)


def _maybe(rng: Random, probability: float, value: _T) -> _T | None:
    return value if rng.random() < probability else None


def _learner(rng: Random) -> LearnerSpec:
    return LearnerSpec(
        step_seconds=rng.uniform(0.2, 2.0),
        step_jitter=rng.choice((0.0, 0.05, 0.3)),
        phase_jitter=rng.choice((0.0, 0.0, 0.1)),
        tokens_per_step=rng.choice((0, 100, 1000, 1000)),
        up_rate=PUSH_BYTES / rng.choice((0.02, 0.2, 2.0)),
        down_rate=PUSH_BYTES / rng.choice((0.02, 0.2, 1.0)),
        latency_seconds=rng.choice((0.01, 0.1, 0.5)),
        latency_jitter=rng.choice((0.0, 0.2, 0.5)),
        mean_up_seconds=_maybe(rng, 0.4, rng.choice((10.0, 40.0))),
        mean_repair_seconds=rng.choice((0.2, 1.0, 10.0)),
        keeps_state=rng.choice((0.0, 0.5, 1.0)),
        state_every_steps=rng.choice((1, 4, 15)),
        mean_link_seconds=_maybe(rng, 0.4, rng.choice((8.0, 30.0))),
        mean_outage_seconds=rng.choice((0.5, 5.0)),
        joins_at=rng.choice((0.0, 0.0, 0.0, rng.uniform(0.0, 30.0))),
        lockstep=rng.random() < 0.1,
    )


def _leaving(spec: LearnerSpec, rng: Random, until: float) -> LearnerSpec:
    return evolve(spec, leaves_at=rng.uniform(spec.joins_at + 5.0, spec.joins_at + until))


def _syncer(rng: Random) -> SyncerSpec:
    return SyncerSpec(
        up_rate=PUSH_BYTES / rng.choice((0.01, 0.1)),
        down_rate=PUSH_BYTES / rng.choice((0.01, 0.1)),
        merge_seconds=rng.choice((0.0, 0.1, 1.0)),
        outer_seconds=rng.choice((0.0, 0.05, 0.5)),
        fsync_seconds=rng.choice((0.0, 0.005, 0.3)),
        checkpoint_seconds=rng.choice((0.0, 0.1, 1.0)),
        mean_up_seconds=_maybe(rng, 0.5, rng.choice((20.0, 40.0))),
        mean_restart_seconds=rng.choice((1.0, 10.0)),
        older_checkpoint=rng.choice((0.0, 0.7)),
        queue_seconds=rng.choice((0.0, 0.0, 0.05, 0.5)),
    )


def _faults(rng: Random, until: float) -> Faults:
    def some(rate: float) -> float:
        return rate if rng.random() < 0.4 else 0.0

    return Faults(
        not_finite=some(0.15),
        duplicate=some(0.3),
        broken_upload=some(0.1),
        late=some(0.3),
        late_seconds=rng.choice((1.0, 8.0, 30.0)),
        half_open=some(0.6),
        merge_failed=some(0.1),
        merge_not_finite=some(0.1),
        outer_not_finite=some(0.1),
        checkpoint_failed=some(0.05),
        until_seconds=until,
    )


def run_seed(seed: int, folder: Path) -> Outcome:
    """Run what a seed stands for and check everything; see ``run_checked``."""
    return run_checked(draw(seed), folder)


def run_checked(
    config: SimConfig, folder: Path, *, make_book: Callable[[SimConfig], FragmentBook] | None = None
) -> Outcome:
    """Run a simulation and check everything.

    Args:
        config: what to simulate; it must come to its end within ``until_seconds``.
        folder: where its tape is written; an older one of the same seed is replaced.
        make_book: makes the learners' books, for a test that breaks a rule on purpose.

    Raises:
        CampaignError: something was not as it must be.
    """
    path = folder / f"campaign-{config.seed}.jsonl"
    path.unlink(missing_ok=True)
    invariants = Invariants(path)
    books = None if make_book is None else (lambda: make_book(config))
    simulation = Simulation(config, tape=path, observer=invariants, make_book=books)
    try:
        result = simulation.run()
        _check_outcome(simulation, result)
        invariants.check_end()
        return Outcome(seed=config.seed, result=result, happened=Counter(simulation.world.happened))
    except Exception as error:
        raise CampaignError(_story(config, simulation, invariants, error)) from error
    finally:
        simulation.close()
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".copy").unlink(missing_ok=True)


def _check_outcome(simulation: Simulation, result: SimResult) -> None:
    """Raise AssertionError unless the run ended, and for a reason that its faults give."""
    world, state = simulation.world, simulation.syncer.state
    config, faults = world.config, world.config.faults
    if result.exit_code is None:
        raise AssertionError(
            f"not at its end {config.until_seconds:g} s after it began, although nothing went wrong "
            f"since {faults.until_seconds or 0.0:g} s: {waiting_for(state, state.at)}"
        )
    # Whoever cannot take the cut because of a fault may have missed it before the faults stopped.
    was_disturbed = result.seconds < (faults.until_seconds or 0.0) + config.core.final_ack_timeout_seconds
    jobs_fail = faults.merge_failed or faults.merge_not_finite or faults.outer_not_finite
    reasons = {
        0: True,
        1: bool(jobs_fail or faults.checkpoint_failed) or "--start-timeout-s" in state.exit_why,
        3: config.core.learner_budget_steps is not None
        or any(spec.leaves_at is not None for spec in config.learners)
        or was_disturbed
        or config.syncer.mean_up_seconds is not None,
        4: "stop" in world.happened,
    }
    if not reasons[result.exit_code]:
        raise AssertionError(f"ended with {result.exit_code} for no reason: {state.exit_why}")
    keeps_all = config.core.checkpoint_every == 1 and not config.syncer.older_checkpoint
    if keeps_all and "rolled_back" in world.happened:
        raise AssertionError("a learner was sent a version that was not in a durable checkpoint")


def _story(config: SimConfig, simulation: Simulation, invariants: Invariants, error: BaseException) -> str:
    lines = [line.decode().rstrip() for line in list(invariants.last)[-25:]]
    return "\n".join(
        [
            f"seed {config.seed}, {simulation.world.agenda.now:.3f} s: {type(error).__name__}: {error}",
            "the tape's last lines:",
            *(line if len(line) < 400 else line[:400] + "..." for line in lines),
            str(config),
            f"again: python -m yeto.sim.campaign --seeds 1 --first {config.seed}",
        ]
    )


def run_seeds(
    seeds: Iterable[int], folder: Path, *, progress: Callable[[Outcome], None] | None = None
) -> Counter[str]:
    """Run seeds one after the other; return how often each kind of thing happened.

    Raises:
        CampaignError: the first seed that failed.
    """
    happened: Counter[str] = Counter()
    for seed in seeds:
        outcome = run_seed(seed, folder)
        happened += outcome.happened
        happened[f"exit_{outcome.result.exit_code}"] += 1
        happened["events"] += outcome.result.events
        if progress is not None:
            progress(outcome)
    return happened


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign from the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m yeto.sim.campaign",
        description="Run many small simulations with faults, and check them.",
    )
    parser.add_argument("--seeds", type=int, default=300, help="how many seeds (default: 300)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    count = 0

    def report(outcome: Outcome) -> None:
        nonlocal count
        count += 1
        if count % 20 == 0 or count == options.seeds:
            seconds = time.monotonic() - began
            print(f"{count} of {options.seeds} seeds, {seconds:.0f} s", file=sys.stderr, flush=True)

    seeds = range(options.first, options.first + options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        try:
            happened = run_seeds(seeds, Path(folder), progress=report)
        except CampaignError as error:
            print(error)
            return 1
    for kind in sorted(happened):
        print(f"{happened[kind]:8,}  {kind}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
