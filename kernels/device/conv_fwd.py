"""Full-sequence causal convolution: `ConvForward`.

A thread owns `vec` channels of `rows` consecutive tokens. It loads them, the W-1 tokens before and the weights, all
before any use, then walks the tokens in registers. No shared memory: neighbours' halos hit L1. Extra blocks write the
final states, which share no work with the others.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr

from accel.kernels.conv_fwd import FIRST_THREADS, MAX_GRID_YZ, ConvSpec
from accel.kernels.device import (
    apply_silu,
    has_dependent_launch,
    to_float,
)
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.device.last_tokens import copy_last_tokens, flatten_tokens
from accel.kernels.device.tokens import (
    find_sequence,
    has_boundary,
    load_indices,
    load_starts,
    load_tokens,
    load_weight,
    store_tokens,
    tap_is_valid,
    token_strides,
)


class ConvForward:
    """y[b, d, t] = act(bias[d] + sum_j weight[d, j] * x[b, d, t - (W-1) + j]) + residual[b, d, t]."""

    def __init__(self, spec: ConvSpec):
        self.spec = spec
        self.halo = spec.width - 1
        self.threads = 32 * spec.warps if spec.channel_last else FIRST_THREADS

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mResidual: cute.Tensor | None,
        mInitial: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mSeqIdx: cute.Tensor | None,
        mY: cute.Tensor,
        mFinal: cute.Tensor | None,
        stream,
    ):
        spec = self.spec
        if const_expr(spec.packing == "cu_seqlens"):
            mX, mY = flatten_tokens(mX), flatten_tokens(mY)
            if const_expr(mResidual is not None):
                mResidual = flatten_tokens(mResidual)
        batch, channels, tokens = mX.shape
        extra = 0
        if const_expr(spec.has_final):
            extra = mFinal.shape[0] if const_expr(spec.packing == "cu_seqlens") else 1
        grid_y = cutlass.min(batch, MAX_GRID_YZ)
        grid_z = cute.ceil_div(batch, grid_y)
        if const_expr(spec.channel_last):
            channel_blocks = cute.ceil_div(channels, 32 * spec.vec)
            row_blocks = cute.ceil_div(tokens, spec.warps * spec.rows) + extra
            if const_expr(spec.flat):
                grid = [channel_blocks * row_blocks, grid_y, grid_z]
            else:
                grid = [channel_blocks, row_blocks, batch]
        else:
            blocks = self.first_blocks(channels, tokens) + extra * cute.ceil_div(channels, self.threads)
            grid = [blocks, grid_y, grid_z]
        self.kernel(mX, mWeight, mBias, mResidual, mInitial, mCu, mWords, mSeqIdx, mY, mFinal).launch(
            grid=grid,
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(spec.arch),
            preferred_smem_carveout=0,
        )

    def first_blocks(self, channels: Int32, tokens: Int32) -> Int32:
        """Channel-first blocks that convolve one batch row."""
        if const_expr(self.spec.flat):
            return cute.ceil_div(channels * cute.ceil_div(tokens, self.spec.rows), self.threads)
        return channels * cute.ceil_div(tokens, self.threads * self.spec.rows)

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mResidual: cute.Tensor | None,
        mInitial: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mSeqIdx: cute.Tensor | None,
        mY: cute.Tensor,
        mFinal: cute.Tensor | None,
    ):
        spec = self.spec
        if const_expr(has_dependent_launch(spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        batch, channels, tokens = mX.shape
        b, d, t, state = self.place(mX)
        if state < 0:
            if b < batch and d < channels and t < tokens:
                self.convolve(mX, mWeight, mBias, mResidual, mInitial, mCu, mWords, mSeqIdx, mY, b, d, t)
        else:
            if const_expr(spec.has_final):
                if b < batch and d < channels:
                    tid, _, _ = cute.arch.thread_idx()
                    n = state if const_expr(spec.packing == "cu_seqlens") else b
                    first, step = (tid // 32, spec.warps) if const_expr(spec.channel_last) else (Int32(0), 1)
                    copy_last_tokens(mX, mInitial, mCu, mWords, mFinal, b, n, d, spec.vec, first, step)

    @cute.jit
    def place(self, mX: cute.Tensor):
        """(batch row, channel, token, state block or -1) of this thread."""
        spec = self.spec
        _, channels, tokens = mX.shape
        tid, _, _ = cute.arch.thread_idx()
        bx, by, bz = cute.arch.block_idx()
        _, grid_y, _ = cute.arch.grid_dim()
        b = by + bz * grid_y
        state = Int32(-1)
        if const_expr(spec.channel_last):
            channel_block, row_block = bx, by
            if const_expr(spec.flat):
                channel_blocks = cute.ceil_div(channels, 32 * spec.vec)
                row_block = bx // channel_blocks
                channel_block = bx - row_block * channel_blocks
            else:
                b = bz
            d = (channel_block * 32 + tid % 32) * spec.vec
            t = (row_block * spec.warps + tid // 32) * spec.rows
            if const_expr(spec.has_final):
                row_blocks = cute.ceil_div(tokens, spec.warps * spec.rows)
                if row_block >= row_blocks:
                    state = row_block - row_blocks
        else:
            if const_expr(spec.flat):
                per_channel = cutlass.max(cute.ceil_div(tokens, spec.rows), 1)
                linear = bx * self.threads + tid
                d = linear // per_channel
                t = (linear - d * per_channel) * spec.rows
            else:
                per_channel = cutlass.max(cute.ceil_div(tokens, self.threads * spec.rows), 1)
                d = bx // per_channel
                t = ((bx - d * per_channel) * self.threads + tid) * spec.rows
            if const_expr(spec.has_final):
                blocks = self.first_blocks(channels, tokens)
                if bx >= blocks:
                    channel_blocks = cute.ceil_div(channels, self.threads)
                    state = (bx - blocks) // channel_blocks
                    d = (bx - blocks - state * channel_blocks) * self.threads + tid
        return b, d, t, state

    @cute.jit
    def convolve(self, mX, mWeight, mBias, mResidual, mInitial, mCu, mWords, mSeqIdx, mY, b: Int32, d: Int32, t: Int32):
        """The outputs of one thread."""
        spec = self.spec
        starts, malformed = Int32(0), Int32(0)
        if const_expr(spec.packing == "cu_seqlens"):
            malformed = mWords[0]
            starts = load_starts(mWords, t, self.halo, spec.rows) | -malformed
        rHalo, rX = load_tokens(spec, mX, b, d, t, spec.align_x)
        rW = load_weight(spec, mWeight, d)
        rIndex = None
        if const_expr(spec.packing == "seq_idx"):
            rIndex = load_indices(mSeqIdx, b, t, self.halo, spec.rows)
        if const_expr(mResidual is not None):
            _, rR = load_tokens(spec, mResidual, b, d, t, spec.align_residual, False, spec.residual == "like")
        else:
            rR = None
        if const_expr(spec.packing != "cu_seqlens"):
            if t < self.halo:
                fill_halo(spec, mInitial, rHalo, b, d, t)
        rY = cute.make_rmem_tensor(spec.rows * spec.vec, mY.element_type)
        if const_expr(spec.packing == "dense"):
            self.rows_inside(rHalo, rX, rW, mBias, rR, rY, d)
        else:
            boundary = starts != 0
            if const_expr(spec.packing == "seq_idx"):
                boundary = has_boundary(rIndex, self.halo + spec.rows)
            if boundary:
                for i in cutlass.range_constexpr(spec.rows):
                    rV = self.masked_window(rHalo, rX, starts, rIndex, i)
                    if const_expr(spec.has_initial and spec.packing == "cu_seqlens"):
                        if malformed == 0 and not tap_is_valid(starts, i, self.halo, self.halo):
                            if t + i < mX.shape[2]:
                                self.read_history(mInitial, mCu, rV, d, t + i)
                    windows = [[rV[k * spec.vec + c] for k in range(spec.width)] for c in range(spec.vec)]
                    self.finish(windows, [(i, c) for c in range(spec.vec)], rW, mBias, rR, rY, d)
                    self.blank(rY, rIndex, malformed, i)
            else:
                self.rows_inside(rHalo, rX, rW, mBias, rR, rY, d)
        store_tokens(spec, rY, mY, b, d, t)

    def rows_inside(self, rHalo, rX, rW, mBias, rR, rY, d: Int32) -> None:
        """All rows of the thread, none of which has a tap in another sequence."""
        spec = self.spec
        elements = [(i, c) for i in range(spec.rows) for c in range(spec.vec)]
        for first in range(0, len(elements), 4):  # four chains at a time keep the pipeline full
            group = elements[first : first + 4]
            windows = [[self.value(rHalo, rX, i - k, c) for k in range(spec.width)] for i, c in group]
            self.finish(windows, group, rW, mBias, rR, rY, d)

    def value(self, rHalo: cute.Tensor, rX: cute.Tensor, row: int, c: int) -> Float32:
        """Token `row` of the thread in fp32; negative rows are the halo."""
        vec = self.spec.vec
        return to_float(rX, row * vec + c) if row >= 0 else to_float(rHalo, (-row - 1) * vec + c)

    def finish(self, windows: list, elements: list, rW, mBias, rR, rY, d: Int32) -> None:
        """Sum the taps, activate, add the residual, round once; windows[e][k] is the token k rows back of element e."""
        spec = self.spec
        width = spec.width
        rZ = cute.make_rmem_tensor(len(elements), Float32)
        for e, (_, c) in enumerate(elements):
            rZ[e] = windows[e][0] * to_float(rW, c * width + width - 1)
        for k in range(1, width):
            for e, (_, c) in enumerate(elements):
                rZ[e] = rZ[e] + windows[e][k] * to_float(rW, c * width + width - 1 - k)
        if const_expr(mBias is not None):
            for e, (_, c) in enumerate(elements):
                rZ[e] = rZ[e] + mBias[d + c].to(Float32)
        if const_expr(spec.silu):
            apply_silu(rZ, spec.dtype is torch.float32)
        for e, (i, c) in enumerate(elements):
            z = rZ[e]
            if const_expr(rR is not None):
                z = z + to_float(rR, i * spec.vec + c)
            rY[i * spec.vec + c] = z.to(rY.element_type)

    @cute.jit
    def masked_window(self, rHalo, rX, starts: Int32, rIndex, i: int):
        """The taps of row i, k rows back at [k * vec + c], 0 where they belong to another sequence."""
        spec = self.spec
        rV = cute.make_rmem_tensor(spec.width * spec.vec, Float32)
        for k in cutlass.range_constexpr(spec.width):
            valid = Boolean(True)
            if const_expr(k > 0):
                if const_expr(spec.packing == "cu_seqlens"):
                    valid = tap_is_valid(starts, i, k, self.halo)
                else:
                    valid = rIndex[self.halo + i - k] == rIndex[self.halo + i]
            for c in cutlass.range_constexpr(spec.vec):
                value = self.value(rHalo, rX, i - k, c)
                if not valid:
                    value = Float32(0.0)
                rV[k * spec.vec + c] = value
        return rV

    @cute.jit
    def read_history(self, mInitial, mCu, rV, d: Int32, token: Int32):
        """Taps before the start of a packed sequence come from its initial state."""
        spec = self.spec
        n = find_sequence(mCu, token)
        position = token - Int32(mCu[n])
        for k in cutlass.range_constexpr(1, spec.width):
            if k > position:
                for c in cutlass.range_constexpr(spec.vec):
                    rV[k * spec.vec + c] = mInitial[n, d + c, mInitial.shape[2] + position - k].to(Float32)

    @cute.jit
    def blank(self, rY, rIndex, malformed: Int32, i: int):
        """Padding tokens are 0, outputs of malformed metadata NaN."""
        spec = self.spec
        if const_expr(spec.packing == "seq_idx"):
            if rIndex[self.halo + i] < 0:
                for c in cutlass.range_constexpr(spec.vec):
                    rY[i * spec.vec + c] = rY.element_type(0.0)
        else:
            if malformed != 0:
                for c in cutlass.range_constexpr(spec.vec):
                    rY[i * spec.vec + c] = Float32(float("nan")).to(rY.element_type)


@cute.jit
def fill_halo(spec: cutlass.Constexpr, mInitial, rHalo: cute.Tensor, b: Int32, d: Int32, t: Int32):
    """Tokens before the first come from the initial state, else they are 0."""
    for j in cutlass.range_constexpr(spec.width - 1):
        if t - 1 - j < 0:
            for c in cutlass.range_constexpr(spec.vec):
                value = rHalo.element_type(0.0)
                if const_expr(spec.has_initial):
                    value = mInitial[b, d + c, mInitial.shape[2] + (t - 1 - j)]
                rHalo[j * spec.vec + c] = value


def build(spec: ConvSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    x_stride = token_strides(spec.channel_last, spec.unit_stride)
    y_stride = token_strides(spec.channel_last, True)
    residual_stride = x_stride if spec.residual == "like" else (None, None, None)
    states = (None, None, None)
    packed = spec.packing == "cu_seqlens"
    return compile_for(
        spec.arch,
        ConvForward(spec),
        fake(spec.dtype, (None, None, None), x_stride),
        fake(spec.weight_dtype, (None, spec.width), (spec.width, 1) if spec.weight_rows else (None, None)),
        fake(spec.bias_dtype, (None,), (None,)),
        fake(spec.dtype if spec.residual else None, (None, None, None), residual_stride),
        fake(spec.dtype if spec.has_initial else None, states, states),
        fake(spec.index_dtype if packed else None, (None,), (None,)),
        fake(torch.int32 if packed else None, (None,), (1,)),
        fake(torch.int32 if spec.packing == "seq_idx" else None, (None, None), (None, None)),
        fake(spec.dtype, (None, None, None), y_stride),
        fake(spec.dtype if spec.has_final else None, states, states),
        keep=keep,
    )
