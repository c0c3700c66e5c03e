"""A learner that is killed and started again trains what it would have trained."""

import shutil
from pathlib import Path

import pytest
from attrs import evolve
from learner_fakes import config
from restarts import Lives, settings_in

from yeto.errors import ConfigError
from yeto.text.config import TextConfig
from yeto.text.task import build_task

STEPS = 12

SCRIPT = {
    0: [("pull", 0, 1, 1)],
    1: [("pull", 1, 2, 1)],
    2: [("broadcast", 0, 1)],
    3: [("broadcast", 1, 2), ("pull", 0, 3, 1)],
    5: [("broadcast", 0, 3), ("pull", 1, 4, 1)],
    6: [("pull", 0, 5, 1)],
    7: [("pull", 1, 4, 2)],
    8: [("broadcast", 1, 4), ("broadcast", 0, 5)],
    9: [("pull", 0, 7, 1), ("pull", 1, 6, 1)],
    11: [("broadcast", 0, 7)],
}
"""Rounds of two fragments: one after the other, overtaking, retried."""


@pytest.fixture
def text(fixtures, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return TextConfig(
        model=str(fixtures / "tiny-llama"),
        data=str(fixtures / "chat" / "train.jsonl"),
        seq_len=64,
        micro_batch_size=2,
        stream_workers=0,
        lora_r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        learner_id=1,
        num_learners=2,
    )


@pytest.fixture
def base():
    return config(
        output_dir=Path("unused"),
        learner_id=1,
        num_learners=2,
        max_local_steps=STEPS,
        warmup_steps=8,
        state_every=2,
        torch_threads=1,
    )


@pytest.fixture
def pair(text, base, tmp_path):
    """Return a function that makes two learners of the same settings."""

    def make(script=None, *, text=text, **changes):
        return [
            Lives(settings_in(tmp_path / name, base, **changes), lambda: build_task(text), script)
            for name in ("killed", "whole")
        ]

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"wire_dtype": "f32"},
        {"wire_dtype": "q4"},
        {"wire_dtype": "bf16", "merge_alpha": 0.0, "lr_schedule": "cosine"},
    ],
    ids=["f32", "q4-residuals", "bf16-overwrite-cosine"],
)
def test_three_kills_change_not_a_bit(pair, changes):
    """Weights, moments, losses, rates, rows and pushes, with dropout and with merges arriving all along."""
    killed, whole = pair(SCRIPT, **changes)
    assert whole.live().exit_code == 4
    for until in (3, 6, 9):
        assert killed.live(until=until) is None
    outcome = killed.live()
    assert outcome.exit_code == 4
    assert f"--max-local-steps {STEPS} reached" in outcome.reason
    said = killed.output.getvalue()
    assert [f"resumed at local step {step}" in said for step in (2, 6, 8)] == [True] * 3
    assert len(whole.pushes) >= 6
    killed.assert_as(whole)


def test_no_row_is_trained_twice_or_skipped(pair):
    """Rows by their hashes, through three kills: the learner's own trajectory has each where it belongs."""
    killed, whole = pair(syncer="none", max_local_steps=40, state_every=7)
    whole.live()
    for until in (3, 17, 30):
        killed.live(until=until)
    assert killed.live().exit_code == 0
    # What was done after the last saving is done again, and nothing else.
    assert killed.fetched == [*range(3), *range(17), *range(14, 30), *range(28, 40)]
    assert sorted(killed.rows) == list(range(40))
    killed.assert_as(whole)


def test_a_learner_goes_on_elsewhere_with_its_folder_and_anew_without(pair, tmp_path):
    """The same id on another machine: with a copy of its folder no row is lost or trained twice."""
    moved, whole = pair(syncer="none", state_every=1)
    whole.live()
    moved.live(until=5)
    for place in ("there", "without"):
        moved.settings = evolve(
            moved.settings, output_dir=tmp_path / place, state_dir=tmp_path / place / "state"
        )
        if place == "there":
            shutil.move(tmp_path / "killed" / "state", moved.settings.state_dir)
            assert moved.live().exit_code == 0
            assert moved.fetched == list(range(STEPS))
            moved.assert_as(whole)
    # Without it: from its first row on, in the same order.
    moved.rows.clear()
    moved.live(until=3)
    assert moved.fetched[STEPS:] == [0, 1, 2]
    assert moved.rows == {number: whole.rows[number] for number in range(3)}


def test_a_stop_saves_the_step_it_stops_at(pair):
    killed, whole = pair(SCRIPT, state_every=1000)
    whole.live()
    assert killed.live(stop_at=4).exit_code == 4
    assert (killed.settings.output_dir / "unmerged-1").is_dir()
    killed.live()
    assert "resumed at local step 4" in killed.output.getvalue()
    killed.assert_as(whole)


def test_without_a_kill_a_restart_at_the_end_says_so_and_saves_the_result_again(pair):
    lives, _ = pair(syncer="none")
    first = lives.live()
    again = lives.live()
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert lives.fetched == list(range(STEPS))
    assert f"resumed at local step {STEPS}" in lives.output.getvalue()


@pytest.mark.parametrize(
    ("changes", "text_changes", "message"),
    [
        ({"inner_lr": 0.5}, {}, r"saved with --inner-lr 0\.01, now it is 0\.5; give the same"),
        ({"learner_id": 0}, {"learner_id": 0}, "saved with --learner-id 1, now it is 0"),
        ({"warmup_steps": 0}, {}, "saved with --warmup-steps 8"),
        ({"lr_schedule": "cosine"}, {}, "saved with --lr-schedule constant"),
        ({"fragments": 1}, {}, "saved with what is trained .*--fragments"),
        ({"syncer": "none"}, {}, "saved with --syncer some, now it is none"),
        ({}, {"seed": 7}, "saved with seed 0, now it is 7"),
        ({}, {"lora_alpha": 16}, "saved with lora.alpha 8, now it is 16"),
        ({}, {"seq_len": 32}, "--seq-len 32: the saved position"),
    ],
)
def test_other_settings_are_refused_by_name(pair, text, changes, text_changes, message):
    lives, _ = pair({}, max_local_steps=2)
    lives.live()
    other, _ = pair({}, text=evolve(text, **text_changes), **({"max_local_steps": 4} | changes))
    with pytest.raises(ConfigError, match=message):
        other.live()


def test_a_longer_run_goes_on(pair):
    lives, _ = pair({}, max_local_steps=2)
    lives.live()
    longer, _ = pair({}, max_local_steps=4)
    longer.live()
    assert longer.fetched == [2, 3]
