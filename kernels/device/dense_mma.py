"""Dense causal convolution as a matrix product over taps and channels, with mma instructions: `DenseProduct`.

A block makes tile_m channels x TILE_N tokens of one batch row. Its sum runs over taps and, inside, chunks of DEPTH
channels: a chunk of weights comes by asynchronous copies, the source's rows at the tap's offset through registers.
The pad is what does not exist: zeros that are never read. A backward's dx is the same product of the transposed
weights with dy, the taps in the other direction of time.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from accel.kernels.contract import VECTOR
from accel.kernels.dense_mma import DenseSpec
from accel.kernels.device import copy_async, has_dependent_launch
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.device.dense_end import finish
from accel.kernels.device.dense_product import add, begin, make_mma
from accel.kernels.device.dense_rows import (
    PAD,
    THREADS,
    WORDS,
    copy_rows,
    fetch_rows,
    place_rows,
    vector_place,
    vectors_of,
)

TILE_N = 128
DEPTH = 32
STAGES = 2


class DenseProduct:
    """out[b, m, t] = act(bias[m] + sum_k sum_c packed[k, m, c] * source[b, c, t + first + k * step])."""

    def __init__(self, spec: DenseSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mPacked: cute.Tensor,
        mIn: cute.Tensor,
        mBias: cute.Tensor | None,
        mOut: cute.Tensor,
        first: Int32,
        step: Int32,
        stream,
    ):
        batch, channels, tokens = mOut.shape
        blocks = cute.ceil_div(channels, self.spec.tile_m) * cute.ceil_div(tokens, TILE_N) * batch
        self.kernel(mPacked, mIn, mBias, mOut, make_mma(self.spec.dtype), first, step).launch(
            grid=[blocks, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(self.spec.arch),
        )

    @cute.kernel
    def kernel(
        self,
        mPacked: cute.Tensor,
        mIn: cute.Tensor,
        mBias: cute.Tensor | None,
        mOut: cute.Tensor,
        mma: cute.TiledMma,
        first: Int32,
        step: Int32,
    ):
        spec = self.spec
        if const_expr(has_dependent_launch(spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        b, m, t = self.place(mOut)
        smem = cutlass.memory.SmemAllocator()
        tile_a = cute.make_layout((spec.tile_m, DEPTH, STAGES), stride=(DEPTH + PAD, 1, spec.tile_m * (DEPTH + PAD)))
        tile_b = cute.make_layout((TILE_N, DEPTH, STAGES), stride=(1, TILE_N + PAD, DEPTH * (TILE_N + PAD)))
        sA = smem.allocate_tensor(mPacked.element_type, tile_a, byte_alignment=16)
        sB = smem.allocate_tensor(mPacked.element_type, tile_b, byte_alignment=16)
        product = begin(mma, sA, sB, True, tid)
        tC = mma.get_slice(tid).partition_C(cute.make_identity_tensor((spec.tile_m, TILE_N)))
        rRaw = cute.make_rmem_tensor(vectors_of(DEPTH, TILE_N) * 2 * WORDS, Int32)
        chunks = cute.ceil_div(mIn.shape[1], DEPTH)
        count = mPacked.shape[0] * chunks
        self.fetch(mPacked, mIn, sA, rRaw, b, m, t, Int32(0), chunks, first, step, tid)
        self.place_source(mIn, rRaw, sB, b, t, Int32(0), chunks, first, step, tid)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        for i in range(count):
            if i + 1 < count:
                self.fetch(mPacked, mIn, sA, rRaw, b, m, t, i + 1, chunks, first, step, tid)
            add(product, i % STAGES)
            if i + 1 < count:
                self.place_source(mIn, rRaw, sB, b, t, i + 1, chunks, first, step, tid)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
        finish(spec, product.rSum, tC, mBias, mOut, b, m, t)

    def place(self, mOut: cute.Tensor) -> tuple[Int32, Int32, Int32]:
        """(batch row, first channel, first token) of this block; blocks of the same tokens are neighbours."""
        _, channels, tokens = mOut.shape
        block, _, _ = cute.arch.block_idx()
        rows, columns = cute.ceil_div(channels, self.spec.tile_m), cute.ceil_div(tokens, TILE_N)
        tile = block // rows
        b = tile // columns
        return b, (block - tile * rows) * self.spec.tile_m, (tile - b * columns) * TILE_N

    @cute.jit
    def fetch(
        self, mPacked, mIn, sA, rRaw, b: Int32, m: Int32, t: Int32, i: Int32, chunks: Int32, first: Int32, step: Int32,
        tid: Int32,
    ):  # fmt: skip
        """Start the copies of step `i` of the sum: weights to their stage, rows of the source to registers."""
        tap = i // chunks
        c = (i - tap * chunks) * DEPTH
        _, outputs, inputs = mPacked.shape
        for v in cutlass.range_constexpr(vectors_of(self.spec.tile_m, DEPTH)):
            row, column = vector_place(v, DEPTH, tid)
            exists = Int32(0)
            if m + row < outputs and c + column < inputs:
                exists = Int32(2 * VECTOR)
            offset = (Int64(tap) * outputs + cutlass.min(m + row, outputs - 1)) * inputs
            offset = offset + cutlass.min(c + column, inputs - VECTOR)
            target = sA.iterator + cute.crd2idx((row, column, i % STAGES), sA.layout)
            copy_async(target, mPacked.iterator + offset, 2 * VECTOR, exists)
        cute.arch.cp_async_commit_group()
        if const_expr(self.spec.vectors):
            fetch_rows(mIn, rRaw, b, c, t, first + tap * step, DEPTH, TILE_N, tid)

    @cute.jit
    def place_source(
        self, mIn, rRaw, sB, b: Int32, t: Int32, i: Int32, chunks: Int32, first: Int32, step: Int32, tid: Int32
    ):  # fmt: skip
        """Rows of the source to their stage."""
        base = i % STAGES * (DEPTH * (TILE_N + PAD))
        tap = i // chunks
        shift = first + tap * step
        if const_expr(self.spec.vectors):
            place_rows(rRaw, sB, base, shift, DEPTH, TILE_N, tid)
        else:
            copy_rows(mIn, sB, base, b, (i - tap * chunks) * DEPTH, t + shift, DEPTH, TILE_N, tid)


def build(spec: DenseSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    any3 = (None, None, None)
    return compile_for(
        spec.arch,
        DenseProduct(spec),
        fake(spec.dtype, any3, (None, None, 1)),
        fake(spec.dtype, any3, (None, None, 1) if spec.vectors else any3),
        fake(spec.dtype if spec.has_bias else None, (None,), (None,)),
        fake(spec.dtype, any3, (None, None, 1)),
        Int32(0),
        Int32(0),
        keep=keep,
    )
