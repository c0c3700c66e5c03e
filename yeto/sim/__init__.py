"""The real coordinator under a simulated fleet: no sleeping, no sockets, no tensors, one seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from yeto.sim.config import Faults, LearnerSpec, Operator, SimConfig, SimResult, SyncerSpec

__all__ = ["Faults", "LearnerSpec", "Operator", "SimConfig", "SimResult", "SyncerSpec", "simulate"]


def simulate(
    config: SimConfig,
    *,
    tape: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> SimResult:
    """Run a simulation.

    Args:
        config: what to simulate.
        tape: where to write the coordinator's tape; must not exist.
        progress: told now and then how much is done, from 0 to 1.

    Raises:
        ConfigError: the configuration is out of range.
        TapeError: the tape exists, or cannot be written.
        AccountError: work was merged twice or lost without a trace; a bug.
    """
    # Here, because it brings the coordinator and the tape: who only describes a simulation needs neither.
    from yeto.sim.run import Simulation

    simulation = Simulation(config, tape=tape)
    try:
        return simulation.run(progress)
    finally:
        simulation.close()
