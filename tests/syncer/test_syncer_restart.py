"""What a start says, and what it leaves alone, when it is refused or has nothing to do."""

import logging

import pytest
from syncer_runs import bodies, fakes, make_config, on_tape, running, until

from yeto.core import decisions as de
from yeto.core import events as ev
from yeto.errors import CheckpointError, ConfigError
from yeto.syncer.start import prepare
from yeto.tape import Decoder


def test_a_resume_without_a_checkpoint_leaves_nothing_behind(tmp_path):
    with (
        pytest.raises(CheckpointError, match="there is no checkpoint"),
        prepare(make_config(tmp_path, resume=True)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


async def test_a_refused_resume_does_not_even_repair_the_tape(tmp_path, caplog):
    config = make_config(tmp_path)
    async with running(config, *fakes()) as run:
        await until(on_tape(config, ev.CheckpointWritten, 3))
        run.stop()
    whole = config.event_tape.read_bytes()
    torn = whole + b'{"seq":'
    caplog.set_level(logging.INFO)
    config.event_tape.write_bytes(torn)
    refused = make_config(tmp_path, resume=True, total_steps=1)
    with pytest.raises(ConfigError, match="--total-steps 1"), prepare(refused):
        pass
    assert config.event_tape.read_bytes() == torn
    # What would have changed does not, and is not said.
    assert "settings changed" not in caplog.text
    with prepare(make_config(tmp_path, resume=True)):
        assert config.event_tape.read_bytes() == torn
    assert config.event_tape.read_bytes() == torn
    assert "ended in the middle of a record; it is cut back" in caplog.text
    async with running(make_config(tmp_path, resume=True), *fakes()) as run:
        assert await run.end() == 0
    assert config.event_tape.read_bytes().startswith(whole)


async def test_a_resume_names_what_is_restored_and_a_finished_run_says_that_it_is(tmp_path, caplog):
    config = make_config(tmp_path, total_steps=3)
    async with running(config, *fakes()) as run:
        assert await run.end() == 0
    caplog.set_level(logging.INFO)
    async with running(make_config(tmp_path, resume=True, total_steps=3)) as run:
        assert await run.end() == 0
    assert (
        "restored: step 3, parameters and momentum of 3 fragments, contributions of 2 learners" in caplog.text
    )
    assert "this run has ended: all 3 rounds are committed; to train on, give a higher" in caplog.text
    caplog.clear()
    async with running(
        make_config(tmp_path, resume=True, total_steps=4, grace_cap_seconds=0.1), *fakes()
    ) as run:
        assert await run.end() == 0
    assert "this run has ended" not in caplog.text
    assert (
        "grace_cap_seconds: 0.05 in the checkpoint, 0.1 now; total_steps: 3 in the checkpoint" in caplog.text
    )
    assert on_tape(config, de.RoundCommitted, 4)()


async def test_a_resume_reads_its_tape_once(tmp_path, monkeypatch):
    """It is read whole before anybody can connect, so a second pass would be waited for as well."""
    config = make_config(tmp_path)
    async with running(config, *fakes()) as run:
        await until(on_tape(config, de.RoundCommitted, 3))
        run.stop()
    records = len(bodies(config.event_tape))
    decoded, decode = [], Decoder.decode

    def counted(decoder, line):
        decoded.append(line)
        return decode(decoder, line)

    monkeypatch.setattr(Decoder, "decode", counted)
    with prepare(make_config(tmp_path, resume=True)):
        assert len(decoded) == records
