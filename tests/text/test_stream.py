import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter, deque
from contextlib import closing
from itertools import islice, product

import psutil
import pytest
from attrs import evolve
from text_helpers import chat

from yeto.cli.length import tokens_of_rows
from yeto.errors import ConfigError, DataError
from yeto.text.config import TextConfig
from yeto.text.evaluate import heldout_rows
from yeto.text.loader import (
    BlockLoader,
    LoaderState,
    _in_turns,
    _Item,
    _messages,
    _share_cores,
    open_stream,
)
from yeto.text.masks import Encoded
from yeto.text.packing import Block, Packer, PackingCounts
from yeto.text.stream import (
    ENCODE_ROWS,
    ENCODE_TOKENS,
    Position,
    Produced,
    RowEncoder,
    stream_blocks,
)
from yeto.text.task import build_task
from yeto.text.tokenizer import load_tokenizer
from yeto.tuning import rows as rows_module
from yeto.tuning.rows import Cursor, Row, TableSource, open_source
from yeto.tuning.share import Share, data_seed, share_of


class Numbers:
    """A source of ``count`` rows that counts how many were read."""

    name = "numbers"

    def __init__(self, count):
        self.count = count
        self.read = 0

    def rows(self, start, wanted=None):
        for row in range(start.row, self.count):
            if wanted is None or row in wanted:
                self.read += 1
                yield Row(index=row, value={}, origin=f"row {row}", after=Cursor(row=row + 1))


def encode(rows):
    """Give row i the token i + 1, as often as the row is long, and supervise all of it."""
    lengths = [3 + row.index % 9 for row in rows]
    return [
        Encoded.of([row.index + 1] * length, [1] * length) for row, length in zip(rows, lengths, strict=True)
    ]


def stream(count, share=None, position=None, *, buffer=64, seed=0, source=None):
    source = source or Numbers(count)
    packer = Packer(6, documents=True, windows=True)
    return stream_blocks(
        source, share or Share(), encode, packer, seed=seed, shuffle_buffer=buffer, position=position
    )


def tokens(produced):
    return [one.block.ids.tolist() for one in produced]


@pytest.mark.parametrize(
    ("learners", "ranks", "workers"), [(1, 1, 1), (3, 1, 1), (4, 2, 1), (2, 3, 2), (5, 1, 3)]
)
def test_shares_are_disjoint_and_complete(learners, ranks, workers):
    seen = Counter()
    for learner in range(learners):
        for rank in range(ranks):
            for worker in range(workers):
                share = Share().part(learner, learners).part(rank, ranks).part(worker, workers)
                rows = [row.index for row in Numbers(97).rows(Cursor(), share.rows())]
                assert all(row % learners == learner for row in rows)
                seen.update(rows)
    assert seen == Counter(range(97))


def test_a_rank_of_one_group_has_the_rows_and_the_seed_of_its_twin_in_an_island():
    """Rank m + M * r of one group of M * G ranks is rank r of learner m of M islands of G ranks."""
    for learner in range(3):
        for rank in range(2):
            island = TextConfig(model="m", learner_id=learner, num_learners=3, rank=rank, num_ranks=2, seed=7)
            group = TextConfig(model="m", rank=learner + 3 * rank, num_ranks=6, seed=7)
            assert share_of(island) == share_of(group)
            assert data_seed(island) == data_seed(group)


def test_learners_with_files_of_their_own_read_all_of_them():
    assert share_of(TextConfig(model="m", learner_id=1, num_learners=3, data_shard="off")) == Share()


@pytest.mark.parametrize("buffer", [1, 5, 64])
def test_each_epoch_has_every_row_once_in_another_order(buffer):
    epochs = {}
    for one in stream(40, buffer=buffer):
        if one.position.epoch == 2:
            break
        epochs.setdefault(one.position.epoch, []).append(one.block)
    for epoch in (0, 1):
        counts = Counter(token for block in epochs[epoch] for token in block.ids.tolist())
        # All tokens but those that the carry takes over the epoch's two ends.
        whole = Counter({row + 1: 3 + row % 9 for row in range(40)})
        assert sum(((whole - counts) + (counts - whole)).values()) < 12
    if buffer > 1:
        assert tokens_of(epochs[0]) != tokens_of(epochs[1])


def tokens_of(blocks):
    return [block.ids.tolist() for block in blocks]


def test_the_order_depends_on_the_seed_and_on_nothing_else():
    first = tokens(islice(stream(40), 60))
    assert tokens(islice(stream(40), 60)) == first
    assert tokens(islice(stream(40, seed=1), 60)) != first


@pytest.mark.parametrize("after", [0, 1, 2, 7, 24, 25, 26, 27, 60, 99])
def test_a_stream_goes_on_from_any_position(after):
    produced = list(islice(stream(40, buffer=16), 140))
    position = produced[after].position
    rest = tokens(islice(stream(40, buffer=16, position=position), 139 - after))
    assert rest == tokens(produced[after + 1 :])


def test_coming_back_costs_a_window_and_not_the_epoch():
    last = None
    for one in islice(stream(5000, buffer=32), 4000):
        last = one
    assert last.position.start.row > 2500
    source = Numbers(5000)
    next(stream(5000, buffer=32, position=last.position, source=source))
    assert source.read <= 32


def test_a_stop_in_the_second_epoch_comes_back_to_the_same_row():
    """The next hundred blocks, from each of several places in the second and third epoch."""
    produced = list(islice(stream(200, buffer=32), 700))
    places = [place for place, one in enumerate(produced[:600]) if one.position.epoch in (1, 2)]
    assert {produced[place].position.epoch for place in places} == {1, 2}
    for place in places[::37]:
        rest = tokens(islice(stream(200, buffer=32, position=produced[place].position), 100))
        assert rest == tokens(produced[place + 1 : place + 101])


MILLION = 10**6
NEAR_THE_END = MILLION - 2_000


class Counted:
    """A reader that counts what is asked of it."""

    def __init__(self, thing):
        self._thing = thing
        self.read_bytes = 0

    def __getattr__(self, name):
        return getattr(self._thing, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._thing.close()

    def read(self, *size):
        found = self._thing.read(*size)
        self.read_bytes += len(found)
        return found


def resumed_near_the_end(source, start):
    """Take a block of a run that goes on in its third epoch; return the rows that were tokenized for it."""
    encoded = []

    def noted(rows):
        encoded.extend(row.index for row in rows)
        return encode(rows)

    position = Position(epoch=2, window=9000, start=start, taken=5)
    packer = Packer(6, documents=True, windows=True)
    next(stream_blocks(source, Share(), noted, packer, seed=0, shuffle_buffer=64, position=position))
    return encoded


def test_coming_back_behind_a_million_lines_reads_none_of_them(tmp_path, monkeypatch):
    line = b'{"a": 1}\n'
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line * MILLION)
    files = []
    source = open_source(str(path))
    opened = source._fs.open

    def counted(*args, **options):
        files.append(Counted(opened(*args, **options)))
        return files[-1]

    monkeypatch.setattr(source._fs, "open", counted)
    start = Cursor(row=NEAR_THE_END, byte=NEAR_THE_END * len(line), line=NEAR_THE_END)
    rows = resumed_near_the_end(source, start)
    assert min(rows) >= NEAR_THE_END
    assert max(rows) < NEAR_THE_END + 64
    (file,) = files
    assert file.read_bytes <= rows_module.CHUNK_BYTES


def test_coming_back_behind_a_million_rows_of_parquet_reads_one_group(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"a": range(MILLION)})
    pyarrow.parquet.write_table(table, path, row_group_size=4000)
    groups = []
    batches = pyarrow.parquet.ParquetFile.iter_batches

    def noted(self, size, row_groups):
        groups.extend(row_groups)
        return batches(self, size, row_groups=row_groups)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", noted)
    start = Cursor(row=NEAR_THE_END, byte=NEAR_THE_END)
    rows = resumed_near_the_end(open_source(str(path)), start)
    assert min(rows) >= NEAR_THE_END
    assert groups == [NEAR_THE_END // 4000]


def test_coming_back_behind_a_million_rows_of_a_table_asks_for_a_window():
    asked = []

    class Table:
        def __len__(self):
            return MILLION

        def __getitem__(self, row):
            asked.append(row)
            return {"a": row}

    rows = resumed_near_the_end(TableSource("table", Table()), Cursor(row=NEAR_THE_END))
    assert min(rows) >= NEAR_THE_END
    assert asked == list(range(NEAR_THE_END, NEAR_THE_END + 64))


def test_the_first_block_needs_few_rows():
    source = Numbers(100_000)
    next(stream(0, buffer=1024, source=source))
    assert source.read <= 16


@pytest.mark.parametrize(("length", "most"), [(10, ENCODE_ROWS), (1000, ENCODE_TOKENS // 1000), (50_000, 1)])
def test_long_rows_are_tokenized_a_few_at_a_time(length, most):
    together = []

    def noted(rows):
        together.append(len(rows))
        return [Encoded.of([1] * length, [1] * length)] * len(rows)

    packer = Packer(64, documents=True, windows=True)
    produced = stream_blocks(Numbers(2000), Share(), noted, packer, seed=0, shuffle_buffer=1024)
    for one in produced:
        if one.position.epoch > 0 or len(together) > 40:
            break
    assert together[0] == 4
    assert max(together[1:]) == max(most, 1)


def test_an_epoch_without_a_block_or_a_target_ends_the_stream():
    def silent(rows):
        return [Encoded.of([1] * 9, [0] * 9)] * len(rows)

    packer = Packer(4, documents=True, windows=True)
    (end,) = stream_blocks(Numbers(5), Share(), silent, packer, seed=0, shuffle_buffer=8)
    assert end.block is None
    assert end.counts.rows == 5
    assert end.counts.dropped_tokens == 45


def test_rows_too_short_for_a_block_are_collected_over_epochs():
    assert len(tokens(islice(stream(1), 3))) == 3


# The loader, on real rows.


def blocks(config, count, state=None):
    iterator = iter(BlockLoader(config, load_tokenizer(config), state))
    taken = [block.ids.tolist() for block in islice(iterator, count)]
    iterator.close()
    return taken


def test_preloading_gives_the_blocks_of_streaming_and_shows_how_far_it_is(config, capsys):
    expected = blocks(config, 40)
    capsys.readouterr()
    assert blocks(evolve(config, tokenize="preload"), 40) == expected
    shown = capsys.readouterr().err
    assert "tokenizing rows" in shown
    assert "tokenizing rows 400 " in shown


def test_closing_a_loader_ends_its_thread(config):
    before = threading.active_count()
    blocks(config, 3)
    assert threading.active_count() == before


def test_a_loader_goes_on_from_its_state(config):
    loader = BlockLoader(config, load_tokenizer(config))
    iterator = iter(loader)
    expected = [next(iterator).ids.tolist() for _ in range(30)]
    state = loader.state
    expected = [next(iterator).ids.tolist() for _ in range(30)]
    iterator.close()
    assert blocks(config, 30, state) == expected


@pytest.mark.timeout(600)
def test_worker_processes_take_turns_and_go_on(config):
    """Two workers give one block each in turn, in the order of their two streams, from any state."""
    config = evolve(config, stream_workers=2)
    tokenizer = load_tokenizer(config)
    start = LoaderState(positions=(Position(), Position()))
    streams = [
        open_stream(config, tokenizer, share_of(config).part(worker, 2), start, worker) for worker in (0, 1)
    ]
    expected = [next(streams[turn % 2]).block.ids.tolist() for turn in range(13)]
    loader = BlockLoader(config, tokenizer)
    iterator = iter(loader)
    assert [next(iterator).ids.tolist() for _ in range(7)] == expected[:7]
    state = loader.state
    iterator.close()
    assert state.turn == 1
    assert blocks(config, 6, state) == expected[7:]


def items(stream, count, *, ends):
    """Make a stream's items, each known by its number of rows; the last one ends it or is a block."""
    for number in range(count):
        last = ends and number == count - 1
        block = None if last else Block(ids=None, weights=None, positions=None)
        counts = PackingCounts(rows=number)
        yield _Item(stream=stream, produced=Produced(block=block, position=Position(), counts=counts))


def taken_in_turn(streams, turn):
    """Put items into messages, send those as the loader does, and give them out in turn."""
    waiting = deque((number, _messages(some, 8)) for number, some in enumerate(streams))
    waiting.rotate(-turn)
    sent = []
    while waiting:
        number, messages = waiting.popleft()
        if message := next(messages, None):
            sent.append(message)
            waiting.append((number, messages))
    return [(one.stream, one.produced.counts.rows) for one in _in_turns(iter(sent), len(streams), turn)]


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_streams_take_turns_until_each_has_ended(turn):
    lengths = (5, 1, 40)
    given = taken_in_turn([items(stream, count, ends=True) for stream, count in enumerate(lengths)], turn)
    order = [(turn + place) % 3 for place in range(3)]
    assert given == [(stream, number) for number in range(40) for stream in order if number < lengths[stream]]


def test_messages_grow_from_one_block_to_a_limit_and_hold_a_failure_last():
    def failing():
        yield from items(0, 20, ends=False)
        yield _Item(stream=0, failure="bad row")

    messages = list(_messages(failing(), 8))
    assert [len(message) for message in messages] == [1, 2, 4, 8, 6]
    assert [one.is_last for message in messages for one in message] == [False] * 20 + [True]


@pytest.mark.parametrize(
    ("cores", "workers", "before", "after"),
    [
        (8, 2, {}, {"RAYON_NUM_THREADS": "4"}),
        (2, 2, {}, {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}),
        (2, 3, {}, {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}),
        (8, 2, {"RAYON_NUM_THREADS": "3"}, {"RAYON_NUM_THREADS": "3"}),
        (
            2,
            2,
            {"TOKENIZERS_PARALLELISM": "true"},
            {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"},
        ),
    ],
)
def test_tokenizers_of_workers_share_the_cores_unless_told_otherwise(
    monkeypatch, cores, workers, before, after
):
    environment = dict(before)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    _share_cores(workers)
    assert environment == after


def test_a_failing_worker_says_only_what_is_wrong(config, write_rows):
    path = write_rows([{"messages": [{"role": "robot", "content": "x"}]}] * 2)
    with pytest.raises(DataError) as caught:
        blocks(evolve(config, data=path, stream_workers=1), 1)
    assert str(caught.value).startswith("rows.jsonl line 1: message 0: role 'robot'")


@pytest.mark.parametrize(("learners", "ranks", "workers"), [(3, 1, 1), (2, 2, 2), (3, 2, 2)])
def test_rows_tokenized_by_all_processes_do_not_meet(
    config, write_rows, monkeypatch, learners, ranks, workers
):
    """Hash what each process tokenizes in its first epoch: no row twice, and together they are the file."""
    rows = [chat(f"question {number}", f"answer {number} " * 9) for number in range(61)]
    path = write_rows(rows)
    hashes = []
    many = RowEncoder.many

    def noted(self, some):
        hashes.extend(hashlib.sha256(json.dumps(row.value).encode()).hexdigest() for row in some)
        return many(self, some)

    monkeypatch.setattr(RowEncoder, "many", noted)
    tokenizer = load_tokenizer(config)
    start = LoaderState(positions=(Position(),) * workers)
    for learner, rank, worker in product(range(learners), range(ranks), range(workers)):
        mine = evolve(
            config, data=path, learner_id=learner, num_learners=learners, rank=rank, num_ranks=ranks
        )
        share = share_of(mine).part(worker, workers)
        before = len(hashes)
        # Windows of one epoch are tokenized before the next epoch begins.
        for produced in open_stream(mine, tokenizer, share, start, worker):
            if produced.position.epoch > 0:
                break
        del hashes[before + sum(row in share.rows() for row in range(61)) :]
    assert len(hashes) == 61
    assert len(set(hashes)) == 61


def test_whoever_reads_rows_one_after_the_other_has_them_tokenized_together(config, write_rows, monkeypatch):
    """Held-out rows and the tokens of an epoch: row by row they would take many times as long."""
    rows = ENCODE_ROWS + 3
    path = write_rows([chat(f"Question {row}.", f"Answer {row % 7}.") for row in range(rows)])
    config = evolve(config, data=path, eval_data=path, eval_rows=rows)
    tokenizer, together, many = load_tokenizer(config), [], RowEncoder.many
    one_by_one = [RowEncoder(config, tokenizer)(row) for row in open_source(path).rows(Cursor())]

    def noted(self, some):
        together.append(len(some))
        return many(self, some)

    monkeypatch.setattr(RowEncoder, "many", noted)
    found = heldout_rows(config, tokenizer)
    assert [row.ids.tolist() for row in found] == [row.ids.tolist() for row in one_by_one]
    assert [row.weights.tolist() for row in found] == [row.weights.tolist() for row in one_by_one]
    assert tokens_of_rows(config) == sum(len(row.ids) for row in one_by_one)
    assert together == 2 * [ENCODE_ROWS, 3]


def long_file(tmp_path, size):
    row = json.dumps(chat("A question. " * 400, "An answer. " * 400)) + "\n"
    path = tmp_path / f"{size}.jsonl"
    path.write_text(row * (size // len(row)), encoding="utf-8")
    return path


def supervised(rows):
    return [Encoded.of([1] * 100, [1] * 100)] * len(rows)


def file_stream(path, **options):
    packer = Packer(64, documents=True, windows=True)
    source = open_source(str(path))
    return stream_blocks(source, Share(), supervised, packer, seed=0, shuffle_buffer=128, **options)


def test_the_first_block_reads_as_much_of_a_long_file_as_of_a_short_one(tmp_path, monkeypatch):
    taken = []
    lines = rows_module._lines

    def counted(file, start):
        for line in lines(file, start):
            taken.append(len(line))
            yield line

    monkeypatch.setattr(rows_module, "_lines", counted)
    for size in (100_000, 10_000_000):
        taken.clear()
        stream = file_stream(long_file(tmp_path, size))
        next(stream)
        assert len(taken) <= 16
        # Nor does coming back into the middle read what lies before.
        if size > 1_000_000:
            for produced in islice(stream, 600):
                middle = produced.position
            taken.clear()
            next(file_stream(long_file(tmp_path, size), position=middle))
            assert len(taken) <= 128


def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks = []
    for size in (4_000_000, 12_000_000):
        path = long_file(tmp_path, size)
        tracemalloc.start()
        for produced in file_stream(path):
            if produced.position.epoch > 0:
                break
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


@pytest.mark.parametrize("tokenize", ["stream", "preload"])
def test_an_empty_share_names_the_learner(config, write_rows, tokenize):
    path = write_rows([chat("a", "b")] * 3)
    starved = evolve(config, data=path, learner_id=3, num_learners=4, tokenize=tokenize)
    with pytest.raises(DataError, match=r"no rows for learner 3 of 4.*--data-shard off"):
        blocks(starved, 1)
    assert len(blocks(evolve(starved, data_shard="off"), 1)) == 1


@pytest.mark.parametrize(("files", "learners"), [(3, 4), (1, 4), (4, 3)])
def test_rows_are_divided_and_not_files(config, tmp_path, files, learners):
    """Fewer files than learners, or a number that does not divide: each learner has its rows, none waits."""
    rows = [chat(f"question {number}", "answer " * 40) for number in range(13)]
    for number in range(files):
        part = "".join(json.dumps(row) + "\n" for row in rows[number::files])
        (tmp_path / f"part-{number}.jsonl").write_text(part, encoding="utf-8")
    seen = []
    for learner in range(learners):
        mine = evolve(config, data=str(tmp_path), learner_id=learner, num_learners=learners)
        assert len(blocks(mine, 2)) == 2
        share = open_source(mine.data).rows(Cursor(), share_of(mine).rows())
        seen += [json.dumps(row.value) for row in share]
    assert sorted(seen) == sorted(json.dumps(row) for row in rows)


def test_a_share_smaller_than_a_batch_is_trained_on(config, write_rows):
    """Three rows for two learners: a batch is filled over epochs, nothing is dropped for being the last."""
    path = write_rows([chat(f"question {number}", "answer") for number in range(3)])
    for learner in (0, 1):
        task = build_task(evolve(config, data=path, learner_id=learner, num_learners=2, micro_batch_size=8))
        batches = task.batches()
        assert next(batches).inputs.ids.shape == (8, config.seq_len)
        batches.close()


def test_nothing_left_is_refused_with_the_counts(config, write_rows):
    path = write_rows([chat("a long question " * 30)] * 4)
    with pytest.raises(DataError, match=r"nothing to train on.*4 rows, \d+ windows.*--seq-len 64"):
        blocks(evolve(config, data=path), 1)


def test_windows_that_were_dropped_are_told_after_the_first_pass(config, write_rows, caplog):
    path = write_rows([chat("a long question " * 30), chat("a", "b")] * 3)
    config = evolve(config, data=path)
    loader = BlockLoader(config, load_tokenizer(config))
    with caplog.at_level("INFO"), closing(iter(loader)) as taken:
        for _ in islice(taken, 40):
            pass
        blocks(config, 40, loader.state)
    (told,) = [record.message for record in caplog.records if "first pass" in record.message]
    assert re.search(
        r"after the first pass .* gave \d+ blocks; \d+ windows .* were dropped \(\d+ tokens\)", told
    )


def test_a_bad_row_ends_training_by_name(config, write_rows):
    path = write_rows([chat("a", "b"), {"messages": [{"role": "robot", "content": "x"}]}])
    with pytest.raises(DataError, match=r"^rows\.jsonl line 2: message 0: role 'robot'"):
        blocks(evolve(config, data=path), 50)


def test_positions_are_small():
    assert Position() == Position(epoch=0, window=0, start=Cursor(), taken=0, skip=0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"learner_id": 2, "num_learners": 2}, "--learner-id 2 is out of range"),
        ({"learner_id": -1}, "--learner-id -1 is out of range"),
        ({"columns": "user=q"}, "must name both"),
        ({"columns": "robot=q,user=a,assistant=b"}, "'robot=q' is not one of"),
        ({"columns": "user=q,user=a"}, "'user=a' is not one of"),
        ({"columns": "user=q,assistant=a", "data_format": "openai"}, "exclude each other"),
        ({"chat_template": "/no/such/file"}, "no such file"),
        ({"packing": "tight"}, "--packing tight: must be one of documents, plain"),
        ({"seq_len": 1}, "--seq-len 1: must be at least 2"),
        ({"lora_dropout": 1.0}, "--lora-dropout"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0"),
    ],
)
def test_impossible_settings_are_refused_by_flag(config, change, problem):
    with pytest.raises(ConfigError, match=problem):
        evolve(config, **change)


def test_workers_heed_no_signal_but_the_trainers_and_end_when_it_is_killed(config):
    program = (
        "import multiprocessing, pickle, sys\n"
        "from yeto.text.loader import BlockLoader\n"
        "from yeto.text.tokenizer import load_tokenizer\n"
        "config = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "loader = BlockLoader(config, load_tokenizer(config))\n"
        "blocks = iter(loader)\n"
        "for line in sys.stdin:\n"
        "    for _ in range(20):\n"
        "        next(blocks)\n"
        "    print('up', flush=True)\n"
        "    if line == 'end one\\n':\n"
        "        worker = multiprocessing.active_children()[0]\n"
        # Of two signals that wait, the system keeps one, and that may be a stranger's.
        "        while worker.exitcode is None:\n"
        "            worker.terminate()\n"
        "            worker.join(1)\n"
        "        print(worker.exitcode, flush=True)\n"
    )
    settings = pickle.dumps(evolve(config, stream_workers=2)).hex()
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with trainer:
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "up\n"
        family = psutil.Process(trainer.pid).children(recursive=True)
        assert len(family) >= 3, "a fork server and two workers"
        for process in family:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
        trainer.stdin.write("end one\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "up\n"
        assert trainer.stdout.readline() == "0\n"
        trainer.kill()
        trainer.wait()
        _, alive = psutil.wait_procs(family, timeout=200)
        for process in alive:
            process.kill()
        assert alive == []
