"""The head's own part: where it begins, what it hands on, and how a result gets to its place.

That it restores, coordinates and exports in one go is shown by test_fleet_launch_whole.py.
"""

import json
import os
import signal
from uuid import uuid4

import pytest
import trio
from fsspec.implementations.memory import MemoryFileSystem

from yeto.errors import YetoError
from yeto.fleet import head, mirror
from yeto.fleet.head import Head, HeadSettings, publish
from yeto.fleet.store import Store

SETTINGS = HeadSettings(
    host="127.0.0.1",
    port=0,
    model="/m",
    output="/o",
    task="text",
    mirror="/mirror",
    export_words=(),
    syncer_words=("--learners=1", "--total-steps=4"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "auth.key").write_text("ab\n")
    (tmp_path / "auth.key").chmod(0o600)
    return tmp_path


@pytest.fixture
def result(tmp_path):
    """Return the folder of a result; the name of one file comes after that of the one to be last."""
    made = tmp_path / "result"
    (made / "deep").mkdir(parents=True)
    for name in ("yeto-export.json", "adapter.safetensors", "zz.txt", "deep/one.bin"):
        (made / name).write_bytes(name.encode())
    return made


def test_a_result_arrives_whole_and_what_proves_it_comes_last(result, monkeypatch):
    uri = f"memory://{uuid4().hex}/run"
    order = []
    real = Store.put_file
    monkeypatch.setattr(Store, "put_file", lambda *words: order.append(words[1]) or real(*words))
    publish(result, uri)
    assert order == ["adapter.safetensors", "deep/one.bin", "zz.txt", "yeto-export.json"]
    for name in order:
        assert MemoryFileSystem().cat_file(f"{uri}/{name}") == name.encode()
    # A head that is started again does it again.
    publish(result, uri)


def test_a_result_that_did_not_arrive_whole_is_an_error(result, monkeypatch):
    real = Store.put_file

    def put_file(store, name, path):
        real(store, name, path)
        if name == "deep/one.bin":
            store.put(name, path.read_bytes()[:-1])

    monkeypatch.setattr(Store, "put_file", put_file)
    with pytest.raises(YetoError, match=r"deep/one\.bin did not arrive whole; start the head again"):
        publish(result, f"memory://{uuid4().hex}/run")


def test_the_mirror_understands_what_the_head_says():
    for what in ("push", "restore"):
        module, *words = Head(SETTINGS)._mirror_words(what)
        assert module == mirror.__name__
        flags = mirror.build().parse_args(words)
        assert (flags.what, str(flags.checkpoint), str(flags.event_tape), str(flags.to)) == (
            *(what, "yeto-state.ckpt", "events.jsonl", "/mirror"),
        )


@pytest.mark.parametrize(
    ("ready", "port"),
    [(None, 0), ({"port": 4711}, 4711), ({"port": True}, 0), ({"port": 70000}, 0), ({}, 0), ([], 0)],
)
def test_the_port_of_the_last_start_is_taken_again(folder, ready, port):
    if ready is not None:
        (folder / "ready.json").write_text(json.dumps(ready))
    assert f"--port={port}" in Head(SETTINGS)._syncer_words()


WORDS = ["--host=127.0.0.1", "--port=0", "--model=/m", "--output=/o"]


def test_a_syncer_that_cannot_begin_ends_the_head_with_its_code_and_words(capfd):
    assert head.main([*WORDS, "--", "--learners=0", "--total-steps=4"]) == 2
    assert "yeto: --learners" in capfd.readouterr().err


def test_an_empty_disk_without_its_mirror_is_no_beginning(folder, capfd):
    (folder / "file").write_text("")
    words = [*WORDS, f"--mirror={folder}/file/mirror", "--", "--learners=1", "--total-steps=4"]
    assert head.main(words) == 1
    err = capfd.readouterr().err
    assert "yeto: the head's restore failed with 1; what it said stands above" in err
    assert not (folder / "events.jsonl").exists()


async def test_a_head_that_is_stopped_while_it_restores_starts_no_syncer(folder, monkeypatch):
    (folder / "restoring.py").write_text("import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(Head, "_mirror_words", lambda *_: ["restoring"])
    stopped = Head(SETTINGS)
    codes = []

    async def run():
        codes.append(await stopped.run())

    with trio.fail_after(200):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            while not (folder / "up").exists():
                await trio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
    assert codes == [4]
    assert stopped._child.name == "restore"
