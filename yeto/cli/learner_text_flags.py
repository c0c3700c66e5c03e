"""The flags of a learner that say what is trained, and on which rows.

Annotations are values here, not text: the class that goes on from this one is in another module.
"""

from typing import Annotated, Literal

from attrs import frozen
from cyclopts import Group, Parameter

# All headings of a learner's help, in their order.
RUN = Group.create_ordered("Run")
MODEL = Group.create_ordered("Model and tuning")
DATA = Group.create_ordered("Data")
LOOP = Group.create_ordered("Training loop")
EXCHANGE = Group.create_ordered("Exchange with the syncer")


@Parameter(name="*")
@frozen(kw_only=True)
class TextFlags:
    """Model, tuning and data."""

    model: Annotated[str, Parameter(group=MODEL)]
    """Hugging Face id, or a local folder, of a language model or (--task diffusion) a diffusers pipeline."""
    model_revision: Annotated[str | None, Parameter(group=MODEL)] = None
    """Branch, tag or commit of the model."""
    trust_remote_code: Annotated[bool, Parameter(group=MODEL, negative=())] = False
    """Run Python code that comes with the model. Only for models you trust."""
    tuning: Annotated[Literal["lora", "full"], Parameter(group=MODEL)] = "lora"
    """lora trains small adapters, so a merge moves megabytes; full trains and sends everything."""
    lora_r: Annotated[int, Parameter(group=MODEL)] = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[int, Parameter(group=MODEL)] = 32
    """Scale of the adapters; they act with alpha / r."""
    lora_dropout: Annotated[float, Parameter(group=MODEL)] = 0.0
    """Dropout on the adapters' input."""
    lora_targets: Annotated[
        str,
        Parameter(
            group=MODEL,
            help=(
                "auto (every linear layer; attention only on mixture-of-experts models; attention and MLP on "
                "diffusers), attention, all-linear, or a comma-separated list of module names."
            ),
        ),
    ] = "auto"
    base_dtype: Annotated[
        Literal["auto", "f32", "bf16"],
        Parameter(
            group=MODEL,
            help=(
                "Precision of the frozen weights: auto is bf16 on accelerators and f32 on a CPU. What is "
                "trained is always f32."
            ),
        ),
    ] = "auto"
    gradient_checkpointing: Annotated[Literal["auto", "on", "off"], Parameter(group=MODEL)] = "auto"
    """Recompute activations to save memory: auto is on with an accelerator."""
    compile: Annotated[
        Literal["off", "on"],
        Parameter(
            group=MODEL,
            help=(
                "on trains through torch.compile: faster steps for minutes at the start, and on a CPU only "
                "with a C++ compiler. Learners may differ in it."
            ),
        ),
    ] = "off"
    device: Annotated[str, Parameter(group=MODEL)] = "auto"
    """cpu, cuda, cuda:1, …; auto takes an accelerator when there is one."""
    shard: Annotated[
        Literal["ddp", "fsdp"],
        Parameter(
            group=MODEL,
            help=(
                "With several ranks (torchrun --nproc-per-node G -m yeto run --role learner …): ddp holds "
                "the whole model on each of them, fsdp a part of every tensor."
            ),
        ),
    ] = "ddp"

    rank_timeout: Annotated[float, Parameter(group=MODEL)] = 1200.0
    """Seconds that one of several ranks may keep the others waiting; then the island ends and names it."""

    data: Annotated[
        str,
        Parameter(
            group=DATA,
            help=(
                "Rows to train on: a Hugging Face data set id, a jsonl, json or parquet file or a folder "
                "of them, a save_to_disk folder, or an s3://, gs:// or hf:// URL."
            ),
        ),
    ]
    data_revision: Annotated[str | None, Parameter(group=DATA)] = None
    """Branch, tag or commit of the data set."""
    data_format: Annotated[
        Literal["auto", "openai", "sharegpt", "alpaca", "qa"],
        Parameter(
            group=DATA,
            help=(
                "What a row looks like: messages (openai), conversations (sharegpt), instruction and output "
                "(alpaca), question and answer (qa); auto takes the one whose columns are there."
            ),
        ),
    ] = "auto"
    columns: Annotated[str | None, Parameter(group=DATA)] = None
    """Take the messages from columns: user=question,assistant=answer, optionally system=…."""
    data_shard: Annotated[Literal["auto", "off"], Parameter(group=DATA)] = "auto"
    """auto gives row i to learner i mod M; off when every learner has a file of its own."""
    train_on: Annotated[Literal["assistant", "all"], Parameter(group=DATA)] = "assistant"
    """Learn the assistant's replies only, or every token."""
    assistant_mask_mode: Annotated[
        Literal["native", "legacy"],
        Parameter(
            group=DATA,
            help=(
                "native: the generation blocks of the chat template say what a reply is; legacy: a "
                "synthetic format of our own, for templates without them."
            ),
        ),
    ] = "native"
    chat_template: Annotated[str | None, Parameter(group=DATA)] = None
    """File with a chat template to use instead of the tokenizer's."""
    mask_report: Annotated[int, Parameter(group=DATA)] = 0
    """Print so many rows with the supervised tokens marked, to see what is learned."""
    seq_len: Annotated[int, Parameter(group=DATA)] = 2048
    """Tokens of one packed block."""
    micro_batch_size: Annotated[int | Literal["auto"], Parameter(group=DATA)] = "auto"
    """Blocks (samples, for diffusion) of one forward pass: auto probes the memory of an accelerator, and is 1
    on a CPU and for diffusion."""
    packing: Annotated[Literal["documents", "plain"], Parameter(group=DATA)] = "documents"
    """documents keeps rows that share a block from seeing each other; plain does not."""
    tokenize: Annotated[Literal["stream", "preload"], Parameter(group=DATA)] = "stream"
    """Tokenize while training, or everything before."""
    stream_workers: Annotated[int, Parameter(group=DATA)] = 2
    """Processes that tokenize while training."""
    shuffle_buffer: Annotated[int, Parameter(group=DATA)] = 1024
    """Blocks (rows, for diffusion) that are shuffled among each other."""
    eval_data: Annotated[str | None, Parameter(group=DATA)] = None
    """Held-out rows, a source as --data."""
    eval_rows: Annotated[int, Parameter(group=DATA)] = 64
    """At most so many held-out rows are scored."""
