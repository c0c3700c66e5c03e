"""Simulating: seconds for a simulated day of 16 learners, beside the coordinator's own share of them.

Two runs that differ in scale only: steps of a second for a day, and steps of a minute for thirty days. Both
write their tape. A part of each is simulated and scaled up, since a run costs the same from hour to hour. The
peer tells the coordinator the events of that part once more, and does nothing else.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.core import fold
from benchmarks.figures import Figure, Report, Target, figure_of
from benchmarks.timing import cpu_clock, take_turns
from yeto.core import CoreConfig, initial_state
from yeto.core.events import Event
from yeto.sim import LearnerSpec, SimConfig, simulate
from yeto.tape import read

LEARNERS = 16
SECONDS = Target(sense="at most", number=60.0, of="value")
DAY_SECONDS = 86_400.0


def run_of(step_seconds: float, seconds: float) -> SimConfig:
    """Return an undisturbed run with the usual settings: H 24, P 8, a majority for a quorum."""
    core = CoreConfig(num_learners=LEARNERS, total_steps=10**9, quorum=LEARNERS // 2 + 1, wait_for=LEARNERS)
    return SimConfig(
        core=core,
        learners=(LearnerSpec(step_seconds=step_seconds),) * LEARNERS,
        num_fragments=8,
        until_seconds=seconds,
    )


def simulate_anew(config: SimConfig, tape: Path) -> None:
    """Simulate over the tape of the last time."""
    tape.unlink(missing_ok=True)
    simulate(config, tape=tape)


def measure(*, repeats: int, hours: float) -> Report:
    """Measure the simulator.

    Args:
        repeats: samples of each figure.
        hours: of the day that are simulated, and as large a share of the thirty days.
    """
    with TemporaryDirectory() as folder:
        tape = Path(folder) / "events.jsonl"
        figures = (
            _figure("day", "16 learners, steps of 1 s", run_of(1.0, 3600.0 * hours), tape, hours, repeats),
            _figure(
                "thirty_days",
                "16 learners, steps of 60 s",
                run_of(60.0, 30 * 3600.0 * hours),
                tape,
                hours,
                repeats,
            ),
        )
    return Report(
        benchmark="sim",
        what="a simulated day and thirty days, with a tape, one thread, CPU seconds",
        settings={"learners": LEARNERS, "hours": hours, "repeats": repeats},
        figures=figures,
    )


def _figure(key: str, name: str, config: SimConfig, tape: Path, hours: float, repeats: int) -> Figure:
    simulate_anew(config, tape)
    events = [record.body for record in read(tape) if isinstance(record.body, Event)]
    ours, bare = take_turns(
        repeats,
        partial(simulate_anew, config, tape),
        partial(fold, initial_state(config.core), events),
        clock=cpu_clock,
        warm_up=False,
    )
    scale = DAY_SECONDS / (3600.0 * hours)
    return figure_of(
        f"{key}_seconds",
        f"{key.replace('_', ' ')}: {name}",
        "s",
        [scale * seconds for seconds in ours],
        peer="step() alone",
        peer_values=[scale * seconds for seconds in bare],
        target=SECONDS,
    )
