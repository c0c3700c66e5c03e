"""A dashboard inside the syncer's process: observers change nothing, and neither does its failure."""

import logging
import re
from collections import Counter
from functools import partial

import h11
import pytest
import trio
from attrs import evolve
from http_talk import EventStream, ask
from syncer_runs import HANGS_SECONDS, fakes, held_back, make_config, running, until

from yeto.cli.run_syncer import SyncerFlags
from yeto.core.decisions import (
    AttemptOpened,
    BroadcastOrdered,
    CheckpointOrdered,
    Decision,
    Ignored,
    RoundCommitted,
)
from yeto.errors import ConfigError
from yeto.tape import read
from yeto.view.server import Place, choose_place, serve_beside

OBSERVERS = 10
PACED = (CheckpointOrdered, BroadcastOrdered, Ignored)


def decided(tape):
    """Return how often what was decided, and of each round who was asked and who was merged.

    How many checkpoints and broadcasts there are depends on how fast the disk is, watched or not.
    """
    bodies = [record.body for record in read(tape) if isinstance(record.body, Decision)]
    opened = [
        (body.step, body.attempt, body.quorum, [member.learner for member in body.members])
        for body in bodies
        if isinstance(body, AttemptOpened)
    ]
    committed = [
        (body.step, [responder.learner for responder in body.responders], body.missed, body.left_out)
        for body in bodies
        if isinstance(body, RoundCommitted)
    ]
    kinds = Counter(body.kind for body in bodies if not isinstance(body, PACED))
    return kinds, opened, committed


async def ordinary(folder, beside=None, while_held=None):
    """Run two learners to the end; return the tape."""
    folder.mkdir()
    config = make_config(folder)
    learners = fakes()
    told = held_back(learners)
    async with running(config, *learners, beside=beside and partial(beside, config.event_tape)) as run:
        await until(lambda: config.event_tape.exists())
        if while_held is None:
            told.set()
            assert await run.end() == 0
        else:
            await while_held(told, run)
    return config.event_tape


def found_port(caplog):
    """Return the port that the log names, once it does."""
    for record in caplog.records:
        if "dashboard" in record.getMessage():
            return int(record.getMessage().rsplit(":", 1)[1].strip("/"))
    return None


async def test_observers_change_no_decision(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    alone = await ordinary(tmp_path / "alone")
    place = Place(host="127.0.0.1", port=0)
    answers = []

    async def watch(told, run):
        await until(lambda: found_port(caplog) is not None)
        port = found_port(caplog)
        async with trio.open_nursery() as nursery:

            async def follow():
                async with EventStream(port) as stream:
                    while await stream.next() is not None:
                        answers.append("event")

            async def scrape():
                while True:
                    answers.append((await ask(port, "/metrics")).status)
                    answers.append((await ask(port, "/healthz")).status)
                    await trio.sleep(0.02)

            for _ in range(OBSERVERS):
                nursery.start_soon(follow)
            nursery.start_soon(scrape)
            await until(lambda: answers.count("event") >= OBSERVERS and 200 in answers)
            told.set()
            with trio.CancelScope(shield=True):
                assert await run.end() == 0
            nursery.cancel_scope.cancel()

    async def guarded(told, run):
        try:
            await watch(told, run)
        except* (OSError, trio.BrokenResourceError, h11.RemoteProtocolError):
            # The server ends with the run, under whoever is asking.
            assert run.exit_code == 0

    watched = await ordinary(tmp_path / "watched", partial(serve, place), guarded)
    assert decided(watched) == decided(alone)


async def serve(place, tape, traffic):
    await serve_beside(tape, place, traffic, made_up=False)


async def test_bytes_are_counted_on_all_connections_of_a_learner(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = make_config(tmp_path)
    learners = fakes(reconnects=True)
    told = held_back(learners)
    place = Place(host="127.0.0.1", port=0)
    async with running(config, *learners, beside=partial(serve, place, config.event_tape)) as run:
        await until(lambda: found_port(caplog) is not None)
        port = found_port(caplog)

        async def counted(enough):
            """Return bytes from and to each learner, as soon as they are enough."""
            with trio.fail_after(HANGS_SECONDS):
                while True:
                    status = await ask(port, "/api/status")
                    rows = status.json["learners"] if status.status == 200 else []
                    pairs = [(row["bytes_in"], row["bytes_out"]) for row in rows]
                    if len(pairs) == 2 and enough(pairs):
                        return pairs
                    await trio.sleep(0.05)

        # The other ends count the same. Nobody pushes, so there is a time when all has arrived.
        await until(lambda: all(one.pulls for one in learners))
        theirs = [one.group.traffic for one in learners]
        before = await counted(lambda pairs: pairs == [(there.sent, there.received) for there in theirs])
        assert all(received > 100 < sent for received, sent in before)
        first = learners[1].group
        await learners[1].streams[0].close()
        await until(lambda: learners[1].group is not first and len(learners[1].pulls) > 1)
        again = learners[1].group.traffic
        after = await counted(
            lambda pairs: (
                pairs[1][0] >= before[1][0] + again.sent and pairs[1][1] >= before[1][1] + again.received
            )
        )
        metrics = (await ask(port, "/metrics")).text
        for way, place_in_pair in (("received", 0), ("sent", 1)):
            value = re.search(rf'^yeto_learner_{way}_bytes_total{{learner="1"}} (\S+)$', metrics, re.M)
            assert float(value[1]) >= after[1][place_in_pair]
        told.set()
        assert await run.end() == 0


async def test_a_port_that_is_taken_is_said_and_the_run_goes_on(tmp_path, caplog):
    async with _Taken() as taken:
        place = Place(host="127.0.0.1", port=taken.port, port_flag="--http-port")
        tape = await ordinary(tmp_path / "run", partial(serve, place))
    assert decided(tape)[2]
    said = [record.getMessage() for record in caplog.records if "--http-port" in record.getMessage()]
    assert len(said) == 1
    assert "in use" in said[0]
    assert "goes on without a dashboard" in said[0]


class _Taken:
    async def __aenter__(self):
        (self._listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = self._listener.socket.getsockname()[1]
        return self

    async def __aexit__(self, *exc_info):
        await self._listener.aclose()


async def test_whatever_fails_inside_ends_only_the_dashboard(tmp_path, caplog, monkeypatch):
    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr("yeto.view.server.TapeSource", broken)
    tape = await ordinary(tmp_path / "run", partial(serve, Place(host="127.0.0.1", port=0)))
    assert decided(tape)[2]
    assert [record.levelname for record in caplog.records if "broken" in record.getMessage()] == ["ERROR"]


def test_beyond_this_machine_a_token_is_made_and_told_once(tmp_path):
    place, made_up = choose_place("0.0.0.0", 0, None)
    assert made_up
    assert place.door.token is not None
    assert not place.door.local
    again, _ = choose_place("0.0.0.0", 0, None)
    assert again.token != place.token
    here, made_up = choose_place("localhost", 0, None)
    assert (here.token, made_up, here.door.local) == (None, False, True)
    path = tmp_path / "token"
    path.write_text("a-token-of-the-test-0123\n")
    given, made_up = choose_place("0.0.0.0", 0, path)
    assert (given.token, made_up) == ("a-token-of-the-test-0123", False)
    with pytest.raises(ConfigError, match="--port 70000"):
        choose_place("localhost", 70000, None)


def test_the_flags_of_a_syncer_say_where_its_dashboard_is(tmp_path):
    flags = SyncerFlags(learners=1, total_steps=1, event_tape=tmp_path / "tape")
    assert flags.beside() is None
    path = tmp_path / "token"
    path.write_text("a-token-of-the-test-0123\n")
    serving = evolve(flags, http_port=0, http_host="0.0.0.0", http_token_file=path).beside()
    tape, place = serving.args
    assert (tape, place.host, place.port) == (tmp_path / "tape", "0.0.0.0", 0)
    assert (place.token, serving.keywords) == ("a-token-of-the-test-0123", {"made_up": False})
    for change, said in (
        ({"http_host": "0.0.0.0"}, "--http-host goes with --http-port"),
        ({"http_token_file": path}, "--http-token-file goes with --http-port"),
        ({"http_port": 70000}, "--http-port 70000: must be 0 to 65535"),
    ):
        with pytest.raises(ConfigError, match=said):
            evolve(flags, **change).beside()
