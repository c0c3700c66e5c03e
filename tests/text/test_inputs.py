import pytest

from yeto.errors import ConfigError
from yeto.text.config import TextConfig
from yeto.text.inputs import hold_out
from yeto.tuning.rows import Cursor, open_source


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (1, "all of them; name other rows"),
        (3, "all of them; give --eval-rows 1, or"),
        (60, "all of them; give --eval-rows 15, or"),
    ],
)
def test_too_few_rows_to_hold_out_name_a_number_that_works(tmp_path, tiny, rows, remedy):
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n' * rows)
    config = TextConfig(model=tiny, data=str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=f"{rows} rows, and --eval-rows 64 would hold out {remedy}"):
        hold_out(config, tmp_path / "out")


def test_the_last_rows_are_held_out_and_all_are_read_as_they_were_given(tmp_path, tiny):
    rows = [f'{{"question": "{number}", "answer": "\u2028é"}}\n' for number in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    config = TextConfig(model=tiny, data=str(tmp_path / "rows.jsonl"), eval_rows=2)
    train, heldout = hold_out(config, tmp_path / "out")
    assert train.read_text(encoding="utf-8") == "".join(rows[:3])
    assert heldout.read_text(encoding="utf-8") == "".join(rows[3:])


def test_half_a_character_that_no_format_reads_is_split_off_as_it_is(tmp_path, tiny):
    row = '{"question": "a", "answer": "\\\\ud800 é", "note": "\\ud800 é"}\n'
    (tmp_path / "rows.jsonl").write_text(row * 2, encoding="utf-8")
    [read, _] = open_source(str(tmp_path / "rows.jsonl")).rows(Cursor())
    config = TextConfig(model=tiny, data=str(tmp_path / "rows.jsonl"), eval_rows=1)
    for part in hold_out(config, tmp_path / "out"):
        [again] = open_source(str(part)).rows(Cursor())
        assert again.value == read.value
