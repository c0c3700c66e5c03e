"""Which layers of a denoiser get an adapter.

Diffusers names the layers of attention alike in all models: ``to_q``, ``to_k``, ``to_v``, ``to_out.0``, and
``add_q_proj`` and its like where the prompt has projections of its own. What follows attention (the MLP) goes
by a few names. So targets are found by pieces of names, and only among linear layers.

The rule is that of language models: what is asked for must be there, and the names that are agreed on and
exported are the shortest that mean exactly these layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from torch import nn

from yeto.errors import ConfigError
from yeto.tuning.lora import matches

ATTENTION: Final = (
    *("to_q", "to_k", "to_v", "to_out.0"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
)
MLP_PIECES: Final = frozenset({"ff", "ffn", "ff_context", "feed_forward", "mlp", "proj_mlp"})
"""A linear layer with one of these in its path belongs to an MLP."""
_PARALLEL: Final = "proj_mlp"
"""A block with this runs MLP and attention side by side; the layer beside it puts both together."""
_EXAMPLES: Final = 12

Targets = dict[str, tuple[str, ...]]
"""Denoiser to names that PEFT takes for the modules in it."""


def find_targets(denoisers: Mapping[str, nn.Module], wanted: str) -> Targets:
    """Find the layers that ``--lora-targets`` means.

    Args:
        denoisers: part name to module, without adapters.
        wanted: ``auto`` (attention and MLP), ``attention``, ``all-linear``, or a comma-separated list of
            module names or suffixes, each of which some denoiser must have.

    Returns:
        Of every denoiser that has such a layer, the shortest names for them.

    Raises:
        ConfigError: there is none, or what is named is no linear layer.
    """
    found: dict[str, list[str]] = {}
    if wanted in ("auto", "attention", "all-linear"):
        for part, denoiser in denoisers.items():
            linear = _linear(denoiser)
            parallel = {name.rpartition(".")[0] for name in linear if matches(name, _PARALLEL)}
            found[part] = [name for name in linear if _is_meant(name, wanted, parallel)]
    else:
        found = _listed(denoisers, wanted)
    if not any(found.values()):
        known = sorted({_last(name) for denoiser in denoisers.values() for name in _linear(denoiser)})
        raise ConfigError(
            f"--lora-targets {wanted}: no linear layer of {' and '.join(denoisers)} goes by such a name; "
            f"name the layers instead, from: {', '.join(known[:_EXAMPLES])}"
        )
    return {part: short_names(denoisers[part], names) for part, names in found.items() if names}


def short_names(model: nn.Module, modules: Iterable[str]) -> tuple[str, ...]:
    """Return the shortest ends of names that mean exactly these modules of a model; sorted."""
    wanted = set(modules)
    everything = [name for name, _ in model.named_modules()]
    verdicts: dict[str, bool] = {}
    chosen: set[str] = set()
    for module in wanted:
        pieces = module.split(".")
        # A number alone says nothing to a person.
        for count in range(1 + pieces[-1].isdigit(), len(pieces) + 1):
            end = ".".join(pieces[-count:])
            if end not in verdicts:
                verdicts[end] = all(name in wanted for name in everything if matches(name, end))
            if verdicts[end]:
                chosen.add(end)
                break
        else:
            # The end of another module's name: PEFT would take it for both.
            raise ConfigError(f"--lora-targets: {module} cannot be meant without others; name it differently")
    return tuple(sorted(chosen))


def _is_meant(name: str, wanted: str, parallel: set[str]) -> bool:
    if wanted == "all-linear":
        return True
    if any(matches(name, layer) for layer in ATTENTION):
        return True
    if wanted != "auto":
        return False
    return name.rpartition(".")[0] in parallel or not MLP_PIECES.isdisjoint(name.split("."))


def _listed(denoisers: Mapping[str, nn.Module], wanted: str) -> dict[str, list[str]]:
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if not names:
        raise ConfigError("--lora-targets is empty; use auto, attention, all-linear or module names")
    found: dict[str, list[str]] = {part: [] for part in denoisers}
    for name in names:
        meant = {
            part: [module for module, _ in denoiser.named_modules() if matches(module, name)]
            for part, denoiser in denoisers.items()
        }
        for part, modules in meant.items():
            unfit = [one for one in modules if not isinstance(denoisers[part].get_submodule(one), nn.Linear)]
            if unfit:
                raise ConfigError(f"--lora-targets {name}: {part}.{unfit[0]} is no linear layer")
            found[part] += [module for module in modules if module not in found[part]]
        if not any(meant.values()):
            known = sorted({_last(layer) for one in denoisers.values() for layer in _linear(one)})
            raise ConfigError(
                f"--lora-targets {name}: matches no module; linear layers here: "
                f"{', '.join(known[:_EXAMPLES])}"
            )
    return found


def _linear(denoiser: nn.Module) -> list[str]:
    return [name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear)]


def _last(name: str) -> str:
    """Return the last piece of a name, with the one before where it is a number."""
    *before, last = name.split(".")
    return f"{before[-1]}.{last}" if before and last.isdigit() else last
