"""Tokens of a [B, D, T] tensor: offsets, weights, and where sequences start."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from accel.kernels.device import load_vector, store_vector


def element_offset(mX: cute.Tensor, b: Int32, d: Int32, t: Int32) -> Int64:
    """Element offset of (b, d, t) in 64 bits."""
    return Int64(b) * mX.stride[0] + Int64(d) * mX.stride[1] + Int64(t) * mX.stride[2]


def load_weight(spec, mWeight: cute.Tensor, d: Int32) -> cute.Tensor:
    """The taps of the thread's channels, [vec * W] with the taps of a channel together."""
    if const_expr(spec.weight_rows):
        return load_vector(mWeight, Int64(d) * spec.width, spec.vec * spec.width, spec.align_weight)
    rW = cute.make_rmem_tensor(spec.vec * spec.width, mWeight.element_type)
    for c in range(spec.vec):
        for tap in range(spec.width):
            rW[c * spec.width + tap] = mWeight[d + c, tap]
    return rW


def load_starts(mWords: cute.Tensor, t: Int32, halo: int, rows: int) -> Int32:
    """Bit halo + i says that a sequence starts at token t + i, for -halo <= i < rows; t is a multiple of rows."""
    high = Int64(mWords[1 + t // 32])
    low = Int64(mWords[cutlass.max(t // 32, 1)]) & 0xFFFFFFFF
    # where t < 32 both words are the first one: rows before token 0 get some bits, and token 0 starts a sequence
    pair = (high << 32) | low
    return Int32((pair >> Int64(32 - halo + (t & 31))) & ((1 << (halo + rows)) - 1))


def load_indices(mSeqIdx: cute.Tensor, b: Int32, t: Int32, halo: int, rows: int) -> cute.Tensor:
    """seq_idx of tokens t - halo .. t + rows; tokens that do not exist have their neighbour's."""
    rIndex = cute.make_rmem_tensor(halo + rows, Int32)
    for i in range(halo + rows):
        token = cutlass.max(cutlass.min(t + (i - halo), mSeqIdx.shape[1] - 1), 0)
        rIndex[i] = mSeqIdx[b, token]
    return rIndex


def has_boundary(rIndex: cute.Tensor, count: int) -> Boolean:
    """Whether neighbouring rows differ in seq_idx, or one is padding."""
    boundary = rIndex[0] < 0
    for i in range(1, count):
        boundary = boundary | (rIndex[i] != rIndex[i - 1]) | (rIndex[i] < 0)
    return boundary


@cute.jit
def find_sequence(mCu: cute.Tensor, token: Int32) -> Int32:
    """The sequence that holds a token: the last n with cu_seqlens[n] <= token. `mCu` must be valid."""
    low = Int32(0)
    high = mCu.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if Int32(mCu[middle]) <= token:
            low = middle
        else:
            high = middle
    return low


def tap_is_valid(starts: Int32, row: int, back: int, halo: int) -> Boolean:
    """Whether the token `back` rows before `row` is in its sequence.

    Bit halo + i of `starts` says that a sequence starts at row i of the thread's rows.
    """
    mask = ((1 << back) - 1) << (halo + row - back + 1)
    return (starts & mask) == 0


@cute.jit
def load_tokens(
    spec: cutlass.Constexpr,
    mX: cute.Tensor,
    b: Int32,
    d: Int32,
    t: Int32,
    align: cutlass.Constexpr[int],
    with_halo: cutlass.Constexpr[bool] = True,
    vectors: cutlass.Constexpr[bool] = True,
):
    """(halo, rows): token t - 1 - j at halo[j * vec + c], token t + i at rows[i * vec + c]; indices are clamped."""
    vec, rows, halo = spec.vec, spec.rows, spec.width - 1
    last = mX.shape[2] - 1
    rHalo = cute.make_rmem_tensor(halo * vec, mX.element_type)
    rX = cute.make_rmem_tensor(rows * vec, mX.element_type)
    if const_expr(spec.channel_last):
        for i in cutlass.range_constexpr(-halo if with_halo else 0, rows):
            token = cutlass.max(t + i, 0) if const_expr(i < 0) else cutlass.min(t + i, last)
            if const_expr(vectors and spec.unit_stride):
                rRow = load_vector(mX, element_offset(mX, b, d, token), vec, align)
            else:
                rRow = cute.make_rmem_tensor(vec, mX.element_type)
                for c in cutlass.range_constexpr(vec):
                    rRow[c] = mX[b, d + c, token]
            for c in cutlass.range_constexpr(vec):
                if const_expr(i < 0):
                    rHalo[(-i - 1) * vec + c] = rRow[c]
                else:
                    rX[i * vec + c] = rRow[c]
    else:
        if const_expr(with_halo):
            if t > 0:
                rBefore = load_vector(mX, element_offset(mX, b, d, t - rows), rows, align)
                for j in cutlass.range_constexpr(halo):
                    rHalo[j] = rBefore[rows - 1 - j]
        if const_expr(vectors):
            if t + rows <= mX.shape[2]:
                rFull = load_vector(mX, element_offset(mX, b, d, t), rows, align)
                for i in cutlass.range_constexpr(rows):
                    rX[i] = rFull[i]
            else:
                for i in cutlass.range_constexpr(rows):
                    rX[i] = mX[b, d, cutlass.min(t + i, last)]
        else:
            for i in cutlass.range_constexpr(rows):
                rX[i] = mX[b, d, cutlass.min(t + i, last)]
    return rHalo, rX


@cute.jit
def store_tokens(spec: cutlass.Constexpr, rY: cute.Tensor, mY: cute.Tensor, b: Int32, d: Int32, t: Int32):
    """Store the rows that exist."""
    vec, rows = spec.vec, spec.rows
    if const_expr(spec.channel_last):
        for i in cutlass.range_constexpr(rows):
            if t + i < mY.shape[2]:
                rRow = cute.make_rmem_tensor(vec, rY.element_type)
                for c in cutlass.range_constexpr(vec):
                    rRow[c] = rY[i * vec + c]
                store_vector(rRow, mY, element_offset(mY, b, d, t + i), spec.align_y)
    else:
        if t + rows <= mY.shape[2]:
            store_vector(rY, mY, element_offset(mY, b, d, t), spec.align_y)
        else:
            for i in cutlass.range_constexpr(rows):
                if t + i < mY.shape[2]:
                    mY[b, d, t + i] = rY[i]


def token_strides(channel_last: bool, unit_stride: bool) -> tuple:
    """Strides of a [B, D, T] tensor for compilation; None is any stride."""
    if not unit_stride:
        return (None, None, None)
    return (None, 1, None) if channel_last else (None, None, 1)
