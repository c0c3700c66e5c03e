"""The words for islands: ``aws:8xa100@us-east-2,runpod:8xh100``, one entry an island.

An entry is ``cloud:[nodes x]count x gpu[@region]``. ``local:1xcpu`` stands for processes on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import frozen

from yeto.errors import ConfigError
from yeto.fleet.gpus import CPU, Gpu, gpu_of, known_gpus

LOCAL = "local"
"""The cloud that is this machine."""

CLOUDS = (
    "aws",
    "azure",
    "cudo",
    "do",
    "fluidstack",
    "gcp",
    "hyperbolic",
    "ibm",
    "kubernetes",
    "lambda",
    "nebius",
    "oci",
    "paperspace",
    "primeintellect",
    "runpod",
    "scp",
    "seeweb",
    "shadeform",
    "slurm",
    "ssh",
    "vast",
    "vsphere",
)
"""Where SkyPilot can rent or reach machines, as it spells them."""

FORM = "cloud:[NODESx]COUNTxGPU[@region], such as aws:8xa100@us-east-2 or aws:4x8xa100-80gb"

COUNT_MAX = 64
"""Most accelerators of a node, and most nodes of an island: above, it is a slip of the finger."""

ISLANDS_MAX = 256
"""Most islands of one line."""

_ENTRY = re.compile(
    r"(?P<cloud>[a-z0-9]+):(?:(?P<nodes>\d{1,3})x)?(?P<count>\d{1,3})x(?P<gpu>[a-z][a-z0-9-]*)"
    r"(?:@(?P<region>[A-Za-z0-9_.-]+))?",
    re.IGNORECASE | re.ASCII,
)


@frozen(kw_only=True)
class Island:
    """One island: machines of one kind in one place that train as one learner."""

    cloud: str
    """As SkyPilot spells it, or ``local``."""
    nodes: int
    """Machines."""
    count: int
    """Accelerators of each machine; for ``local``, processes."""
    gpu: Gpu
    region: str | None = None
    """None leaves the choice to the one who provisions."""

    @property
    def is_local(self) -> bool:
        """Whether it is processes on this machine."""
        return self.cloud == LOCAL

    @property
    def ranks(self) -> int:
        """Processes that train: one for each accelerator."""
        return self.nodes * self.count

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        region = f"@{self.region}" if self.region else ""
        return f"{self.cloud}:{nodes}{self.count}x{self.gpu.name.lower()}{region}"


def parse_islands(text: str) -> tuple[Island, ...]:
    """Return the islands that ``--gpu`` names, in its order.

    Raises:
        ConfigError: an entry has another form, or a name is unknown.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if len(entries) > ISLANDS_MAX:
        raise ConfigError(f"--gpu names {len(entries)} islands; at most {ISLANDS_MAX} are possible")
    return tuple(_parse(entry) for entry in entries)


def join_islands(islands: Sequence[Island]) -> str:
    """Return the line that ``parse_islands`` reads as these islands."""
    return ",".join(map(str, islands))


def _parse(entry: str) -> Island:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ConfigError(f"--gpu {entry!r}: the form is {FORM}; GPUs are {', '.join(known_gpus())}")
    cloud = match["cloud"].lower()
    if cloud != LOCAL and cloud not in CLOUDS:
        raise ConfigError(
            f"--gpu {entry}: {cloud!r} is no known cloud; known are {', '.join(CLOUDS)}, {LOCAL}"
        )
    try:
        gpu = gpu_of(match["gpu"])
    except ConfigError as error:
        raise ConfigError(f"--gpu {entry}: {error}") from None
    nodes, count = int(match["nodes"] or 1), int(match["count"])
    for number, what in ((nodes, "nodes"), (count, "accelerators of a node")):
        if not 1 <= number <= COUNT_MAX:
            raise ConfigError(f"--gpu {entry}: {number} {what}; possible are 1 to {COUNT_MAX}")
    if (gpu is CPU) != (cloud == LOCAL):
        raise ConfigError(f"--gpu {entry}: cpu goes with {LOCAL}: alone ({LOCAL}:1xcpu)")
    if cloud == LOCAL and nodes > 1:
        raise ConfigError(f"--gpu {entry}: {LOCAL}: is one machine; write {LOCAL}:{nodes * count}xcpu")
    return Island(cloud=cloud, nodes=nodes, count=count, gpu=gpu, region=match["region"])
