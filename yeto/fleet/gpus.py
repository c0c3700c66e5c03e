"""The accelerators a plan may use: what each can do and hold.

Figures are the vendors' dense bf16 peaks and memory sizes. Names are SkyPilot's own, so that a plan can be
handed to it as it is.
"""

from __future__ import annotations

from attrs import frozen

from yeto.errors import ConfigError


@frozen(kw_only=True)
class Gpu:
    """One kind of accelerator."""

    name: str
    """As SkyPilot spells it, such as ``A100-80GB``."""
    tflops: float
    """Dense bf16 peak in TFLOPS; 0 for processes on a CPU."""
    memory_gb: float
    """Memory of one in GB; 0 for processes on a CPU."""
    has_bf16: bool = True
    """Whether bf16 runs in hardware; training here needs it."""


CPU = Gpu(name="CPU", tflops=0.0, memory_gb=0.0)
"""Processes on this machine: for trials of the whole path, of no use in a plan."""

GPUS = (
    Gpu(name="T4", tflops=65, memory_gb=16, has_bf16=False),
    Gpu(name="V100", tflops=112, memory_gb=16, has_bf16=False),
    Gpu(name="L4", tflops=121, memory_gb=24),
    Gpu(name="A10G", tflops=125, memory_gb=24),
    Gpu(name="L40S", tflops=362, memory_gb=48),
    Gpu(name="A100", tflops=312, memory_gb=40),
    Gpu(name="A100-80GB", tflops=312, memory_gb=80),
    Gpu(name="H100", tflops=989, memory_gb=80),
    Gpu(name="H200", tflops=989, memory_gb=141),
    Gpu(name="B200", tflops=2250, memory_gb=180),
)

_BY_NAME = {gpu.name.lower(): gpu for gpu in (*GPUS, CPU)}


def gpu_of(name: str) -> Gpu:
    """Return the accelerator of a name, in any case.

    Raises:
        ConfigError: there is none of that name.
    """
    found = _BY_NAME.get(name.lower())
    if found is None:
        raise ConfigError(f"{name!r} is no known accelerator; known are {', '.join(known_gpus())}, and cpu")
    return found


def known_gpus() -> list[str]:
    """Return the names of all accelerators as people type them."""
    return [gpu.name.lower() for gpu in GPUS]
