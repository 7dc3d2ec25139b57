"""Gradients of the full-sequence convolution, channel-last: `ConvBackward`.

A warp owns 32 * vec channels and walks down a run of tokens: x and dy arrive through a private cp.async ring, the
pre-activation is recomputed, dx leaves as soon as its last tap was added, and the weight gradient stays in registers
over all runs of the warp. x and dy are read once, dx is written once. A block sums its warps in order into one partial;
`accel.kernels.conv_reduce` sums the partials in order. No atomics: the same bits in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from accel.kernels.conv_bwd_last import BATCH, BackwardSpec
from accel.kernels.device import (
    has_dependent_launch,
    load_shared,
    multiply_silu_gradient,
    store_vector,
    to_float,
)
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.device.conv_bwd_ring import Ring
from accel.kernels.device.conv_reduce import write_partial
from accel.kernels.device.last_tokens import flatten_tokens
from accel.kernels.device.tokens import (
    element_offset,
    find_sequence,
    has_boundary,
    load_indices,
    load_starts,
    load_weight,
    tap_is_valid,
    token_strides,
)


class Tensors(NamedTuple):
    """The tensors of a call, in global memory."""

    mX: cute.Tensor
    mDy: cute.Tensor
    mInitial: cute.Tensor | None
    mDFinal: cute.Tensor | None
    mCu: cute.Tensor | None
    mWords: cute.Tensor | None
    mSeqIdx: cute.Tensor | None
    mDx: cute.Tensor | None


class Registers(NamedTuple):
    """What a thread keeps, in fp32, [.., vec]."""

    rW: cute.Tensor  # taps of its channels
    rB: cute.Tensor  # bias
    rSum: cute.Tensor  # weight and bias gradient, over all its runs
    rWindow: cute.Tensor  # token -1 - k of the batch at [k * vec + c]
    rPending: cute.Tensor  # dx of the same tokens, so far
    rEnd: cute.Tensor  # the sequence that holds the next dx, and its end


class Run(NamedTuple):
    """Tokens [t, t + rows) of batch row b, channels from d on, and who walks them."""

    b: Int32
    d: Int32
    t: Int32
    rows: Int32
    warp: Int32
    lane: Int32
    malformed: Int32


class ConvBackward(Ring):
    """g = dy * act'(u); dx[t] = sum_k w[W-1-k] g[t+k]; dw[j] = sum g[t] x[t-(W-1)+j]; db = sum g."""

    def __init__(self, spec: BackwardSpec):
        self.spec = spec
        self.halo = spec.width - 1
        self.row = 32 * spec.vec  # channels of a block
        self.sums = spec.width + (1 if spec.bias_dtype is not None else 0)  # what a channel's partial holds

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
        run: Int32,
        blocks: Int32,
        stream,
    ):
        spec = self.spec
        if const_expr(spec.packing == "cu_seqlens"):
            mX, mDy = flatten_tokens(mX), flatten_tokens(mDy)
            if const_expr(mDx is not None):
                mDx = flatten_tokens(mDx)
        self.kernel(mX, mDy, mWeight, mBias, mInitial, mDFinal, mCu, mWords, mSeqIdx, mDx, mPartial, run).launch(
            grid=[cute.ceil_div(mX.shape[1], self.row), blocks, 1],
            block=[32 * spec.warps, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(spec.arch),
            min_blocks_per_mp=spec.per_sm,
            preferred_smem_carveout=100,
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
        run: Int32,
    ):
        spec = self.spec
        if const_expr(has_dependent_launch(spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        channel_block, block, _ = cute.arch.block_idx()
        _, blocks, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        smem = cutlass.memory.SmemAllocator()
        ring = cute.make_layout(
            (self.row, BATCH, 2, spec.stages, spec.warps),
            stride=(1, self.row, self.row * BATCH, self.row * BATCH * 2, self.row * BATCH * 2 * spec.stages),
        )
        sRing = smem.allocate_tensor(mX.element_type, ring, byte_alignment=128)
        d = channel_block * self.row + lane * spec.vec
        io = Tensors(mX, mDy, mInitial, mDFinal, mCu, mWords, mSeqIdx, mDx)
        sizes = (spec.vec * spec.width, spec.vec, spec.vec * self.sums, spec.vec * self.halo, spec.vec * self.halo)
        registers = Registers(*(cute.make_rmem_tensor(n, Float32) for n in sizes), cute.make_rmem_tensor(2, Int32))
        lanes = (self.lane_pieces(mX, d, lane, spec.piece_x), self.lane_pieces(mDy, d, lane, spec.piece_dy))
        runs = cute.ceil_div(mX.shape[2], run)
        items, step = mX.shape[0] * runs, blocks * spec.warps
        first = block * spec.warps + warp
        # the copies of the first run are on their way before anything else is waited for
        if first < items:
            self.begin(mX, mDy, sRing, lanes, first // runs, d, first % runs * run, warp, lane)
        malformed = Int32(0)
        if const_expr(spec.packing == "cu_seqlens"):
            malformed = mWords[0]
        self.load_parameters(mWeight, mBias, registers, d, mX.shape[1], malformed)
        for item in range(first, items, step):
            t = item % runs * run
            at = Run(item // runs, d, t, cutlass.min(run, mX.shape[2] - t), warp, lane, malformed)
            self.walk(io, registers, sRing, lanes, at)
            if item + step < items:
                self.begin(mX, mDy, sRing, lanes, (item + step) // runs, d, (item + step) % runs * run, warp, lane)
        if const_expr(spec.needs_parameters):
            write_partial(sRing, registers.rSum, mPartial, self.sums, spec.vec, spec.warps, warp, lane)

    @cute.jit
    def load_parameters(self, mWeight, mBias, registers, d: Int32, channels: Int32, malformed: Int32):
        """Weights and bias in fp32, sums at 0; NaN everywhere where the metadata is malformed."""
        spec = self.spec
        rW, rB, rSum = registers[:3]
        nan = Float32(float("nan"))
        for i in cutlass.range_constexpr(spec.vec * spec.width):
            rW[i] = Float32(0.0)
        for c in cutlass.range_constexpr(spec.vec):
            rB[c] = Float32(0.0)
        for i in cutlass.range_constexpr(self.sums * spec.vec):
            rSum[i] = Float32(0.0)
        if d < channels:
            rRaw = load_weight(spec, mWeight, d)
            for i in cutlass.range_constexpr(spec.vec * spec.width):
                rW[i] = rRaw[i].to(Float32)
            if const_expr(mBias is not None):
                for c in cutlass.range_constexpr(spec.vec):
                    rB[c] = mBias[d + c].to(Float32)
        if malformed != 0:
            for i in cutlass.range_constexpr(spec.vec * spec.width):
                rW[i] = nan
            for i in cutlass.range_constexpr(self.sums * spec.vec):
                rSum[i] = nan

    @cute.jit
    def walk(self, io, registers, sRing, lanes, at):
        """One run of tokens: dx of each, and its share of the sums."""
        spec = self.spec
        _, _, _, rWindow, rPending, rEnd = registers
        for i in cutlass.range_constexpr(self.halo * spec.vec):
            rWindow[i] = Float32(0.0)
            rPending[i] = Float32(0.0)
        if at.d < io.mX.shape[1]:
            self.load_window(io.mX, io.mInitial, rWindow, at.b, at.d, at.t)
        rEnd[0], rEnd[1] = at.b, io.mX.shape[2]
        if const_expr(spec.has_final and spec.packing == "cu_seqlens"):
            if at.malformed == 0:
                rEnd[0] = find_sequence(io.mCu, at.t)
                rEnd[1] = Int32(io.mCu[rEnd[0] + 1])
        own = cute.ceil_div(at.rows, BATCH)
        for q in range(own):
            self.advance(io, registers, sRing, lanes, at, q, True)
        for extra in cutlass.range_constexpr((self.halo + BATCH - 1) // BATCH):
            self.advance(io, registers, sRing, lanes, at, own + extra, False)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    @cute.jit
    def advance(self, io, registers, sRing, lanes, at, q: Int32, own: cutlass.Constexpr[bool]):
        """One batch of rows: wait for it, start the copy of a later one, compute."""
        spec = self.spec
        vec, halo = spec.vec, self.halo
        cute.arch.cp_async_wait_group(spec.stages - 2)
        cute.arch.sync_warp()
        bytes_ = vec * io.mX.element_type.width // 8
        rX = cute.make_rmem_tensor(BATCH * vec, Float32)
        rG = cute.make_rmem_tensor(BATCH * vec, Float32)
        base = cute.crd2idx((at.lane * vec, 0, 0, q % spec.stages, at.warp), sRing.layout)
        for i in cutlass.range_constexpr(BATCH):
            rRow = load_shared(sRing, base + i * self.row, vec, bytes_)
            rDRow = load_shared(sRing, base + (BATCH + i) * self.row, vec, bytes_)
            for c in cutlass.range_constexpr(vec):
                rX[i * vec + c] = to_float(rRow, c)
                rG[i * vec + c] = to_float(rDRow, c)
        ahead = q + spec.stages - 1
        self.fetch(
            io.mX, io.mDy, sRing, lanes, at.b, at.d, at.t + ahead * BATCH, ahead % spec.stages, at.warp, at.lane
        )  # fmt: skip
        first = at.t + q * BATCH
        if const_expr(spec.packing == "dense"):
            self.compute(io, registers, rX, rG, Int32(0), None, at, first, own, False)
        else:
            starts, rIndex, boundary = Int32(0), None, Boolean(False)
            if const_expr(spec.packing == "cu_seqlens"):
                starts = load_starts(io.mWords, cutlass.min(first, io.mX.shape[2] - 1), halo, BATCH)
                boundary = starts != 0 and at.malformed == 0
            else:
                rIndex = load_indices(io.mSeqIdx, at.b, first, halo, BATCH)
                boundary = has_boundary(rIndex, halo + BATCH)
            if boundary:
                self.compute(io, registers, rX, rG, starts, rIndex, at, first, own, True)
            else:
                self.compute(io, registers, rX, rG, starts, rIndex, at, first, own, False)

    @cute.jit
    def compute(
        self, io, registers, rX, rG, starts: Int32, rIndex, at, first: Int32, own: cutlass.Constexpr[bool],
        masked: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Rows first .. first + BATCH: g from u, then dx of the rows halo back, and the sums where the rows are own."""
        spec = self.spec
        vec, width, halo = spec.vec, spec.width, self.halo
        rW, rB, rSum, rWindow, _, _ = registers
        # in the rare masked batch row by row: it needs fewer registers, and nobody waits for it
        group = 1 if masked else BATCH
        for start in cutlass.range_constexpr(0, BATCH, group):
            taps = self.taps(io, rX, rWindow, starts, rIndex, at, first, start, group, masked)
            if const_expr(spec.silu):
                rU = cute.make_rmem_tensor(group * vec, Float32)
                rPart = cute.make_rmem_tensor(group * vec, Float32)
                for i in cutlass.range_constexpr(group):
                    for c in cutlass.range_constexpr(vec):
                        rU[i * vec + c] = rB[c] + taps[i * width * vec + c] * rW[c * width + width - 1]
                        rPart[i * vec + c] = rG[(start + i) * vec + c]
                    for k in cutlass.range_constexpr(1, width):
                        for c in cutlass.range_constexpr(vec):
                            tap = taps[(i * width + k) * vec + c]
                            rU[i * vec + c] = rU[i * vec + c] + tap * rW[c * width + width - 1 - k]
                multiply_silu_gradient(rPart, rU)
                for i in cutlass.range_constexpr(group * vec):
                    rG[start * vec + i] = rPart[i]
            if const_expr(masked and spec.packing == "seq_idx"):
                for i in cutlass.range_constexpr(start, start + group):
                    if rIndex[halo + i] < 0:
                        for c in cutlass.range_constexpr(vec):
                            rG[i * vec + c] = Float32(0.0)
            if const_expr(own and spec.needs_parameters):
                for i in cutlass.range_constexpr(group):
                    for k in cutlass.range_constexpr(width):
                        for c in cutlass.range_constexpr(vec):
                            j = (width - 1 - k) * vec + c
                            rSum[j] = rSum[j] + rG[(start + i) * vec + c] * taps[(i * width + k) * vec + c]
                    if const_expr(spec.bias_dtype is not None):
                        for c in cutlass.range_constexpr(vec):
                            rSum[width * vec + c] = rSum[width * vec + c] + rG[(start + i) * vec + c]
            if const_expr(spec.needs_x):
                self.write_dx(io, registers, rG, starts, rIndex, at, first, start, group, masked)
        rNext = cute.make_rmem_tensor(halo * vec, Float32)
        for k in cutlass.range_constexpr(halo):
            for c in cutlass.range_constexpr(vec):
                back = BATCH - 1 - k
                rNext[k * vec + c] = rX[back * vec + c] if back >= 0 else rWindow[(-back - 1) * vec + c]
        for i in cutlass.range_constexpr(halo * vec):
            rWindow[i] = rNext[i]

    @cute.jit
    def taps(
        self, io, rX, rWindow, starts: Int32, rIndex, at, first: Int32, start: cutlass.Constexpr[int],
        group: cutlass.Constexpr[int], masked: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """What row start + i multiplies: the token k rows back at [(i * W + k) * vec + c]."""
        spec = self.spec
        vec, width, halo = spec.vec, spec.width, self.halo
        rTap = cute.make_rmem_tensor(group * width * vec, Float32)
        for i in cutlass.range_constexpr(group):
            row = start + i
            for k in cutlass.range_constexpr(width):
                for c in cutlass.range_constexpr(vec):
                    back = row - k
                    value = rX[back * vec + c] if back >= 0 else rWindow[(-back - 1) * vec + c]
                    if const_expr(masked and k > 0):
                        if not self.is_valid(starts, rIndex, row, k):
                            value = Float32(0.0)
                    rTap[(i * width + k) * vec + c] = value
            if const_expr(masked and spec.has_initial and spec.packing == "cu_seqlens"):
                exists = first + row < io.mX.shape[2] and at.d < io.mX.shape[1]
                if exists and not tap_is_valid(starts, row, halo, halo):
                    self.read_history(io.mInitial, io.mCu, rTap, at.d, first + row, i)
        return rTap

    @cute.jit
    def write_dx(
        self, io, registers, rG, starts: Int32, rIndex, at, first: Int32, start: cutlass.Constexpr[int],
        group: cutlass.Constexpr[int], masked: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Each row of g completes dx of the row halo before it, and leaves its share with the rows between."""
        spec = self.spec
        vec, width, halo = spec.vec, spec.width, self.halo
        rW, rPending, rEnd, mDx = registers.rW, registers.rPending, registers.rEnd, io.mDx
        exists, end = at.d < io.mX.shape[1], at.t + at.rows
        offset = element_offset(mDx, at.b, at.d, first - halo)
        rOut = cute.make_rmem_tensor(group * vec, Float32)
        for i in cutlass.range_constexpr(start, start + group):
            rDone = cute.make_rmem_tensor(vec, Float32)
            for k in cutlass.range_constexpr(width - 1, -1, -1):
                for c in cutlass.range_constexpr(vec):
                    g = rG[i * vec + c]
                    if const_expr(masked and k > 0):
                        if not self.is_valid(starts, rIndex, i, k):
                            g = Float32(0.0)
                    share = g * rW[c * width + width - 1 - k]
                    if const_expr(k > 0):
                        share = rPending[(k - 1) * vec + c] + share
                    if const_expr(k == halo):
                        rDone[c] = share
                    else:
                        rPending[k * vec + c] = share
            for c in cutlass.range_constexpr(vec):
                rOut[(i - start) * vec + c] = rDone[c]
        if const_expr(spec.has_final):
            for i in cutlass.range_constexpr(start, start + group):
                row = first + i - halo
                if row >= at.t and row < end and exists:
                    self.add_final(io.mDFinal, io.mCu, rOut, rEnd, at.d, row, at.malformed, (i - start) * vec)
        for i in cutlass.range_constexpr(start, start + group):
            rRow = cute.make_rmem_tensor(vec, mDx.element_type)
            for c in cutlass.range_constexpr(vec):
                rRow[c] = rOut[(i - start) * vec + c].to(mDx.element_type)
            row = first + i - halo
            if row >= at.t and row < end and exists:
                store_vector(rRow, mDx, offset + Int64(i) * mDx.stride[2], spec.align_dx)

    def is_valid(self, starts: Int32, rIndex, i: int, k: int) -> Boolean:
        """Whether the token k rows before row i is in its sequence."""
        if const_expr(self.spec.packing == "cu_seqlens"):
            return tap_is_valid(starts, i, k, self.halo)
        return rIndex[self.halo + i - k] == rIndex[self.halo + i]

    @cute.jit
    def read_history(self, mInitial, mCu, rTap, d: Int32, token: Int32, i: cutlass.Constexpr[int]):
        """Taps before the start of a packed sequence come from its initial state."""
        spec = self.spec
        n = find_sequence(mCu, token)
        position = token - Int32(mCu[n])
        for k in cutlass.range_constexpr(1, spec.width):
            if k > position:
                for c in cutlass.range_constexpr(spec.vec):
                    column = mInitial.shape[2] + position - k
                    rTap[(i * spec.width + k) * spec.vec + c] = mInitial[n, d + c, column].to(Float32)

    @cute.jit
    def add_final(self, mDFinal, mCu, rOut, rEnd, d: Int32, row: Int32, malformed: Int32, at: cutlass.Constexpr[int]):
        """A final-state column that holds a token gives its gradient to the token."""
        spec = self.spec
        if const_expr(spec.packing == "cu_seqlens"):
            if malformed == 0:
                while row >= rEnd[1]:
                    rEnd[0] = rEnd[0] + 1
                    rEnd[1] = Int32(mCu[rEnd[0] + 1])
        column = row - rEnd[1] + mDFinal.shape[2]
        if column >= 0:
            for c in cutlass.range_constexpr(spec.vec):
                rOut[at + c] = rOut[at + c] + mDFinal[rEnd[0], d + c, column].to(Float32)


def build(spec: BackwardSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    any3 = (None, None, None)
    packed = spec.packing == "cu_seqlens"
    return compile_for(
        spec.arch,
        ConvBackward(spec),
        fake(spec.dtype, any3, token_strides(True, spec.piece_x > 0)),
        fake(spec.dtype, any3, token_strides(True, spec.piece_dy > 0)),
        fake(spec.weight_dtype, (None, spec.width), (spec.width, 1) if spec.weight_rows else (None, None)),
        fake(spec.bias_dtype, (None,), (None,)),
        fake(spec.dtype if spec.has_initial else None, any3, any3),
        fake(spec.dtype if spec.has_final else None, any3, any3),
        fake(spec.index_dtype if packed else None, (None,), (None,)),
        fake(torch.int32 if packed else None, (None,), (1,)),
        fake(torch.int32 if spec.packing == "seq_idx" else None, (None, None), (None, None)),
        fake(spec.dtype if spec.needs_x else None, any3, token_strides(True, True)),
        fake(torch.float32 if spec.needs_parameters else None, any3, (None, None, 1)),
        Int32(0),
        Int32(0),
        keep=keep,
    )
