"""The compiled loops: what they decode, encode and sum up, held against codecs and exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yeto.errors import MergeError
from yeto.merge import examine_push, is_finite
from yeto.merge.blocks import BLOCK, plan
from yeto.merge.kernels import CHUNK, LANES, STREAMED
from yeto.merge.memory import empty_floats, empty_halves
from yeto.merge.passes import accumulate, examine, split_power, step
from yeto.merge.sources import of_payload, of_tensor
from yeto.wire import bf16
from yeto.wire.codecs import by_name

DTYPES = ["f32", "bf16", "q4"]
SIZES = [1, 2, LANES - 1, LANES + 1, 255, 256, 257, CHUNK - 1, CHUNK + 1, 3 * CHUNK + 300, BLOCK + 77]


def random(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def decoded(source, numel, sizes=None):
    """Return what a source decodes to, by the way the merge takes."""
    out = torch.full((numel,), math.pi)
    cut = plan(sizes or (numel,))
    accumulate([source], [[1.0]] * cut.tensors, out, cut)
    return out


def exact_sum(left, right):
    """The sum of products without any rounding."""
    return float(sum(Fraction(a) * Fraction(b) for a, b in zip(left.tolist(), right.tolist(), strict=True)))


class TestDecoding:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", SIZES)
    def test_is_the_codecs_bit_for_bit(self, dtype, size):
        payload = by_name(dtype).encode(random(size).numpy())
        expected = torch.from_numpy(by_name(dtype).decode(payload, size))
        assert torch.equal(decoded(of_payload(payload, dtype, size), size), expected)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_tensors_may_begin_anywhere(self, dtype):
        sizes = (1, 255, 3, 256, 511, 700, CHUNK, 5)
        numel = sum(sizes)
        payload = by_name(dtype).encode(random(numel).numpy())
        expected = torch.from_numpy(by_name(dtype).decode(payload, numel))
        assert torch.equal(decoded(of_payload(payload, dtype, numel), numel, sizes), expected)

    def test_every_bf16_pattern_that_is_a_number(self):
        halves = np.arange(1 << 16, dtype=np.uint16)
        numbers = halves[(halves & 0x7F80) != 0x7F80]
        found = decoded(of_payload(numbers.tobytes(), "bf16", numbers.size), numbers.size)
        assert np.array_equal(found.numpy().view(np.uint32), numbers.astype(np.uint32) << 16)

    @pytest.mark.parametrize("scale", [1e-45, 1e-40, 1.1754944e-38, 1.0, 3.4e38])
    def test_q4_of_far_scales(self, scale):
        values = (np.linspace(-1, 1, 700) * scale).astype(np.float32)
        payload = by_name("q4").encode(values)
        expected = torch.from_numpy(by_name("q4").decode(payload, 700))
        assert torch.equal(decoded(of_payload(payload, "q4", 700), 700), expected)

    @pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0])
    @pytest.mark.parametrize("block", [0, 1, 2])
    def test_a_bad_q4_scale_is_never_a_number(self, scale, block):
        payload = bytearray(by_name("q4").encode(np.zeros(600, dtype=np.float32)))
        payload[132 * block : 132 * block + 4] = np.float32(scale).tobytes()
        assert not examine_push(payload, "q4", 600, torch.zeros(600)).finite

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bytes_that_begin_at_an_odd_address(self, dtype):
        payload = by_name(dtype).encode(random(1000).numpy())
        odd = memoryview(b"x" + payload)[1:]
        expected = torch.from_numpy(by_name(dtype).decode(payload, 1000))
        assert torch.equal(decoded(of_payload(odd, dtype, 1000), 1000), expected)

    def test_a_wrong_size_is_refused(self):
        with pytest.raises(MergeError, match="a bf16 push of 2 elements has 3 bytes instead of 4"):
            of_payload(bytes(3), "bf16", 2)


class TestSums:
    @pytest.mark.parametrize("size", [1, LANES - 1, LANES, 3 * LANES + 5, CHUNK + 1])
    def test_as_good_as_exact(self, size):
        left, right = random(size, 1), random(size, 2)
        facts = examine(of_tensor(left), right, plan((size,)))[0]
        magnitude = exact_sum(left.abs(), right.abs())
        assert facts.norm == pytest.approx(math.sqrt(exact_sum(left, left)), rel=1e-15)
        assert facts.momentum_norm == pytest.approx(math.sqrt(exact_sum(right, right)), rel=1e-15)
        assert facts.dot == pytest.approx(exact_sum(left, right), abs=1e-15 * magnitude)

    @pytest.mark.parametrize("value", [1e-45, 1e-40, 1e-20, 1.0, 1e20, 3.4e38])
    def test_no_magnitude_overflows_or_vanishes(self, value):
        tensor = torch.full((1000,), value)
        facts = examine(of_tensor(tensor), tensor, plan((1000,)))[0]
        single = float(np.float32(value))
        assert facts.norm == pytest.approx(single * math.sqrt(1000), rel=1e-14)
        assert facts.dot == pytest.approx(single**2 * 1000, rel=1e-14)

    def test_a_mile_of_equal_elements_loses_nothing(self):
        size = 5 * BLOCK + 1
        facts = examine(of_tensor(torch.ones(size)), torch.ones(size), plan((size,)))[0]
        assert facts.norm == math.sqrt(size)
        assert facts.dot == size

    @settings(max_examples=60, deadline=None)
    @given(
        size=st.integers(1, 2 * CHUNK),
        where=st.floats(0, 1, exclude_max=True),
        value=st.sampled_from([math.nan, math.inf, -math.inf]),
        dtype=st.sampled_from(DTYPES),
    )
    def test_one_element_that_is_no_number_is_found_anywhere(self, size, where, value, dtype):
        values = np.zeros(size, dtype=np.float32)
        values[int(where * size)] = value
        with np.errstate(invalid="ignore"):
            payload = by_name(dtype).encode(values)
        assert not examine_push(payload, dtype, size, torch.ones(size)).finite
        assert not is_finite(torch.from_numpy(values))
        assert is_finite(torch.full((size,), 3.4e38))


class TestAccumulation:
    def test_a_coefficient_of_zero_hides_whatever_is_there(self):
        bad = torch.tensor([math.nan, math.inf])
        out = torch.empty(2)
        accumulate([of_tensor(bad), of_tensor(torch.ones(2))], [[0.0, 2.0]], out, plan((2,)))
        assert out.tolist() == [2.0, 2.0]
        accumulate([of_tensor(bad)], [[0.0]], out, plan((2,)))
        assert out.tolist() == [0.0, 0.0]

    def test_each_tensor_has_its_own_coefficients(self):
        values, out = torch.arange(1.0, 7.0), torch.empty(6)
        squares = accumulate([of_tensor(values)], [[1.0], [-2.0], [0.5]], out, plan((1, 3, 2)))
        assert out.tolist() == [1.0, -4.0, -6.0, -8.0, 2.5, 3.0]
        assert squares == [1.0, 116.0, 15.25]

    @pytest.mark.parametrize("size", [3, LANES + 3])
    def test_minus_zero_stays(self, size):
        out = torch.empty(size)
        accumulate([of_tensor(torch.zeros(size))], [[-1.0]], out, plan((size,)))
        assert torch.equal(out.view(torch.int32), torch.full((size,), -0.0).view(torch.int32))

    def test_what_one_tensor_leaves_is_not_in_the_sums_of_the_next(self):
        # Both are too short for a vector, and the second is the shorter one.
        values, out = torch.ones(LANES - 1 + 2), torch.empty(LANES - 1 + 2)
        cut = plan((LANES - 1, 2))
        assert accumulate([of_tensor(values)], [[1.0], [1.0]], out, cut) == [LANES - 1, 2.0]
        assert examine(of_tensor(values), values, cut)[1].dot == 2.0

    def test_products_are_fused(self):
        # (1 + 2**-12)**2 is 1 + 2**-11 + 2**-24; f32 keeps the last only if it is not rounded before -1.
        left, out = torch.tensor([1 + 2.0**-12]), torch.empty(1)
        accumulate([of_tensor(-torch.ones(1)), of_tensor(left)], [[1.0, 1 + 2.0**-12]], out, plan((1,)))
        assert out.item() == 2.0**-11 + 2.0**-24

    @pytest.mark.parametrize("coefficient", [1e-44, 1e-39, 1e40, 1e44, -1e44])
    def test_coefficients_beyond_f32(self, coefficient):
        element = float(np.float32(3e38 if abs(coefficient) < 1 else 1e-43))
        out = torch.empty(1)
        accumulate([of_tensor(torch.tensor([element]))], [[coefficient]], out, plan((1,)))
        assert out.item() == pytest.approx(element * coefficient, rel=1e-6)

    @given(
        st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) > 1e-40 and abs(x) < 1e40)
    )
    def test_split_power_is_exact(self, coefficient):
        power, rest = split_power(coefficient)
        assert power * rest == coefficient
        assert math.log2(power).is_integer()


@pytest.mark.parametrize("first", [LANES, 5])
class TestArraysThatNoCacheHolds:
    """They are written past the caches where they begin with a line, which must not show."""

    SIZE = STREAMED + LANES + 7

    def values(self):
        return torch.arange(self.SIZE, dtype=torch.float32)

    def test_a_sum(self, first):
        values, out = self.values(), empty_floats(self.SIZE)
        accumulate([of_tensor(values)], [[2.0], [2.0]], out, plan((first, self.SIZE - first)), threads=2)
        assert torch.equal(out, values * 2)

    def test_a_step(self, first):
        values, zeros, halves = self.values(), torch.zeros(self.SIZE), empty_halves(self.SIZE)
        new = {"new_params": empty_floats(self.SIZE), "new_momentum": empty_floats(self.SIZE)}
        cut = plan((first, self.SIZE - first))
        step(values, [1.0, 1.0], zeros, zeros, cut, lr=1.0, mu=0.0, **new, halves=halves, threads=2)
        assert torch.equal(new["new_params"], -values)
        assert torch.equal(new["new_momentum"], values)
        assert torch.equal(torch.from_numpy(halves).view(torch.bfloat16), (-values).bfloat16())


class TestStep:
    def patterns(self):
        """f32 numbers that rounding to bf16 treats in every possible way."""
        upper = np.arange(0, 1 << 16, 7, dtype=np.uint32) << 16
        lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
        return (upper[:, None] | lower).reshape(-1).view(np.float32)

    def test_the_encoding_is_the_codecs_bit_for_bit(self):
        params = torch.from_numpy(self.patterns())
        size = params.numel()
        halves, new = np.empty(size, dtype=np.uint16), torch.empty(size)
        zeros, keep = torch.zeros(size), {"lr": 0.0, "mu": 0.0}
        found = step(
            zeros,
            [1.0],
            params,
            zeros,
            plan((size,)),
            new_params=new,
            new_momentum=None,
            halves=halves,
            **keep,
        )
        assert halves.tobytes() == bf16.encode(new.numpy())
        assert not found.finite

    @pytest.mark.parametrize("where", [0, 70, CHUNK, BLOCK + 3])
    @pytest.mark.parametrize("which", ["params", "momentum"])
    def test_a_result_that_is_no_number_is_found(self, where, which):
        size = BLOCK + 5
        given = {"params": torch.zeros(size), "momentum": torch.zeros(size)}
        cut, new = plan((size,)), {"new_params": torch.empty(size), "new_momentum": torch.empty(size)}
        assert step(torch.zeros(size), [1.0], *given.values(), cut, lr=0.7, mu=0.9, **new).finite
        given[which][where] = 3.4e38
        gradient = torch.zeros(size)
        gradient[where] = -3.4e38 if which == "params" else 3.4e38
        assert not step(gradient, [1.0], *given.values(), cut, lr=0.7, mu=0.9, **new).finite
