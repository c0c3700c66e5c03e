"""``yeto run --role supervisor``: the flags of a syncer, for a run that is to end with a proof."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import attrs
from attrs import frozen
from cyclopts import Group, Parameter

from yeto.cli.passing import flags_without, to_words
from yeto.cli.preset import PresetFlag
from yeto.cli.run_syncer import SyncerFlags
from yeto.errors import ConfigError
from yeto.wire.auth import KEY_VARIABLE
from yeto.wire.hello import FRAGMENTS_MAX

# Decided by the phase.
LEFT_OUT = {
    *("learners", "total_steps", "learner_budget_steps", "budget_finish", "mark_final_checkpoint"),
    *(
        "resume",
        "resume_or_start",
        "checkpoint_path",
        "event_tape",
        "port",
        "ready_file",
        "iso_worker_python",
    ),
}

SyncerPart: Any = flags_without(SyncerFlags, LEFT_OUT, name="SyncerPart", group="Syncer")


@Parameter(name="*", group=Group("This run", sort_key=-1))
@frozen(kw_only=True)
class SupervisorFlags:
    """What a supervisor has to know itself."""

    learners: int
    """How many learners take part (M). Others start them, with the same --learner-budget-steps."""
    learner_budget_steps: int
    """Local steps of each learner (N); when all have taken them, each fragment is merged once more by all."""
    total_steps: int | None = None
    """Global steps that the first phase may not exceed. Default: more than the budget can bring."""
    checkpoint_path: Path = Path("yeto-state.ckpt")
    """Folder of the checkpoint; the final marker is beside it, with .final added to its name."""
    event_tape: Path = Path("events.jsonl")
    """File that remembers every fact and every decision, and by which the run is verified."""
    syncer_log: Path = Path("syncer.log")
    """File that what the syncer prints is added to."""
    port: int = 29400
    """Port that the syncer listens on in both phases; 0 takes any free one and prints it."""
    ready_file: Path | None = None
    """Where the syncer writes host, port and pid as JSON. Default: --checkpoint-path with .ready added."""
    iso_worker_python: Annotated[str, Parameter(env_var="ISO_WORKER_PYTHON", show_default=False)] = (
        sys.executable
    )
    """Python of the SVD workers; see yeto run --role syncer."""


def run_supervisor_command(
    flags: SupervisorFlags,
    *,
    syncer: Annotated[SyncerPart, Parameter(name="*")] = SyncerPart(),  # noqa: B008 - frozen
    preset: PresetFlag = None,
) -> int:
    """Run the syncer through both phases of a learner budget, and verify them.

    Phase 1 ends when every learner has used up --learner-budget-steps. Then its checkpoint is verified, and
    in phase 2 every fragment is merged once more, by all learners. At the end the tape is replayed and has to
    show all learners at exactly the budget in every one of these last rounds; only then is the final marker
    written. On any failure there is none. Learners are started elsewhere, as for any syncer. The same
    command goes on after an interruption or a crash.

    The exit code is 0 only when all this went so.
    """
    if flags.learner_budget_steps < 1:
        raise ConfigError(f"--learner-budget-steps {flags.learner_budget_steps}: need at least 1")
    if not flags.checkpoint_path.name:
        raise ConfigError(f"--checkpoint-path {flags.checkpoint_path}: has no name of its own; write it out")
    total_steps = flags.total_steps
    if total_steps is None:
        # A learner has a part in a merge of a fragment at most once a step.
        total_steps = (flags.learner_budget_steps + 1) * flags.learners * FRAGMENTS_MAX
    ready_file = flags.ready_file or flags.checkpoint_path.with_name(f"{flags.checkpoint_path.name}.ready")
    # What the syncer would refuse is refused here, before anything is started.
    SyncerFlags(
        learners=flags.learners,
        total_steps=total_steps,
        learner_budget_steps=flags.learner_budget_steps,
        iso_worker_python=flags.iso_worker_python,
        port=flags.port,
        **{item.name: getattr(syncer, item.name) for item in attrs.fields(SyncerPart)},
    ).config()
    try:
        flags.syncer_log.open("ab").close()
    except OSError as error:
        raise ConfigError(f"--syncer-log {flags.syncer_log}: cannot be written: {error.strerror}") from error
    from yeto.fleet.supervisor import Supervised

    return Supervised(
        num_learners=flags.learners,
        budget=flags.learner_budget_steps,
        checkpoint=flags.checkpoint_path,
        tape=flags.event_tape,
        log=flags.syncer_log,
        ready_file=ready_file,
        port=flags.port,
        syncer_words=[
            f"--total-steps={total_steps}",
            # Said always: the environment would have another word in it.
            f"--iso-worker-python={flags.iso_worker_python}",
            *to_words(syncer),
        ],
        kept_variables=[]
        if syncer.auth_key_file
        else [name for name in (KEY_VARIABLE,) if name in os.environ],
    ).run()
