"""What ``yeto simulate`` can be told: the fleet in units that people use, and the coordinator's own flags.

Each class is one heading of the help text, and knows what of a simulation's configuration it stands for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from attrs import frozen
from cyclopts import Group, Parameter, Token

from yeto.cli.passing import flags_without
from yeto.cli.policy import PolicyFlags
from yeto.errors import ConfigError
from yeto.sim.config import Faults, LearnerSpec, SyncerSpec

WIRE_BYTES = {"f32": (4.0, 4.0), "bf16": (2.0, 2.0), "q4": (132 / 256, 2.0)}
"""Bytes of one parameter in a push and in a broadcast; q4 packs 256 into 132 bytes and broadcasts bf16."""

MEGABIT_BYTES = 125_000.0


def _at_least_0(_: object, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ValueError("must be finite and not negative")


def _above_0(_: object, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ValueError("must be finite and above 0")


def _at_least_1(_: object, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError("must be at least 1")


def _in_0_to_1(_: object, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError("must lie in [0, 1]")


LEARNERS_MAX = 10_000
"""Of a simulated fleet: far above what a syncer serves, and few enough to be held in memory."""


def _a_fleet(_: object, value: int | None) -> None:
    if value is not None and not 1 <= value <= LEARNERS_MAX:
        raise ValueError(f"must lie between 1 and {LEARNERS_MAX:,}")


UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def _duration(_: object, tokens: Sequence[Token]) -> float:
    """Read a time such as 90s, 30m, 12h or 1d; a bare number is seconds."""
    text = tokens[0].value
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([smhd]?)", text)
    if found is None:
        raise ValueError("must be a time such as 90s, 30m, 12h or 1d")
    return float(found[1]) * UNITS[found[2]]


Amount = Annotated[float, Parameter(validator=_above_0)]
OptionalAmount = Annotated[float | None, Parameter(validator=_above_0)]
Level = Annotated[float, Parameter(validator=_at_least_0)]
Count = Annotated[int, Parameter(validator=_at_least_1)]


def _in_0_to_1_or_carry(kind: object, value: float | str) -> None:
    if not isinstance(value, str):
        _in_0_to_1(kind, value)


Chance = Annotated[float, Parameter(validator=_in_0_to_1)]
Switch = Annotated[bool, Parameter(negative=())]


@Parameter(name="*", group=Group("Fleet", sort_key=1))
@frozen(kw_only=True)
class FleetFlags:
    """Who takes part."""

    learners: Annotated[int | None, Parameter(validator=_a_fleet)] = None
    """How many learners take part (M). Default: as many as --learner describes, else 4."""
    learner: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            show_default=False,
            help=(
                'Some learners that differ from the flags below: "count=4,step-seconds=1.18,up-mbps=20". '
                "May be given several times; ids go to them in order, and the rest is as the flags below say."
            ),
        ),
    ] = ()


@Parameter(name="*", group=Group("Each learner", sort_key=2))
@frozen(kw_only=True)
class LearnerFlags:
    """What one learner is like: its speed, its link, its failures."""

    step_seconds: Amount = 1.0
    """One inner step, on average."""
    step_jitter: Level = 0.05
    """Standard deviation of one inner step, as a share of it."""
    phase_jitter: Level = 0.0
    """Standard deviation of the pace of a whole stretch between two broadcasts, as a share of it."""
    tokens_per_step: Count = 8192
    """Tokens of one inner step."""
    up_mbps: Amount = 100.0
    """Bandwidth to the syncer, in megabits a second."""
    down_mbps: Amount = 100.0
    """Bandwidth from the syncer, in megabits a second."""
    latency_ms: Level = 50.0
    """One way, in milliseconds."""
    latency_jitter: Level = 0.2
    """Standard deviation of the latency, as a share of it."""
    mean_up_hours: OptionalAmount = None
    """Mean time between two failures or preemptions that stop training. Default: never."""
    repair_minutes: Amount = 10.0
    """Mean time until it is back."""
    keeps_state: Chance = 0.0
    """How likely it comes back with its saved state instead of with nothing, 0 to 1."""
    state_every_steps: Count = 100
    """Inner steps between two such saved states."""
    mean_link_hours: OptionalAmount = None
    """Mean time between two losses of the connection alone; training goes on. Default: never."""
    outage_seconds: Amount = 5.0
    """Mean time until the connection is back."""
    joins_at: Annotated[float, Parameter(converter=_duration)] = 0.0
    """When it comes, such as 30m or 2h."""
    leaves_at: Annotated[float | None, Parameter(converter=_duration)] = None
    """When it leaves for good, such as 12h. Default: never."""
    lockstep: Switch = False
    """Wait, without training, from each answer to the round's broadcast: synchronous training."""

    def spec(self, streams: int, window_mb: float) -> LearnerSpec:
        """Return the learner that these flags describe; so many streams carry a window each round trip."""
        round_trip = 2.0 * self.latency_ms / 1000.0
        most = streams * window_mb * 1e6 / round_trip if round_trip else math.inf
        return LearnerSpec(
            step_seconds=self.step_seconds,
            step_jitter=self.step_jitter,
            phase_jitter=self.phase_jitter,
            tokens_per_step=self.tokens_per_step,
            up_rate=min(self.up_mbps * MEGABIT_BYTES, most),
            down_rate=min(self.down_mbps * MEGABIT_BYTES, most),
            latency_seconds=self.latency_ms / 1000.0,
            latency_jitter=self.latency_jitter,
            mean_up_seconds=_times(self.mean_up_hours, 3600.0),
            mean_repair_seconds=self.repair_minutes * 60.0,
            keeps_state=self.keeps_state,
            state_every_steps=self.state_every_steps,
            mean_link_seconds=_times(self.mean_link_hours, 3600.0),
            mean_outage_seconds=self.outage_seconds,
            joins_at=self.joins_at,
            leaves_at=self.leaves_at,
            lockstep=self.lockstep,
        )


@Parameter(name="*", group=Group("Model and wire", sort_key=3))
@frozen(kw_only=True)
class WireFlags:
    """How much there is to send."""

    fragments: Count = 8
    """Parts that the trained tensors are divided into (P); one is merged at a time."""
    fragment_mb: OptionalAmount = None
    """Megabytes of one fragment in bf16. Default: what --parameters says, else 4."""
    parameters: OptionalAmount = None
    """Parameters that are trained, such as 40e6, instead of --fragment-mb; goes with a swept --fragments."""
    wire_dtype: Literal["bf16", "f32", "q4"] = "bf16"
    """Precision on the wire. q4 sends deltas in four bits and weights as bf16."""
    merge_alpha: Annotated[float | Literal["carry"], Parameter(validator=_in_0_to_1_or_carry)] = 0.5
    """Share of its own weights that a learner keeps when a merged fragment arrives, or carry."""
    wan_streams: Count = 4
    """TCP connections of a learner; more fill a long fat link better."""
    window_mb: Amount = 4.0
    """Megabytes that one TCP connection can have under way; it carries no more in a round trip."""

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of a push and of a broadcast of one fragment."""
        if self.parameters is not None and self.fragment_mb is not None:
            raise ConfigError("--parameters and --fragment-mb: give one of them")
        if self.parameters is not None:
            count = self.parameters / self.fragments
        else:
            count = (4.0 if self.fragment_mb is None else self.fragment_mb) * 1e6 / 2.0
        push, broadcast = WIRE_BYTES[self.wire_dtype]
        return max(1, round(count * push)), max(1, round(count * broadcast))


@Parameter(name="*", group=Group("Syncer's machine", sort_key=5))
@frozen(kw_only=True)
class SyncerMachineFlags:
    """What the syncer's machine is like."""

    syncer_up_mbps: Amount = 1000.0
    """Bandwidth of all broadcasts together, in megabits a second."""
    syncer_down_mbps: Amount = 1000.0
    """Bandwidth of all pushes together, in megabits a second."""
    merge_seconds: Level = 0.1
    """Time of the merge of one fragment."""
    outer_seconds: Level = 0.05
    """Time of the outer step that follows."""
    fsync_ms: Level = 5.0
    """Time until a record of the tape is on disk, in milliseconds."""
    checkpoint_seconds: Level = 0.1
    """Time of writing a checkpoint."""
    syncer_mean_up_hours: OptionalAmount = None
    """Mean time between two crashes of the syncer. Default: never."""
    syncer_restart_seconds: Amount = 30.0
    """Mean time until it is back."""
    older_checkpoint: Chance = 0.0
    """How likely it finds its newest checkpoint unusable then, 0 to 1."""
    queue_ms: Level = 0.0
    """Longest time that a fact waits for the coordinator, in milliseconds."""

    def spec(self) -> SyncerSpec:
        """Return the syncer that these flags describe."""
        return SyncerSpec(
            up_rate=self.syncer_up_mbps * MEGABIT_BYTES,
            down_rate=self.syncer_down_mbps * MEGABIT_BYTES,
            merge_seconds=self.merge_seconds,
            outer_seconds=self.outer_seconds,
            fsync_seconds=self.fsync_ms / 1000.0,
            checkpoint_seconds=self.checkpoint_seconds,
            mean_up_seconds=_times(self.syncer_mean_up_hours, 3600.0),
            mean_restart_seconds=self.syncer_restart_seconds,
            older_checkpoint=self.older_checkpoint,
            queue_seconds=self.queue_ms / 1000.0,
        )


@Parameter(name="*", group=Group("Faults (how likely, 0 to 1)", sort_key=6))
@frozen(kw_only=True)
class FaultFlags:
    """What goes wrong with single messages and jobs."""

    fault_not_finite: Chance = 0.0
    """A push holds NaN."""
    fault_duplicate: Chance = 0.0
    """A push is offered twice."""
    fault_broken_upload: Chance = 0.0
    """The connection ends in the middle of an upload."""
    fault_late: Chance = 0.0
    """A message, either way, takes longer by --fault-late-seconds."""
    fault_late_seconds: Level = 5.0
    """How much longer."""
    fault_half_open: Chance = 0.0
    """A lost connection is noticed by its learner only."""
    fault_merge_failed: Chance = 0.0
    """A merge fails."""
    fault_merge_not_finite: Chance = 0.0
    """A merge gives NaN."""
    fault_outer_not_finite: Chance = 0.0
    """The outer step of a merge gives NaN."""
    fault_checkpoint_failed: Chance = 0.0
    """A checkpoint cannot be written, which ends the session."""
    faults_until: Annotated[float | None, Parameter(converter=_duration)] = None
    """From then on nothing fails any more, machines and links included, such as 12h. Default: never."""

    def faults(self) -> Faults:
        """Return the faults that these flags ask for."""
        return Faults(
            not_finite=self.fault_not_finite,
            duplicate=self.fault_duplicate,
            broken_upload=self.fault_broken_upload,
            late=self.fault_late,
            late_seconds=self.fault_late_seconds,
            half_open=self.fault_half_open,
            merge_failed=self.fault_merge_failed,
            merge_not_finite=self.fault_merge_not_finite,
            outer_not_finite=self.fault_outer_not_finite,
            checkpoint_failed=self.fault_checkpoint_failed,
            until_seconds=self.faults_until,
        )


@Parameter(name="*", group=Group("Length", sort_key=0))
@frozen(kw_only=True)
class LengthFlags:
    """How long the simulated run is."""

    duration: Annotated[float | None, Parameter(converter=_duration, validator=_above_0)] = None
    """Simulated time: seconds, or 90s, 30m, 12h, 1d. Default: 1d; with --total-steps its end, 30d at most."""
    total_steps: Annotated[int | None, Parameter(validator=_at_least_1)] = None
    """Global steps after which the run ends, with its closing sweep. Default: the end is not simulated."""


POLICY_LEFT_OUT = {
    # Said elsewhere in this command.
    *("learners", "total_steps"),
    # Of no effect where there are no tensors, no signals and no second start.
    *("delta_correction", "outer_lr", "outer_momentum", "outer_normalised"),
    *("learner_weight", "max_norm_ratio"),
    *("mark_final_checkpoint", "stop_budget_s", "learner_budget_steps", "budget_finish"),
}
PolicyPart: Any = Parameter(name="*")(
    flags_without(PolicyFlags, POLICY_LEFT_OUT, name="PolicyPart", group="Syncer")
)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
