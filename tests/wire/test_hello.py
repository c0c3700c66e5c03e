import struct
import tracemalloc

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_examples import HELLO, HELLOS, KEY, LAYOUT, REPEATABLE

from yeto.errors import ProtocolError
from yeto.wire import FragmentLayout, Hello, HelloFragment, HelloLayout, Layout, MergeMode, TensorSpec
from yeto.wire.errors import AuthenticationError
from yeto.wire.hello import FRAGMENTS_MAX, HELLO_BYTES_MAX, TENSORS_MAX

START = bytes.fromhex("0400 01000000 efcdab8967452301 02")
"""Version, learner, generation, dtype."""
END = bytes(64) + bytes.fromhex("0400")
"""Fingerprint, contract and number of streams."""


def hello_bytes(layout):
    return START + bytes.fromhex(layout) + END


@pytest.mark.parametrize("key", [None, KEY])
def test_round_trip(key):
    @REPEATABLE
    @given(HELLOS)
    def holds(hello):
        assert Hello.decode(hello.encode(key), key) == hello

    holds()


def test_layout_bytes():
    """Two fragments: an average of two tensors; an iso fragment, whose rows and cols follow its numels."""
    layout = HelloLayout(
        fragments=(
            HelloFragment(mode=MergeMode.AVG, numels=(5, 6)),
            HelloFragment(mode=MergeMode.ISO, numels=(6, 8), matrices=((2, 3), (4, 2))),
        )
    )
    expected = hello_bytes(
        "02000000"
        "00 02000000 0500000000000000 0600000000000000"
        "02 02000000 0600000000000000 0800000000000000"
        "0200000000000000 0300000000000000 0400000000000000 0200000000000000"
    )
    hello = attrs.evolve(HELLO, layout=layout, fingerprint=bytes(32), contract=bytes(32))
    assert hello.encode() == expected
    assert Hello.decode(expected) == hello
    assert layout.numels == (11, 14)


def test_a_profile_lies_between_contract_and_streams():
    plain, stated = HELLO.encode(), attrs.evolve(HELLO, profile=b"p" * 32).encode()
    assert stated == plain[:-2] + b"p" * 32 + plain[-2:]
    assert Hello.decode(stated).profile == b"p" * 32
    assert Hello.decode(plain).profile is None


def test_layout_and_back():
    layout = Layout(
        fragments=(
            FragmentLayout(mode=MergeMode.AVG, tensors=(TensorSpec(name="embed.weight", shape=(7, 3)),)),
            FragmentLayout(
                mode=MergeMode.ISO,
                tensors=(TensorSpec(name="a", shape=(2, 3)), TensorSpec(name="b", shape=(4, 1))),
            ),
        )
    )
    stated = HelloLayout.of(layout)
    back = stated.as_layout()
    assert HelloLayout.of(back) == stated
    assert [[t.shape for t in f.tensors] for f in back.fragments] == [[(21,)], [(2, 3), (4, 1)]]
    assert [f.mode for f in back.fragments] == [MergeMode.AVG, MergeMode.ISO]
    assert {t.name for f in back.fragments for t in f.tensors} == {""}
    assert HelloLayout.of(LAYOUT).numels == (4,)


def test_an_iso_fragment_holds_matrices():
    vector = FragmentLayout(mode=MergeMode.ISO, tensors=(TensorSpec(name="norm.weight", shape=(8,)),))
    with pytest.raises(ProtocolError, match=r"norm\.weight"):
        HelloLayout.of(Layout(fragments=(vector,)))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("00000000", "P 0"),
        ("01000000 03 01000000 0400000000000000", "mode 3 must be one of 0, 1, 2"),
        ("01000000 01 00000000", "T 0"),
        ("01000000 01 01000000 0000000000000000", "numel must be at least 1"),
        ("01000000 01 02000000 0100000000000000 0000000000000100", "numel 281474976710657"),
        ("01000000 01 01000000 ffffffffffffffff", "numel 18446744073709551615"),
        ("01000000 02 01000000 0400000000000000 0300000000000000 0100000000000000", "rows x cols"),
        ("01000000 02 01000000 0400000000000000 ffffffffffffffff ffffffffffffffff", "rows x cols"),
        ("01000000 01 ffffffff 0400000000000000", "more than 262144 tensors"),
        ("01000000 01 00000400 0400000000000000", "numel at byte 24 needs 2097152 bytes"),
        ("ffffffff 01 01000000 0400000000000000", "HELLO"),
    ],
)
def test_layouts_that_cannot_be(layout, reason):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=reason):
            Hello.decode(hello_bytes(layout))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (0, "0300", "version 3 must be 4"),
        (6, "0000000000000000", "generation 0"),
        (14, "00", "dtype 0 must be one of 1, 2, 3"),
        (14, "04", "dtype 4"),
        (-2, "0101", "num_streams 257 must be 0 to 256"),
    ],
)
def test_fields_out_of_range_are_named(offset, data, reason):
    payload = bytearray(HELLO.encode())
    at = offset % len(payload)
    payload[at : at + len(data) // 2] = bytes.fromhex(data)
    with pytest.raises(ProtocolError, match=reason):
        Hello.decode(payload)


def test_fields_of_our_own_are_checked_too():
    for change, reason in (
        ({"dtype": "f16"}, "dtype f16"),
        ({"fingerprint": bytes(31)}, "fingerprint has 31 bytes"),
        ({"contract": bytes(33)}, "session_contract has 33 bytes"),
        ({"profile": b""}, "profile has 0 bytes"),
        ({"learner": -1}, "learner -1"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            attrs.evolve(HELLO, **change)
    with pytest.raises(ProtocolError, match="mode rda"):
        HelloFragment(mode=MergeMode.RDA, numels=(4,), matrices=((2, 2),))


def test_every_truncation_and_a_trailing_byte_are_refused():
    """Without a key: only 2 or 34 bytes may follow the contract."""
    payload = HELLO.encode()
    for size in [*range(len(payload)), len(payload) + 1]:
        with pytest.raises(ProtocolError):
            Hello.decode(payload[:size] if size < len(payload) else payload + b"\0")


def test_largest_layout_fits_and_one_tensor_more_does_not():
    sides = (1, 1) * TENSORS_MAX
    head = struct.pack("<IBI", 1, MergeMode.ISO, TENSORS_MAX)
    full = START + head + struct.pack(f"<{3 * TENSORS_MAX}Q", *(1,) * TENSORS_MAX, *sides) + END
    assert len(full) < HELLO_BYTES_MAX
    assert Hello.decode(full).layout.numels == (TENSORS_MAX,)
    with pytest.raises(ProtocolError, match="more than 262144 tensors"):
        Hello.decode(START + struct.pack("<IBI", 1, MergeMode.AVG, TENSORS_MAX + 1) + END)
    with pytest.raises(ProtocolError, match="at most 262144"):
        HelloLayout(fragments=(HelloFragment(mode=MergeMode.AVG, numels=(1,) * (TENSORS_MAX + 1)),))
    with pytest.raises(ProtocolError, match="at most 16777216"):
        Hello.decode(bytes(HELLO_BYTES_MAX + 1))


def test_more_fragments_than_any_model_needs_are_refused_before_the_first_is_read():
    one = HelloFragment(mode=MergeMode.AVG, numels=(1,))
    assert len(HelloLayout(fragments=(one,) * FRAGMENTS_MAX).numels) == FRAGMENTS_MAX
    with pytest.raises(ProtocolError, match="P 4097, at most 4096 fragments"):
        HelloLayout(fragments=(one,) * (FRAGMENTS_MAX + 1))
    with pytest.raises(ProtocolError, match="P 4097, at most 4096 fragments"):
        Hello.decode(START + struct.pack("<I", FRAGMENTS_MAX + 1))


def test_mac_is_the_last_32_bytes_and_is_checked_first():
    payload = HELLO.encode(KEY)
    assert payload[:-32] == HELLO.encode()
    assert Hello.decode(payload, KEY) == HELLO
    for wrong in (
        HELLO.encode(),
        HELLO.encode(b"another key"),
        payload[:-1],
        payload + b"\0",
        b"",
        bytes(20),
        # Broken fields under a wrong mac: the mac is what the error is about.
        bytes(len(payload)),
    ):
        with pytest.raises(AuthenticationError, match=r"^HELLO authentication failed$"):
            Hello.decode(wrong, KEY)


def test_any_flipped_bit_breaks_the_mac():
    payload = HELLO.encode(KEY)
    for index in range(len(payload)):
        changed = bytearray(payload)
        changed[index] ^= 1
        with pytest.raises(AuthenticationError):
            Hello.decode(changed, KEY)


@pytest.mark.parametrize("prefix", [b"", START, START + bytes.fromhex("01000000 01 01000000")])
def test_random_bytes_are_a_hello_or_a_protocol_error(prefix):
    @REPEATABLE
    @given(st.binary(max_size=300))
    def holds(data):
        try:
            hello = Hello.decode(prefix + data)
        except ProtocolError:
            return
        assert hello.encode() == prefix + data

    holds()


@REPEATABLE
@given(HELLOS, st.data())
def test_one_changed_byte_is_a_hello_or_a_protocol_error(hello, data):
    payload = bytearray(hello.encode())
    index = data.draw(st.integers(0, len(payload) - 1))
    payload[index] = data.draw(st.integers(0, 255))
    try:
        decoded = Hello.decode(payload)
    except ProtocolError:
        return
    assert decoded.encode() == payload
