"""The child of the pool, by its pipes: as a process, and its loop in a thread for all that can be wrong."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from yeto.merge import isotropic
from yeto.merge.svd_frames import (
    HEADER_BYTES,
    Code,
    Request,
    decode_answer,
    decode_message,
    encode_matrix_header,
)
from yeto.merge.svd_worker import Computer, serve

from test_svd_frames import header  # isort: skip


def random(rows, cols, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def request(number, matrix):
    return encode_matrix_header(number, *matrix.shape) + matrix.tobytes()


def read_answer(stream, number, shape):
    """Return what a worker answered: its matrix, or (code, sentence)."""
    asked = Request(number=number, rows=shape[0], cols=shape[1])
    answer = decode_answer(stream.read(HEADER_BYTES), asked)
    payload = stream.read(answer.payload_bytes)
    if answer.code is Code.OK:
        return np.frombuffer(payload, "<f4").reshape(shape)
    return answer.code, decode_message(payload)


class Loop:
    """The loop of a worker in a thread, with real pipes and the real decomposition."""

    def __init__(self, device="cpu", frame_bytes_max=1 << 20):
        requests, to = os.pipe()
        answers, answering = os.pipe()
        self.requests = os.fdopen(to, "wb", buffering=0)
        self.answers = os.fdopen(answers, "rb")
        self.code = None
        self.computer = Computer(device)

        def run():
            with (
                os.fdopen(requests, "rb", buffering=0) as given,
                os.fdopen(answering, "wb", buffering=0) as to,
            ):
                self.code = serve(given, to, self.computer, frame_bytes_max)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def ask(self, data, number=7, shape=(2, 3)):
        self.requests.write(data)
        return read_answer(self.answers, number, shape)

    def end(self):
        """End stdin; return the exit code."""
        self.requests.close()
        self._thread.join(30)
        self.answers.close()
        return self.code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


@pytest.fixture
def loop():
    with Loop() as loop:
        yield loop


def test_a_process_answers_bit_for_bit_and_keeps_what_others_print_off_the_pipe(tmp_path):
    # What is loaded after the pipe was moved may print: here, when numpy asks for it.
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, sys\n"
        "load = builtins.__import__\n"
        "def chatty(name, *rest, **others):\n"
        "    if name == 'yeto.merge.iso':\n"
        "        print('loading', name, flush=True)\n"
        "        sys.__stdout__.write('straight'); sys.__stdout__.flush()\n"
        "        import os; os.write(1, b'to the descriptor')\n"
        "    return load(name, *rest, **others)\n"
        "builtins.__import__ = chatty\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-m", "yeto.merge.svd_worker", "--device", "cpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
    )
    with worker:
        for number, shape in enumerate([(1, 1), (40, 24), (3, 50)]):
            matrix = random(*shape, seed=number)
            worker.stdin.write(request(number, matrix))
            worker.stdin.flush()
            expected = isotropic(torch.from_numpy(matrix)).numpy()
            np.testing.assert_array_equal(read_answer(worker.stdout, number, shape), expected)
        worker.stdin.write(request(9, matrix)[:-1])
        worker.stdin.close()
        assert worker.stdout.read() == b""
        said = worker.stderr.read().decode()
        assert worker.wait(60) == 2
    for words in ("loading yeto.merge.iso", "straight", "to the descriptor"):
        assert words in said


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (header(magic=b"XXXXXXXX") + bytes(24), Code.MALFORMED),
        (header(version=2) + bytes(24), Code.UNSUPPORTED),
        (header(code=5) + bytes(24), Code.UNSUPPORTED),
        (header(rows=0, payload=0), Code.BAD_SHAPE),
        (header(payload=28) + bytes(28), Code.BAD_LENGTH),
        (header(rows=700, cols=700, payload=1_960_000) + bytes(1_960_000), Code.TOO_LARGE),
        (header() + np.float32([1, 2, np.nan, 4, 5, 6]).tobytes(), Code.NOT_FINITE),
        (header() + np.float32([1, 2, 3, 4, 5, np.inf]).tobytes(), Code.NOT_FINITE),
    ],
)
def test_a_whole_bad_request_is_answered_and_the_next_one_served(loop, data, code):
    found, sentence = loop.ask(data)
    assert found is code
    assert sentence
    matrix = random(2, 3)
    np.testing.assert_array_equal(loop.ask(request(7, matrix)), isotropic(torch.from_numpy(matrix)))
    assert loop.end() == 0


def test_a_result_that_is_not_finite_is_said_and_survived():
    with Loop() as loop:
        # No matrix does that to a sound device.
        loop.computer._isotropic = lambda matrix: matrix * float("inf")
        for _ in range(2):
            code, sentence = loop.ask(request(7, random(2, 3)))
            assert code is Code.RESULT_NOT_FINITE
            assert "not finite" in sentence


def test_a_device_that_is_not_there_is_said_and_survived():
    with Loop(device="cuda:77") as loop:
        for _ in range(2):
            code, sentence = loop.ask(request(7, random(2, 3)))
            assert code is Code.FAILED
            assert "CUDA" in sentence
        assert loop.end() == 0


def test_the_limit_is_looked_at_before_anything_is_allocated():
    """A terabyte is claimed; only what is sent costs anything."""
    with Loop(frame_bytes_max=1 << 60) as loop:
        loop.requests.write(header(rows=1 << 20, cols=1 << 18, payload=1 << 40))
        assert loop.end() == 2
    with Loop() as loop:
        loop.requests.write(header(rows=1 << 30, cols=1 << 30, payload=1 << 62) + bytes(100))
        assert loop.end() == 2


@pytest.mark.parametrize("length", [0, 1, 47, 48, 71, 72])
def test_only_the_end_between_two_requests_is_a_clean_one(loop, length):
    loop.requests.write((header() + bytes(24))[:length])
    assert loop.end() == (0 if length in (0, 72) else 2)


def test_a_syncer_that_takes_no_answer_is_gone():
    loop = Loop()
    loop.answers.close()
    loop.requests.write(request(1, random(2, 3)))
    loop._thread.join(30)
    assert loop.code == 2
    loop.requests.close()
