"""TLS as a learner meets it: the whole exchange over it, and what ends at once because no retry mends it."""

import numpy as np
import pytest
import trio
from fake_syncer import fake_syncer
from learner_fakes import eventually
from syncer_runs import make_config, running
from test_learner_client import seeded
from tls_authority import Authority

from yeto.wire.frames import MessageType, encode_header
from yeto.wire.messages import ErrorMessage


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls-of-others"))


async def test_a_whole_exchange(learn, authority):
    async with (
        fake_syncer(tls=authority.server(client_ca=authority)) as syncer,
        learn(syncer, free=True, tls=authority.client(authority.sign("learner-0"))) as run,
    ):
        link, inits = await seeded(syncer)
        link.pull(0, 1)
        head, delta = await link.expect("push")
        assert (head.step, delta.shape) == (1, inits[0].shape)
        final = [init + np.float32(1) for init in inits]
        link.final(1, [1, 0], final)
        assert await link.expect("ack") == 1
        link.shutdown()
        assert (await run.expect_end()).exit_code == 0


@pytest.mark.parametrize("case", ["authority", "name", "none", "client"])
async def test_what_no_retry_mends_ends_at_once(learn, authority, stranger, case):
    context, settings, told = {
        "authority": (authority.server(), {"tls": stranger.client()}, "--tls-ca must hold the CA"),
        "name": (authority.server("head.example"), {"tls": authority.client()}, "--tls-server-name"),
        "none": (
            authority.server(client_ca=authority),
            {"tls": authority.client()},
            "the syncer demands a client certificate; give --tls-cert and --tls-key",
        ),
        "client": (
            authority.server(client_ca=authority),
            {"tls": authority.client(stranger.sign("learner-0"))},
            "its --tls-client-ca must have signed it",
        ),
    }[case]
    async with fake_syncer(tls=context) as syncer, learn(syncer, **settings) as run:
        outcome = await run.expect_end()
        assert outcome.exit_code == 1
        assert told in outcome.reason
        assert "\n" not in outcome.reason
        # One dial, of a control and at most four data streams.
        assert syncer.accepted <= 1 + run.settings.wan_streams


async def test_a_syncer_without_tls_is_no_syncer_for_who_wants_it(learn, authority):
    async def answer(raw):
        await raw.receive_some()
        error = ErrorMessage(text="this syncer does not speak TLS").encode()
        await raw.send_all(encode_header(MessageType.ERROR, len(error)) + error)
        await raw.send_eof()
        while await raw.receive_some():
            pass

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        async with learn(None, address=address, tls=authority.client()) as run:
            outcome = await run.expect_end()
        nursery.cancel_scope.cancel()
    assert outcome.exit_code == 1
    assert "it does not speak TLS; start the syncer with --tls-cert and --tls-key, or leave" in outcome.reason


async def test_without_tls_at_a_tls_port_the_first_dial_hears_why(learn, authority, tmp_path, caplog):
    """However the end of four data streams and the ERROR on control race."""
    async with (
        running(make_config(tmp_path, tls=authority.server())) as syncer,
        learn(None, address=f"127.0.0.1:{syncer.address.port}", wan_streams=4) as run,
    ):
        outcome = await run.expect_end()
    assert outcome.exit_code == 1
    assert "refused by the syncer: this syncer speaks TLS only; give every learner --tls-ca" in outcome.reason
    assert caplog.text.count("speaks TLS only") == 1


async def test_another_name_than_the_address(learn, authority):
    async with (
        fake_syncer(tls=authority.server("head.example")) as syncer,
        learn(syncer, tls=authority.client(), tls_server_name="head.example"),
    ):
        await seeded(syncer)


async def test_after_a_good_connection_the_syncer_s_side_may_be_mended(learn, authority, stranger):
    good, bad = authority.server(), stranger.server()
    async with fake_syncer(tls=good) as syncer, learn(syncer, tls=authority.client()) as run:
        link, _ = await seeded(syncer)
        await eventually(lambda: run.gate.is_closed)
        syncer.tls = bad
        await link.drop()
        accepted = syncer.accepted
        await eventually(lambda: syncer.accepted >= accepted + 2)
        syncer.tls = good
        await syncer.connection()
    assert "certificate is not accepted" in run.output.getvalue()
