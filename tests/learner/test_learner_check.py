"""``--check`` beside real syncers on real sockets: what it finds, and that nobody notices it."""

import signal
import socket
import subprocess
import sys

import attrs
import pytest
import trio
from fault_proxy import fault_proxy
from faults import Rate
from learner_fakes import TinyTask, config
from resolver import Resolver
from syncer_runs import bodies, fakes, held_back, hurrying, make_config, running, until
from tls_authority import Authority
from trio import socket as trio_socket

from yeto.cli.run_learner import LearnerFlags, run_learner_command
from yeto.core import CoreConfig
from yeto.core.events import HelloReceived, LearnerLeft
from yeto.errors import ConfigError, DataError, ProtocolError
from yeto.learner.check import (
    USUAL_INTERVAL_STEPS,
    Link,
    Work,
    check_learner,
    check_link,
    check_task,
    exchange_seconds,
)
from yeto.learner.last_words import PermanentFailure
from yeto.learner.probe import FIRST_BYTES, NOBODYS_VERSION, Probe, false_hello, stale_hello
from yeto.link import Dialler, LinkClosed, LinkRefused
from yeto.wire.errors import AuthenticationError
from yeto.wire.frames import MessageType
from yeto.wire.hello import Hello

KEY = b"a key of the tests"


def settings(address, **changes):
    return config(syncer=address, learner_id=0, num_learners=2, **changes)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def told(capsys):
    """Return a function for the lines that were printed since it was called last, by their first words."""

    def read():
        lines = capsys.readouterr().out.splitlines()
        return [(line[:16].strip(), line[16:]) for line in lines]

    return read


async def checked(address, **changes):
    with trio.fail_after(200):
        return await check_link(settings(address, **changes))


async def test_all_is_right_and_the_run_does_not_notice(tmp_path, told):
    learners = fakes(key=KEY)
    may_answer = held_back(learners)
    syncer = make_config(tmp_path, auth_key=KEY)
    async with running(syncer, *learners) as run:
        await until(lambda: all(learner.pulls for learner in learners))
        told()
        task = TinyTask(rows_per_batch=3)
        before = task.flat()
        wanted = settings(f"127.0.0.1:{run.address.port}", auth_key=KEY, grad_accum=3)
        assert await trio.to_thread.run_sync(check_learner, wanted, lambda: task) == 0
        lines = told()
        may_answer.set()
        assert await run.end() == 0
    assert [name for name, _ in lines] == [
        *("reach", "authentication", "round trip", "bandwidth up", "clock", "task", "step", "exchange", "H")
    ]
    text = dict(lines)
    assert text["reach"].startswith(f"connected to 127.0.0.1:{run.address.port} in ")
    assert text["authentication"] == "the syncer asks for a key, and this one is right"
    assert "down is not measured" in text["bandwidth up"]
    assert "15 parameters to train, in 2 fragments" in text["task"]
    assert "3 (--grad-accum) x" in text["step"]
    assert "6e-05 MB up (--wire-dtype f32), and 2 round trips" in text["exchange"]
    assert "steps between two merges of a fragment" in text["H"]
    # Two micro batches, and not a step.
    assert task.batches_given == 2
    assert (task.flat() == before).all()
    # The two learners, one of them with the id of who asked, said HELLO once and stayed.
    assert [learner.dials for learner in learners] == [1, 1]
    hellos = bodies(syncer.event_tape, HelloReceived)
    assert sorted(hello.learner for hello in hellos) == [0, 1]
    assert len(bodies(syncer.event_tape, LearnerLeft)) == 2


def test_what_a_link_makes_of_the_work():
    link = Link(round_trip_seconds=0.1, bytes_per_second=1e6)
    assert exchange_seconds(link, Work(num_fragments=8, push_bytes=2_000_000, step_seconds=1.0)) == 2.8
    assert attrs.fields(CoreConfig).sync_interval_steps.default == USUAL_INTERVAL_STEPS


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (KEY, b"another", "HELLO authentication failed; --auth-key-file must hold the syncer's key"),
        (KEY, None, "HELLO authentication failed; --auth-key-file must hold the syncer's key"),
        (None, KEY, "this syncer has no key; give it the learners' --auth-key-file"),
        (None, None, None),
    ],
)
async def test_keys(tmp_path, told, theirs, ours, message):
    async with running(make_config(tmp_path, auth_key=theirs)) as run:
        address = f"127.0.0.1:{run.address.port}"
        if message is None:
            link = await checked(address)
            assert link.round_trip_seconds > 0
            assert ("authentication", "the syncer asks for no key") in told()
        else:
            with pytest.raises(PermanentFailure, match=message) as refused:
                await checked(address, auth_key=ours)
            assert refused.value.exit_code == 1


def test_what_is_asked_is_no_hello_for_any_syncer():
    """With the right key, with another one, without one: none of it is ever told to a coordinator."""
    for key in (KEY, b"another", None):
        for size in (0, 1000):
            with pytest.raises(
                ProtocolError, match=f"version {NOBODYS_VERSION} must be|authentication failed"
            ):
                Hello.decode(stale_hello(KEY, size), key)
        with pytest.raises(AuthenticationError if key else ProtocolError, match="HELLO"):
            Hello.decode(false_hello(), key)
    assert len(stale_hello(KEY, 1000)) == len(stale_hello(None, 1000)) == 1000


async def test_nobody_listens(told):
    with trio_socket.socket() as taken:
        await taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LinkClosed, match=f"no syncer at {address}: .*refused; check --syncer") as failed:
            await checked(address)
    assert failed.value.exit_code == 1
    [(name, text)] = told()
    assert (name, "refused" in text) == ("reach", True)


async def test_a_name_without_an_address():
    class Unknown(Resolver):
        async def getaddrinfo(self, host, *_, **__):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for resolver, why in ((Resolver(), ";"), (Unknown(), ": Name or service not known;")):
        trio_socket.set_custom_hostname_resolver(resolver)
        with pytest.raises(LinkClosed, match=f"no syncer at head:1: head has no address{why} check --syncer"):
            await checked("head:1")


async def test_every_address_of_a_name_is_tried(tmp_path, told):
    async with running(make_config(tmp_path)) as run:
        trio_socket.set_custom_hostname_resolver(Resolver("127.0.0.2", "127.0.0.1"))
        await checked(f"head.example:{run.address.port}")
    refused, connected = [text for name, text in told() if name == "reach"]
    assert "127.0.0.2" in refused
    assert "refused" in refused
    assert "connected to 127.0.0.1" in connected


async def test_tls(tmp_path, authority, told):
    context = authority.server("head.example")
    async with running(make_config(tmp_path, tls=context, auth_key=KEY)) as run:
        address = f"127.0.0.1:{run.address.port}"
        await checked(address, tls=authority.client(), tls_server_name="head.example", auth_key=KEY)
        lines = dict(told())
        assert " with TLS in " in lines["reach"]
        assert lines["authentication"] == "the syncer asks for a key, and this one is right"
        assert "the dates of the certificates are right" in lines["clock"]
        with pytest.raises(LinkRefused, match=r"certificate is not accepted: .* --tls-server-name"):
            await checked(address, tls=authority.client(), auth_key=KEY)
        with pytest.raises(PermanentFailure, match="speaks TLS only; give every learner --tls-ca"):
            await checked(address, auth_key=KEY)


async def test_tls_of_a_foreign_authority_and_none_where_one_is_demanded(tmp_path, authority):
    stranger = Authority(tmp_path)
    context = authority.server(client_ca=authority)
    async with running(make_config(tmp_path, tls=context)) as run:
        address = f"127.0.0.1:{run.address.port}"
        with pytest.raises(LinkRefused, match="--tls-ca must hold the CA"):
            await checked(address, tls=stranger.client())
        # TLS 1.3 tells a client only when it has sent something.
        with pytest.raises(LinkRefused, match="demands a client certificate"):
            await checked(address, tls=authority.client())


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (None, "takes connections and closes them, which no syncer"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "magic .* not a Yeto peer"),
    ],
)
async def test_something_else_listens(answers, message):
    async def serve(raw):
        await raw.receive_some()
        if answers is not None:
            await raw.send_all(answers)

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        with pytest.raises(LinkClosed, match=message):
            await checked(f"127.0.0.1:{listener.socket.getsockname()[1]}")
        nursery.cancel_scope.cancel()


def test_who_never_answers(skipping_clock):
    async def ask():
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        async with listener, hurrying(skipping_clock, 5.0):
            with pytest.raises(LinkClosed, match="were not answered within 10 s"):
                await checked(address)

    trio.run(ask, clock=skipping_clock)


async def test_the_rate_of_a_slow_link(tmp_path):
    slow = 150_000
    async with running(make_config(tmp_path, auth_key=KEY)) as run:
        target = (run.address.host, run.address.port)
        async with fault_proxy(target, Rate(frame=MessageType.HELLO, bytes_per_second=slow / 2)) as proxy:
            # Takes longer than the least that is believed: one is enough.
            rate = await Probe(Dialler(proxy.host, proxy.port), KEY).rate(0.0)
    assert rate.bytes == FIRST_BYTES
    assert slow / 4 <= rate.bytes_per_second <= slow


async def test_a_fast_link_is_asked_for_more(tmp_path, caplog):
    async with running(make_config(tmp_path)) as run:
        rate = await Probe(Dialler(run.address.host, run.address.port), None).rate(0.0)
    assert rate.bytes > FIRST_BYTES
    # The syncer's log is for people: each question is a line there.
    assert 2 <= caplog.text.count(f"version {NOBODYS_VERSION} must be") <= 6


def test_rows_without_a_target():
    task = TinyTask(num_rows=1)
    with pytest.raises(DataError, match="no target to learn from"):
        check_task(settings("127.0.0.1:1"), lambda: task)


def test_without_a_syncer_and_under_torchrun(monkeypatch):
    alone = config(syncer="none", max_local_steps=3)
    with pytest.raises(ConfigError, match="--check: with --syncer none there is nobody to reach"):
        check_learner(alone, TinyTask)
    flags = LearnerFlags(syncer="127.0.0.1:1", model="m", data="rows.jsonl", check=True)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigError, match="--check is one process"):
        run_learner_command(flags)


async def test_ctrl_c(tmp_path):
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    words = ["--syncer", f"127.0.0.1:{listener.socket.getsockname()[1]}", "--model", "m", "--data", "r.jsonl"]
    async with listener:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "yeto", "run", "--role", "learner", "--check", *words],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        async with process.stdout, process.stderr:
            with trio.fail_after(200):
                assert (await process.stdout.receive_some()).startswith(b"reach")
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 130
            assert await process.stderr.receive_some() == b"yeto: interrupted\n"
