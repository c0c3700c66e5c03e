"""``yeto run --role syncer``: flags to one config object, one call."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from attrs import evolve, frozen
from cyclopts import Parameter

from yeto.cli.policy import DOOR, ENDING, ISO, WATCHING, PolicyFlags, explained
from yeto.cli.preset import PresetFlag
from yeto.errors import ConfigError
from yeto.syncer.config import Bounds, StartMode, SyncerConfig, merge_profile
from yeto.syncer.svd_settings import SvdSettings, parse_devices
from yeto.wire.auth import load_key

if TYPE_CHECKING:
    from yeto.link import TlsContext
    from yeto.syncer.app import Beside


@frozen(kw_only=True)
class SyncerFlags(PolicyFlags):
    """Every flag of the syncer: the coordinator's, and where things are.

    Durations are seconds unless the name says otherwise.
    """

    host: Annotated[
        str, explained(DOOR, "Address to listen on. Anything but this machine's own needs --auth-key-file.")
    ] = "127.0.0.1"
    port: Annotated[int, explained(DOOR, "Port to listen on; 0 takes any free one and prints it.")] = 29400
    ready_file: Annotated[
        Path | None, explained(DOOR, "Write host, port and pid here as JSON once learners can connect.")
    ] = None
    iso_backend: Annotated[
        Literal["scalar", "torch-svd"] | None,
        explained(
            ISO,
            "Where matrices are decomposed for --matrix-merge iso: in this process (scalar), or by a worker "
            "process for each of --iso-worker-devices (torch-svd). Fixed for a run. Default: torch-svd when "
            "devices are named.",
        ),
    ] = None
    iso_worker_devices: Annotated[
        str | None,
        explained(
            ISO, "Devices of the workers, for example cuda:0,cuda:1; several on one processor: cpu:0,cpu:1."
        ),
    ] = None
    iso_worker_python: Annotated[
        str,
        Parameter(
            group=ISO,
            help="Python of the workers, with this Yeto and torch. Default: the syncer's own. None that "
            "starts a container: run the syncer in there instead, with ISO_WORKER_PYTHON=python3.",
            env_var="ISO_WORKER_PYTHON",
            show_default=False,
        ),
    ] = sys.executable
    iso_worker_queue_capacity: Annotated[
        int, explained(ISO, "Matrices that are queued or being decomposed at a time; more of them wait.")
    ] = 16
    iso_worker_frame_mib: Annotated[int, explained(ISO, "Largest matrix of the workers, in MiB.")] = 2048
    iso_worker_startup_timeout_s: Annotated[
        float, explained(ISO, "A worker that has not answered so long after its start ends the run.")
    ] = 300.0
    iso_worker_request_timeout_s: Annotated[
        float, explained(ISO, "A matrix that is not done so long after its admission ends the run.")
    ] = 3540.0
    iso_worker_drain_timeout_s: Annotated[
        float, explained(ISO, "A matrix that is still there so long after the last round ends the run.")
    ] = 3600.0
    checkpoint_path: Annotated[
        Path, explained(ENDING, "Folder of the checkpoint, from which the model can be exported at any time.")
    ] = Path("yeto-state.ckpt")
    keep_every: Annotated[
        int,
        explained(
            ENDING, "Keep the checkpoint of every N-th global step for good; 0 keeps the newest two only."
        ),
    ] = 0
    resume: Annotated[bool, Parameter(group=ENDING, help="Go on from the checkpoint.", negative=())] = False
    resume_or_start: Annotated[
        bool,
        Parameter(
            group=ENDING, help="Go on when there is a checkpoint, else begin; for supervisors.", negative=()
        ),
    ] = False
    event_tape: Annotated[
        Path, explained(ENDING, "File that remembers every fact and every decision; see yeto replay.")
    ] = Path("events.jsonl")
    record_payloads: Annotated[
        Path | None,
        explained(
            ENDING,
            "Write every merged push here, so that yeto replay --tensors can execute all merges again. "
            "Takes what the learners send: for bf16 two bytes a parameter, learner and merge.",
        ),
    ] = None
    auth_key_file: Annotated[
        Path | None,
        explained(
            DOOR, "Key that learners must know (mode 0600), made by yeto keys new; or YETO_ISLAND_HMAC_KEY."
        ),
    ] = None
    allow_unauthenticated: Annotated[
        bool,
        Parameter(
            group=DOOR,
            help="Listen to other machines without a key: anybody there can join the run.",
            negative=(),
        ),
    ] = False
    tls_cert: Annotated[
        Path | None,
        explained(
            DOOR, "Encrypt every connection with this certificate (yeto keys new --tls HOST); with --tls-key."
        ),
    ] = None
    tls_key: Annotated[Path | None, explained(DOOR, "Key of --tls-cert (mode 0600).")] = None
    tls_client_ca: Annotated[
        Path | None, explained(DOOR, "Demand of every learner a certificate that this authority signed.")
    ] = None
    max_pending_handshakes: Annotated[
        int,
        explained(
            DOOR, "Connections that have not said who they are; one more takes the place of the oldest."
        ),
    ] = 64
    require_profile_binding: Annotated[
        bool,
        Parameter(
            group=DOOR, help="Refuse learners that do not state the profile of these settings.", negative=()
        ),
    ] = False
    http_port: Annotated[
        int | None,
        explained(
            WATCHING,
            "Serve a dashboard (/), metrics for Prometheus (/metrics) and health (/healthz) at this port; 0 "
            "takes any free one. The run goes on if that fails. Needs pip install 'yeto[http]'.",
        ),
    ] = None
    http_host: Annotated[
        str,
        explained(WATCHING, "Address of --http-port. Anything but this machine's own asks for a token."),
    ] = "127.0.0.1"
    http_token_file: Annotated[
        Path | None,
        explained(
            WATCHING,
            "Token that --http-port asks for. Default: a new one, printed, where --http-host needs one.",
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning"], explained(WATCHING, "How much is said on stderr.")
    ] = "info"

    @property
    def means_stock(self) -> bool:
        """Whether what else is given makes sense with the stock outer step; an average decomposes nothing."""
        iso = self.iso_backend is not None or self.iso_worker_devices is not None
        return iso or super().means_stock

    def config(self) -> SyncerConfig:
        """Return the settings these flags stand for.

        Raises:
            ConfigError: a flag asks for something impossible, or a key or certificate cannot be used.
        """
        if self.resume and self.resume_or_start:
            raise ConfigError("--resume and --resume-or-start: give one of them")
        if self.budget_finish and not (self.resume or self.resume_or_start):
            raise ConfigError("--budget-finish goes on from a checkpoint: add --resume")
        svd = self._svd_settings()
        backend = self.iso_backend or ("scalar" if svd is None else "torch-svd")
        core = evolve(self.core_config(), svd_pool=backend == "torch-svd")
        if self.require_profile_binding:
            core = evolve(core, require_profile=merge_profile(core))
        start = StartMode.FRESH
        if self.resume:
            start = StartMode.RESUME
        elif self.resume_or_start:
            start = StartMode.RESUME_OR_START
        return SyncerConfig(
            core=core,
            resume_wait_for=self.wait_for,
            start=start,
            host=self.host,
            port=self.port,
            ready_file=self.ready_file,
            checkpoint_path=self.checkpoint_path,
            keep_every=self.keep_every,
            event_tape=self.event_tape,
            record_payloads=self.record_payloads,
            auth_key=load_key(self.auth_key_file, os.environ),
            allow_unauthenticated=self.allow_unauthenticated,
            tls=self._tls(),
            bounds=Bounds(pending_handshakes=self.max_pending_handshakes),
            iso_backend=backend,
            svd=svd,
        ).validated()

    def beside(self) -> Beside | None:
        """Return the task that serves the dashboard, if one is asked for.

        Raises:
            ConfigError: a flag makes no sense, or a package is missing.
        """
        if self.http_port is None:
            for flag, given in (
                ("--http-host", self.http_host != "127.0.0.1"),
                ("--http-token-file", self.http_token_file is not None),
            ):
                if given:
                    raise ConfigError(f"{flag} goes with --http-port")
            return None
        from yeto.view.server import choose_place, serve_beside

        place, made_up = choose_place(
            *(self.http_host, self.http_port, self.http_token_file),
            host_flag="--http-host",
            port_flag="--http-port",
            token_flag="--http-token-file",
        )
        return partial(serve_beside, self.event_tape, place, made_up=made_up)

    def _tls(self) -> TlsContext | None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key: give both or none")
        if self.tls_cert is None or self.tls_key is None:
            if self.tls_client_ca is not None:
                raise ConfigError(f"--tls-client-ca {self.tls_client_ca}: needs --tls-cert and --tls-key")
            return None
        # Not at the top: --help need not wait for what the link brings.
        from yeto.link.tls_files import server_context

        return server_context(self.tls_cert, self.tls_key, self.tls_client_ca)

    def _svd_settings(self) -> SvdSettings | None:
        if self.iso_worker_devices is None:
            return None
        return SvdSettings(
            devices=parse_devices(self.iso_worker_devices),
            python=self.iso_worker_python,
            queue_capacity=self.iso_worker_queue_capacity,
            frame_bytes_max=self.iso_worker_frame_mib << 20,
            startup_seconds=self.iso_worker_startup_timeout_s,
            request_seconds=self.iso_worker_request_timeout_s,
            drain_seconds=self.iso_worker_drain_timeout_s,
        )


def run_syncer_command(
    flags: Annotated[SyncerFlags, Parameter(name="*")], *, preset: PresetFlag = None
) -> int:
    """Run the syncer until the final cut: it pulls fragments from the learners, merges, commits, broadcasts.

    Ctrl-C stops it in order, with a checkpoint; the same command with --resume goes on. The exit code is also
    0 after the cut-off of a learner budget.
    """
    config, beside = flags.config(), flags.beside()
    logging.basicConfig(
        level=flags.log_level.upper(), format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"
    )
    # Only now: --help and mistakes in flags need not wait for torch.
    from yeto.syncer.app import run_syncer

    return run_syncer(config, beside=beside)
