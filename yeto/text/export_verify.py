"""Proof that an export is what it claims to be, by loading it the way its users will.

The rule: writing without an error proves nothing. An adapter whose keys are named wrongly loads without a
complaint and does nothing. So the written folder is loaded with plain transformers and PEFT, every key must
be there and no other, and the logits of the result must differ from those of the base model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from yeto.errors import CheckpointError
from yeto.text.config import TextConfig
from yeto.text.lora import EMBEDDING_TARGETS, quiet
from yeto.text.model import load_base
from yeto.tuning.export_fill import begins_at_zero
from yeto.tuning.hub import cause_of

PROBE_TOKENS = 16
"""Enough for attention to matter; more would only take longer on a CPU."""
_EXAMPLES = 3


@frozen(kw_only=True)
class Verified:
    """What loading the export back showed."""

    tensors: int
    """Tensors of the folder, all of them expected and none missing."""
    logits_moved: float
    """Largest change of any logit against the base model, on a fixed probe text."""
    empty: bool
    """The trained tensors say that nothing was learned: every B matrix of the adapter is zero."""


def verify_adapter(folder: Path, config: TextConfig) -> Verified:
    """Load an adapter folder onto its base model and compare.

    Raises:
        CheckpointError: it does not load, a key is missing, unexpected or not loaded, or a non-zero adapter
            changes nothing.
    """
    written = load_file(folder / "adapter_model.safetensors")
    empty = not any(bool(tensor.any()) for name, tensor in written.items() if begins_at_zero(name))
    moved = 0.0
    # In a coarse dtype a young adapter can drown in rounding; float32 has the last word.
    for dtype in ("auto", torch.float32):
        base = load_base(config, dtype)
        before = _probe(base)
        with _loading(folder):
            adapted = PeftModel.from_pretrained(base, str(folder))
        targets = set(adapted.peft_config["default"].target_modules or ())
        loaded = get_peft_model_state_dict(
            adapted, save_embedding_layers=bool(targets.intersection(EMBEDDING_TARGETS))
        )
        _require_keys(folder, set(loaded), set(written))
        for name, tensor in written.items():
            if not torch.equal(loaded[name].float(), tensor.float()):
                raise CheckpointError(f"{folder}: {name} was not loaded as written")
        moved = _largest_change(before, _probe(adapted))
        # One model in memory at a time, also when there is a second pass.
        del base, adapted, loaded
        if moved > 0.0 or empty:
            break
    if moved == 0.0 and not empty:
        raise CheckpointError(f"{folder}: the adapter loads but does not change the model's logits")
    return Verified(tensors=len(written), logits_moved=moved, empty=empty)


def verify_model(folder: Path, config: TextConfig, *, expect_change: bool) -> Verified:
    """Load a model folder and compare it with the base model.

    Args:
        folder: what was written.
        config: names the base model.
        expect_change: something was merged, so the two must differ.

    Raises:
        CheckpointError: it does not load, a key is missing, unexpected or of another shape, embeddings that
            were tied are not, or an expected change is not there.
    """
    with _loading(folder):
        exported, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            output_loading_info=True,
            # They are among what is looked at below.
            ignore_mismatched_sizes=True,
            trust_remote_code=config.trust_remote_code,
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, info.get(kind) or ()))
        if keys:
            raise CheckpointError(f"{folder}: {kind.replace('_', ' ')}: {', '.join(keys[:_EXAMPLES])}")
    tied, dtype, tensors = _is_tied(exported), exported.dtype, len(list(exported.parameters()))
    after = _probe(exported)
    # One model in memory at a time; and in one dtype, or rounding alone would look like a change.
    del exported
    base = load_base(config, dtype)
    if _is_tied(base) != tied:
        raise CheckpointError(f"{folder}: embedding and output head are tied in only one of base and export")
    moved = _largest_change(_probe(base), after)
    if moved == 0.0 and expect_change:
        raise CheckpointError(
            f"{folder}: the exported model gives the base model's logits; if the change is too small for "
            f"{str(dtype).removeprefix('torch.')}, --dtype f32 keeps it"
        )
    return Verified(tensors=tensors, logits_moved=moved, empty=not expect_change)


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Say that a folder does not load, whatever the libraries raise then.

    Raises:
        CheckpointError: so it is.
    """
    try:
        with quiet():
            yield
    except Exception as error:
        raise CheckpointError(f"{folder}: does not load: {cause_of(error)}") from error


def _require_keys(folder: Path, expected: set[str], written: set[str]) -> None:
    missing, unexpected = sorted(expected - written), sorted(written - expected)
    if missing or unexpected:
        raise CheckpointError(
            f"{folder}: keys differ from PEFT's own: missing {', '.join(missing[:_EXAMPLES]) or 'none'}, "
            f"unexpected {', '.join(unexpected[:_EXAMPLES]) or 'none'}"
        )


def _probe(model: Any) -> Tensor:
    """Return a model's logits on the first token ids, float32."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(PROBE_TOKENS).remainder(size).unsqueeze(0)
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _largest_change(before: Tensor, after: Tensor) -> float:
    change = float((after - before).abs().max())
    if not change < float("inf"):
        raise CheckpointError("the exported model's logits are not finite")
    return change


def _is_tied(model: nn.Module) -> bool:
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    return head is not None and embedding is not None and head.weight is embedding.weight
