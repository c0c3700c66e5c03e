"""The door: strangers, malformed frames, wrong keys, other sessions. The run never notices."""

import logging
import math
import re

import attrs
import pytest
import trio
from dialled import dial
from fake_learner import BINDING, FakeLearner, small_layout
from syncer_runs import BOUNDS, HANGS_SECONDS, bodies, fakes, hurrying, make_config, on_tape, running, until

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.link import FrameStream
from yeto.syncer.config import merge_profile
from yeto.syncer.pump import Pump
from yeto.wire.frames import MAGIC, MessageType, encode_header
from yeto.wire.hello import HelloLayout
from yeto.wire.layout import FragmentLayout, Layout, MergeMode, TensorSpec
from yeto.wire.messages import DataHello, Heartbeat, PushHeader


async def raw_stream(run):
    return await trio.open_tcp_stream(run.address.host, run.address.port)


async def hung_up(stream, seconds=HANGS_SECONDS):
    """Wait until the other side has closed the stream."""
    with trio.fail_after(seconds):
        try:
            while await stream.receive_some(4096):
                pass
        except trio.BrokenResourceError:
            pass
    await stream.aclose()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        encode_header(MessageType.HELLO, 2**40),
        encode_header(MessageType.HEARTBEAT, 12) + bytes(12),
        encode_header(MessageType.HELLO, 40) + bytes(40),
        encode_header(MessageType.DATA_HELLO, 16) + bytes(16),
        MAGIC.to_bytes(4, "little") + b"\xff" + bytes(8),
    ],
    ids=["http", "2^40 bytes", "heartbeat first", "empty hello", "empty data hello", "unknown type"],
)
async def test_malformed_first_frames_cost_one_line(tmp_path, data, caplog):
    config = make_config(tmp_path, total_steps=3)
    async with running(config) as run:
        stream = await raw_stream(run)
        peer = "{}:{}".format(*stream.socket.getsockname())
        await stream.send_all(data)
        await hung_up(stream)
        for learner in fakes():
            run.join(learner)
        assert await run.end() == 0
    assert [peer in record.getMessage() for record in caplog.records].count(True) == 1


async def test_a_stranger_that_says_nothing_is_closed_in_time(tmp_path):
    config = make_config(tmp_path, bounds=attrs.evolve(BOUNDS, handshake_seconds=0.2))
    async with running(config) as run:
        await hung_up(await raw_stream(run))
        # A HELLO that never ends is no better than none.
        stream = await raw_stream(run)
        await stream.send_all(encode_header(MessageType.HELLO, 1 << 20) + bytes(1000))
        await hung_up(stream)


async def test_strangers_are_counted_and_keep_nobody_out(tmp_path):
    """One more than may be silent takes the place of the one that was silent longest."""
    bounds = attrs.evolve(BOUNDS, pending_handshakes=3, handshake_seconds=3600.0)
    config = make_config(tmp_path, bounds=bounds, total_steps=3)
    async with running(config) as run:
        quiet = [await raw_stream(run) for _ in range(5)]
        for stream in quiet[:2]:
            await hung_up(stream)
        for learner in fakes(num_streams=0):
            run.join(learner)
        assert await run.end() == 0
        for stream in quiet[2:]:
            await stream.aclose()


async def test_whoever_is_being_turned_away_takes_no_place_from_others(tmp_path, caplog):
    """It may read why at leisure, unless its place is needed."""
    config = make_config(tmp_path, auth_key=b"secret", bounds=attrs.evolve(BOUNDS, pending_handshakes=1))
    wrong = FakeLearner(learner=0, generation=7)
    async with running(config) as run:
        silent = await raw_stream(run)
        refused = FrameStream(await raw_stream(run))
        await hung_up(silent)
        await refused.send(MessageType.HELLO, wrong.hello().encode())
        assert (await refused.read_header()).type is MessageType.ERROR
        another = await raw_stream(run)
        await hung_up(refused.stream)
        await another.aclose()
    assert "did not say who it is before others came" in caplog.text
    assert "took its time to leave while others came" in caplog.text


async def test_when_nobody_can_be_done_without_the_newcomer_goes(tmp_path, caplog, monkeypatch):
    """A HELLO is with the coordinator: that one is no stranger any more, and not a group yet."""
    config = make_config(tmp_path, bounds=attrs.evolve(BOUNDS, pending_handshakes=1))
    asked, go_on = trio.Event(), trio.Event()
    ask = Pump.ask

    async def slowly(pump, event):
        asked.set()
        await go_on.wait()
        return await ask(pump, event)

    monkeypatch.setattr(Pump, "ask", slowly)
    async with running(config) as run:
        (learner,) = fakes(1, num_streams=0)
        run.join(learner)
        with trio.fail_after(HANGS_SECONDS):
            await asked.wait()
        await hung_up(await raw_stream(run))
        go_on.set()
        await until(on_tape(config, ev.LearnerJoined))
    assert "all places for newcomers (1) are taken" in caplog.text


async def test_whoever_waits_for_its_old_connection_takes_no_place_from_others(tmp_path, caplog, monkeypatch):
    """It has said who it is, and cannot be displaced: a fleet of them would keep everybody out."""
    bounds = attrs.evolve(BOUNDS, pending_handshakes=1, second_look_seconds=3600.0)
    config = make_config(tmp_path, bounds=bounds)
    looks, ended = [], FrameStream.ended

    async def look(stream):
        looks.append(stream)
        return await ended(stream)

    monkeypatch.setattr(FrameStream, "ended", look)
    first, other = fakes(num_streams=0)
    again = FakeLearner(learner=0, num_streams=0)
    async with running(config) as run:
        run.join(first)
        await until(on_tape(config, ev.LearnerJoined))
        run.join(again)
        await until(lambda: len(looks) > 4)
        run.join(other)
        await until(on_tape(config, ev.LearnerJoined, 2))
        await first.hang_up()
        assert await run.end() == 0
    assert (again.dials, other.dials) == (1, 1)
    assert "places" not in caplog.text


async def test_groups_of_more_streams_than_there_are_places_come_in(tmp_path, caplog):
    config = make_config(tmp_path, total_steps=3)
    learners = fakes(num_streams=100)
    async with running(config, *learners) as run:
        assert await run.end() == 0
    assert [learner.dials for learner in learners] == [1, 1]
    assert "places" not in caplog.text


async def test_a_group_that_never_completes_is_closed(tmp_path, skipping_clock):
    bounds = attrs.evolve(BOUNDS, silence_seconds=math.inf)
    config = make_config(tmp_path, bounds=bounds, start_timeout_seconds=1e9)
    learner = FakeLearner(learner=0, num_streams=2)
    async with running(config) as run:
        learner.generation = 7
        (control,) = await dial(run.address.host, run.address.port, 0)
        await control.send(MessageType.HELLO, learner.hello().encode())
        await until(on_tape(config, ev.HelloReceived))
        async with hurrying(skipping_clock, config.bounds.handshake_seconds):
            await hung_up(control.stream, math.inf)
        await until(on_tape(config, ev.LearnerLeft))
    (left,) = bodies(config.event_tape, ev.LearnerLeft)
    assert left.reason == "not all of its 2 data streams came in time"
    assert not bodies(config.event_tape, ev.LearnerJoined)


async def test_a_data_stream_joins_only_a_generation_that_said_hello(tmp_path, skipping_clock):
    config = make_config(tmp_path, start_timeout_seconds=1e9)
    async with running(config) as run:
        stream = FrameStream(await raw_stream(run))
        hello = DataHello(learner=0, generation=99, stream=1)
        await stream.send(hello.TYPE, hello.encode())
        async with hurrying(skipping_clock, config.bounds.handshake_seconds):
            await hung_up(stream.stream, math.inf)
    assert not bodies(config.event_tape, ev.Event)


async def test_the_right_key_opens_and_the_wrong_one_does_not(tmp_path):
    config = make_config(tmp_path, auth_key=b"secret", total_steps=3)
    wrong = FakeLearner(learner=0, key=b"guess")
    missing = FakeLearner(learner=1)
    async with running(config) as run:
        run.join(wrong)
        run.join(missing)
        await until(lambda: wrong.error and missing.error)
        assert not bodies(config.event_tape, ev.HelloReceived)
        for learner in fakes(key=b"secret"):
            run.join(learner)
        assert await run.end() == 0
    assert wrong.error == missing.error == "HELLO authentication failed"


async def test_a_syncer_that_asks_for_its_profile_says_it_and_takes_who_states_it(tmp_path, caplog):
    plain = make_config(tmp_path, total_steps=3)
    profile = merge_profile(plain.core)
    with caplog.at_level(logging.INFO, "yeto.syncer"):
        async with running(
            attrs.evolve(plain, core=attrs.evolve(plain.core, require_profile=profile))
        ) as run:
            assert f"learners must be started with --profile {profile}" in caplog.messages
            silent = FakeLearner(learner=1)
            run.join(silent)
            await until(lambda: silent.error)
            for learner in fakes(profile=bytes.fromhex(profile)):
                run.join(learner)
            assert await run.end() == 0
    assert silent.error.startswith(f"learner 1 states profile none, the session has {profile}")


async def test_a_template_that_differs_on_its_last_line_is_shown_there(tmp_path):
    learners = fakes(binding=BINDING | {"chat_template": "a" * 1000 + "old"})
    stranger = FakeLearner(learner=1, binding=BINDING | {"chat_template": "a" * 1000 + "new"})

    async def hold(learner, pull):
        if pull.step == 2:
            run.join(stranger)
            await until(lambda: stranger.error is not None)
        return True

    learners[0].before_push = hold
    async with running(make_config(tmp_path), *learners) as run:
        assert await run.end() == 0
    assert re.match(
        r"chat_template differs: the session has \.\.\.a{20}old', .* has \.\.\.a{20}new'", stranger.error
    )


@pytest.mark.parametrize("sends_manifest", [True, False])
async def test_another_contract_is_refused_with_the_field(tmp_path, sends_manifest):
    bounds = BOUNDS if sends_manifest else attrs.evolve(BOUNDS, manifest_seconds=0.2)
    config = make_config(tmp_path, bounds=bounds)
    learners = fakes()
    stranger = FakeLearner(learner=1, binding=BINDING | {"seed": 7}, sends_manifest=sends_manifest)
    held = trio.Event()

    async def hold(learner, pull):
        if pull.step == 2:
            held.set()
            await until(lambda: stranger.error is not None)
        return True

    learners[0].before_push = hold
    async with running(config, *learners) as run:
        await held.wait()
        run.join(stranger)
        assert await run.end() == 0
    if sends_manifest:
        assert stranger.error.startswith("seed differs: the session has 0, learner 1 has 7")
    else:
        assert "contract" in stranger.error
    # Nobody was locked out, and the one with the same id went on.
    assert learners[1].dials == 1


async def test_a_learner_with_another_dtype_is_named_while_learner_0_may_still_be_wrong(tmp_path):
    config = make_config(tmp_path)
    early = FakeLearner(learner=1, dtype="bf16")
    async with running(config, early) as run:
        await until(on_tape(config, ev.LearnerJoined))
        # Only the HELLO of learner 0, without its values: the session stays provisional.
        first = FakeLearner(learner=0, initial=[])
        run.join(first)
        await until(lambda: early.closed)
    assert early.error is None
    (refusal,) = bodies(config.event_tape, de.LearnerRefused)
    assert (refusal.field, refusal.permanent) == ("dtype", False)


async def test_sizes_that_do_not_fit_the_fingerprint_are_refused(tmp_path, caplog):
    """The fingerprint is a claim; memory is taken by the session's sizes only."""
    config = make_config(tmp_path, quorum=1, wait_for=1, total_steps=3)
    (steady,) = fakes(1)
    gone = trio.Event()

    async def hold(learner, pull):
        await gone.wait()
        return True

    steady.before_push = hold
    huge = Layout(
        fragments=tuple(
            FragmentLayout(mode=MergeMode.AVG, tensors=(TensorSpec(name=f"t{p}", shape=(1 << 30,)),))
            for p in range(3)
        )
    )
    async with running(config, steady) as run:
        await until(lambda: steady.pulls)
        lie = attrs.evolve(steady.hello(), learner=1, layout=HelloLayout.of(huge), num_streams=0)
        (control,) = await dial(run.address.host, run.address.port, 0)
        await control.send(MessageType.HELLO, lie.encode())
        await hung_up(control.stream)
        gone.set()
        assert await run.end() == 0
    assert "other sizes than the session" in caplog.text


async def test_speaking_for_another_learner_ends_the_group_only(tmp_path, caplog):
    config = make_config(tmp_path, quorum=1, wait_for=2, total_steps=4, final_ack_timeout_seconds=0.2)
    learners = fakes()

    async def impersonate(learner, pull):
        beat = Heartbeat(learner=0, local_step=10**6)
        learner.group.outbox.put_control(beat.TYPE, beat.encode())
        return False

    learners[1].before_push = impersonate
    async with running(config, *learners) as run:
        assert await run.end() == 3
    assert "HEARTBEAT: learner 0 on the connection of learner 1" in caplog.text
    assert all(beat.local_step < 10**6 for beat in bodies(config.event_tape, ev.Heartbeat))


async def test_a_push_of_the_wrong_size_ends_the_group_only(tmp_path, caplog):
    config = make_config(tmp_path, quorum=1, wait_for=2, total_steps=4, final_ack_timeout_seconds=0.2)
    learners = fakes()

    async def shrink(learner, pull):
        head, tensor = learner.push_message(pull, learner.anchor(pull.fragment))
        learner.group.outbox.put(head, tensor[:-8], order=(pull.step, pull.attempt))
        return False

    learners[1].before_push = shrink
    async with running(config, *learners) as run:
        assert await run.end() == 3
    assert "learner 1" in caplog.text
    assert "broke the protocol: PUSH_FRAGMENT" in caplog.text


async def test_pushes_nobody_asked_for_are_drained(tmp_path):
    config = make_config(tmp_path, total_steps=4)
    learners = fakes()

    async def also_push_nonsense(learner, pull):
        if pull.step == 1:
            head, tensor = learner.push_message(pull, 0)
            stray = PushHeader(**(attrs.asdict(head) | {"step": 1000}))
            learner.group.outbox.put(stray, tensor, order=(0,))
            # Or the true answer, being newer, would take its place.
            await until(lambda: ("out_of_round", 1000) in refused())
        return True

    def refused():
        refusals = bodies(config.event_tape, de.PushRefused)
        return {(refusal.reason, refusal.step) for refusal in refusals}

    learners[1].before_push = also_push_nonsense
    async with running(config, *learners) as run:
        assert await run.end() == 0
    assert ("out_of_round", 1000) in refused()


async def test_a_small_layout_is_what_the_fakes_use():
    assert [f.numel for f in small_layout().fragments] == [40, 58, 58]


async def test_a_learner_with_a_key_is_told_that_the_syncer_has_none(tmp_path):
    config = make_config(tmp_path, total_steps=3)
    keyed = FakeLearner(learner=0, key=b"secret")
    async with running(config) as run:
        run.join(keyed)
        await until(lambda: keyed.error)
        for learner in fakes():
            run.join(learner)
        assert await run.end() == 0
    assert "this syncer has no key" in keyed.error
    assert "--auth-key-file" in keyed.error


@pytest.mark.parametrize("change", ["binding", "layout"])
async def test_another_layout_is_refused_with_what_differs(tmp_path, change):
    config = make_config(tmp_path)
    learners = fakes()
    stranger = FakeLearner(
        learner=1,
        layout=small_layout(numel=48) if change == "binding" else small_layout(mode=MergeMode.AVG),
        binding=BINDING | ({"seed": 7} if change == "binding" else {}),
    )

    async def hold(learner, pull):
        if pull.step == 2:
            await until(lambda: stranger.error is not None)
        return True

    learners[0].before_push = hold
    async with running(config, *learners) as run:
        await until(lambda: learners[0].pulls)
        run.join(stranger)
        assert await run.end() == 0
    if change == "binding":
        assert stranger.error.startswith("seed differs: the session has 0, learner 1 has 7")
    else:
        assert "(rda)" in stranger.error
        assert "(avg)" in stranger.error


async def test_the_data_sockets_of_a_refused_learner_are_no_strangers(tmp_path, caplog, skipping_clock):
    config = make_config(tmp_path, total_steps=3)
    async with running(config) as run:
        stranger = FakeLearner(learner=5, num_streams=3)
        run.join(stranger)
        await until(lambda: stranger.closed)
        assert stranger.error
        skipping_clock.jump(config.bounds.handshake_seconds)
        for learner in fakes():
            run.join(learner)
        assert await run.end() == 0
    assert "did not say in time" not in caplog.text


async def test_values_of_any_length_are_told_in_a_sentence(tmp_path):
    """What differs may be a list of a thousand names, or spell a line of the log."""
    config = make_config(tmp_path)
    learners = fakes()
    stranger = FakeLearner(learner=1, binding=BINDING | {"targets\nlearner 0 left": ["q_proj"] * 10_000})

    async def hold(learner, pull):
        if pull.step == 2:
            await until(lambda: stranger.error is not None)
        return True

    learners[0].before_push = hold
    async with running(config, *learners) as run:
        await until(lambda: learners[0].pulls)
        run.join(stranger)
        assert await run.end() == 0
    assert stranger.error.startswith(
        "targets\\nlearner 0 left differs: the session has '(absent)', learner 1 has"
    )
    assert "start every learner of a run with the same model" in stranger.error
    assert len(stranger.error) < 1000
