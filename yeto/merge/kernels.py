"""The loops over elements, compiled: each reads what it needs once, works in registers, writes once.

Bits follow from the source alone, on every processor and for any number of threads:

- Element by element, each operation is rounded once, as IEEE 754 has it. A fused multiply-add is written out
  where one is meant; the compiler makes none of its own and reorders nothing (no fast-math).
- A sum has ``LANES`` f64 accumulators: element i of a piece goes to accumulator i mod ``LANES``, and in the
  end they are folded in halves. The order is fixed, and yet a vector unit of any width can be filled. The
  product of two f32 numbers is exact in f64, so each addition is rounded once.

f64 also makes norms safe: the square of the largest f32 is 1e77, of the smallest 1e-90. A sum of squares is
finite exactly if every element is, so one pass gives both the norm and the verdict.

A kernel works on *vectors*: ``LANES`` numbers as one value, which the compiler spreads over as many registers
of the processor as it takes. Left to find them in loops over arrays, it keeps accumulators and intermediate
results in memory, and the loops take twice as long as the memory they read.

A *piece* is a row (tensor, start, stop): at most a block of one tensor, in elements of the fragment. A kernel
takes a run of pieces and leaves one result for each; whoever adds them up does it in their order. A *source*
is an address and a kind of encoding. What vectors cannot be loaded from (q4, and the last elements of a piece
that fill none) is decoded to a *spare row* first, ``CHUNK`` elements at a time.

All kernels stand in this one file: numba keeps what it compiled on disk for as long as the file does not
change, and does not notice when another one that it took a function from does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numpy.typing import NDArray

F32: Final = 1
BF16: Final = 2
Q4: Final = 3
"""Kinds of source: the wire's numbers of the dtypes."""

LANES: Final = 64
"""Numbers of a vector. 192 accumulators in f64 just fit the registers of AVX-512."""
CHUNK: Final = 2048
"""Elements decoded at a time: 8 KiB in f32. A multiple of ``LANES`` and of a q4 block."""
AHEAD: Final = 16 * LANES
"""Elements before which the memory is told what will be loaded, where little or nothing is written: the
processor's own guesses come too late then. Beside many writes they are good enough, and this disturbs."""
LINE: Final = 64
"""Bytes of a cache line."""
STREAMED: Final = 1 << 24
"""Elements from which on an array is too large to be in a cache when the next pass reads it. It is written
past the caches then, unless it is digested at once, which spares reading the memory that is overwritten."""
Q4_ELEMENTS: Final = 256
Q4_BYTES: Final = 132

Pieces = NDArray[np.int64]
"""(count, 3): tensor, start, stop."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Halves = NDArray[np.uint16]

Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    """Compile on first use, to run without the interpreter's lock; kept on disk where that is possible."""
    settings = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return cast(Function, numba.njit(cache=True, **settings)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        return cast(Function, numba.njit(**settings)(function))


# What Python has no word for.


@intrinsic  # type: ignore[untyped-decorator]
def _as_f32(_context: Any, _bits: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), emit


@intrinsic  # type: ignore[untyped-decorator]
def _as_bits(_context: Any, _value: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), emit


def _pointer(element: Any, bits: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def at(_context: Any, _address: Any) -> Any:
        def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], bits.as_pointer())

        return types.CPointer(element)(types.int64), emit

    return at


_f32_at = _pointer(types.float32, ir.FloatType())
_u16_at = _pointer(types.uint16, ir.IntType(16))
_u8_at = _pointer(types.uint8, ir.IntType(8))


# Vectors: values of ``LANES`` numbers. One operation is one instruction for each register it takes.


class _Vector(types.Type):  # type: ignore[misc]
    """The type of a vector, as numba has types."""

    def __init__(self, name: str, lane: Any) -> None:
        super().__init__(name=name)
        self.lanes = ir.VectorType(lane, LANES)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Any) -> None:
        super().__init__(manager, vector, vector.lanes)


_FLOATS = _Vector("f32 vector", ir.FloatType())
_DOUBLES = _Vector("f64 vector", ir.DoubleType())
_BITS = _Vector("u32 vector", ir.IntType(32))
_HALVES = _Vector("u16 vector", ir.IntType(16))
_INDEX = ir.IntType(32)


def _operation(result: Any, operands: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """Return a function for kernels: ``emit(builder, *values)`` says what is to be compiled for it."""
    signature = result(*operands)

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        made = emit(builder, *values)
        return context.get_dummy_value() if result is types.void else made

    by_count: dict[int, Callable[..., Any]] = {
        0: lambda _context: (signature, lower),
        1: lambda _context, _a: (signature, lower),
        2: lambda _context, _a, _b: (signature, lower),
        3: lambda _context, _a, _b, _c: (signature, lower),
    }
    return intrinsic(by_count[len(operands)])


def _same(vector: Any, number: float) -> Any:
    """Return a constant vector, all of one number."""
    return ir.Constant(vector.lanes, [number] * LANES)


def _emit_load(builder: Any, address: Any, vector: Any, size: int) -> Any:
    loaded = builder.load(builder.inttoptr(address, vector.lanes.as_pointer()))
    loaded.align = size
    return loaded


def _emit_hint(builder: Any, address: Any, size: int) -> None:
    """Have the lines loaded that hold the vector ``AHEAD`` elements from here, if there are such."""
    line, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    shape = ir.FunctionType(ir.VoidType(), [line, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
    for byte in range(AHEAD * size, (AHEAD + LANES) * size, LINE):
        there = builder.inttoptr(builder.add(address, ir.Constant(address.type, byte)), line)
        builder.call(prefetch, [there, number(0), number(3), number(1)])  # to read, into all caches, data


def _emit_load_f32_ahead(builder: Any, address: Any) -> Any:
    _emit_hint(builder, address, 4)
    return _emit_load(builder, address, _FLOATS, 4)


def _emit_load_bf16_ahead(builder: Any, address: Any) -> Any:
    _emit_hint(builder, address, 2)
    bits = builder.zext(_emit_load(builder, address, _HALVES, 2), _BITS.lanes)
    return builder.bitcast(builder.shl(bits, _same(_BITS, 16)), _FLOATS.lanes)


def _emit_store(builder: Any, address: Any, values: Any, size: int, *, past: bool = False) -> None:
    stored = builder.store(values, builder.inttoptr(address, values.type.as_pointer()))
    stored.align = LINE if past else size
    if past:
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


def _emit_store_bf16(builder: Any, address: Any, values: Any, *, past: bool = False) -> None:
    """Encode as `yeto.wire.bf16` does: to nearest, ties to even; NaN is cut and marked quiet."""
    bits = builder.bitcast(values, _BITS.lanes)
    upper = builder.lshr(bits, _same(_BITS, 16))
    half = builder.add(_same(_BITS, 0x7FFF), builder.and_(upper, _same(_BITS, 1)))
    rounded = builder.lshr(builder.add(bits, half), _same(_BITS, 16))
    nan = builder.icmp_unsigned(">", _magnitude(builder, values), _same(_BITS, 0x7F800000))
    quiet = builder.or_(upper, _same(_BITS, 0x40))
    halves = builder.trunc(builder.select(nan, quiet, rounded), _HALVES.lanes)
    _emit_store(builder, address, halves, 2, past=past)


def _emit_splat(builder: Any, number: Any) -> Any:
    unset = ir.Constant(_FLOATS.lanes, ir.Undefined)
    first = builder.insert_element(unset, number, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(first, unset, ir.Constant(_BITS.lanes, [0] * LANES))


def _emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    bits = 64 if a.type == _DOUBLES.lanes else 32
    shape = ir.FunctionType(a.type, [a.type] * 3)
    fma = cgutils.get_or_insert_function(builder.module, shape, f"llvm.fma.v{LANES}f{bits}")
    return builder.call(fma, [a, b, c])


def _emit_add_products(builder: Any, sums: Any, a: Any, b: Any) -> Any:
    return _emit_fma(builder, builder.fpext(a, _DOUBLES.lanes), builder.fpext(b, _DOUBLES.lanes), sums)


def _magnitude(builder: Any, values: Any) -> Any:
    return builder.and_(builder.bitcast(values, _BITS.lanes), _same(_BITS, 0x7FFFFFFF))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", a, b), a, b)


def _emit_fold(builder: Any, vector: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """Join the lanes in halves: the first with the one in the middle, and so on, until one is left."""
    count = LANES
    while count > 1:
        count //= 2
        unset, places = ir.Constant(vector.type, ir.Undefined), ir.VectorType(_INDEX, count)
        lower = builder.shuffle_vector(vector, unset, ir.Constant(places, list(range(count))))
        upper = builder.shuffle_vector(vector, unset, ir.Constant(places, list(range(count, 2 * count))))
        vector = join(builder, lower, upper)
    return builder.extract_element(vector, ir.Constant(_INDEX, 0))


_load_f32 = _operation(_FLOATS, (types.int64,), lambda to, at: _emit_load(to, at, _FLOATS, 4))
_load_f32_ahead = _operation(_FLOATS, (types.int64,), _emit_load_f32_ahead)
_load_bf16_ahead = _operation(_FLOATS, (types.int64,), _emit_load_bf16_ahead)
_store_f32 = _operation(types.void, (types.int64, _FLOATS), lambda to, at, x: _emit_store(to, at, x, 4))
_store_bf16 = _operation(types.void, (types.int64, _FLOATS), _emit_store_bf16)
_store_f32_past = _operation(
    types.void, (types.int64, _FLOATS), lambda to, at, x: _emit_store(to, at, x, 4, past=True)
)
_store_bf16_past = _operation(
    types.void, (types.int64, _FLOATS), lambda to, at, x: _emit_store_bf16(to, at, x, past=True)
)
_settle = _operation(types.void, (), lambda to: to.fence("seq_cst"))
_splat = _operation(_FLOATS, (types.float32,), _emit_splat)
_times = _operation(_FLOATS, (_FLOATS, _FLOATS), lambda to, a, b: to.fmul(a, b))
_plus = _operation(_FLOATS, (_FLOATS, _FLOATS), lambda to, a, b: to.fadd(a, b))
_fma = _operation(_FLOATS, (_FLOATS, _FLOATS, _FLOATS), _emit_fma)
_no_sums = _operation(_DOUBLES, (), lambda _: _same(_DOUBLES, 0.0))
_add_products = _operation(_DOUBLES, (_DOUBLES, _FLOATS, _FLOATS), _emit_add_products)
_sum = _operation(
    types.float64, (_DOUBLES,), lambda to, sums: _emit_fold(to, sums, lambda to, a, b: to.fadd(a, b))
)
_no_bits = _operation(_BITS, (), lambda _: _same(_BITS, 0))
_raise_to = _operation(_BITS, (_BITS, _FLOATS), lambda to, top, x: _larger(to, _magnitude(to, x), top))
_largest_of = _operation(types.uint32, (_BITS,), lambda to, top: _emit_fold(to, top, _larger))


@_compiled
def examine(kind: int, address: int, pieces: Pieces, momentum: Floats, sums: Doubles) -> None:
    """Sum up what a push and the momentum have to do with each other, piece by piece.

    Args:
        kind: encoding of the push.
        address: where its first byte is; the number of bytes was checked.
        pieces: what to look at.
        momentum: of the whole fragment.
        sums: (count, 3), overwritten: push squared, push times momentum, momentum squared.
    """
    spare = np.empty((2, CHUNK), dtype=np.float32)
    for piece in range(pieces.shape[0]):
        squares = _no_sums()
        dots = _no_sums()
        lengths = _no_sums()
        start, stop = pieces[piece, 1], pieces[piece, 2]
        while start < stop:
            count = _chunk(start, stop)
            found, there = _locate(kind, address, start, count, spare[0])
            _, beside = _locate(F32, _address(momentum), start, count, spare[1])
            for at in range(0, count, LANES):
                x = _load_bf16_ahead(there + 2 * at) if found == BF16 else _load_f32_ahead(there + 4 * at)
                y = _load_f32_ahead(beside + 4 * at)
                squares = _add_products(squares, x, x)
                dots = _add_products(dots, x, y)
                lengths = _add_products(lengths, y, y)
            start += count
        sums[piece, 0] = _sum(squares)
        sums[piece, 1] = _sum(dots)
        sums[piece, 2] = _sum(lengths)


@_compiled
def accumulate(
    kinds: Ints,
    addresses: Ints,
    coefficients: Floats,
    powers: Floats,
    pieces: Pieces,
    out: Floats,
    sums: Doubles,
) -> None:
    """Write the weighted sum of several sources, and sum up its squares.

    Args:
        kinds: encodings of the sources.
        addresses: where their first bytes are.
        coefficients: (tensors, sources). A source whose coefficient is 0 is not read.
        powers: (tensors, sources); each element is multiplied by it before its coefficient.
        pieces: what to write.
        out: of the whole fragment; overwritten.
        sums: (count,), overwritten: squares of what was written.
    """
    spare = np.empty((kinds.size + 1, CHUNK), dtype=np.float32)
    found, there = np.empty(kinds.size, dtype=np.int64), np.empty(kinds.size, dtype=np.int64)
    for piece in range(pieces.shape[0]):
        tensor = pieces[piece, 0]
        wanted = np.flatnonzero(coefficients[tensor])
        scales, before = coefficients[tensor][wanted], powers[tensor][wanted]
        squares = _no_sums()
        start, stop = pieces[piece, 1], pieces[piece, 2]
        while start < stop:
            count = _chunk(start, stop)
            for index in range(wanted.size):
                source = wanted[index]
                found[index], there[index] = _locate(
                    kinds[source], addresses[source], start, count, spare[index]
                )
            target = _address(out) + 4 * start if count >= LANES else _address(spare[-1])
            past = out.size >= STREAMED and count >= LANES and target % LINE == 0
            for at in range(0, count, LANES):
                total = _splat(np.float32(0))
                for index in range(wanted.size):
                    if found[index] == BF16:
                        x = _load_bf16_ahead(there[index] + 2 * at)
                    else:
                        x = _load_f32_ahead(there[index] + 4 * at)
                    if before[index] != 1:
                        x = _times(x, _splat(before[index]))
                    if index == 0:  # not added to 0, which would make a 0 of what is -0
                        total = _times(x, _splat(scales[index]))
                    else:
                        total = _fma(x, _splat(scales[index]), total)
                if past:
                    _store_f32_past(target + 4 * at, total)
                else:
                    _store_f32(target + 4 * at, total)
                squares = _add_products(squares, total, total)
            if count < LANES:
                out[start:stop] = spare[-1, :count]
            start += count
        sums[piece] = _sum(squares)
    _settle()


@_compiled
def step(
    gradient: Floats,
    coefficients: Floats,
    powers: Floats,
    pieces: Pieces,
    params: Floats,
    momentum: Floats,
    lr: float,
    mu: float,
    new_params: Floats,
    new_momentum: Floats,
    halves: Halves,
    largest: NDArray[np.uint32],
) -> None:
    """Make the outer step: momentum, parameters and the parameters' bf16 encoding.

    Args:
        gradient: of the whole fragment, up to a factor for each tensor. It may be ``new_params``.
        coefficients: (tensors,): that factor.
        powers: (tensors,): the gradient is multiplied by it before.
        pieces: what to step.
        params: of the whole fragment, as ``momentum``.
        momentum: the Nesterov buffer.
        lr: outer learning rate.
        mu: outer momentum.
        new_params: overwritten.
        new_momentum: overwritten; of no elements when the momentum stays as it is.
        halves: overwritten with the rounded parameters; of no elements when nobody wants them.
        largest: (count,), overwritten: bits of the largest magnitude of what was written, NaN above all.
    """
    spare, spare_halves = np.empty((5, CHUNK), dtype=np.float32), np.empty(LANES, dtype=np.uint16)
    down, keep = _splat(np.float32(-lr)), _splat(np.float32(mu))
    with_momentum, with_halves = new_momentum.size > 0, halves.size > 0
    for piece in range(pieces.shape[0]):
        power, factor = powers[pieces[piece, 0]], coefficients[pieces[piece, 0]]
        top = _no_bits()
        start, stop = pieces[piece, 1], pieces[piece, 2]
        while start < stop:
            count = _chunk(start, stop)
            _, merged = _locate(F32, _address(gradient), start, count, spare[0])
            _, old = _locate(F32, _address(params), start, count, spare[1])
            _, kept = _locate(F32, _address(momentum), start, count, spare[2])
            to_params, to_momentum = _address(new_params) + 4 * start, _address(new_momentum) + 4 * start
            to_halves = _address(halves) + 2 * start
            if count < LANES:
                to_params, to_momentum = _address(spare[3]), _address(spare[4])
                to_halves = _address(spare_halves)
            past = halves.size >= STREAMED and count >= LANES and to_halves % LINE == 0
            for at in range(0, count, LANES):
                g = _load_f32(merged + 4 * at)
                if power != 1:
                    g = _times(g, _splat(power))
                g = _times(g, _splat(factor))
                buffer = _plus(_times(_load_f32(kept + 4 * at), keep), g)
                new = _fma(_fma(buffer, keep, g), down, _load_f32(old + 4 * at))
                _store_f32(to_params + 4 * at, new)
                top = _raise_to(top, new)
                if with_momentum:
                    _store_f32(to_momentum + 4 * at, buffer)
                    top = _raise_to(top, buffer)
                if with_halves and past:
                    _store_bf16_past(to_halves + 2 * at, new)
                elif with_halves:
                    _store_bf16(to_halves + 2 * at, new)
            if count < LANES:
                new_params[start:stop] = spare[3, :count]
                if with_momentum:
                    new_momentum[start:stop] = spare[4, :count]
                if with_halves:
                    halves[start:stop] = spare_halves[:count]
            start += count
        largest[piece] = _largest_of(top)
    _settle()


@_compiled
def largest_magnitudes(pieces: Pieces, values: Floats, largest: NDArray[np.uint32]) -> None:
    """Write the bits of each piece's largest magnitude; those of NaN are above all."""
    for piece in range(pieces.shape[0]):
        largest[piece] = _largest(values[pieces[piece, 1] : pieces[piece, 2]])


# Where a vector can be loaded from.


@_compiled
def _address(array: Any) -> int:
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


@_compiled
def _chunk(start: int, stop: int) -> int:
    """Return how many elements are worked on next: whole vectors, or what is left when it fills none."""
    left = stop - start
    if left >= CHUNK:
        return CHUNK
    return left - left % LANES if left >= LANES else left


@_compiled
def _locate(kind: int, address: int, start: int, count: int, row: Floats) -> tuple[int, int]:
    """Return kind and address of elements ``start`` and following of a source: there, or in the spare row."""
    if count >= LANES and kind == BF16:
        return kind, address + 2 * start
    if count >= LANES and kind == F32:
        return kind, address + 4 * start
    _read(kind, address, start, row[:count])
    row[count:LANES] = 0  # adds nothing to a sum
    return F32, _address(row)


@_compiled
def _read(kind: int, address: int, start: int, out: Floats) -> None:
    """Decode elements ``start`` and following of a source."""
    if kind == BF16:
        halves = numba.carray(_u16_at(address + 2 * start), (out.size,))
        for i in range(out.size):
            out[i] = _as_f32(np.uint32(halves[i]) << np.uint32(16))
    elif kind == F32:
        floats = numba.carray(_f32_at(address + 4 * start), (out.size,))
        for i in range(out.size):
            out[i] = floats[i]
    else:
        done = 0
        while done < out.size:
            block, first = divmod(start + done, Q4_ELEMENTS)
            stop = min(done + Q4_ELEMENTS - first, out.size)
            _read_q4(address + block * Q4_BYTES, first, out[done:stop])
            done = stop


@_compiled
def _read_q4(address: int, first: int, out: Floats) -> None:
    """Decode elements ``first`` and following of one q4 block; a scale below 0 or not finite gives NaN."""
    scale = numba.carray(_f32_at(address), (1,))[0]
    if not (scale >= 0 and scale < np.inf):
        scale = np.float32(np.nan)
    codes = numba.carray(_u8_at(address + 4), (Q4_ELEMENTS // 2,))
    if first == 0 and out.size == Q4_ELEMENTS:
        for i in range(Q4_ELEMENTS // 2):
            out[2 * i] = _q4_factor(np.uint32(codes[i]) & np.uint32(15)) * scale
            out[2 * i + 1] = _q4_factor(np.uint32(codes[i]) >> np.uint32(4)) * scale
    else:
        for i in range(out.size):
            code = np.uint32(codes[(first + i) >> 1]) >> np.uint32(4 * ((first + i) & 1))
            out[i] = _q4_factor(code & np.uint32(15)) * scale


@_compiled
def _q4_factor(code: np.uint32) -> np.float32:
    """Return what a nibble stands for: 0 for level 0, else 2**(level - 7), with its sign."""
    level = code & np.uint32(7)
    bits = (level + np.uint32(120)) << np.uint32(23) if level else np.uint32(0)
    return _as_f32(bits | (code >> np.uint32(3)) << np.uint32(31))  # type: ignore[no-any-return]


@_compiled
def _largest(values: Floats) -> np.uint32:
    top = np.uint32(0)
    for i in range(values.size):
        top = max(top, _as_bits(values[i]) & np.uint32(0x7FFFFFFF))
    return top
