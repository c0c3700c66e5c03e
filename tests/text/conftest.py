"""Fixtures of the text task: tokenizer, tiny model, settings, rows."""

import json

import pytest
import torch
from text_helpers import WITH_TAGS, make_tokenizer

from yeto.text.config import TextConfig

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_tokenizer():
    return make_tokenizer()


@pytest.fixture
def tokenizer(shared_tokenizer):
    shared_tokenizer.chat_template = WITH_TAGS
    return shared_tokenizer


@pytest.fixture(scope="session")
def tiny(fixtures):
    return str(fixtures / "tiny-llama")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep model digests out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def config(tiny, fixtures):
    """Return the settings of a small run; tests change them with evolve."""
    return TextConfig(
        model=tiny,
        data=str(fixtures / "chat" / "train.jsonl"),
        seq_len=64,
        micro_batch_size=1,
        stream_workers=0,
        lora_r=4,
        lora_alpha=8,
    )


@pytest.fixture
def write_rows(tmp_path):
    """Return a function that writes rows as JSONL and returns the path as text."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def checkpoint(tmp_path):
    """Return where a test's checkpoint is to be."""
    return tmp_path / "yeto-state.ckpt"


@pytest.fixture
def out(tmp_path):
    """Return where a test's export is to be."""
    return tmp_path / "out"
