"""The rows of x and dy on their way to a warp: `Ring`, a private ring in shared memory, filled by asynchronous copies.

A stage holds BATCH rows of both. What does not exist arrives as 0, which costs the arithmetic no branch: dy = 0 gives
g = 0. Tensors whose rows no copy can take (odd strides, an expanded dy) are loaded element by element instead.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from accel.kernels.conv_bwd_last import BATCH
from accel.kernels.device import copy_async
from accel.kernels.device.tokens import element_offset


class Ring:
    """The part of a kernel that moves rows; its class sets `spec`, `halo` (W - 1) and `row` (channels of a block)."""

    @cute.jit
    def fetch(self, mX, mDy, sRing, lanes, b: Int32, d: Int32, t: Int32, stage: Int32, warp: Int32, lane: Int32):
        """Start copying rows t .. t + BATCH of x and dy into a stage; rows and channels that do not exist become 0."""
        for which in cutlass.range_constexpr(2):
            mIn = mX if const_expr(which == 0) else mDy
            if const_expr(lanes[which] is not None):
                self.fetch_pieces(mIn, sRing, lanes[which], t, which, stage, warp)
            else:
                self.fetch_elements(mIn, sRing, b, d, t, which, stage, warp, lane)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def begin(self, mX, mDy, sRing, lanes, b: Int32, d: Int32, t: Int32, warp: Int32, lane: Int32):
        """Fill the ring with the first rows of a run."""
        for mIn, pieces in ((mX, lanes[0]), (mDy, lanes[1])):
            if const_expr(pieces is not None):
                _, row, channel, _, rAt = pieces
                rAt[0] = element_offset(mIn, b, d - lane * self.spec.vec + channel, t + row)
        for stage in cutlass.range_constexpr(self.spec.stages - 1):
            self.fetch(mX, mDy, sRing, lanes, b, d, t + stage * BATCH, Int32(stage), warp, lane)

    def lane_pieces(self, mIn, d: Int32, lane: Int32, piece: int):
        """What asynchronous copies of a lane need: (piece, row, channel, bytes that exist, moving offset)."""
        if const_expr(piece == 0):
            return None
        size = mIn.element_type.width // 8
        per_row = self.row * size // piece
        row = lane // per_row if const_expr(per_row < 32) else Int32(0)
        channel = (lane % per_row) * (piece // size)
        first = d - lane * self.spec.vec + channel
        exists = [
            cutlass.min(cutlass.max((mIn.shape[1] - first) * size - 32 * piece * i, 0), piece)
            for i in range(max(1, per_row // 32))
        ]
        return piece, row, channel, exists, cute.make_rmem_tensor(1, Int64)

    @cute.jit
    def fetch_pieces(self, mIn, sRing, pieces, t: Int32, which: cutlass.Constexpr[int], stage: Int32, warp: Int32):
        """Asynchronous copies, one piece a lane and instruction."""
        piece, row, channel, exists, rAt = pieces
        size = mIn.element_type.width // 8
        per_row = self.row * size // piece
        at_once = max(1, 32 // per_row)  # rows that one instruction of the warp copies
        source = mIn.iterator + rAt[0]
        target = sRing.iterator + cute.crd2idx((channel, row, which, stage, warp), sRing.layout)
        step = Int64(at_once) * mIn.stride[2]
        for rows in cutlass.range_constexpr(0, BATCH, at_once):
            for i in cutlass.range_constexpr(len(exists)):
                bytes_ = exists[i]
                if t + row + rows >= mIn.shape[2]:
                    bytes_ = Int32(0)
                column = i * 32 * piece // size
                copy_async(target + (rows * self.row + column), source + column, piece, bytes_)
            source = source + step
        rAt[0] = rAt[0] + Int64(BATCH) * mIn.stride[2]

    @cute.jit
    def fetch_elements(
        self, mIn, sRing, b: Int32, d: Int32, t: Int32, which: cutlass.Constexpr[int], stage: Int32, warp: Int32,
        lane: Int32,
    ):  # fmt: skip
        """Plain loads of any strides, a lane its own channels."""
        vec = self.spec.vec
        rIn = cute.make_rmem_tensor(BATCH * vec, mIn.element_type)
        for i in cutlass.range_constexpr(BATCH):
            for c in cutlass.range_constexpr(vec):
                rIn[i * vec + c] = mIn.element_type(0.0)
                if t + i < mIn.shape[2] and d + c < mIn.shape[1]:
                    rIn[i * vec + c] = mIn[b, d + c, t + i]
        for i in cutlass.range_constexpr(BATCH):
            for c in cutlass.range_constexpr(vec):
                sRing[lane * vec + c, i, which, stage, warp] = rIn[i * vec + c]

    @cute.jit
    def load_window(self, mX, mInitial, rWindow, b: Int32, d: Int32, t: Int32):
        """The tokens before the run; before the first token the initial state, else 0."""
        spec = self.spec
        for k in cutlass.range_constexpr(self.halo):
            token = t - 1 - k
            for c in cutlass.range_constexpr(spec.vec):
                value = Float32(0.0)
                if token >= 0:
                    value = mX[b, d + c, token].to(Float32)
                else:
                    if const_expr(spec.has_initial and spec.packing != "cu_seqlens"):
                        value = mInitial[b, d + c, mInitial.shape[2] + token].to(Float32)
                rWindow[k * spec.vec + c] = value
