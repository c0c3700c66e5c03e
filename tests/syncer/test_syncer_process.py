"""Signals, ports, addresses: how the process begins and how it ends."""

import contextlib
import functools
import json
import os
import signal
import socket
import stat
import subprocess
import sys

import attrs
import pytest
import trio
from fake_learner import small_layout
from resolver import Resolver
from syncer_runs import HANGS_SECONDS, bodies, fakes, make_config, on_tape, running, until, verify

from yeto.cli.main import main
from yeto.core import CoreConfig
from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import ConfigError
from yeto.state import read_checkpoint
from yeto.syncer.app import listen, serve, write_ready_file
from yeto.syncer.config import SyncerConfig, merge_profile


def command(folder, *flags):
    return [
        sys.executable, "-m", "yeto", "run", "--role", "syncer", "--learners", "2", "--total-steps", "500",
        "--port", "0", "--ready-file", str(folder / "ready.json"), "--sync-interval-steps", "0",
        "--checkpoint-path", str(folder / "state.ckpt"), "--event-tape", str(folder / "events.jsonl"), *flags,
    ]  # fmt: skip


async def test_killed_resumed_and_stopped_as_a_process(tmp_path):
    """SIGKILL, then a second process that goes on, then SIGTERM: exit 4, and files that agree."""
    ready = tmp_path / "ready.json"
    learners = fakes(layout=small_layout())

    async def keep_dialling(learner):
        while not learner.released and learner.error is None:
            if ready.exists():
                address = json.loads(ready.read_text())
                with contextlib.suppress(FileNotFoundError):
                    await learner.run(address["host"], address["port"])
            await trio.sleep(0.03)

    async def answered(process, count):
        await until(lambda: process.poll() is not None or min(len(k.pushes) for k in learners) >= count)
        assert process.poll() is None

    async with trio.open_nursery() as nursery:
        for learner in learners:
            nursery.start_soon(keep_dialling, learner)
        first = await trio.lowlevel.open_process(command(tmp_path))
        await answered(first, 5)
        assert json.loads(ready.read_text())["pid"] == first.pid
        first.kill()
        assert await first.wait() == -signal.SIGKILL
        ready.unlink()
        pushed = len(learners[0].pushes)

        second = await trio.lowlevel.open_process(command(tmp_path, "--resume"), stderr=subprocess.PIPE)
        await answered(second, pushed + 8)
        second.send_signal(signal.SIGTERM)
        with trio.fail_after(HANGS_SECONDS):
            assert await second.wait() == 4
        said = (await second.stderr.receive_some(1 << 20)).decode()
        await second.stderr.aclose()
        nursery.cancel_scope.cancel()

    assert "SIGTERM: stopping in order" in said
    assert "start again with --resume" in said
    assert said.count("resumed at step") == 1
    state = verify(tmp_path / "events.jsonl").state
    assert state.step == read_checkpoint(tmp_path / "state.ckpt").step > 0
    assert not any(learner.released for learner in learners)


async def test_the_first_signal_asks_and_the_second_ends_at_once(tmp_path, monkeypatch):
    """A learner holds its answer, so the stop waits for the quorum, here for as long as a grace."""
    codes = []
    monkeypatch.setattr("yeto.syncer.app.os._exit", codes.append)
    config = make_config(tmp_path, grace_cap_seconds=60.0, stop_budget_seconds=600.0)
    learners = fakes()

    async def never(learner, pull):
        await trio.sleep_forever()

    learners[1].before_push = never
    async with trio.open_nursery() as nursery:
        address = await nursery.start(functools.partial(serve, config, watch_signals=True))
        for learner in learners:
            nursery.start_soon(learner.run, address.host, address.port)
        await until(lambda: learners[1].pulls)
        signal.raise_signal(signal.SIGINT)
        await until(on_tape(config, ev.StopRequested))
        assert codes == []
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: codes)
        nursery.cancel_scope.cancel()
    assert codes == [130]
    (asked,) = bodies(config.event_tape, ev.StopRequested)[:1]
    assert asked.signal == "SIGINT"
    verify(config.event_tape)


async def test_start_timeout_without_a_quorum_is_an_error_that_says_so(tmp_path):
    config = make_config(tmp_path, start_timeout_seconds=0.2)
    async with running(config) as run:
        assert await run.end() == 1
    (ended,) = bodies(config.event_tape, de.SessionEnded)
    assert "learner 0" in ended.why


async def test_the_log_says_whom_the_run_waits_for(tmp_path, caplog):
    caplog.set_level("INFO", "yeto.syncer")
    config = make_config(tmp_path)
    async with running(config, *fakes(1)):
        await until(on_tape(config, ev.CheckpointWritten))
        await until(lambda: "waiting for 1 of 2: learner 1" in caplog.text)


async def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: in use on 127\.0\.0\.1; .*--port 0"):
            await listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen there"):
        await listen("192.0.2.1", 0)


async def test_port_0_is_one_number_for_every_address_of_the_host():
    """As of the families of one name, of which IPv6 may be missing here."""
    trio.socket.set_custom_hostname_resolver(Resolver("127.0.0.1", "127.0.0.2"))
    listeners = await listen("syncer.example", 0)
    assert [listener.socket.getsockname()[0] for listener in listeners] == ["127.0.0.1", "127.0.0.2"]
    assert len({listener.socket.getsockname()[1] for listener in listeners}) == 1
    for listener in listeners:
        await listener.aclose()


def test_the_ready_file_appears_whole(tmp_path):
    path = tmp_path / "ready.json"
    write_ready_file(path, "127.0.0.1", 4711)
    assert json.loads(path.read_text()) == {"host": "127.0.0.1", "port": 4711, "pid": os.getpid()}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="--ready-file"):
        write_ready_file(tmp_path / "missing" / "ready.json", "::1", 1)


CORE = CoreConfig(num_learners=2, total_steps=6, quorum=2, wait_for=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "--auth-key-file"),
        ({"host": "example.org"}, "--allow-unauthenticated"),
        ({"port": 70000}, "--port 70000"),
        ({"keep_every": -1}, "--keep-every -1"),
        ({"resume_wait_for": 1}, "--wait-for 1"),
        ({"auth_key": b""}, "yeto keys new"),
        ({"iso_backend": "torch-svd"}, "--iso-backend torch-svd"),
        ({"core": attrs.evolve(CORE, quorum=3)}, "--quorum 3"),
    ],
)
def test_impossible_settings_name_their_flag(settings, message):
    with pytest.raises(ConfigError, match=message):
        SyncerConfig(**({"core": CORE} | settings)).validated()


def test_who_may_be_reached_without_a_key():
    for settings in (
        {"host": "127.0.0.1"},
        {"host": "::1"},
        {"host": "localhost"},
        {"host": "0.0.0.0", "auth_key": b"secret"},
        {"host": "0.0.0.0", "allow_unauthenticated": True},
    ):
        SyncerConfig(core=CORE, **settings).validated()
    assert "secret" not in repr(SyncerConfig(core=CORE, auth_key=b"secret"))


def test_a_profile_names_what_changes_the_merges():
    assert merge_profile(CORE) == merge_profile(attrs.evolve(CORE, total_steps=9, start_timeout_seconds=1.0))
    assert merge_profile(CORE) != merge_profile(attrs.evolve(CORE, outer_lr=0.5))


def run_main(tokens, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["run", "--role", "syncer", *tokens])
    captured = capsys.readouterr()
    return exit.value.code, captured.out, captured.err


def test_command_line_errors_are_one_line(tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o644)
    cases = {
        ("--learners", "2"): "total-steps",
        ("--learners", "2", "--total-steps", "4", "--quorum", "3"): "--quorum 3",
        ("--learners", "2", "--total-steps", "4", "--host", "0.0.0.0"): "--auth-key-file",
        ("--learners", "2", "--total-steps", "4", "--auth-key-file", str(key)): "chmod 600",
        ("--learners", "2", "--total-steps", "4", "--budget-finish"): "--resume",
        ("--learners", "2", "--total-steps", "4", "--resume", "--resume-or-start"): "--resume-or-start",
    }
    for tokens, word in cases.items():
        code, out, err = run_main(tokens, capsys)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert word in err
    assert stat.S_IMODE(key.stat().st_mode) == 0o644


def test_flags_become_the_config(tmp_path):
    from yeto.cli.run_syncer import SyncerFlags

    config = SyncerFlags(
        learners=5,
        total_steps=40,
        grace_ms=250.0,
        min_round_interval_ms=100.0,
        quorum_timeout_s=60.0,
        require_profile_binding=True,
    ).config()
    core = config.core
    assert (core.quorum, core.wait_for, config.resume_wait_for) == (3, 5, None)
    assert (core.grace_cap_seconds, core.min_round_interval_seconds) == (0.25, 0.1)
    assert core.final_ack_timeout_seconds == 60.0
    assert core.require_profile == merge_profile(core)
    for learners, quorum in ((1, 1), (2, 2), (3, 2), (4, 3)):
        assert SyncerFlags(learners=learners, total_steps=1).config().core.quorum == quorum
