"""Tiles of rows on their way to shared memory: vectors at any token, aligned or not, with zeros where nothing is.

A row is one channel of one batch row. A filter tap reads it at an offset that no vector load could take, so two aligned
vectors are loaded and the eight elements between are cut out in registers. Rows in shared memory are PAD elements
longer than they look, which spreads eight of them over all banks.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from accel.kernels.contract import VECTOR
from accel.kernels.device.tokens import element_offset

THREADS = 256
PAD = 8
WORDS = VECTOR // 2


def vectors_of(rows: int, columns: int) -> int:
    """Vectors of a tile that one thread moves."""
    return rows * columns // VECTOR // THREADS


def vector_place(index: int, columns: int, tid: Int32) -> tuple[Int32, Int32]:
    """(row, first column) of a thread's vector in a tile."""
    number = tid + index * THREADS
    per_row = columns // VECTOR
    return number // per_row, number % per_row * VECTOR


@cute.jit
def fetch_rows(
    mIn: cute.Tensor,
    rRaw: cute.Tensor,
    b: Int32,
    channel: Int32,
    t: Int32,
    shift: Int32,
    rows: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
    tid: Int32,
):
    """Start loading tokens t + shift .. + columns of `rows` channels of [B, C, T]; `t` is a multiple of a vector."""
    _, channels, tokens = mIn.shape
    for i in cutlass.range_constexpr(vectors_of(rows, columns)):
        row, column = vector_place(i, columns, tid)
        c = channel + row
        start = t + column + (shift & -VECTOR)
        for half in cutlass.range_constexpr(2):
            at = start + half * VECTOR
            exists = c < channels and at >= 0 and at < tokens
            if const_expr(half == 1):
                exists = exists and (shift & (VECTOR - 1)) != 0
            first = (2 * i + half) * WORDS
            for j in cutlass.range_constexpr(WORDS):
                rRaw[first + j] = Int32(0)
            if exists:
                load_words(mIn, rRaw, element_offset(mIn, b, c, at), first)


@cute.jit
def load_words(mIn: cute.Tensor, rRaw: cute.Tensor, offset: Int64, at: cutlass.Constexpr[int]):
    """One aligned vector into four words."""
    pointer = cute.make_ptr(Int32, (mIn.iterator + offset).toint(), cute.AddressSpace.gmem, assumed_align=16)
    rWord = cute.make_rmem_tensor(WORDS, Int32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WORDS)), rWord)
    for j in cutlass.range_constexpr(WORDS):
        rRaw[at + j] = rWord[j]


@cute.jit
def place_rows(
    rRaw: cute.Tensor,
    sOut: cute.Tensor,
    base: Int32,
    shift: Int32,
    rows: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
    tid: Int32,
):
    """Store what `fetch_rows` loaded as rows of columns + PAD elements from element `base` on."""
    for i in cutlass.range_constexpr(vectors_of(rows, columns)):
        row, column = vector_place(i, columns, tid)
        rOut = cute.make_rmem_tensor(WORDS, Int32)
        cut(rRaw, rOut, shift & (VECTOR - 1), i * 2 * WORDS)
        store_words(rOut, sOut, base + row * (columns + PAD) + column)


@cute.jit
def copy_rows(
    mIn: cute.Tensor,
    sOut: cute.Tensor,
    base: Int32,
    b: Int32,
    channel: Int32,
    t: Int32,
    rows: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
    tid: Int32,
):
    """Both in one, element by element, for rows of any strides and alignment; `t` has the shift in it."""
    _, channels, tokens = mIn.shape
    for i in cutlass.range_constexpr(vectors_of(rows, columns)):
        row, column = vector_place(i, columns, tid)
        c = channel + row
        rX = cute.make_rmem_tensor(VECTOR, mIn.element_type)
        for j in cutlass.range_constexpr(VECTOR):
            at = t + column + j
            rX[j] = mIn.element_type(0.0)
            if c < channels and at >= 0 and at < tokens:
                rX[j] = mIn[b, c, at]
        store_words(cute.recast_tensor(rX, Int32), sOut, base + row * (columns + PAD) + column)


def store_words(rOut: cute.Tensor, sOut: cute.Tensor, offset: Int32) -> None:
    """Four words to an aligned place in shared memory."""
    address = (sOut.iterator + offset).toint()
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    cute.autovec_copy(rOut, cute.make_tensor(pointer, cute.make_layout(WORDS)))


@cute.jit
def cut(rRaw: cute.Tensor, rOut: cute.Tensor, skip: Int32, at: cutlass.Constexpr[int]):
    """Elements skip .. skip + 8 of sixteen: the bits of `skip` one after the other, because registers have no index."""
    rWord = cute.make_rmem_tensor(2 * WORDS, Int32)
    for j in cutlass.range_constexpr(2 * WORDS):
        rWord[j] = rRaw[at + j]
    for step in cutlass.range_constexpr(2):
        words = 2 - step  # 4 elements, then 2
        for j in cutlass.range_constexpr(2 * WORDS - words):
            rWord[j] = rWord[j + words] if skip & (2 * words) else rWord[j]
    for j in cutlass.range_constexpr(WORDS):
        rOut[j] = funnel(rWord[j], rWord[j + 1], (skip & 1) * 16)


def funnel(low: Int32, high: Int32, bits: Int32) -> Int32:
    """The word that starts `bits` bits into two of them."""
    return cute.arch.inline_ptx(
        "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[low, high, bits]
    )
