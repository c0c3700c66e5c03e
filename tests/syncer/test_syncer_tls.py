"""TLS at the door: whole runs over it, and every peer that does not fit, refused while a run goes on."""

import contextlib
import math
import re
import ssl

import attrs
import pytest
import trio
from dialled import dial
from fake_learner import FakeLearner
from syncer_runs import BOUNDS, bodies, fakes, hurrying, make_config, running, until
from tls_authority import Authority

from yeto.cli.run_syncer import SyncerFlags
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import ConfigError
from yeto.link import FrameStream, LinkClosed, LinkRefused
from yeto.wire.frames import MessageType, encode_header
from yeto.wire.messages import DataHello, ErrorMessage


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Another authority."""
    return Authority(tmp_path_factory.mktemp("tls-of-others"))


@contextlib.asynccontextmanager
async def steady_run(config, **settings):
    """A run of two learners whose second round waits until the block has ended, which they never notice."""
    learners, done = fakes(**settings), trio.Event()

    async def hold(learner, pull):
        if pull.step >= 2:
            await done.wait()
        return True

    for learner in learners:
        learner.before_push = hold
    async with running(config, *learners) as run:
        await until(lambda: all(learner.pulls for learner in learners))
        yield run
        done.set()
        assert await run.end() == 0
    assert [learner.dials for learner in learners] == [1, 1]
    steps = [commit.step for commit in bodies(config.event_tape, de.RoundCommitted)]
    assert steps == list(range(1, config.core.total_steps + 1))


def said_about(caplog, peer):
    """Return what the log says of a peer."""
    return [record.getMessage() for record in caplog.records if peer in record.getMessage()]


async def test_a_run_over_tls_with_client_certificates_and_a_key(tmp_path, authority, caplog):
    config = make_config(tmp_path, tls=authority.server(client_ca=authority), auth_key=b"secret")
    caplog.set_level("INFO")
    learners = fakes(tls=authority.client(authority.sign("learner")), key=b"secret", reconnects=True)

    async def lose_the_connection(learner, pull):
        if pull.step == 3 and learner.dials == 1:
            await learner.hang_up()
            return False
        return True

    learners[1].before_push = lose_the_connection
    async with running(config, *learners) as run:
        assert await run.end() == 0
    assert learners[0].final_digests() == learners[1].final_digests()
    assert [learner.dials for learner in learners] == [1, 2]
    assert "every connection is TLS 1.3, with a certificate of the learner's" in caplog.text


async def plain_hello(run, tls):
    learner = FakeLearner(learner=0, generation=7)
    (control,) = await dial(run.address.host, run.address.port, 0)
    yield control
    await control.send(MessageType.HELLO, learner.hello().encode())
    header = await control.read_header()
    assert header.type is MessageType.ERROR
    said = ErrorMessage.decode(await control.read_exact(header.length)).text
    assert said == "this syncer speaks TLS only; give every learner --tls-ca"


def raw_bytes(*pieces):
    async def say(run, tls):
        stream = FrameStream(await trio.open_tcp_stream(run.address.host, run.address.port))
        yield stream
        for piece in pieces:
            await stream.stream.send_all(piece)
        with pytest.raises(LinkClosed):
            await stream.read_exact(1000)

    return say


CLIENT_HELLO = bytes.fromhex("1603010100010000fc0303") + bytes(20)
"""A beginning of one."""

AT_A_TLS_PORT = {
    "plain frames": (plain_hello, "this syncer speaks TLS only; give every learner --tls-ca"),
    "http": (raw_bytes(b"GET / HTTP/1.1\r\n\r\n"), "it does not speak TLS; give every learner --tls-ca"),
    "a version of its own": (raw_bytes(b"\x16\x09\x09" + bytes(100)), "it does not speak TLS"),
    "nothing": (raw_bytes(), "did not say in time who it is"),
    "half a handshake": (raw_bytes(CLIENT_HELLO), "did not say in time who it is"),
    "a huge record": (raw_bytes(b"\x16\x03\x01\xff\xff" + bytes(70_000)), "the TLS handshake failed: "),
}


PATIENT = {"silence_seconds": math.inf, "farewell_seconds": math.inf}
"""Bounds of a run whose clock is set forward until a handshake took too long, which nothing else may."""


@pytest.mark.parametrize("case", AT_A_TLS_PORT)
async def test_who_does_not_speak_tls_is_refused_by_name(tmp_path, authority, caplog, case, skipping_clock):
    act, told = AT_A_TLS_PORT[case]
    config = make_config(
        tmp_path,
        tls=authority.server(client_ca=authority),
        bounds=attrs.evolve(BOUNDS, **PATIENT),
        total_steps=3,
        quorum_timeout_seconds=1e9,
    )
    seconds = config.bounds.handshake_seconds if told == "did not say in time who it is" else 0.0
    async with steady_run(config, tls=authority.client(authority.sign("learner"))) as run:
        async with contextlib.aclosing(act(run, None)) as stranger:
            stream = await anext(stranger)
            peer = "{}:{}".format(*stream.stream.socket.getsockname())
            async with hurrying(skipping_clock, seconds):
                await anext(stranger, None)
            await stream.close()
        await until(lambda: said_about(caplog, peer))
    (line,) = said_about(caplog, peer)
    assert told in line


@pytest.mark.parametrize(
    ("case", "heard", "told"),
    [
        (
            "no certificate",
            "the syncer demands a client certificate; give --tls-cert and --tls-key",
            "it has no client certificate; give it --tls-cert and --tls-key",
        ),
        (
            "another authority's",
            "the syncer does not accept this learner's certificate; its --tls-client-ca must have signed it",
            "its certificate is not accepted: unable to get local issuer certificate",
        ),
        (
            "expired",
            "the syncer does not accept this learner's certificate, which has expired",
            "its certificate is not accepted: certificate has expired",
        ),
    ],
)
async def test_client_certificates_that_are_not_accepted(
    tmp_path, authority, others, caplog, monkeypatch, case, heard, told
):
    good = authority.client(authority.sign("learner"))
    # A learner whose own certificate has expired would not even start; this one expires while it runs.
    monkeypatch.setattr("yeto.link.tls_files._rehearse", lambda *_, **__: None)
    pair = {
        "no certificate": (None, None),
        "another authority's": others.sign("learner"),
        "expired": authority.expired("learner"),
    }[case]
    config = make_config(tmp_path, tls=authority.server(client_ca=authority), total_steps=3)
    async with steady_run(config, tls=good) as run:
        (control,) = await dial(run.address.host, run.address.port, 0, tls=authority.client(pair))
        peer = "{}:{}".format(*control.stream.raw.socket.getsockname())
        hello = FakeLearner(learner=0, generation=7).hello().encode()
        with contextlib.suppress(LinkClosed):
            await control.send(MessageType.HELLO, hello)
        with pytest.raises(LinkRefused, match=re.escape(heard)):
            await control.read_header()
        await control.close()
        await until(lambda: said_about(caplog, peer))
    (line,) = said_about(caplog, peer)
    assert told in line
    assert len(bodies(config.event_tape, ev.HelloReceived)) == 2


@pytest.mark.parametrize(
    ("case", "heard", "told"),
    [
        ("authority", "--tls-ca must hold the CA that signed it", "which its --tls-ca did not sign"),
        ("version", "it does not speak TLS 1.3", "it does not speak TLS 1.3"),
    ],
)
async def test_learners_that_do_not_take_the_syncer_s_tls(
    tmp_path, authority, others, caplog, case, heard, told
):
    client = (others if case == "authority" else authority).client()
    if case == "version":
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2
    config = make_config(tmp_path, tls=authority.server(), total_steps=3)
    async with steady_run(config, tls=authority.client()) as run:
        with pytest.raises(LinkRefused, match=heard):
            await dial(run.address.host, run.address.port, 2, tls=client)
        await until(lambda: told in caplog.text)
    (line,) = (record.getMessage() for record in caplog.records if told in record.getMessage())
    assert re.match(r"127\.0\.0\.1:\d+: ", line)


def flags(**given):
    """Return the configuration of these flags, beside those that are required."""
    return SyncerFlags(learners=2, total_steps=1, **given).config()


def test_flags_of_a_syncer(authority):
    cert, key = authority.sign("localhost")
    assert flags().tls is None
    assert flags(tls_cert=cert, tls_key=key).tls.verify_mode is ssl.CERT_NONE
    demanding = flags(tls_cert=cert, tls_key=key, tls_client_ca=authority.path)
    assert demanding.tls.verify_mode is ssl.CERT_REQUIRED
    assert demanding.tls.minimum_version is ssl.TLSVersion.TLSv1_3
    for wrong, told in (
        ({"tls_cert": cert}, "--tls-cert and --tls-key: give both or none"),
        ({"tls_key": key}, "--tls-cert and --tls-key: give both or none"),
        ({"tls_client_ca": authority.path}, "--tls-client-ca .*: needs --tls-cert and --tls-key"),
        ({"tls_cert": cert, "tls_key": cert}, "--tls-key .*: holds no PEM private key"),
        ({"max_pending_handshakes": 0}, "--max-pending-handshakes 0: need at least 1"),
        # TLS hides what is said; who may say it is the key's to tell.
        ({"tls_cert": cert, "tls_key": key, "host": "0.0.0.0"}, "pass --auth-key-file"),
    ):
        with pytest.raises(ConfigError, match=told):
            flags(**wrong)


@pytest.mark.parametrize(
    ("host", "key", "tls", "warned"),
    [
        ("0.0.0.0", b"secret", False, 1),
        ("0.0.0.0", b"secret", True, 0),
        ("127.0.0.1", b"secret", False, 0),
        ("127.0.0.1", None, False, 0),
    ],
)
async def test_a_key_without_tls_is_warned_of_once_where_others_can_listen(
    tmp_path, authority, caplog, host, key, tls, warned
):
    config = make_config(tmp_path, total_steps=3, auth_key=key, tls=authority.server() if tls else None)
    config = attrs.evolve(config, host=host).validated()
    async with running(config) as run:
        run.address = attrs.evolve(run.address, host="127.0.0.1")
        for learner in fakes(key=key, tls=authority.client() if tls else None):
            run.join(learner)
        assert await run.end() == 0
    assert caplog.text.count("there is a key, but no TLS: who can read") == warned


async def test_tls_at_a_plain_port(tmp_path, authority, caplog):
    config = make_config(tmp_path, total_steps=3)
    async with steady_run(config) as run:
        with pytest.raises(LinkRefused, match="it does not speak TLS; start the syncer with --tls-cert"):
            await dial(run.address.host, run.address.port, 0, tls=authority.client())
        await until(lambda: "it speaks TLS, this syncer does not" in caplog.text)


async def test_authentication_and_generations_are_asked_for_inside_tls_too(
    tmp_path, authority, caplog, skipping_clock
):
    """Who has the certificate and not the key; who has neither, and guesses at a generation."""
    config = make_config(
        tmp_path,
        tls=authority.server(),
        auth_key=b"secret",
        bounds=attrs.evolve(BOUNDS, **PATIENT),
        total_steps=3,
        quorum_timeout_seconds=1e9,
    )
    async with steady_run(config, tls=authority.client(), key=b"secret") as run:
        wrong = FakeLearner(learner=1, tls=authority.client(), key=b"guess", num_streams=0)
        await wrong.run(run.address.host, run.address.port)
        (data,) = await dial(run.address.host, run.address.port, 0, tls=authority.client())
        hello = DataHello(learner=1, generation=99, stream=1)
        await data.send(hello.TYPE, hello.encode())
        async with hurrying(skipping_clock, config.bounds.handshake_seconds):
            with pytest.raises(LinkClosed, match="the peer closed"):
                await data.read_header()
        await data.close()
    assert wrong.error == "HELLO authentication failed"
    assert "HELLO authentication failed; connection closed" in caplog.text
    assert "did not say in time who it is, or not truly" in caplog.text
    assert len(bodies(config.event_tape, ev.HelloReceived)) == 2


async def test_handshakes_that_never_end_keep_nobody_out(tmp_path, authority, caplog):
    bounds = attrs.evolve(BOUNDS, pending_handshakes=3)
    config = make_config(tmp_path, tls=authority.server(), bounds=bounds, total_steps=3)
    async with running(config) as run:
        stuck = []
        for _ in range(5):
            stuck.append(await trio.open_tcp_stream(run.address.host, run.address.port))
            await stuck[-1].send_all(CLIENT_HELLO)
        for learner in fakes(num_streams=0, tls=authority.client()):
            run.join(learner)
        assert await run.end() == 0
        for stream in stuck:
            await stream.aclose()
    assert caplog.text.count("did not say who it is before others came") >= 2


async def test_a_header_that_claims_2_to_the_40_bytes_inside_tls(tmp_path, authority, caplog):
    config = make_config(tmp_path, tls=authority.server(), total_steps=3)
    async with steady_run(config, tls=authority.client()) as run:
        (control,) = await dial(run.address.host, run.address.port, 0, tls=authority.client())
        await control.stream.send_all(encode_header(MessageType.HELLO, 2**40))
        with pytest.raises(LinkClosed):
            await control.read_header()
        await control.close()
    assert "HELLO of 1099511627776 bytes is not legal here" in caplog.text
