"""``yeto run --role learner``: one island's learner, from flags to its configuration objects."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from attrs import evolve, fields, frozen
from cyclopts import Parameter

from yeto.cli.learner_diffusion_flags import TaskFlags
from yeto.cli.learner_text_flags import EXCHANGE, LOOP, RUN
from yeto.cli.quiet import configure_logging, silence_libraries
from yeto.diffusion.config import DiffusionConfig
from yeto.diffusion.extra import require_diffusers
from yeto.errors import ConfigError
from yeto.learner.config import LearnerConfig
from yeto.learner.ranks import LAUNCHED, Ranks
from yeto.learner.sinks import require_packages
from yeto.link.tls import TlsContext
from yeto.link.tls_files import client_context
from yeto.text.config import TextConfig
from yeto.tuning.config import TuningConfig
from yeto.wire.auth import load_key

if TYPE_CHECKING:
    from yeto.learner.task import Task

ALONE = Ranks()


@Parameter(name="*")
@frozen(kw_only=True)
class LearnerFlags(TaskFlags):
    """Every flag of a learner. What is impossible is refused before anything is loaded."""

    syncer: Annotated[
        str,
        Parameter(
            group=RUN,
            help=(
                "Where the syncer is: HOST:PORT, [IPV6]:PORT, or @FILE that holds one (read anew at every "
                "dial, for a syncer that moves). 'none' trains alone for --max-local-steps: the baseline "
                "to compare with."
            ),
        ),
    ]
    learner_id: Annotated[
        int,
        Parameter(
            group=RUN,
            help=(
                "Which learner this is, 0 to --num-learners - 1. Each id once; learner 0 brings the "
                "initial weights."
            ),
        ),
    ] = 0
    num_learners: Annotated[int, Parameter(group=RUN)] = 1
    """How many learners the run has; decides which rows are this one's."""
    output_dir: Annotated[
        Path,
        Parameter(
            group=RUN,
            help=(
                "Where the global result is saved after the final cut. A run that ends before saves this "
                "learner's own weights in unmerged-<id>/ inside, which are not the global result."
            ),
        ),
    ] = Path("yeto-learner")
    max_local_steps: Annotated[int | None, Parameter(group=RUN)] = None
    """Stop after so many optimizer steps even if the syncer goes on."""
    eval_every: Annotated[int, Parameter(group=RUN)] = 0
    """Score --eval-data every so many steps, at the start, and after the final cut. 0: never."""
    log_jsonl: Annotated[Path | None, Parameter(group=RUN)] = None
    """Append one JSON object per step, merge, push and evaluation to this file."""
    tensorboard: Annotated[Path | None, Parameter(group=RUN)] = None
    """Write curves for TensorBoard to learner-<id>/ in this folder: pip install 'yeto[tensorboard]'."""
    wandb: Annotated[
        str | None,
        Parameter(
            group=RUN,
            help=(
                "Send curves to this project of Weights & Biases: pip install 'yeto[wandb]'. "
                "WANDB_MODE=offline keeps them on disk."
            ),
        ),
    ] = None
    state_dir: Annotated[
        Path | None,
        Parameter(
            group=RUN,
            help=(
                "Folder of this learner's own, in which it keeps weights, optimizer, place in the rows and "
                "all else that it needs to go on: start it again with the same command, and it does. Rows "
                "that it pushed after the last saving are trained again. Has room for three times the "
                "trained weights, their two moments and the anchors."
            ),
        ),
    ] = None
    state_every: Annotated[int, Parameter(group=RUN)] = 100
    """Optimizer steps between two savings in --state-dir. Training waits for a copy in memory only."""
    check: Annotated[bool, Parameter(group=RUN, negative=())] = False
    """Do not train: say whether syncer and key, model and rows are right, how fast the link is, and the H to
    expect. The syncer's run does not notice."""
    seed: Annotated[int, Parameter(group=RUN)] = 0
    """Root of all chance. The same on every learner, or they start from different adapters."""

    inner_lr: Annotated[float, Parameter(group=LOOP)] = 3e-4
    """AdamW's learning rate."""
    weight_decay: Annotated[float, Parameter(group=LOOP)] = 0.01
    """AdamW's weight decay."""
    warmup_steps: Annotated[int, Parameter(group=LOOP)] = 10
    """Steps over which the rate grows to --inner-lr."""
    lr_schedule: Annotated[Literal["constant", "cosine"], Parameter(group=LOOP)] = "constant"
    """After the warm-up: keep the rate, or let it fall to 0 at --max-local-steps or the budget's end."""
    clip_norm: Annotated[float, Parameter(group=LOOP)] = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    grad_accum: Annotated[int, Parameter(group=LOOP)] = 1
    """Micro batches of one optimizer step. The loss is the mean over all their target tokens."""
    torch_threads: Annotated[int | None, Parameter(group=LOOP)] = None
    """Threads of a CPU operation; give each learner its share when several run on one machine."""

    fragments: Annotated[int, Parameter(group=EXCHANGE)] = 8
    """Parts that the trained tensors are divided into; one is merged at a time."""
    fragment_pattern: Annotated[Literal["binpack", "strided"], Parameter(group=EXCHANGE)] = "binpack"
    """Parts of equal size, or layers dealt out in turn."""
    matrix_merge: Annotated[Literal["rda", "iso"], Parameter(group=EXCHANGE)] = "rda"
    """How the syncer merges what are no embeddings: radial-directional averaging, or isotropic."""
    wire_dtype: Annotated[Literal["bf16", "f32", "q4"], Parameter(group=EXCHANGE)] = "bf16"
    """Precision on the wire. q4 sends deltas in four bits and weights as bf16."""
    wan_streams: Annotated[int, Parameter(group=EXCHANGE)] = 4
    """TCP connections for tensors, beside one for control; more fill a long fat link better."""
    merge_alpha: Annotated[
        float | Literal["carry"],
        Parameter(
            group=EXCHANGE,
            help=(
                "What a merge leaves of the local weights. A number in [0, 1) is the share that survives, so "
                "that steps taken while the merge was under way are not all lost; 0 overwrites, which large "
                "fleets prefer. carry takes off exactly what was pushed and keeps and counts the rest, so "
                "that every step is merged once; a push that comes too late for its merge is lost whole, "
                "and the first merge after a restart from --state-dir overwrites."
            ),
        ),
    ] = 0.5
    q4_error_feedback: Annotated[bool, Parameter(group=EXCHANGE)] = True
    """Add what four bits could not carry to a later push."""
    learner_budget_steps: Annotated[
        int | None,
        Parameter(
            group=EXCHANGE,
            help=(
                "Freeze after so many steps and let the syncer merge the rest, so that no work is lost: "
                "for benchmarks."
            ),
        ),
    ] = None
    give_up_after: Annotated[float, Parameter(group=EXCHANGE)] = 3600.0
    """Seconds without a connection, once there was one, after which the learner ends: an idle machine costs
    more than an error. For the first connection it tries 15 minutes."""
    auth_key_file: Annotated[Path | None, Parameter(group=EXCHANGE)] = None
    """File with the key shared with the syncer (yeto keys new makes one), or YETO_ISLAND_HMAC_KEY."""
    tls_ca: Annotated[
        Path | None,
        Parameter(
            group=EXCHANGE,
            help=(
                "Encrypt every connection: file with the authority that signed the syncer's certificate "
                "(yeto keys new --tls HOST makes both)."
            ),
        ),
    ] = None
    tls_cert: Annotated[Path | None, Parameter(group=EXCHANGE)] = None
    """This learner's certificate, when the syncer demands one (--tls-client-ca); with --tls-key."""
    tls_key: Annotated[Path | None, Parameter(group=EXCHANGE)] = None
    """Key of --tls-cert (mode 0600)."""
    tls_server_name: Annotated[str | None, Parameter(group=EXCHANGE)] = None
    """Name in the syncer's certificate, if it is not the host in --syncer."""
    no_manifest: Annotated[bool, Parameter(group=EXCHANGE, negative=())] = False
    """Do not send model name and settings in plain text; for syncers of other makes."""
    profile: Annotated[
        str | None,
        Parameter(
            group=EXCHANGE,
            help=(
                "Profile of the syncer's merge settings, as a syncer with --require-profile-binding prints "
                "it (64 hex digits): one with other settings refuses this learner."
            ),
        ),
    ] = None

    def learner_config(self) -> LearnerConfig:
        """Return how to train and exchange.

        Raises:
            ConfigError: a flag is out of range, or a key or certificate cannot be used.
        """
        return LearnerConfig(
            syncer=self.syncer,
            learner_id=self.learner_id,
            num_learners=self.num_learners,
            output_dir=self.output_dir,
            fragments=self.fragments,
            fragment_pattern=self.fragment_pattern,
            matrix_merge=self.matrix_merge,
            wire_dtype=self.wire_dtype,
            wan_streams=self.wan_streams,
            auth_key=load_key(self.auth_key_file, os.environ),
            tls=self._tls(),
            tls_server_name=self.tls_server_name,
            give_up_seconds=self.give_up_after,
            send_manifest=not self.no_manifest,
            profile=self._profile(),
            merge_alpha=self.merge_alpha,
            q4_error_feedback=self.q4_error_feedback,
            budget_steps=self.learner_budget_steps,
            unit="samples" if self.task == "diffusion" else "tokens",
            inner_lr=self.inner_lr,
            weight_decay=self.weight_decay,
            warmup_steps=self.warmup_steps,
            lr_schedule=self.lr_schedule,
            clip_norm=self.clip_norm,
            grad_accum=self.grad_accum,
            max_local_steps=self.max_local_steps,
            eval_every=self.eval_every,
            torch_threads=self.torch_threads,
            rank_timeout_seconds=self.rank_timeout,
            log_jsonl=self.log_jsonl,
            tensorboard=self.tensorboard,
            wandb=self.wandb,
            state_dir=self.state_dir,
            state_every=self.state_every,
        )

    def _profile(self) -> bytes | None:
        if self.profile is None:
            return None
        if re.fullmatch("[0-9a-fA-F]{64}", self.profile) is None:
            raise ConfigError(
                f"--profile {self.profile}: need the 64 hex digits that the syncer prints with "
                "--require-profile-binding"
            )
        return bytes.fromhex(self.profile)

    def _tls(self) -> TlsContext | None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key: give both or none")
        if self.tls_ca is None:
            for flag, value in (("--tls-cert", self.tls_cert), ("--tls-server-name", self.tls_server_name)):
                if value is not None:
                    raise ConfigError(f"{flag} {value}: needs --tls-ca, which turns TLS on")
            return None
        return client_context(self.tls_ca, self.tls_cert, self.tls_key)

    def text_config(self, ranks: Ranks = ALONE) -> TextConfig:
        """Return what to train on which rows, on one of an island's ranks.

        Raises:
            ConfigError: a flag is out of range or contradicts another one.
        """
        return TextConfig(
            **self._named_alike(TextConfig, but={"micro_batch_size"}),
            micro_batch_size=None if self.micro_batch_size == "auto" else self.micro_batch_size,
            rank=ranks.rank,
            num_ranks=ranks.size,
        )

    def diffusion_config(self, ranks: Ranks = ALONE) -> DiffusionConfig:
        """Return which pipeline to adapt to which rows, on one of an island's ranks.

        Raises:
            ConfigError: a flag is out of range or contradicts another one.
        """
        return DiffusionConfig(
            **self._named_alike(DiffusionConfig, but={"micro_batch_size", "loss_weighting"}),
            # Nothing is probed here: a sample is large, and few go together.
            micro_batch_size=1 if self.micro_batch_size == "auto" else self.micro_batch_size,
            loss_weighting=self.diffusion_loss_weighting,
            rank=ranks.rank,
            num_ranks=ranks.size,
        )

    def _named_alike(self, config: type[TuningConfig], *, but: set[str]) -> dict[str, Any]:
        """Return the flags that have the names of a task's settings; where it runs is for no flag to say."""
        names = {field.name for field in fields(config)} - but - {"rank", "num_ranks"}
        return {name: getattr(self, name) for name in names}

    def task_config(self, ranks: Ranks = ALONE) -> TextConfig | DiffusionConfig:
        """Return the settings of the task that is asked for.

        Raises:
            ConfigError: a flag is out of range, contradicts another one, or is of the other task.
        """
        self.require_own_flags()
        return self.diffusion_config(ranks) if self.task == "diffusion" else self.text_config(ranks)


def run_learner_command(flags: LearnerFlags) -> int:
    """Train one island's learner on its own data and exchange fragments with the syncer, to the final cut.

    Under torchrun this is one of the island's ranks. Ctrl-C stops it in order; with --state-dir the same
    command goes on.
    """
    ranks = Ranks.of(os.environ)
    if flags.check and (LAUNCHED in os.environ or ranks.size > 1):
        raise ConfigError("--check is one process: give it without torchrun")
    learner, task = flags.learner_config(), flags.task_config(ranks)
    require_packages(learner)
    if isinstance(task, DiffusionConfig):
        require_diffusers()
    if LAUNCHED in os.environ:
        from yeto.fleet.child import die_with_parent

        # torchrun ends its ranks, but it cannot once it is killed itself.
        die_with_parent(os.getppid())
    silence_libraries()
    configure_logging(f"learner {learner.learner_id}", is_head=ranks.is_head)
    # Checked first, loaded second: a wrong flag must not cost the seconds that torch takes.
    if flags.check:
        from yeto.learner.check import check_learner

        return check_learner(learner, lambda: _build_task(task))
    from yeto.learner.app import run_learner
    from yeto.learner.island import find_island

    island = find_island(ranks, task.device, learner.rank_timeout_seconds)
    return run_learner(learner, lambda: _build_task(evolve(task, device=island.device(task.device))), island)


def _build_task(settings: TextConfig | DiffusionConfig) -> Task:
    """Load model and data."""
    if isinstance(settings, DiffusionConfig):
        from yeto.diffusion import build_task as build_diffusion_task

        return build_diffusion_task(settings)
    from yeto.text import build_task

    return build_task(settings)
