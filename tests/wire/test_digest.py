import numpy as np
from blake3 import blake3

from yeto.wire import digest


def test_known_answer():
    """The published BLAKE3 test vector of empty input, its first 16 bytes."""
    assert digest() == digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc949"


def test_buffers_of_any_kind_are_one_stream():
    values = np.arange(1000, dtype=np.float32)
    data = values.tobytes()
    expected = blake3(data).hexdigest()[:32]
    assert digest(data) == digest(bytearray(data)) == digest(memoryview(data)) == digest(values) == expected
    assert digest(data[:10], data[10:]) == digest(values[:7], values[7:]) == expected
    assert digest(values.reshape(10, 100)) == expected
    assert digest(values[:0]) == digest(b"")
    assert digest(values[::2]) == digest(values[::2].copy())
    assert digest(values, b"\0") != expected
