"""The SVD worker pool as an operator describes it: which devices, which Python, which limits."""

from __future__ import annotations

import math
import re
import sys
from typing import Final

from attrs import frozen

from yeto.errors import ConfigError
from yeto.merge.svd_frames import FRAME_BYTES_MAX, HEADER_BYTES
from yeto.syncer.svd_interpreter import find_interpreter

_DEVICE: Final = re.compile(r"([a-z]+)(?::(\d{1,4}))?")


@frozen(kw_only=True)
class SvdSettings:
    """One worker for each device, and how long anything may take. Durations are seconds."""

    devices: tuple[str, ...]
    """As torch names them: ``cuda:0``, ``cpu``. Several workers on one processor are ``cpu:0``, ``cpu:1``."""
    python: str = sys.executable
    """Path or name of the interpreter; it must have this Yeto and torch."""
    queue_capacity: int = 16
    """Matrices admitted, queued and running together."""
    frame_bytes_max: int = FRAME_BYTES_MAX
    """Largest matrix."""
    startup_seconds: float = 300.0
    """From starting a worker to its first answer: loading torch, and a driver that wakes up."""
    request_seconds: float = 3540.0
    """From the admission of a matrix to its answer, the wait in the queue included."""
    drain_seconds: float = 3600.0
    """Until every admitted matrix is done. A minute more than any of them may take: when one hangs, its own
    deadline comes first, and that names it."""

    def validated(self) -> SvdSettings:
        """Return self, or raise ConfigError naming the flag at fault."""
        _check_devices(self.devices)
        find_interpreter(self.python)
        if self.queue_capacity < 1:
            raise ConfigError(f"--iso-worker-queue-capacity {self.queue_capacity}: must be at least 1")
        if self.frame_bytes_max < HEADER_BYTES:
            raise ConfigError(f"--iso-worker-frame-mib: {self.frame_bytes_max} bytes hold no matrix")
        for flag, seconds in (
            ("--iso-worker-startup-timeout-s", self.startup_seconds),
            ("--iso-worker-request-timeout-s", self.request_seconds),
            ("--iso-worker-drain-timeout-s", self.drain_seconds),
        ):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(
                    f"{flag} {seconds} (or YETO_{flag[2:].upper().replace('-', '_')}): "
                    "must be a finite number of seconds above 0"
                )
        return self


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the devices of a comma-separated list, as they stand there."""
    return tuple(device.strip() for device in text.split(","))


def _check_devices(devices: tuple[str, ...]) -> None:
    """Check that there is one worker for each device, and a device for each worker.

    Raises:
        ConfigError: a device is empty, is none, or is named twice.
    """
    shown = ",".join(devices)
    if not devices:
        raise ConfigError("--iso-worker-devices: is empty; name one device or more, for example cuda:0")
    seen: set[tuple[str, int]] = set()
    for device in devices:
        found = _DEVICE.fullmatch(device)
        if not device:
            raise ConfigError(f"--iso-worker-devices {shown}: names an empty device; take the comma away")
        if found is None:
            raise ConfigError(
                f"--iso-worker-devices {shown}: {device!r} is no device; name them like cuda:0 or cpu"
            )
        one = found[1], int(found[2] or 0)  # without a number it is the first
        if one in seen:
            raise ConfigError(
                f"--iso-worker-devices {shown}: {device} is there twice; each device has one worker"
            )
        seen.add(one)
