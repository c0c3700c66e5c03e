"""A learner's side of the link: dials, beats, and dials again.

The rules are those of the real client: any loss ends the generation; the next one is dialled after a
full-jitter back-off that starts anew once the syncer was heard; heartbeats go out after the first two steps
of a generation and then every five seconds, and only the syncer's ERROR or the end keep a learner away.
"""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

from yeto.sim.account import Push
from yeto.sim.agenda import spell
from yeto.sim.messages import PushMessage
from yeto.sim.network import SILENCE_SECONDS, Connection, Delays, Lane
from yeto.sim.world import World

if TYPE_CHECKING:
    from yeto.sim.learner import Learner

BACKOFF_BASE_SECONDS = 1.0
BACKOFF_CAP_SECONDS = 30.0
HEARTBEAT_SECONDS = 5.0
EARLY_BEATS = 2
"""Steps of each generation that are reported at once."""


class Client:
    """Keeps one learner connected for as long as its process lives."""

    def __init__(self, world: World, learner: Learner) -> None:
        """Start unconnected."""
        spec = learner.spec
        self._world = world
        self._learner = learner
        self._spec = spec
        self._rng: Random = world.chance(f"link/{learner.number}")
        self._delays = Delays(
            spec, world.config.faults, world.chance(f"messages/{learner.number}"), world.is_calm, world.note
        )
        self._process = 0
        """Counts starts and ends, so that what was planned before means nothing after."""
        self._backoff = BACKOFF_BASE_SECONDS
        self._outage_until = 0.0
        self._early_beats = 0
        self._beats_from = 0.0
        self._under_way: list[Push] = []
        self._sent_bytes = self._received_bytes = 0
        self.connection: Connection | None = None
        self.generation: int | None = None
        """Of the newest connection, also when it has ended."""

    @property
    def sent_bytes(self) -> int:
        """Bulk sent to the syncer, over all connections."""
        return self._sent_bytes + (self.connection.up.num_bytes if self.connection else 0)

    @property
    def received_bytes(self) -> int:
        """Bulk sent by the syncer, over all connections."""
        return self._received_bytes + (self.connection.down.num_bytes if self.connection else 0)

    # -- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """The process starts: dial."""
        self._process += 1
        self._backoff = BACKOFF_BASE_SECONDS
        self._dial(self._process)

    def end(self, *, half_open: bool = False) -> None:
        """The process is gone, and with it the connection."""
        self._process += 1
        if self.connection is not None:
            self._break(self.connection, half_open=half_open)

    def lose(self, connection: Connection) -> None:
        """The network loses this connection; the process lives."""
        if self.connection is not connection:
            return
        world = self._world
        half_open = self._rng.random() < world.config.faults.half_open and not world.is_calm()
        world.note("half_open" if half_open else "link_lost")
        self._outage_until = world.agenda.now + spell(self._rng, self._spec.mean_outage_seconds)
        self._break(connection, half_open=half_open)
        self._redial()

    def closed(self, connection: Connection) -> None:
        """The syncer's side closed this connection, or its process is gone."""
        if self.connection is connection:
            self._forget(connection)
            self._redial()

    def refused(self, connection: Connection) -> None:
        """The syncer said ERROR: this process does not dial again."""
        if self.connection is connection:
            self._forget(connection)
            self._learner.refused()

    def shut_down(self, connection: Connection) -> None:
        """The syncer said SHUTDOWN."""
        if self.connection is connection:
            self._forget(connection)
            self._learner.released()

    def _break(self, connection: Connection, *, half_open: bool) -> None:
        self._forget(connection)
        notice = SILENCE_SECONDS if half_open else self._delays.draw()
        self._world.agenda.after(notice, self._world.syncer.noticed, connection, "connection lost")

    def _forget(self, connection: Connection) -> None:
        self.connection = None
        connection.break_off()
        self._sent_bytes += connection.up.num_bytes
        self._received_bytes += connection.down.num_bytes
        self._world.account.link_lost(self._under_way)
        self._under_way.clear()
        if connection.was_heard:
            self._backoff = BACKOFF_BASE_SECONDS

    # -- dialling ------------------------------------------------------------------------------------

    def _redial(self) -> None:
        wait = self._rng.uniform(0.0, self._backoff)
        self._backoff = min(2.0 * self._backoff, BACKOFF_CAP_SECONDS)
        self._world.agenda.after(wait, self._dial, self._process)

    def _dial(self, process: int) -> None:
        world = self._world
        if process != self._process or self.connection is not None:
            return
        agenda, syncer = world.agenda, world.syncer
        if agenda.now < self._outage_until or not syncer.is_up:
            self._redial()
            return
        self.generation = self._rng.getrandbits(64) | 1
        connection = Connection(
            self._learner.number,
            self.generation,
            client=self,
            process=syncer.process,
            agenda=agenda,
            up=Lane(agenda, self._spec.up_rate, syncer.down_rate, self._delays),
            down=Lane(agenda, self._spec.down_rate, syncer.up_rate, self._delays),
            delays=self._delays,
        )
        self.connection = connection
        self._early_beats = EARLY_BEATS
        self._beats_from = agenda.now
        # The connection has to be made before anything is said on it.
        agenda.after(self._delays.draw(), connection.send_up, syncer.hello)
        agenda.after(HEARTBEAT_SECONDS, self._beat, connection)
        if not world.is_calm():
            life = spell(self._rng, self._spec.mean_link_seconds)
            agenda.at(agenda.now + life, self._fail_link, connection)
        self._learner.connected()
        self.report_early()

    def _fail_link(self, connection: Connection) -> None:
        if not self._world.is_calm():
            self.lose(connection)

    # -- sending -------------------------------------------------------------------------------------

    def introduced(self, connection: Connection) -> None:
        """The syncer has taken the HELLO; what goes out right behind it can arrive now."""
        if self.connection is connection:
            self._learner.introduced(connection)

    def send_push(self, message: PushMessage) -> None:
        """Send a push over the connection that asked for it."""
        connection, world = self.connection, self._world
        if connection is None:
            world.account.link_lost([message.push])
            return
        if len(self._under_way) >= 64:
            self._under_way = [push for push in self._under_way if push.fate is None and not push.arrived]
        self._under_way.append(message.push)
        push, syncer = message.push, world.syncer
        key = (push.fragment, message.is_copy)
        size = world.config.push_bytes
        connection.up.put(key, size, syncer.push_begun, syncer.push_arrived, connection, message)

    def tear_upload(self) -> None:
        """Lose the connection somewhere in the middle of the upload that was just begun."""
        connection = self.connection
        if connection is not None:
            seconds = self._rng.random() * self._world.config.push_bytes / self._spec.up_rate
            self._world.agenda.after(self._spec.latency_seconds + seconds, self.lose, connection)

    def report_early(self) -> None:
        """Report the next step at its boundary, if it is one of the first of this generation."""
        boundary = self._learner.boundary
        if self.connection is not None and self._early_beats > 0 and boundary < math.inf:
            self._world.agenda.at(boundary, self._beat_early, self.connection)

    def _beat_early(self, connection: Connection) -> None:
        if self.connection is connection and self._report(connection):
            self._early_beats -= 1
            self.report_early()

    def _beat(self, connection: Connection) -> None:
        if self.connection is not connection:
            return
        self._report(connection)
        # Beats that would tell nothing new are left out: the next one is the first behind a step boundary.
        now, boundary = self._world.agenda.now, self._learner.boundary
        when = now + HEARTBEAT_SECONDS
        if when < boundary < math.inf:
            beats = math.ceil((boundary - self._beats_from) / HEARTBEAT_SECONDS)
            when = max(when, self._beats_from + beats * HEARTBEAT_SECONDS)
        self._world.agenda.at(when, self._beat, connection)

    def _report(self, connection: Connection) -> bool:
        """Send the local step if it has advanced."""
        step = self._learner.advance()
        if step <= connection.told_step:
            return False
        connection.told_step = step
        connection.send_up(self._world.syncer.heartbeat, step)
        return True
