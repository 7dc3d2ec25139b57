"""Gradients of the full-sequence convolution, channel-first: `ConvBackwardFirst`.

A thread owns 8 consecutive tokens of one channel and loads the 8 before and the 8 after as well (they hit L1); a warp
owns 256 tokens, and walks over batch rows so that the partial sums stay few. Same sums, same order, in every run.
"""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr

from accel.kernels.conv_bwd_first import ROWS, TILE, WARPS, BackwardFirstSpec
from accel.kernels.device import has_dependent_launch, load_vector, multiply_silu_gradient, store_vector, to_float
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.device.last_tokens import flatten_tokens
from accel.kernels.device.tokens import (
    element_offset,
    find_sequence,
    load_indices,
    load_starts,
    load_weight,
    tap_is_valid,
    token_strides,
)


class ConvBackwardFirst:
    """g = dy * act'(u); dx[t] = sum_k w[W-1-k] g[t+k]; dw[j] = sum g[t] x[t-(W-1)+j]; db = sum g."""

    def __init__(self, spec: BackwardFirstSpec):
        self.spec = spec
        self.halo = spec.width - 1
        self.sums = spec.width + (1 if spec.bias_dtype is not None else 0)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mDy: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mInitial: cute.Tensor | None,
        mDFinal: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mSeqIdx: cute.Tensor | None,
        mDx: cute.Tensor | None,
        mPartial: cute.Tensor | None,
        batches: Int32,
        stream,
    ):
        if const_expr(self.spec.packing == "cu_seqlens"):
            mX, mDy = flatten_tokens(mX), flatten_tokens(mDy)
            if const_expr(mDx is not None):
                mDx = flatten_tokens(mDx)
        tiles = cute.ceil_div(mX.shape[2], TILE)
        self.kernel(mX, mDy, mWeight, mBias, mInitial, mDFinal, mCu, mWords, mSeqIdx, mDx, mPartial).launch(
            grid=[cute.ceil_div(mX.shape[1] * tiles, WARPS), batches, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(self.spec.arch),
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mDy: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mInitial: cute.Tensor | None,
        mDFinal: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mSeqIdx: cute.Tensor | None,
        mDx: cute.Tensor | None,
        mPartial: cute.Tensor | None,
    ):
        spec = self.spec
        if const_expr(has_dependent_launch(spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        block, first, _ = cute.arch.block_idx()
        _, batches, _ = cute.arch.grid_dim()
        batch, channels, tokens = mX.shape
        tiles = cute.ceil_div(tokens, TILE)
        index = block * WARPS + tid // 32
        d = index // tiles
        tile = index - d * tiles
        lane = tid % 32
        t = tile * TILE + lane * ROWS
        if d < channels:
            rSum = cute.make_rmem_tensor(self.sums, Float32)
            for i in cutlass.range_constexpr(self.sums):
                rSum[i] = Float32(0.0)
            for b in range(first, batch, batches):
                if t < tokens:
                    self.gradients(mX, mDy, mWeight, mBias, mInitial, mDFinal, mCu, mWords, mSeqIdx, mDx, rSum, b, d, t)
            if const_expr(spec.needs_parameters):
                for i in cutlass.range_constexpr(self.sums):
                    total = cute.arch.warp_reduction(rSum[i], operator.add)
                    if lane == 0:
                        mPartial[first * tiles + tile, i, d] = total

    @cute.jit
    def gradients(
        self, mX, mDy, mWeight, mBias, mInitial, mDFinal, mCu, mWords, mSeqIdx, mDx, rSum, b: Int32, d: Int32, t: Int32
    ):
        """dx of the thread's tokens and their share of the sums. Rows are counted from the thread's first token."""
        spec = self.spec
        width, halo, tokens = spec.width, self.halo, mX.shape[2]
        malformed = Int32(0)
        starts, rSame = Int32(0), None
        if const_expr(spec.packing == "cu_seqlens"):
            malformed = mWords[0]
            starts = load_starts(mWords, t, halo, ROWS)
            after = load_starts(mWords, cutlass.min(t + ROWS, (tokens - 1) // ROWS * ROWS), halo, ROWS)
            starts = starts | ((after >> halo) << (halo + ROWS))
            if malformed != 0:
                starts = Int32(0)
        if const_expr(spec.packing == "seq_idx"):
            rSame = same_sequence(load_indices(mSeqIdx, b, t, halo, ROWS + halo), halo, ROWS + halo)
        rX = cute.make_rmem_tensor(3 * ROWS, mX.element_type)  # rows -8 .. 15
        rDy = cute.make_rmem_tensor(2 * ROWS, mX.element_type)  # rows 0 .. 15
        load_eight(mX, rX, b, d, t - ROWS, 0, spec.align_x)
        for part in cutlass.range_constexpr(2):
            load_eight(mX, rX, b, d, t + part * ROWS, (1 + part) * ROWS, spec.align_x)
            load_eight(mDy, rDy, b, d, t + part * ROWS, part * ROWS, spec.align_dy)
        if const_expr(spec.has_initial and spec.packing != "cu_seqlens"):
            if t == 0:
                for j in cutlass.range_constexpr(halo):
                    rX[ROWS - 1 - j] = mInitial[b, d, mInitial.shape[2] - 1 - j]
        rRaw = load_weight(spec, mWeight, d)
        rW = cute.make_rmem_tensor(width, Float32)
        poison = Float32(0.0)
        if malformed != 0:
            poison = Float32(float("nan"))
        for j in cutlass.range_constexpr(width):
            rW[j] = rRaw[j].to(Float32) + poison
        rG = cute.make_rmem_tensor(ROWS + halo, Float32)
        # rows together interleave their chains, but a wide filter has no registers for many
        group = ROWS + halo if width <= 4 else 1
        for start in cutlass.range_constexpr(0, ROWS + halo, group):
            count = min(group, ROWS + halo - start)
            self.row_gradients(
                mBias, mInitial, mCu, rX, rDy, rW, rG, rSum, starts, rSame, d, t, tokens, malformed, start, count
            )
        for i in cutlass.range_constexpr(ROWS + halo):
            rG[i] = rG[i] + poison
        if const_expr(spec.needs_parameters):
            for i in cutlass.range_constexpr(self.sums):
                rSum[i] = rSum[i] + poison
        rDx = cute.make_rmem_tensor(ROWS, Float32)
        for i in cutlass.range_constexpr(ROWS):
            rDx[i] = rG[i] * rW[width - 1]
        for k in cutlass.range_constexpr(1, width):
            for i in cutlass.range_constexpr(ROWS):
                share = rG[i + k]
                if not self.is_valid(starts, rSame, i + k, k):
                    share = Float32(0.0)
                rDx[i] = rDx[i] + share * rW[width - 1 - k]
        if const_expr(spec.needs_x):
            if const_expr(spec.has_final):
                self.add_final(mDFinal, mCu, rDx, b, d, t, tokens, malformed)
            rOut = cute.make_rmem_tensor(ROWS, mX.element_type)
            for i in cutlass.range_constexpr(ROWS):
                rOut[i] = rDx[i].to(mX.element_type)
            if t + ROWS <= tokens:
                store_vector(rOut, mDx, element_offset(mDx, b, d, t), spec.align_dx)
            else:
                for i in cutlass.range_constexpr(ROWS):
                    if t + i < tokens:
                        mDx[b, d, t + i] = rOut[i]

    @cute.jit
    def row_gradients(
        self, mBias, mInitial, mCu, rX, rDy, rW, rG, rSum, starts: Int32, rSame, d: Int32, t: Int32,
        tokens: Int32, malformed: Int32, start: cutlass.Constexpr[int], count: cutlass.Constexpr[int],
    ):  # fmt: skip
        """g of rows start .. start + count, and the share of those that are the thread's own in the sums."""
        spec = self.spec
        width, halo = spec.width, self.halo
        rTap = cute.make_rmem_tensor(count * width, Float32)  # token k rows back of row start + i at [i * W + k]
        rU = cute.make_rmem_tensor(count, Float32)
        rPart = cute.make_rmem_tensor(count, Float32)
        bias = Float32(0.0)
        if const_expr(mBias is not None):
            bias = mBias[d].to(Float32)
        for i in cutlass.range_constexpr(count):
            row = start + i
            for k in cutlass.range_constexpr(width):
                value = to_float(rX, ROWS + row - k)
                if const_expr(k > 0):
                    if not self.is_valid(starts, rSame, row, k):
                        value = Float32(0.0)
                rTap[i * width + k] = value
            if const_expr(spec.has_initial and spec.packing == "cu_seqlens"):
                if malformed == 0 and t + row < tokens and not tap_is_valid(starts, row, halo, halo):
                    self.read_history(mInitial, mCu, rTap, d, t + row, i * width)
            u = bias
            for k in cutlass.range_constexpr(width):
                u += rTap[i * width + k] * rW[width - 1 - k]
            rU[i] = u
            rPart[i] = to_float(rDy, row)
        if const_expr(spec.silu):
            multiply_silu_gradient(rPart, rU)
        for i in cutlass.range_constexpr(count):
            row = start + i
            if const_expr(spec.packing == "seq_idx"):
                if rSame[row] & 1 == 0:
                    rPart[i] = Float32(0.0)
            rG[row] = rPart[i]
            if const_expr(row < ROWS and spec.needs_parameters):
                for k in cutlass.range_constexpr(width):
                    rSum[width - 1 - k] = rSum[width - 1 - k] + rPart[i] * rTap[i * width + k]
                if const_expr(spec.bias_dtype is not None):
                    rSum[width] = rSum[width] + rPart[i]

    def is_valid(self, starts: Int32, rSame, i: int, k: int) -> Boolean:
        """Whether the token k rows before row i is in its sequence; tokens before the first are 0 anyway."""
        if const_expr(self.spec.packing == "cu_seqlens"):
            return tap_is_valid(starts, i, k, self.halo)
        if const_expr(self.spec.packing == "seq_idx"):
            return (rSame[i] >> k) & 1 != 0
        return Boolean(True)

    @cute.jit
    def read_history(self, mInitial, mCu, rTap, d: Int32, token: Int32, at: cutlass.Constexpr[int]):
        """Taps before the start of a packed sequence come from its initial state."""
        n = find_sequence(mCu, token)
        position = token - Int32(mCu[n])
        for k in cutlass.range_constexpr(1, self.spec.width):
            if k > position:
                rTap[at + k] = mInitial[n, d, mInitial.shape[2] + position - k].to(Float32)

    @cute.jit
    def add_final(self, mDFinal, mCu, rDx, b: Int32, d: Int32, t: Int32, tokens: Int32, malformed: Int32):
        """A final-state column that holds a token gives its gradient to the token."""
        n, end = b, tokens
        if const_expr(self.spec.packing == "cu_seqlens"):
            if malformed == 0:
                n = find_sequence(mCu, t)
                end = Int32(mCu[n + 1])
        for i in cutlass.range_constexpr(ROWS):
            if t + i < tokens:
                if const_expr(self.spec.packing == "cu_seqlens"):
                    if malformed == 0:
                        while t + i >= end:
                            n = n + 1
                            end = Int32(mCu[n + 1])
                column = t + i - end + mDFinal.shape[2]
                if column >= 0:
                    rDx[i] = rDx[i] + mDFinal[n, d, column].to(Float32)


def same_sequence(rIndex: cute.Tensor, halo: int, rows: int) -> cute.Tensor:
    """Of each row, bit k: the token k rows back has its index; bit 0: the row is no padding."""
    rSame = cute.make_rmem_tensor(rows, Int32)
    for i in range(rows):
        rSame[i] = Int32(rIndex[halo + i] >= 0)
        for k in range(1, halo + 1):
            rSame[i] = rSame[i] | (Int32(rIndex[halo + i - k] == rIndex[halo + i]) << k)
    return rSame


@cute.jit
def load_eight(
    mIn: cute.Tensor,
    rIn: cute.Tensor,
    b: Int32,
    d: Int32,
    t: Int32,
    at: cutlass.Constexpr[int],
    align: cutlass.Constexpr[int],
):
    """Tokens t .. t + 8 into registers from `at` on; tokens that do not exist are 0."""
    if t >= 0 and t + ROWS <= mIn.shape[2] and align > 0:
        rFull = load_vector(mIn, element_offset(mIn, b, d, t), ROWS, align)
        for i in cutlass.range_constexpr(ROWS):
            rIn[at + i] = rFull[i]
    else:
        for i in cutlass.range_constexpr(ROWS):
            rIn[at + i] = mIn.element_type(0.0)
            if t + i >= 0 and t + i < mIn.shape[2]:
                rIn[at + i] = mIn[b, d, t + i]


def build(spec: BackwardFirstSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    any3 = (None, None, None)
    packed = spec.packing == "cu_seqlens"
    return compile_for(
        spec.arch,
        ConvBackwardFirst(spec),
        fake(spec.dtype, any3, token_strides(False, True)),
        fake(spec.dtype, any3, token_strides(False, spec.align_dy > 0)),
        fake(spec.weight_dtype, (None, spec.width), (spec.width, 1) if spec.weight_rows else (None, None)),
        fake(spec.bias_dtype, (None,), (None,)),
        fake(spec.dtype if spec.has_initial else None, any3, any3),
        fake(spec.dtype if spec.has_final else None, any3, any3),
        fake(spec.index_dtype if packed else None, (None,), (None,)),
        fake(torch.int32 if packed else None, (None,), (1,)),
        fake(torch.int32 if spec.packing == "seq_idx" else None, (None, None), (None, None)),
        fake(spec.dtype if spec.needs_x else None, any3, token_strides(False, True)),
        fake(torch.float32 if spec.needs_parameters else None, any3, (None, None, 1)),
        Int32(0),
        keep=keep,
    )
