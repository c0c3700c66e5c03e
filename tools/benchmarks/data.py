"""Rows into blocks: tokens a second beside the tokenizer alone; what the length of a file costs.

Ours reads JSONL, understands the rows, renders the template, tokenizes, proves the mask and packs. Two peers
do a part of that, in one batch: the tokenizer on texts that were rendered beforehand, and the tokenizer's
template call, which renders, tokenizes and makes the mask that nobody checks. Once in one process, counted in
CPU seconds of all its threads; once as a run does it, with worker processes beside the tokenizer's own
threads, on as many cores: by the wall, and in the CPU seconds of all processes, which tell what the job costs
from what is left idle.

The files of different lengths are written for the occasion. The long one is read whole by a learner whose
share of it is as large as the short one.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.figures import Figure, Report, Target, figure_of
from benchmarks.timing import (
    Spent,
    cpu_clock,
    in_child,
    peak_bytes,
    rates,
    reset_peak,
    settle_memory,
    take_turns,
    timed,
    wall_clock,
)

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "fixtures" / "tiny-llama"
CHATS = ROOT / "fixtures" / "chat" / "train.jsonl"
TURNS = 4
"""Chats of the fixture that make one row, about 180 tokens."""
SEQ_LEN = 2048
BESIDE = Target(sense="at least", number=0.9, of="ratio")
SAME_TIME = Target(sense="at most", number=1.2, of="ratio")
SAME_MEMORY = Target(sense="at most", number=1.1, of="ratio")
MIB = 1 << 20


def measure(
    *,
    repeats: int,
    rows: int,
    small: int,
    large: int,
    model: Path | None = None,
    data: Path | None = None,
) -> Report:
    """Measure streaming tokenization.

    Args:
        repeats: samples of each figure.
        rows: of one sample of the speeds.
        small: bytes of the short file.
        large: bytes of the long file.
        model: folder with another tokenizer.
        data: JSONL file with other rows, of which the first ``rows`` are taken.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with TemporaryDirectory() as name:
        folder = Path(name)
        lines = _lines() if data is None else data.read_bytes().splitlines(keepends=True)
        some = folder / "rows.jsonl"
        some.write_bytes(b"".join(itertools.islice(itertools.cycle(lines), rows)))
        model = model or MODEL
        figures = [*_speeds(model, some, repeats)]
        files = [_file(folder / f"{size}.jsonl", lines, size) for size in (small, large)]
        figures.append(_first_block(model, files, repeats))
        figures.append(_memory(model, files, large // small))
    return Report(
        benchmark="data",
        what="rows into blocks, with their masks",
        settings={
            "repeats": repeats,
            "rows": rows,
            "cores": _cores(),
            "small_mib": small // MIB,
            "large_mib": large // MIB,
        },
        figures=tuple(figures),
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _lines() -> list[bytes]:
    """Return rows made of the fixture's chats, several in one conversation."""
    chats = [json.loads(line)["messages"] for line in CHATS.read_text(encoding="utf-8").splitlines()]
    groups = (chats[start : start + TURNS] for start in range(0, len(chats), TURNS))
    return [json.dumps({"messages": list(itertools.chain(*group))}).encode() + b"\n" for group in groups]


def _file(path: Path, lines: list[bytes], size: int) -> Path:
    piece = b"".join(itertools.islice(itertools.cycle(lines), MIB // max(map(len, lines)) + 1))
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(piece)
    return path


def _config(model: Path, data: Path, **changes: Any) -> Any:
    from yeto.text.config import TextConfig

    return TextConfig(model=str(model), data=str(data), seq_len=SEQ_LEN, **changes)


def _stream(config: Any, tokenizer: Any) -> Iterator[Any]:
    """Return the stream of blocks of one process."""
    from yeto.text.loader import LoaderState, open_stream
    from yeto.text.stream import Position
    from yeto.tuning.share import share_of

    return open_stream(config, tokenizer, share_of(config), LoaderState(positions=(Position(),)), 0)


def _speeds(model: Path, data: Path, repeats: int) -> Iterator[Figure]:
    from yeto.text.tokenizer import load_tokenizer

    config = _config(model, data, stream_workers=_cores())
    tokenizer = load_tokenizer(config)
    chats = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    messages = [_messages(chat) for chat in chats]
    texts = tokenizer.apply_chat_template(messages, tokenize=False)
    tokens = sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    blocks = tokens // SEQ_LEN
    alone = partial(tokenizer, texts, add_special_tokens=False)
    template_call = partial(
        tokenizer.apply_chat_template, messages, return_dict=True, return_assistant_tokens_mask=True
    )

    def in_this_process() -> None:
        for _ in itertools.islice(_stream(config, tokenizer), blocks):
            pass

    ours, texts_only, same_job = take_turns(repeats, in_this_process, alone, template_call, clock=cpu_clock)
    once = blocks * SEQ_LEN
    for key, name, peer, seconds in (
        ("core_beside_texts", "one process, CPU seconds", "tokenizer, texts", texts_only),
        ("core_beside_template", "one process, CPU seconds", "template call", same_job),
    ):
        yield figure_of(
            f"{key}_tokens_per_second",
            name,
            "tokens/s",
            rates(once, ours),
            peer=peer,
            peer_values=rates(tokens, seconds),
            target=BESIDE if key == "core_beside_template" else None,
        )
    with _Workers(config, tokenizer, blocks) as workers:
        spent, texts_spent, same_spent = workers.beside(repeats, alone, template_call)
    for key, peer, peers_spent in (
        ("workers_beside_texts", "tokenizer, texts", texts_spent),
        ("workers_beside_template", "template call", same_spent),
    ):
        yield figure_of(
            f"{key}_tokens_per_second",
            f"{_cores()} workers, wall",
            "tokens/s",
            rates(once, [one.wall for one in spent]),
            peer=peer,
            peer_values=rates(tokens, [one.wall for one in peers_spent]),
            target=BESIDE,
        )
    yield figure_of(
        "workers_cpu_beside_texts_tokens_per_second",
        f"{_cores()} workers, CPU of all processes",
        "tokens/s",
        rates(once, [one.cpu for one in spent]),
        peer="tokenizer, texts",
        peer_values=rates(tokens, [one.cpu for one in texts_spent]),
    )


def _messages(row: dict[str, Any]) -> Any:
    from yeto.text.formats import conversation

    return conversation(row, "row").messages


class _Workers:
    """A loader whose workers stand still while nobody takes their blocks."""

    def __init__(self, config: Any, tokenizer: Any, blocks: int) -> None:
        from yeto.text.loader import PREFETCH_MESSAGES, BlockLoader
        from yeto.text.stream import ENCODE_TOKENS

        self._iterator = iter(BlockLoader(config, tokenizer))
        # Besides the messages that wait, one is being filled from rows that are tokenized already.
        self._ready = (PREFETCH_MESSAGES + 2) * (ENCODE_TOKENS // SEQ_LEN) * config.stream_workers
        self._blocks = blocks

    def __enter__(self) -> _Workers:
        self._take(self._ready)
        return self

    def __exit__(self, *_: object) -> None:
        self._iterator.close()

    def _take(self, blocks: int) -> None:
        for _ in range(blocks):
            next(self._iterator)

    def beside(self, repeats: int, *peers: Callable[[], object]) -> tuple[list[Spent], ...]:
        """Take blocks and run the peers in turn; return what each took, of all processes."""
        settle_memory()
        spent: tuple[list[Spent], ...] = tuple([] for _ in range(1 + len(peers)))
        for _ in range(repeats):
            # What waited while the peers had their turn was made at their expense, so it is not counted.
            self._take(self._ready)
            spent[0].append(self._spent_on(partial(self._take, self._blocks)))
            self._come_to_rest()
            for place, peer in enumerate(peers, start=1):
                spent[place].append(self._spent_on(peer))
        return spent

    def _spent_on(self, work: Callable[[], object]) -> Spent:
        family, (_, here) = self._cpu_of_workers(), timed(work)
        return Spent(here.cpu + self._cpu_of_workers() - family, here.wall)

    def _come_to_rest(self) -> None:
        """Wait until the workers have nothing to do: their CPU seconds stand still."""
        before = -1.0
        while (now := self._cpu_of_workers()) > before:
            before = now
            psutil.wait_procs(psutil.Process().children(), timeout=0.25)

    def _cpu_of_workers(self) -> float:
        family = psutil.Process().children(recursive=True)
        return sum(sum(process.cpu_times()[:2]) for process in family)


def _first_block(model: Path, files: list[Path], repeats: int) -> Figure:
    from yeto.text.tokenizer import load_tokenizer

    config = _config(model, files[0])
    tokenizer = load_tokenizer(config)

    def first(path: Path) -> None:
        next(_stream(_config(model, path), tokenizer))

    short, long = take_turns(repeats, *(partial(first, path) for path in files), clock=wall_clock)
    return figure_of(
        "first_block_milliseconds",
        "first block, long file",
        "ms",
        [1000 * seconds for seconds in long],
        peer="short file",
        peer_values=[1000 * seconds for seconds in short],
        target=SAME_TIME,
    )


def _memory(model: Path, files: list[Path], times: int) -> Figure:
    short = in_child(peak_of_an_epoch, str(model), str(files[0]), 1)
    long = in_child(peak_of_an_epoch, str(model), str(files[1]), times)
    return figure_of(
        "peak_mib",
        "peak memory, long file",
        "MiB",
        [long / MIB],
        peer="short file",
        peer_values=[short / MIB],
        target=SAME_MEMORY,
    )


def peak_of_an_epoch(model: str, data: str, learners: int) -> int:
    """Return the peak resident bytes of one pass over a file, as one of several learners."""
    from yeto.text.tokenizer import load_tokenizer

    config = _config(Path(model), Path(data), num_learners=learners)
    stream = _stream(config, load_tokenizer(config))
    next(stream)
    reset_peak()
    while next(stream).position.epoch == 0:
        pass
    return peak_bytes()
