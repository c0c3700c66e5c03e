import hashlib
import json
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from itertools import islice

import psutil
import pytest
from attrs import evolve
from text_helpers import chat

from yeto.errors import ConfigError, DataError
from yeto.text.config import TextConfig
from yeto.text.loader import BlockLoader, LoaderState, data_seed, open_stream
from yeto.text.masks import Encoded
from yeto.text.packing import Packer
from yeto.text.rows import Cursor, Row, open_source
from yeto.text.stream import Position, Share, share_of, stream_blocks
from yeto.text.tokenizer import load_tokenizer


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


def encode(row):
    """Give row i the token i + 1, as often as the row is long, and supervise all of it."""
    length = 3 + row.index % 9
    return Encoded.of([row.index + 1] * length, [1] * length)


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


def test_the_first_block_needs_few_rows():
    source = Numbers(100_000)
    next(stream(0, buffer=1024, source=source))
    assert source.read <= 16


def test_an_epoch_without_a_block_or_a_target_ends_the_stream():
    def silent(row):
        return Encoded.of([1] * 9, [0] * 9)

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


def test_preloading_gives_the_blocks_of_streaming(config):
    expected = blocks(config, 40)
    assert blocks(evolve(config, tokenize="preload"), 40) == expected


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


@pytest.mark.timeout(240)
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


def test_a_failing_worker_says_only_what_is_wrong(config, write_rows):
    path = write_rows([{"messages": [{"role": "robot", "content": "x"}]}] * 2)
    with pytest.raises(DataError) as caught:
        blocks(evolve(config, data=path, stream_workers=1), 1)
    assert str(caught.value).startswith("rows.jsonl line 1: message 0: role 'robot'")


def test_rows_seen_by_the_learners_do_not_meet(config, write_rows):
    """Hash what each learner tokenizes in an epoch: intersections are empty, the union is the file."""
    rows = [chat(f"question {number}", f"answer {number}") for number in range(31)]
    path = write_rows(rows)
    seen = []
    for learner in range(3):
        mine = evolve(config, data=path, learner_id=learner, num_learners=3)
        hashes = set()
        for row in open_rows(mine):
            hashes.add(hashlib.sha256(json.dumps(row.value).encode()).hexdigest())
        seen.append(hashes)
    assert seen[0] & seen[1] == seen[0] & seen[2] == seen[1] & seen[2] == set()
    assert len(set.union(*seen)) == 31


def open_rows(config):
    return open_source(config.data).rows(Cursor(), share_of(config).rows())


@pytest.mark.parametrize("tokenize", ["stream", "preload"])
def test_an_empty_share_names_the_learner(config, write_rows, tokenize):
    path = write_rows([chat("a", "b")] * 3)
    starved = evolve(config, data=path, learner_id=3, num_learners=4, tokenize=tokenize)
    with pytest.raises(DataError, match=r"no rows for learner 3 of 4.*--data-shard off"):
        blocks(starved, 1)
    assert len(blocks(evolve(starved, data_shard="off"), 1)) == 1


def test_nothing_left_is_refused_with_the_counts(config, write_rows):
    path = write_rows([chat("a long question " * 30)] * 4)
    with pytest.raises(DataError, match=r"nothing to train on.*4 rows, \d+ windows.*--seq-len 64"):
        blocks(evolve(config, data=path), 1)


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
        ({"packing": "tight"}, "--packing 'tight' is not one of documents, plain"),
        ({"seq_len": 1}, "--seq-len 1 must be at least 2"),
        ({"lora_dropout": 1.0}, "--lora-dropout"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0"),
    ],
)
def test_impossible_settings_are_refused_by_flag(config, change, problem):
    with pytest.raises(ConfigError, match=problem):
        evolve(config, **change)


def test_workers_are_deaf_to_ctrl_c_and_end_when_the_trainer_is_killed(config):
    program = (
        "import pickle, sys\n"
        "from yeto.text.loader import BlockLoader\n"
        "from yeto.text.tokenizer import load_tokenizer\n"
        "config = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "loader = BlockLoader(config, load_tokenizer(config))\n"
        "blocks = iter(loader)\n"
        "for line in sys.stdin:\n"
        "    for _ in range(20):\n"
        "        next(blocks)\n"
        "    print('up', flush=True)\n"
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
        trainer.stdin.write("go\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "up\n"
        trainer.kill()
        trainer.wait()
        _, alive = psutil.wait_procs(family, timeout=30)
        for process in alive:
            process.kill()
        assert alive == []
