"""The learner's side of the link: dials the syncer, again and again, until the run is over.

The redial loop knows no phases. A link that is lost before the first anchor, in a round or after the final
cut is dialled again in the same way, each time with the address looked up anew and a fresh random generation.
What ends the loop:

* SHUTDOWN, or a patience of a minute after the final cut was acknowledged;
* ERROR, which is permanent: the syncer refuses this client for a reason that a retry does not mend;
* TLS that does not fit, as long as no connection was good: a file or a flag is wrong. Later it is a syncer
  that came back with another certificate, or an address that is another machine's now: that is mended there;
* time: 900 s without a first connection, ``--give-up-after`` without a later one. Training goes on meanwhile,
  and its work is merged after the reconnection.

The back-off starts anew only after a connection that was good for something, so that a syncer which accepts
and closes at once is not asked without pause.
"""

from __future__ import annotations

import math
import random
import secrets

import trio

from yeto.errors import EXIT_STOPPED, ProtocolError, YetoError
from yeto.learner.connection import Connection, Shared
from yeto.learner.identity import InitialFragment
from yeto.learner.last_words import PermanentFailure, SessionReleased
from yeto.learner.mailbox import Stop
from yeto.learner.progress import Progress
from yeto.link import Dialler, LinkClosed, LinkRefused, Target, backoff
from yeto.wire.legality import TensorSizes

DIAL_SECONDS = 30.0
"""Most that one dial may take: all streams opened and introduced, over slow links and several addresses."""

USEFUL_SECONDS = 60.0
"""A dial whose connection held until then was good, even if the syncer had nothing to say yet."""

FINAL_PATIENCE_SECONDS = 60.0
"""How long SHUTDOWN is waited for after the final cut was acknowledged, from when a syncer was last met."""

STOPPED_PATIENCE_SECONDS = 2.0
"""The same when the user wants to stop: time for the ACK to leave, no more."""


class Client:
    """Keeps a learner connected; one task of one Trio loop."""

    def __init__(self, shared: Shared, progress: Progress, rng: random.Random | None = None) -> None:
        """Prepare; ``run`` dials.

        Args:
            shared: what all connections have in common.
            progress: told about the link.
            rng: chance of the back-off; seeded from the system by default.
        """
        self._shared = shared
        self._progress = progress
        self._rng = random.Random() if rng is None else rng
        self._target = Target.parse(shared.config.syncer)
        numels = [fragment.numel for fragment in shared.identity.layout.fragments]
        self._sizes = TensorSizes.of(numels, shared.config.wire_dtype)
        self._initial: tuple[InitialFragment, ...] = shared.identity.initial
        self._anchored: set[int] = set()
        self._has_cut = False
        self._patience = trio.CancelScope()
        self._stop_requested = False

    async def run(self) -> None:
        """Stay connected until the run is over, then release the training thread."""
        with self._patience:
            await self._stay_connected()
        if self._patience.cancelled_caught:
            self._progress.notice("the syncer did not confirm the end in time; the final cut is saved")
        self._shared.arrivals.release()

    def stop_requested(self) -> None:
        """The user wants to stop: do not linger for a SHUTDOWN once the final cut is acknowledged."""
        self._stop_requested = True
        if self._shared.departures.saved is not None:
            self._be_patient()

    async def _stay_connected(self) -> None:
        waits = backoff(self._rng)
        lost_at = trio.current_time()
        was_useful = was_broken = False
        while True:
            self._progress.link("connecting", self._shared.config.syncer)
            started = trio.current_time()
            end, was_heard = await self._connect_once()
            now = trio.current_time()
            is_broken = isinstance(end, ProtocolError)
            # A syncer that sends what it must not, again and again, is as good as none.
            if (was_heard or now - started >= USEFUL_SECONDS) and not (is_broken and was_broken):
                waits, lost_at, was_useful = backoff(self._rng), now, True
            was_broken = is_broken
            if self._is_over(end, was_useful):
                return
            limit = self._limit_seconds(was_useful)
            self._progress.link("down", str(end), then=f"dialling again for up to {limit:.0f} s")
            if now - lost_at >= limit:
                self._shared.arrivals.stop(self._given_up(was_useful, limit, end))
                return
            if self._stop_requested and self._shared.departures.saved is not None:
                self._be_patient()
            await trio.sleep(min(next(waits), max(0.0, lost_at + limit - now)))

    def _is_over(self, end: YetoError, was_useful: bool) -> bool:
        """Whether a connection that ended like this was the last one; tells the training thread why."""
        if isinstance(end, PermanentFailure) or (isinstance(end, LinkRefused) and not was_useful):
            self._shared.arrivals.stop(Stop(exit_code=1, reason=str(end)))
            return True
        if isinstance(end, SessionReleased):
            if self._has_cut:
                return True
            # After the cut-off of a budget, the finish will want this learner's frozen weights.
            if self._shared.departures.budget_steps is None:
                reason = "the syncer ended the session before a final cut"
                self._shared.arrivals.stop(Stop(exit_code=EXIT_STOPPED, reason=reason))
                return True
        return False

    async def _connect_once(self) -> tuple[YetoError, bool]:
        """Dial and exchange until the connection ends; return why, and whether anything was heard on it."""
        connection: Connection | None = None
        try:
            with trio.move_on_after(DIAL_SECONDS):
                connection = await self._dial()
        except (LinkClosed, ProtocolError, PermanentFailure) as error:
            return error, False
        if connection is None:
            return LinkClosed(f"no connection within {DIAL_SECONDS:.0f} s"), False
        self._progress.link("up", self._shared.config.syncer)
        if self._shared.departures.saved is not None and self._patience.deadline == math.inf:
            self._be_patient()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, connection)
            end = await connection.run(self._initial)
            nursery.cancel_scope.cancel()
        if connection.acknowledged.is_set() and self._patience.deadline == math.inf:
            # It ended as soon as the ACK was out.
            self._be_patient()
        self._has_cut = self._has_cut or connection.has_cut
        self._anchored |= connection.anchored
        if len(self._anchored) == len(self._shared.identity.layout.fragments):
            self._initial = ()
        return end, connection.heard.is_set()

    async def _dial(self) -> Connection:
        """Open and introduce a group; leaves nothing open when it fails or is cancelled."""
        config = self._shared.config
        host, port = await self._target.address()
        dialler = Dialler(host, port, tls=config.tls, server_name=config.tls_server_name)
        connection = Connection(self._shared, _draw_generation(), await dialler.open(), self._sizes)
        try:
            await connection.introduce(dialler)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _watch(self, connection: Connection) -> None:
        """Grant the end more time when there is a syncer that may bring it.

        To be connected says little: what accepts may be a tunnel whose other end is gone.
        """
        await connection.heard.wait()
        if self._shared.departures.saved is not None:
            self._be_patient()
        await connection.acknowledged.wait()
        self._be_patient()

    def _be_patient(self) -> None:
        """Wait for SHUTDOWN from now on, but not for ever."""
        seconds = STOPPED_PATIENCE_SECONDS if self._stop_requested else FINAL_PATIENCE_SECONDS
        self._patience.deadline = trio.current_time() + seconds

    def _limit_seconds(self, was_useful: bool) -> float:
        config = self._shared.config
        return config.give_up_seconds if was_useful else config.first_connect_seconds

    def _given_up(self, was_useful: bool, limit: float, last: YetoError) -> Stop:
        if was_useful:
            return Stop(
                exit_code=EXIT_STOPPED,
                reason=f"no connection to the syncer for {limit:.0f} s (--give-up-after); last: {last}",
            )
        return Stop(
            exit_code=1,
            reason=f"no syncer at {self._shared.config.syncer} within {limit:.0f} s; last: {last}; "
            "check --syncer, and that the syncer runs and is reachable",
        )


def _draw_generation() -> int:
    """Return a number that no other connection of this run has, and that is not 0."""
    return secrets.randbelow(2**64 - 1) + 1
