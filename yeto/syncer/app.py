"""The syncer's process: one nursery, in which every part of it runs and falls together.

::

    serve
    ├── pump            owns the state: stamps, appends, steps, dispatches
    ├── flusher         one fsync per batch; then the acts that waited for it
    ├── listener        sockets -> groups -> facts
    ├── rounds          jobs of open attempts, in worker threads
    ├── initial         decodes learner 0's first values
    ├── broadcasts      encodes each version once, for everybody
    ├── checkpointer    writes cuts
    ├── recorder        writes merged pushes, if asked for
    ├── svd             tells how the pool of SVD workers fares, if there is one
    ├── status          says every few seconds whom the run waits for
    ├── beside          what whoever started this wants to run here, such as a dashboard
    └── signals         the first asks the coordinator to stop, the second ends the process

The workers of that pool are started before all this and killed after it (``yeto.syncer.svd_pool``).

What one learner does ends its group and nothing else. Everything that is not expected crashes the nursery,
and with it the process: a supervisor starts it again, and it goes on from its checkpoint.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import trio
from attrs import frozen

from yeto.core import waiting_for
from yeto.core.events import StopRequested
from yeto.errors import ConfigError, YetoError, first_of
from yeto.hosts import with_port
from yeto.syncer.acceptor import Acceptor, raise_descriptor_limit, sockets_max
from yeto.syncer.adoption import Adoption
from yeto.syncer.broadcasts import Broadcasts
from yeto.syncer.checkpointer import Checkpointer
from yeto.syncer.config import SyncerConfig, words_of_safety
from yeto.syncer.dispatch import Ending, Orders
from yeto.syncer.initial import Initial
from yeto.syncer.listener import Listener
from yeto.syncer.past import resumed_event
from yeto.syncer.pump import UNSTAMPED, Pump, SessionClock
from yeto.syncer.receivers import Receivers
from yeto.syncer.recorder import Recorder
from yeto.syncer.registry import Registry
from yeto.syncer.rounds import Rounds
from yeto.syncer.session import Session
from yeto.syncer.start import Start, prepare
from yeto.syncer.svd_merges import SvdMerges
from yeto.syncer.svd_pool import SvdPool, svd_pool
from yeto.tape import Past
from yeto.wire.contract import TrainingManifest
from yeto.wire.hello import HelloLayout

log = logging.getLogger("yeto.syncer")

Beside = Callable[[Callable[[], Sequence[tuple[int, int]]]], Awaitable[None]]
"""Given a function: for each learner, the bytes received from it and sent to it since this start."""

KILLED: Final = 130
"""Exit code when a second signal ended the process at once (128 + SIGINT)."""

LAST_WORDS_SECONDS: Final = 15.0
"""Longest time that SHUTDOWNs may take to go out at the end: a group's own limits are shorter."""

THREADS_SECONDS: Final = 30.0
"""Longest time that what they compute is waited for at the end; the slowest is compiling, the first time."""

HEAVY_THREADS: Final = max(2, os.cpu_count() or 2)
"""Worker threads that compute at a time: one a core, and never so few that one long merge stops the rest."""


@frozen
class Address:
    """Where the syncer accepts connections."""

    host: str
    port: int


def run_syncer(config: SyncerConfig, *, beside: Beside | None = None) -> int:
    """Run a syncer until its session ends; return the process's exit code.

    Args:
        config: settings.
        beside: a task that runs in the same nursery while the session does, and is cancelled at its end. What
            it raises ends the run, so it should raise nothing.

    Returns:
        0 after the final cut or a budget cut-off, 1 when the run failed, 3 when final ACKs are missing,
        4 when it was stopped before the final cut.

    Raises:
        YetoError: it could not start, or the tape could not be written.
    """
    config.validated()
    raise_descriptor_limit()
    try:
        return trio.run(partial(serve, config, watch_signals=True, beside=beside))
    except BaseExceptionGroup as group:
        raise _only_ours(group) from group


async def serve(
    config: SyncerConfig,
    *,
    watch_signals: bool = False,
    beside: Beside | None = None,
    task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Run a syncer; ``task_status`` gets the bound address as soon as connections are accepted.

    Args:
        config: validated settings.
        watch_signals: stop on SIGINT and SIGTERM; main thread only.
        beside: see :func:`run_syncer`.
        task_status: for ``nursery.start``.
    """
    # The port first: when it is in use, nothing on disk has been touched.
    listeners = await listen(config.host, config.port)
    try:
        async with AsyncExitStack() as held:
            # A worker that is of no use shows before a file is touched and before anybody is let in.
            pool = None if config.svd is None else await held.enter_async_context(svd_pool(config.svd))
            with prepare(config) as start:
                return await _Run(config, start, pool, beside).serve(listeners, watch_signals, task_status)
    finally:
        for listener in listeners:
            await trio.aclose_forcefully(listener)


async def listen(host: str, port: int) -> list[trio.SocketListener]:
    """Bind every address of ``host``, all on one port.

    Raises:
        ConfigError: the port is taken, or the host is not an address of this machine.
    """
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
        if port == 0 and len(listeners) > 1:
            # Each family got a port of its own; whoever reads one number must reach all of them.
            chosen = listeners[0].socket.getsockname()[1]
            for listener in listeners:
                await listener.aclose()
            listeners = await trio.open_tcp_listeners(chosen, host=host)
        return listeners
    except (OSError, UnicodeError) as error:  # the other: no name can be spelled so
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {port}: in use on {host}; stop the other syncer or take another port (--port 0: any)"
            ) from error
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error}") from error


class _Run:
    """The parts of one run and how they are joined."""

    def __init__(
        self, config: SyncerConfig, start: Start, pool: SvdPool | None, beside: Beside | None = None
    ) -> None:
        self._config = config
        self._beside = beside
        self._start = start
        self._heavy = heavy = trio.CapacityLimiter(HEAVY_THREADS)
        self._session = Session()
        self._registry = Registry()
        self._ending = Ending()
        self._pump = Pump(
            state=start.state,
            tape=start.tape,
            clock=SessionClock(start.begin_at),
            events_max=config.bounds.events,
        )
        core = start.state.config
        self._recorder: Recorder | None = None
        if start.recording is not None:
            self._recorder = Recorder(start.recording, begun=start.resumed is not None)
        self._svd = None if pool is None else SvdMerges(pool=pool, facts=self._pump, heavy=heavy)
        self._rounds = Rounds(
            session=self._session,
            facts=self._pump,
            config=core,
            heavy=heavy,
            recorder=self._recorder,
            svd=self._svd,
        )
        self._initial = Initial(session=self._session, facts=self._pump, heavy=heavy)
        self._broadcasts = Broadcasts(session=self._session, registry=self._registry, heavy=heavy)
        self._checkpointer = Checkpointer(
            config=config, session=self._session, facts=self._pump, recorder=self._recorder
        )
        self._pump.dispatcher = Orders(
            session=self._session,
            registry=self._registry,
            rounds=self._rounds,
            broadcasts=self._broadcasts,
            checkpointer=self._checkpointer,
            ending=self._ending,
            svd=self._svd,
        )
        adoption = None
        if start.older is not None:
            adoption = Adoption(
                start.older,
                settings=attrs.asdict(core),
                iso_backend=config.iso_backend,
                resumed=partial(resumed_event, start.older, core, Past(checkpoint_seq=None)),
                session=self._session,
                facts=self._pump,
            )
        self._listener = Listener(
            session=self._session,
            adoption=adoption,
            registry=self._registry,
            receivers=Receivers(facts=self._pump, pushes=self._rounds, first_values=self._initial),
            auth_key=config.auth_key,
            tls=config.tls,
            num_learners=core.num_learners,
            bounds=config.bounds,
        )
        self._acceptor = Acceptor(
            self._listener.serve, make_room=self._listener.make_room, most=sockets_max()
        )

    async def serve(
        self,
        listeners: list[trio.SocketListener],
        watch_signals: bool,
        task_status: trio.TaskStatus[Address],
    ) -> int:
        try:
            await self._serve(listeners, watch_signals, task_status)
        finally:
            await self._threads_end()
        decision = self._ending.decision
        assert decision is not None
        log.log(logging.INFO if decision.exit_code == 0 else logging.ERROR, "%s", decision.why)
        return decision.exit_code

    async def _serve(
        self,
        listeners: list[trio.SocketListener],
        watch_signals: bool,
        task_status: trio.TaskStatus[Address],
    ) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._rounds.run)
            await nursery.start(self._initial.run)
            self._begin()
            for task in (
                self._pump.run,
                self._pump.flush_forever,
                self._broadcasts.run,
                self._checkpointer.run,
                self._report_status,
            ):
                nursery.start_soon(task)
            if self._recorder is not None:
                nursery.start_soon(self._recorder.run)
            if self._svd is not None:
                nursery.start_soon(self._svd.run)
            if self._beside is not None:
                nursery.start_soon(self._beside, self._listener.traffic)
            if watch_signals:
                await nursery.start(self._watch_signals)
            await nursery.start(self._acceptor.run, listeners)
            await self._announce(listeners, task_status)
            await self._ending.happened.wait()
            with trio.move_on_after(LAST_WORDS_SECONDS):
                await self._pump.settled()
                await self._released()
            nursery.cancel_scope.cancel()

    async def _threads_end(self) -> None:
        """Wait for what worker threads still compute, in vain: a process must not end under native code."""
        with trio.move_on_after(THREADS_SECONDS, shield=True):
            while self._heavy.borrowed_tokens:
                await trio.sleep(0.01)

    def _begin(self) -> None:
        """Load what is resumed, and tell the coordinator of it before anybody can connect."""
        checkpoint, event = self._start.checkpoint, self._start.resumed
        if self._start.older is not None:
            return
        if checkpoint is None or event is None:
            log.info("waiting for learner 0, which brings the initial values")
            return
        assert checkpoint.layout is not None, "only our own format is resumed"
        self._session.open(event.terms, HelloLayout.of(checkpoint.layout), None)
        stated = checkpoint.training_manifest
        self._session.restore(
            checkpoint.fragments, None if stated is None else TrainingManifest.from_dict(stated)
        )
        self._pump.feed(event)

    async def _announce(
        self, listeners: list[trio.SocketListener], task_status: trio.TaskStatus[Address]
    ) -> None:
        host, port = listeners[0].socket.getsockname()[:2]
        print(f"yeto syncer listens on {with_port(host, port)}", flush=True)
        for level, text in words_of_safety(self._config):
            log.log(level, "%s", text)
        if self._start.state.config.require_profile is not None:
            log.info("learners must be started with --profile %s", self._start.state.config.require_profile)
        if self._config.ready_file is not None:
            await trio.to_thread.run_sync(write_ready_file, self._config.ready_file, host, port)
        task_status.started(Address(host, port))

    async def _report_status(self) -> None:
        while True:
            await trio.sleep(self._config.bounds.status_seconds)
            log.info("%s", waiting_for(self._pump.state, self._pump.clock.now()))

    async def _watch_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            stopping = False
            async for number in signals:
                name = signal.Signals(number).name
                if stopping:
                    log.error("%s again: ending at once; the tape and the last checkpoint are valid", name)
                    logging.shutdown()
                    # Worker threads may be computing, and nothing they do is waited for any more.
                    os._exit(KILLED)
                stopping = True
                log.warning("%s: stopping in order; a second one ends the process at once", name)
                await self._pump.tell(StopRequested(at=UNSTAMPED, signal=name))

    async def _released(self) -> None:
        """Wait for the groups that were told that the run is over."""
        for group in self._registry.groups():
            if group.finishing:
                await group.ended.wait()


def write_ready_file(path: Path, host: str, port: int) -> None:
    """Write where the syncer listens, so that whoever sees the file sees all of it.

    Raises:
        ConfigError: it cannot be written.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps({"host": host, "port": port, "pid": os.getpid()}) + "\n")
        aside.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {path}: cannot be written: {error.strerror}") from error


def _only_ours(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return what a group comes down to: Ctrl-C, else our first error when all are ours, else the group."""
    if group.subgroup(KeyboardInterrupt) is not None:
        return KeyboardInterrupt()
    ours, others = group.split(YetoError)
    if others is not None or ours is None:
        return group
    return first_of(ours)
