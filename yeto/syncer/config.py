"""Every setting of a syncer process, as one frozen object.

Two kinds live here. ``core`` is the policy: it goes onto the tape, and the coordinator decides by it. All
the rest says where things are (addresses, files, keys) and how much one peer may cost; none of it changes a
decision, so none of it is on the tape.

The bounds at the end are constants of the protocol rather than flags. Each has its reason beside it, and
tests pass shorter ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import ssl
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from yeto.core import CoreConfig
from yeto.core.outer import with_numbers
from yeto.errors import ConfigError
from yeto.hosts import is_loopback
from yeto.state.manifest import ISO_BACKENDS
from yeto.syncer.svd_settings import SvdSettings

if TYPE_CHECKING:
    from yeto.link import TlsContext

PROFILE_FIELDS = (
    "closing_sweep",
    "delta_correction",
    "grace_cap_seconds",
    "grace_gamma",
    "grace_tau",
    "learner_weight",
    "max_base_lag",
    "max_norm_ratio",
    "min_round_interval_seconds",
    "num_learners",
    "outer_lr",
    "outer_momentum",
    "pipeline",
    "quorum",
    "quorum_timeout_seconds",
    "sync_interval_steps",
)
"""The settings a profile names: those that change what is merged, or when."""


class StartMode(Enum):
    """What to do about the files of an earlier run."""

    FRESH = "fresh"
    """They must not exist."""
    RESUME = "resume"
    """They must exist."""
    RESUME_OR_START = "resume-or-start"
    """Go on when there is a checkpoint, begin when there is none (for supervisors)."""


@frozen(kw_only=True)
class Bounds:
    """What one peer may cost, and for how long it may say nothing. Durations are seconds."""

    pending_handshakes: int = 64
    """Sockets that have not introduced themselves yet; enough for twelve islands dialling at once, and
    few enough that strangers cannot take the process's file descriptors. One more takes the place of the one
    that has been silent longest."""
    handshake_seconds: float = 10.0
    """Longest time to a complete first frame, and from a HELLO to the last socket of its group."""
    second_look_seconds: float = 1.0
    """Longest that a HELLO waits for the end of its own connection while its learner has another one. A dial
    that was given up may say HELLO after its successor did; its end is then some round trips behind it."""
    silence_seconds: float = 15.0
    """A group without one byte on its control socket for so long is gone: three missed heartbeats."""
    manifest_seconds: float = 5.0
    """How long a learner with another contract is given to say what differs before it is refused."""
    initial_seconds: float = 10.0
    """How long a learner 0 that has trained may say so and send nothing of the initial values it owes."""
    farewell_seconds: float = 5.0
    """How long a closing connection may take to read its last frame and hang up."""
    progress_seconds: float = 60.0
    """An advancing upload is told to the coordinator at most this often."""
    status_seconds: float = 10.0
    """How often the log says whom the run is waiting for."""
    events: int = 1024
    """Events queued before the pump; full, it holds back the sockets, never the pump itself."""


@frozen(kw_only=True)
class SyncerConfig:
    """One start of the syncer.

    ``core.wait_for`` is the number of a fresh start; a resumed one waits for ``resume_wait_for``.
    """

    core: CoreConfig
    resume_wait_for: int | None = None
    """``None``: the quorum, because whoever is back first may go on."""
    start: StartMode = StartMode.FRESH

    host: str = "127.0.0.1"
    port: int = 29400
    """0 takes any free port; the bound one is printed and written to ``ready_file``."""
    ready_file: Path | None = None
    """JSON ``{"host", "port", "pid"}``, written when connections are accepted."""

    checkpoint_path: Path = Path("yeto-state.ckpt")
    keep_every: int = 0
    """Keep every N-th checkpoint beside the newest two; 0 keeps the newest two only."""
    event_tape: Path = Path("events.jsonl")
    record_payloads: Path | None = None
    """Folder for every merged push, so that the run can be executed again; None records none."""

    auth_key: bytes | None = attrs.field(default=None, repr=False)
    """Shared secret of the HELLO's mac."""
    allow_unauthenticated: bool = False
    tls: TlsContext | None = attrs.field(default=None, repr=False)
    """Every connection is TLS when it is given."""
    iso_backend: str = "scalar"
    """``scalar``, or ``torch-svd``: the pool that ``svd`` describes; then ``core.svd_pool`` is set, too."""
    svd: SvdSettings | None = None

    bounds: Bounds = Bounds()

    def validated(self) -> SyncerConfig:
        """Return self, or raise ConfigError naming the flag at fault and what to do."""
        self.core.validated()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: must lie between 0 and 65535")
        if self.keep_every < 0:
            raise ConfigError(f"--keep-every {self.keep_every}: must not be negative")
        if self.iso_backend not in ISO_BACKENDS:
            raise ConfigError(f"--iso-backend {self.iso_backend}: must be one of {', '.join(ISO_BACKENDS)}")
        pooled = self.iso_backend == "torch-svd"
        if pooled and self.svd is None:
            raise ConfigError(
                "--iso-backend torch-svd: needs workers; name their devices, for example "
                "--iso-worker-devices cuda:0,cuda:1"
            )
        if self.svd is not None and not pooled:
            raise ConfigError(
                f"--iso-worker-devices: --iso-backend {self.iso_backend} has no workers; give one of them"
            )
        assert self.core.svd_pool == pooled, "the coordinator knows whether there is a pool to be drained"
        if self.svd is not None:
            self.svd.validated()
        if self.resume_wait_for is not None and not (
            self.core.quorum <= self.resume_wait_for <= self.core.num_learners
        ):
            raise ConfigError(
                f"--wait-for {self.resume_wait_for}: must lie between --quorum {self.core.quorum} "
                f"and --learners {self.core.num_learners}"
            )
        if self.bounds.pending_handshakes < 1:
            raise ConfigError(f"--max-pending-handshakes {self.bounds.pending_handshakes}: need at least 1")
        if self.auth_key is not None and not self.auth_key:
            raise ConfigError("the authentication key is empty; make one with: yeto keys new")
        if self.auth_key is None and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host}: anybody who can reach it could join this run; pass "
                "--auth-key-file (yeto keys new makes one), or --allow-unauthenticated if that is wanted"
            )
        return self


def words_of_safety(config: SyncerConfig) -> Iterator[tuple[int, str]]:
    """Yield what the log is to say about who can read and who can join: level and text."""
    if config.tls is not None:
        demanded = config.tls.verify_mode is ssl.CERT_REQUIRED
        yield (
            logging.INFO,
            "every connection is TLS 1.3" + (", with a certificate of the learner's" if demanded else ""),
        )
    elif config.auth_key is not None and not is_loopback(config.host):
        yield (
            logging.WARNING,
            "there is a key, but no TLS: who can read the connections reads the weights, and can take a "
            "learner's place with its HELLO after the next start of this syncer; give --tls-cert and "
            "--tls-key (yeto keys new --tls HOST makes them)",
        )


def merge_profile(config: CoreConfig) -> str:
    """Return the profile of these settings: 64 hex digits that learners may state in their HELLO.

    SHA-256 over the canonical JSON of the fields that change what is merged or when. Numbers are written
    as text, so that no reader's float formatting is part of the hash.
    """
    settled = with_numbers(config)
    values = {name: str(getattr(settled, name)) for name in PROFILE_FIELDS}
    if config.outer != "stock":
        # A profile of stock settings is what it was when there were no others.
        values["outer"] = config.outer
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
