import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from yeto.text.masks import Encoded
from yeto.text.packing import Packer


def rows_of(weights):
    """Return rows whose token ids are all different, so that every token can be found again."""
    rows, number = [], 1
    for row in weights:
        rows.append(Encoded.of(list(range(number, number + len(row))), list(row)))
        number += len(row)
    return rows


ROWS = st.lists(st.lists(st.sampled_from([0, 0, 1]), max_size=23), max_size=30).map(rows_of)
LENGTHS = st.integers(2, 9)


def pack(packer, rows):
    return [block for row in rows for block in packer.add(row)]


@given(rows=ROWS, seq_len=LENGTHS, documents=st.booleans(), windows=st.booleans())
def test_what_holds_for_every_block(rows, seq_len, documents, windows):
    packer = Packer(seq_len, documents=documents, windows=windows)
    blocks = pack(packer, rows)
    for block in blocks:
        assert block.ids.shape == block.weights.shape == block.positions.shape == (seq_len,)
        assert block.weights[0] == 0
        assert block.targets > 0
        assert block.positions[0] == 0
        steps = np.diff(block.positions)
        assert set(steps[block.positions[1:] != 0].tolist()) <= {1}
        assert documents or (steps == 1).all()
        if documents:
            assert not block.weights[block.positions == 0].any()
    assert sum(len(piece.ids) for piece in packer.carry) < seq_len
    assert packer.counts.blocks == len(blocks)
    assert packer.counts.rows == len(rows)


@given(rows=ROWS, seq_len=LENGTHS, documents=st.booleans(), windows=st.booleans())
def test_every_token_is_in_a_block_or_in_the_carry_or_counted(rows, seq_len, documents, windows):
    packer = Packer(seq_len, documents=documents, windows=windows)
    blocks = pack(packer, rows)
    kept = [token for block in blocks for token in block.ids.tolist()]
    kept += [token for piece in packer.carry for token in piece.ids.tolist()]
    assert len(set(kept)) == len(kept)
    total = sum(len(row.ids) for row in rows)
    assert len(kept) + packer.counts.dropped_tokens == total


@given(rows=ROWS, seq_len=LENGTHS, documents=st.booleans(), windows=st.booleans())
def test_a_target_keeps_its_token_and_its_predecessor(rows, seq_len, documents, windows):
    """A target of a block was supervised in its row and, with documents, follows its row's own token."""
    packer = Packer(seq_len, documents=documents, windows=windows)
    weight_of = {int(t): int(w) for row in rows for t, w in zip(row.ids, row.weights, strict=True)}
    first_of_row = {int(row.ids[0]) for row in rows if len(row.ids)}
    for block in pack(packer, rows):
        for place in np.flatnonzero(block.weights):
            token = int(block.ids[place])
            assert weight_of[token] == 1
            if documents:
                assert token not in first_of_row
                assert block.ids[place - 1] == token - 1


@given(rows=ROWS, seq_len=LENGTHS, documents=st.booleans(), windows=st.booleans(), cut=st.integers(0, 30))
def test_a_restored_carry_goes_on_alike(rows, seq_len, documents, windows, cut):
    whole = Packer(seq_len, documents=documents, windows=windows)
    first = Packer(seq_len, documents=documents, windows=windows)
    second = Packer(seq_len, documents=documents, windows=windows)
    expected = pack(whole, rows)
    blocks = pack(first, rows[:cut])
    second.restore(first.carry)
    blocks += pack(second, rows[cut:])
    assert [block.ids.tolist() for block in blocks] == [block.ids.tolist() for block in expected]
    assert [block.weights.tolist() for block in blocks] == [block.weights.tolist() for block in expected]


def test_windows_of_a_long_row_and_its_tail():
    # 11 tokens, windows of 4: the second has no target and is dropped, the tail goes on in the carry.
    packer = Packer(4, documents=True, windows=True)
    (row,) = rows_of([[0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]])
    (block,) = packer.add(row)
    assert block.ids.tolist() == [1, 2, 3, 4]
    assert block.weights.tolist() == [0, 0, 1, 1]
    assert [piece.ids.tolist() for piece in packer.carry] == [[9, 10, 11]]
    assert packer.counts.dropped_windows == 1
    assert packer.counts.dropped_tokens == 4


def test_a_reply_cut_by_a_window_is_supervised_in_both_parts():
    packer = Packer(4, documents=True, windows=True)
    (row,) = rows_of([[0, 0, 0, 1, 1, 1, 1, 1]])
    first, second = packer.add(row)
    assert first.weights.tolist() == [0, 0, 0, 1]
    # The first token of a window has nothing before it to be predicted from.
    assert second.weights.tolist() == [0, 1, 1, 1]


def test_documents_share_a_block_with_positions_of_their_own():
    packer = Packer(6, documents=True, windows=True)
    first, second = rows_of([[0, 1, 1, 1], [0, 1, 1, 1]])
    assert packer.add(first) == []
    (block,) = packer.add(second)
    assert block.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert block.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert block.weights.tolist() == [0, 1, 1, 1, 0, 1]
    assert [piece.ids.tolist() for piece in packer.carry] == [[7, 8]]


def test_plain_packing_runs_on():
    packer = Packer(6, documents=False, windows=False)
    first, second = rows_of([[1] * 4, [1] * 4])
    assert packer.add(first) == []
    (block,) = packer.add(second)
    assert block.positions.tolist() == list(range(6))
    assert block.weights.tolist() == [0, 1, 1, 1, 1, 1]


def test_a_tail_whose_only_target_is_its_first_token_is_dropped_with_documents():
    (row,) = rows_of([[1, 0]])
    apart, joined = (Packer(4, documents=documents, windows=True) for documents in (True, False))
    assert apart.add(row) == []
    assert joined.add(row) == []
    assert apart.carry == ()
    assert apart.counts.dropped_windows == 1
    assert len(joined.carry) == 1


@pytest.mark.parametrize("windows", [True, False])
def test_an_empty_row_is_nothing(windows):
    packer = Packer(4, documents=True, windows=windows)
    assert packer.add(Encoded.of([], [])) == []
    assert packer.carry == ()
    assert packer.counts.dropped_windows == 0
