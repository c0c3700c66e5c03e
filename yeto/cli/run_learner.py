"""``yeto run --role learner``: one island's learner, from flags to its two configuration objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from attrs import frozen
from cyclopts import Group, Parameter

from yeto.cli.quiet import configure_logging, silence_libraries
from yeto.learner.config import LearnerConfig
from yeto.text.config import TextConfig
from yeto.wire.auth import load_key

_RUN = Group.create_ordered("Run")
_MODEL = Group.create_ordered("Model and tuning")
_DATA = Group.create_ordered("Data")
_LOOP = Group.create_ordered("Training loop")
_EXCHANGE = Group.create_ordered("Exchange with the syncer")


@Parameter(name="*")
@frozen(kw_only=True)
class LearnerFlags:
    """Every flag of a learner. What is impossible is refused before anything is loaded."""

    syncer: Annotated[
        str,
        Parameter(
            group=_RUN,
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
            group=_RUN,
            help=(
                "Which learner this is, 0 to --num-learners - 1. Each id once; learner 0 brings the "
                "initial weights."
            ),
        ),
    ] = 0
    num_learners: Annotated[int, Parameter(group=_RUN)] = 1
    """How many learners the run has; decides which rows are this one's."""
    output_dir: Annotated[
        Path,
        Parameter(
            group=_RUN,
            help=(
                "Where the global result is saved after the final cut. A run that ends before saves this "
                "learner's own weights in unmerged-<id>/ inside, which are not the global result."
            ),
        ),
    ] = Path("yeto-learner")
    max_local_steps: Annotated[int | None, Parameter(group=_RUN)] = None
    """Stop after so many optimizer steps even if the syncer goes on."""
    eval_every: Annotated[int, Parameter(group=_RUN)] = 0
    """Score --eval-data every so many steps, at the start, and after the final cut. 0: never."""
    log_jsonl: Annotated[Path | None, Parameter(group=_RUN)] = None
    """Append one JSON object per step, merge, push and evaluation to this file."""
    seed: Annotated[int, Parameter(group=_RUN)] = 0
    """Root of all chance. The same on every learner, or they start from different adapters."""

    model: Annotated[str, Parameter(group=_MODEL)]
    """Hugging Face id, or a local model folder."""
    model_revision: Annotated[str | None, Parameter(group=_MODEL)] = None
    """Branch, tag or commit of the model."""
    trust_remote_code: Annotated[bool, Parameter(group=_MODEL, negative=())] = False
    """Run Python code that comes with the model. Only for models you trust."""
    tuning: Annotated[Literal["lora", "full"], Parameter(group=_MODEL)] = "lora"
    """lora trains small adapters, so a merge moves megabytes; full trains and sends everything."""
    lora_r: Annotated[int, Parameter(group=_MODEL)] = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[int, Parameter(group=_MODEL)] = 32
    """Scale of the adapters; they act with alpha / r."""
    lora_dropout: Annotated[float, Parameter(group=_MODEL)] = 0.0
    """Dropout on the adapters' input."""
    lora_targets: Annotated[
        str,
        Parameter(
            group=_MODEL,
            help=(
                "auto (every linear layer; attention only on mixture-of-experts models), attention, "
                "all-linear, or a comma-separated list of module names."
            ),
        ),
    ] = "auto"
    base_dtype: Annotated[
        Literal["auto", "f32", "bf16"],
        Parameter(
            group=_MODEL,
            help=(
                "Precision of the frozen weights: auto is bf16 on accelerators and f32 on a CPU. What is "
                "trained is always f32."
            ),
        ),
    ] = "auto"
    gradient_checkpointing: Annotated[Literal["auto", "on", "off"], Parameter(group=_MODEL)] = "auto"
    """Recompute activations to save memory: auto is on with an accelerator."""
    device: Annotated[str, Parameter(group=_MODEL)] = "auto"
    """cpu, cuda, cuda:1, …; auto takes an accelerator when there is one."""

    data: Annotated[
        str,
        Parameter(
            group=_DATA,
            help=(
                "Rows to train on: a Hugging Face data set id, a jsonl, json or parquet file or a folder "
                "of them, a save_to_disk folder, or an s3://, gs:// or hf:// URL."
            ),
        ),
    ]
    data_revision: Annotated[str | None, Parameter(group=_DATA)] = None
    """Branch, tag or commit of the data set."""
    data_format: Annotated[
        Literal["auto", "openai", "sharegpt", "alpaca", "qa"],
        Parameter(
            group=_DATA,
            help=(
                "What a row looks like: messages (openai), conversations (sharegpt), instruction and output "
                "(alpaca), question and answer (qa); auto takes the one whose columns are there."
            ),
        ),
    ] = "auto"
    columns: Annotated[str | None, Parameter(group=_DATA)] = None
    """Take the messages from columns: user=question,assistant=answer, optionally system=…."""
    data_shard: Annotated[Literal["auto", "off"], Parameter(group=_DATA)] = "auto"
    """auto gives row i to learner i mod M; off when every learner has a file of its own."""
    train_on: Annotated[Literal["assistant", "all"], Parameter(group=_DATA)] = "assistant"
    """Learn the assistant's replies only, or every token."""
    assistant_mask_mode: Annotated[
        Literal["native", "legacy"],
        Parameter(
            group=_DATA,
            help=(
                "native: the generation blocks of the chat template say what a reply is; legacy: a "
                "synthetic format of our own, for templates without them."
            ),
        ),
    ] = "native"
    chat_template: Annotated[str | None, Parameter(group=_DATA)] = None
    """File with a chat template to use instead of the tokenizer's."""
    mask_report: Annotated[int, Parameter(group=_DATA)] = 0
    """Print so many rows with the supervised tokens marked, to see what is learned."""
    seq_len: Annotated[int, Parameter(group=_DATA)] = 2048
    """Tokens of one packed block."""
    micro_batch_size: Annotated[int | Literal["auto"], Parameter(group=_DATA)] = "auto"
    """Blocks of one forward pass: auto probes the memory of an accelerator, and is 1 on a CPU."""
    packing: Annotated[Literal["documents", "plain"], Parameter(group=_DATA)] = "documents"
    """documents keeps rows that share a block from seeing each other; plain does not."""
    tokenize: Annotated[Literal["stream", "preload"], Parameter(group=_DATA)] = "stream"
    """Tokenize while training, or everything before."""
    stream_workers: Annotated[int, Parameter(group=_DATA)] = 2
    """Processes that tokenize while training."""
    shuffle_buffer: Annotated[int, Parameter(group=_DATA)] = 1024
    """Blocks that are shuffled among each other."""
    eval_data: Annotated[str | None, Parameter(group=_DATA)] = None
    """Held-out rows, a source as --data."""
    eval_rows: Annotated[int, Parameter(group=_DATA)] = 64
    """At most so many held-out rows are scored."""

    inner_lr: Annotated[float, Parameter(group=_LOOP)] = 3e-4
    """AdamW's learning rate."""
    weight_decay: Annotated[float, Parameter(group=_LOOP)] = 0.01
    """AdamW's weight decay."""
    warmup_steps: Annotated[int, Parameter(group=_LOOP)] = 10
    """Steps over which the rate grows to --inner-lr."""
    lr_schedule: Annotated[Literal["constant", "cosine"], Parameter(group=_LOOP)] = "constant"
    """After the warm-up: keep the rate, or let it fall to 0 at --max-local-steps."""
    clip_norm: Annotated[float, Parameter(group=_LOOP)] = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    grad_accum: Annotated[int, Parameter(group=_LOOP)] = 1
    """Micro batches of one optimizer step. The loss is the mean over all their target tokens."""
    torch_threads: Annotated[int | None, Parameter(group=_LOOP)] = None
    """Threads of a CPU operation; give each learner its share when several run on one machine."""

    fragments: Annotated[int, Parameter(group=_EXCHANGE)] = 8
    """Parts that the trained tensors are divided into; one is merged at a time."""
    fragment_pattern: Annotated[Literal["binpack", "strided"], Parameter(group=_EXCHANGE)] = "binpack"
    """Parts of equal size, or layers dealt out in turn."""
    matrix_merge: Annotated[Literal["rda", "iso"], Parameter(group=_EXCHANGE)] = "rda"
    """How the syncer merges what are no embeddings: radial-directional averaging, or isotropic."""
    wire_dtype: Annotated[Literal["bf16", "f32", "q4"], Parameter(group=_EXCHANGE)] = "bf16"
    """Precision on the wire. q4 sends deltas in four bits and weights as bf16."""
    wan_streams: Annotated[int, Parameter(group=_EXCHANGE)] = 4
    """TCP connections for tensors, beside one for control; more fill a long fat link better."""
    merge_alpha: Annotated[
        float,
        Parameter(
            group=_EXCHANGE,
            help=(
                "Share of the local weights that survives a merge, in [0, 1). It keeps the steps taken "
                "while the merge was under way; 0 overwrites, which large fleets prefer."
            ),
        ),
    ] = 0.5
    q4_error_feedback: Annotated[bool, Parameter(group=_EXCHANGE)] = True
    """Add what four bits could not carry to a later push."""
    learner_budget_steps: Annotated[
        int | None,
        Parameter(
            group=_EXCHANGE,
            help=(
                "Freeze after so many steps and let the syncer merge the rest, so that no work is lost: "
                "for benchmarks."
            ),
        ),
    ] = None
    give_up_after: Annotated[float, Parameter(group=_EXCHANGE)] = 3600.0
    """Seconds without a connection after which an idle machine costs more than an error."""
    auth_key_file: Annotated[Path | None, Parameter(group=_EXCHANGE)] = None
    """File with the key shared with the syncer (yeto keys new makes one), or YETO_ISLAND_HMAC_KEY."""
    no_manifest: Annotated[bool, Parameter(group=_EXCHANGE, negative=())] = False
    """Do not send model name and settings in plain text; for syncers of other makes."""

    def learner_config(self) -> LearnerConfig:
        """Return how to train and exchange.

        Raises:
            ConfigError: a flag is out of range, or the key cannot be read.
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
            give_up_seconds=self.give_up_after,
            send_manifest=not self.no_manifest,
            merge_alpha=self.merge_alpha,
            q4_error_feedback=self.q4_error_feedback,
            budget_steps=self.learner_budget_steps,
            inner_lr=self.inner_lr,
            weight_decay=self.weight_decay,
            warmup_steps=self.warmup_steps,
            lr_schedule=self.lr_schedule,
            clip_norm=self.clip_norm,
            grad_accum=self.grad_accum,
            max_local_steps=self.max_local_steps,
            eval_every=self.eval_every,
            torch_threads=self.torch_threads,
            log_jsonl=self.log_jsonl,
        )

    def text_config(self) -> TextConfig:
        """Return what to train on which rows.

        Raises:
            ConfigError: a flag is out of range or contradicts another one.
        """
        return TextConfig(
            model=self.model,
            model_revision=self.model_revision,
            trust_remote_code=self.trust_remote_code,
            data=self.data,
            data_revision=self.data_revision,
            data_format=self.data_format,
            columns=self.columns,
            data_shard=self.data_shard,
            eval_data=self.eval_data,
            eval_rows=self.eval_rows,
            train_on=self.train_on,
            assistant_mask_mode=self.assistant_mask_mode,
            chat_template=self.chat_template,
            mask_report=self.mask_report,
            seq_len=self.seq_len,
            micro_batch_size=None if self.micro_batch_size == "auto" else self.micro_batch_size,
            packing=self.packing,
            tokenize=self.tokenize,
            stream_workers=self.stream_workers,
            shuffle_buffer=self.shuffle_buffer,
            tuning=self.tuning,
            lora_r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            lora_targets=self.lora_targets,
            base_dtype=self.base_dtype,
            gradient_checkpointing=self.gradient_checkpointing,
            device=self.device,
            seed=self.seed,
            learner_id=self.learner_id,
            num_learners=self.num_learners,
        )


def run_learner_command(flags: LearnerFlags) -> int:
    """Train this island's learner until the final cut."""
    learner, text = flags.learner_config(), flags.text_config()
    silence_libraries()
    configure_logging(f"learner {learner.learner_id}")
    # Checked first, loaded second: a wrong flag must not cost the seconds that torch takes.
    from yeto.learner.app import run_learner
    from yeto.learner.task import Task

    def make_task() -> Task:
        from yeto.text import build_task

        return build_task(text)

    return run_learner(learner, make_task)
