import json
import math
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wire_examples import REPEATABLE

from yeto.errors import ConfigError, ProtocolError
from yeto.wire import bf16, codecs, f32, q4
from yeto.wire.errors import NonFiniteError

CODECS = [f32, bf16, q4]
BLOCK = 256

f32_values = st.floats(width=32, allow_nan=False, allow_infinity=False)
magnitudes = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-38, 3e38, -3.4e38, 1.0, -0.5, 2.0**-7])
vectors = st.lists(f32_values | magnitudes, max_size=600).map(lambda v: np.array(v, dtype=np.float32))


@pytest.fixture(autouse=True)
def strict_arithmetic():
    """No floating-point flag may be raised unnoticed, whatever the caller has asked NumPy to report."""
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def bits(values):
    return np.asarray(values, dtype=np.float32).view(np.uint32)


# ---------------------------------------------------------------------- all three


@pytest.mark.parametrize("codec", CODECS)
def test_sizes_and_refusal_of_other_sizes(codec):
    per_256 = {"f32": 1024, "bf16": 512, "q4": 132}[codec.NAME]
    assert codec.encoded_size(0) == 0
    assert codec.encoded_size(256) == per_256
    assert codec.encoded_size(3 * 2**30) == 12 * 2**20 * per_256
    data = codec.encode(np.ones(300, dtype=np.float32))
    assert len(data) == codec.encoded_size(300)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ProtocolError, match=f"{codec.NAME} tensor: {len(wrong)} bytes instead of"):
            codec.decode(wrong, 300)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 257, 65536, 65537, 200_000])
def test_out_into_and_ranges_give_the_same(codec, numel):
    values = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    data = codec.encode(values)
    decoded = codec.decode(data, numel)
    assert type(data) is bytes
    assert decoded.dtype == np.float32
    assert decoded.flags.writeable
    assert codec.encode(decoded) == data  # decoded values are fixed points

    buffer = bytearray(b"\xaa" * codec.encoded_size(numel))
    codec.encode_into(values, memoryview(buffer))
    assert buffer == data
    out = np.full(numel, np.nan, dtype=np.float32)
    assert codec.decode(memoryview(data), numel, out) is out
    np.testing.assert_array_equal(bits(out), bits(decoded))
    np.testing.assert_array_equal(codec.decode(np.frombuffer(data, dtype=np.uint8), numel), decoded)


@pytest.mark.parametrize("codec", CODECS)
def test_bugs_of_the_caller_are_value_errors(codec):
    data = codec.encode(np.ones(600, dtype=np.float32))
    with pytest.raises(ValueError, match="1-D values"):
        codec.encode(np.ones((2, 3), dtype=np.float32))
    with pytest.raises(ValueError, match=r"wanted float32\(600,\)"):
        codec.decode(data, 600, np.empty(599, dtype=np.float32))
    with pytest.raises(ValueError, match="wanted float32"):
        codec.decode(data, 600, np.empty(600, dtype=np.float64))


@pytest.mark.parametrize("codec", CODECS)
def test_random_bytes_decode_or_are_refused(codec):
    @REPEATABLE
    @given(st.binary(max_size=600), st.integers(0, 600))
    def holds(data, numel):
        try:
            values = codec.decode(data, numel)
        except ProtocolError:
            return
        assert values.shape == (numel,)
        if codec is q4:
            assert np.isfinite(values).all()

    holds()


def test_names_and_dtypes():
    assert [codecs.by_name(name).NAME for name in ("f32", "bf16", "q4")] == ["f32", "bf16", "q4"]
    assert [codecs.bulk_dtype(name) for name in ("f32", "bf16", "q4")] == ["f32", "bf16", "bf16"]
    assert codecs.DTYPE_NUMBERS == {"f32": 1, "bf16": 2, "q4": 3}
    for ask in (codecs.by_name, codecs.bulk_dtype):
        with pytest.raises(ConfigError, match="--wire-dtype f16: must be one of f32, bf16, q4"):
            ask("f16")


# ---------------------------------------------------------------------- f32


@REPEATABLE
@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_f32_keeps_every_bit(patterns):
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    data = f32.encode(values)
    assert data == struct.pack(f"<{len(patterns)}I", *patterns)
    np.testing.assert_array_equal(bits(f32.decode(data, len(patterns))), patterns)


# ---------------------------------------------------------------------- bf16


@pytest.mark.parametrize(
    ("pattern", "encoded"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F808000, 0x3F80),  # half-way, down to even
        (0x3F818000, 0x3F82),  # half-way, up to even
        (0x3F808001, 0x3F81),  # above half-way
        (0x3F817FFF, 0x3F81),  # below half-way
        (0x3FFF8000, 0x4000),  # carries into the exponent
        (0x7F7FFFFF, 0x7F80),  # largest f32 rounds to infinity
        (0x7F7F7FFF, 0x7F7F),  # largest that does not
        (0x7F800000, 0x7F80),  # infinity
        (0xFF800000, 0xFF80),
        (0x80000000, 0x8000),  # -0.0
        (0x00000001, 0x0000),  # subnormals
        (0x00018000, 0x0002),
        (0x807F8001, 0x8080),
        (0x7FC00000, 0x7FC0),  # NaNs stay NaNs and become quiet
        (0x7F800001, 0x7FC0),
        (0xFFFFFFFF, 0xFFFF),
        (0xFF800001, 0xFFC0),
    ],
)
def test_bf16_cases(pattern, encoded):
    values = np.array([pattern], dtype=np.uint32).view(np.float32)
    assert bf16.encode(values) == struct.pack("<H", encoded)
    assert bits(bf16.decode(struct.pack("<H", encoded), 1))[0] == encoded << 16


def test_bf16_rounds_as_torch_does_on_the_whole_range():
    """Each of the 65,536 upper halves with lower halves around the tie, compared with torch."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    values = (upper[:, None] | lower).reshape(-1).view(np.float32)
    ours = np.frombuffer(bf16.encode(values), dtype="<u2")
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    decoded = bf16.decode(ours.tobytes(), ours.size)
    assert np.isnan(decoded[nan]).all()
    expected = torch.from_numpy(ours.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(bits(decoded)[~nan], bits(expected)[~nan])


# ---------------------------------------------------------------------- q4


def slow_q4(values):
    """Encode one element at a time, by the words of the format, with Python's own exact arithmetic.

    The logarithm is taken in f64 and rounded to f32: log2 of an f32 ratio is never so near to the middle of
    two f32 numbers that this second rounding could matter for a level.
    """
    out = bytearray()
    for start in range(0, len(values), BLOCK):
        block = [float(v) for v in values[start : start + BLOCK]]
        block += [0.0] * (BLOCK - len(block))
        scale = max(abs(v) for v in block)
        nibbles = []
        for v in block:
            ratio = round_f32(abs(v) / scale) if scale else 0.0
            level = min(max(round(round_f32(math.log2(ratio))) + 7, 0), 7) if ratio else 0
            nibbles.append(level + (8 if v < 0 and level else 0))
        out += struct.pack("<f", scale)
        out += bytes(low | high << 4 for low, high in zip(nibbles[0::2], nibbles[1::2], strict=True))
    return bytes(out)


def round_f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def slow_q4_decode(data, numel):
    values = []
    for start in range(0, len(data), 132):
        (scale,) = struct.unpack_from("<f", data, start)
        for byte in data[start + 4 : start + 132]:
            for nibble in (byte & 15, byte >> 4):
                level = nibble & 7
                magnitude = 2.0 ** (level - 7) * scale if level else 0.0
                values.append(-magnitude if nibble & 8 and level else magnitude)
    return np.array(values[:numel], dtype=np.float64)


def test_q4_bytes_worked_out_by_hand(fixtures):
    cases = json.loads((fixtures / "wire" / "q4.json").read_text(encoding="utf-8"))
    assert len(cases) == 4
    for case in cases:
        values = np.frombuffer(bytes.fromhex("".join(case["values"])), dtype="<f4")
        assert q4.encode(values).hex() == case["encoded"], case["about"]


def test_q4_example_of_the_format():
    data = q4.encode(np.array([1, -0.5, 0.25, 0], dtype=np.float32))
    assert data == struct.pack("<f", 1.0) + bytes.fromhex("e705") + bytes(126)
    np.testing.assert_array_equal(q4.decode(data, 4), np.array([1, -0.5, 0.25, 0], dtype=np.float32))


@pytest.mark.parametrize(
    ("values", "decoded"),
    [
        ([0.0] * 300, [0.0] * 300),
        ([-0.0, 0.0, -0.0], [0.0, 0.0, 0.0]),
        ([1e-40, -1e-40], [1e-40, -1e-40]),
        ([1e-45, 0.0], [1e-45, 0.0]),
        ([3.4e38] + [1e-30] * 10, [3.4e38] + [0.0] * 10),
        ([-3.4e38, 1.7e38, -1e-45], [-3.4e38, 1.7e38, 0.0]),
        ([1.0] * 256 + [0.0], [1.0] * 256 + [0.0]),
    ],
)
def test_q4_zeros_subnormals_and_one_huge_among_tiny(values, decoded):
    data = q4.encode(np.array(values, dtype=np.float32))
    expected = np.array(decoded, dtype=np.float32)
    result = q4.decode(data, len(values))
    np.testing.assert_array_equal(result, expected)
    assert not np.signbit(result[result == 0]).any()  # a zero has no sign


def test_q4_thresholds_between_levels():
    """Every ratio within 2,000 f32 steps of each threshold, against the scalar oracle."""
    for level in range(7):
        middle = int(bits([2.0 ** (level - 6.5)])[0])
        ratios = np.arange(middle - 2000, middle + 2000, dtype=np.uint32).view(np.float32)
        blocks = np.ones((len(ratios) // 250, BLOCK), dtype=np.float32)
        blocks[:, :250] = ratios.reshape(-1, 250)
        assert q4.encode(blocks.reshape(-1)) == slow_q4(blocks.reshape(-1))


@REPEATABLE
@given(vectors)
def test_q4_equals_the_scalar_oracle(values):
    data = q4.encode(values)
    assert data == slow_q4(values)
    decoded = q4.decode(data, len(values))
    slow = slow_q4_decode(data, len(values))
    np.testing.assert_array_equal(decoded.astype(np.float64), slow.astype(np.float32).astype(np.float64))


@pytest.mark.parametrize("scale", [1e-40, 1e-3, 1.0, 1e30])
def test_q4_equals_the_scalar_oracle_on_normal_deltas(scale):
    with np.errstate(under="ignore"):
        values = (np.random.default_rng(7).standard_normal(5000) * scale).astype(np.float32)
    assert q4.encode(values) == slow_q4(values)


def test_q4_error_is_relative_to_the_delta():
    """At most half an octave up or down for what is kept, 2**-6.5 of the block's largest for what is not."""
    values = np.random.default_rng(3).standard_normal(100_000).astype(np.float32)
    decoded = q4.decode(q4.encode(values), values.size)
    kept = decoded != 0
    ratio = decoded[kept] / values[kept]
    assert ratio.min() > 0.7071 * 0.9999
    assert ratio.max() < 1.4143
    rows = np.abs(np.pad(values, (0, -values.size % BLOCK)).reshape(-1, BLOCK)).max(axis=1)
    floor = np.repeat(rows, BLOCK)[: values.size] * 2.0**-6.5
    assert (np.abs(values[~kept]) <= 1.0001 * floor[~kept]).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_q4_cannot_hide_a_value_that_is_not_finite(value):
    values = np.ones(600, dtype=np.float32)
    values[300] = value
    data = q4.encode(values)
    with pytest.raises(NonFiniteError, match="q4 tensor: scale of block 1 is"):
        q4.decode(data, 600)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-45])
def test_q4_refuses_a_scale_that_is_no_magnitude(scale):
    data = struct.pack("<f", 1.0) + b"\x77" * 128 + struct.pack("<f", scale) + bytes(128)
    out = np.full(512, 9.0, dtype=np.float32)
    with pytest.raises(NonFiniteError, match="block 1"):
        q4.decode(data, 512, out)
    assert (out == 9.0).all()
    assert issubclass(NonFiniteError, ProtocolError)


def test_q4_smallest_scale_underflows_to_zero_in_silence():
    smallest = float(np.float32(1e-45))
    data = struct.pack("<f", smallest) + bytes([0x71]) + bytes(127)
    with np.errstate(all="raise"):
        decoded = q4.decode(data, 2)
    assert decoded.tolist() == [0.0, smallest]
