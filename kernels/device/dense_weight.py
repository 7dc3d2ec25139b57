"""Weight gradient of the dense convolution with mma instructions: `DenseWeight`.

A block makes tile_m output channels x tile_n input channels of one tap, and sums over its share of the tokens of all
batch rows, CHUNK at a time. Its sums are a partial result of its own: no atomics, so that the order never changes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr

from accel.kernels.dense_weight import CHUNK, DenseWeightSpec
from accel.kernels.device import has_dependent_launch
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.device.dense_end import store_partial
from accel.kernels.device.dense_product import add, begin, make_mma
from accel.kernels.device.dense_rows import PAD, THREADS, WORDS, copy_rows, fetch_rows, place_rows, vectors_of

STAGES = 2


class DenseWeight:
    """partial[p, k, o, c] = the sum over part p of the tokens of dy[b, o, t] * x[b, c, t + first + k * step]."""

    def __init__(self, spec: DenseWeightSpec):
        self.spec = spec

    @cute.jit
    def __call__(self, mDy: cute.Tensor, mX: cute.Tensor, mPartial: cute.Tensor, first: Int32, step: Int32, stream):
        parts, taps, outputs, inputs = mPartial.shape
        blocks = cute.ceil_div(outputs, self.spec.tile_m) * cute.ceil_div(inputs, self.spec.tile_n) * taps * parts
        self.kernel(mDy, mX, mPartial, make_mma(self.spec.dtype), first, step).launch(
            grid=[blocks, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(self.spec.arch),
        )

    @cute.kernel
    def kernel(
        self,
        mDy: cute.Tensor,
        mX: cute.Tensor,
        mPartial: cute.Tensor,
        mma: cute.TiledMma,
        first: Int32,
        step: Int32,
    ):
        spec = self.spec
        if const_expr(has_dependent_launch(spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        m, n, tap, part = self.place(mPartial)
        shift = first + tap * step
        smem = cutlass.memory.SmemAllocator()
        sA, sB = (
            smem.allocate_tensor(
                mX.element_type,
                cute.make_layout((rows, CHUNK, STAGES), stride=(CHUNK + PAD, 1, rows * (CHUNK + PAD))),
                byte_alignment=16,
            )
            for rows in (spec.tile_m, spec.tile_n)
        )
        product = begin(mma, sA, sB, False, tid)
        tC = mma.get_slice(tid).partition_C(cute.make_identity_tensor((spec.tile_m, spec.tile_n)))
        rDy, rX = (
            cute.make_rmem_tensor(vectors_of(rows, CHUNK) * 2 * WORDS, Int32) for rows in (spec.tile_m, spec.tile_n)
        )
        per_row = cute.ceil_div(mX.shape[2], CHUNK)
        chunks = mX.shape[0] * per_row
        share = cute.ceil_div(chunks, mPartial.shape[0])
        begin_, end = part * share, cutlass.min(chunks, (part + 1) * share)
        if begin_ < end:
            self.fetch(mDy, mX, rDy, rX, begin_, per_row, m, n, shift, tid)
            self.place_both(mDy, mX, rDy, rX, sA, sB, begin_, per_row, m, n, shift, Int32(0), tid)
        cute.arch.sync_threads()
        for i in range(begin_, end):
            if i + 1 < end:
                self.fetch(mDy, mX, rDy, rX, i + 1, per_row, m, n, shift, tid)
            add(product, (i - begin_) % STAGES)
            if i + 1 < end:
                stage = (i + 1 - begin_) % STAGES
                self.place_both(mDy, mX, rDy, rX, sA, sB, i + 1, per_row, m, n, shift, stage, tid)
            cute.arch.sync_threads()
        store_partial(product.rSum, tC, mPartial, part, tap, m, n)

    def place(self, mPartial: cute.Tensor) -> tuple[Int32, Int32, Int32, Int32]:
        """(first output channel, first input channel, tap, part) of this block; blocks of the same tokens neighbour."""
        _, taps, outputs, inputs = mPartial.shape
        block, _, _ = cute.arch.block_idx()
        rows, columns = cute.ceil_div(outputs, self.spec.tile_m), cute.ceil_div(inputs, self.spec.tile_n)
        tile = block // rows
        tap = tile // columns
        part = tap // taps
        return (
            (block - tile * rows) * self.spec.tile_m,
            (tile - tap * columns) * self.spec.tile_n,
            tap - part * taps,
            part,
        )

    @cute.jit
    def fetch(
        self, mDy, mX, rDy, rX, chunk: Int32, per_row: Int32, m: Int32, n: Int32, shift: Int32, tid: Int32
    ):  # fmt: skip
        """Start loading a chunk of tokens of both."""
        spec = self.spec
        b = chunk // per_row
        t = (chunk - b * per_row) * CHUNK
        if const_expr(spec.vectors_dy):
            fetch_rows(mDy, rDy, b, m, t, Int32(0), spec.tile_m, CHUNK, tid)
        if const_expr(spec.vectors_x):
            fetch_rows(mX, rX, b, n, t, shift, spec.tile_n, CHUNK, tid)

    @cute.jit
    def place_both(
        self, mDy, mX, rDy, rX, sA, sB, chunk: Int32, per_row: Int32, m: Int32, n: Int32, shift: Int32, stage: Int32,
        tid: Int32,
    ):  # fmt: skip
        """A chunk of both to its stage."""
        spec = self.spec
        b = chunk // per_row
        t = (chunk - b * per_row) * CHUNK
        base_a, base_b = stage * (spec.tile_m * (CHUNK + PAD)), stage * (spec.tile_n * (CHUNK + PAD))
        if const_expr(spec.vectors_dy):
            place_rows(rDy, sA, base_a, Int32(0), spec.tile_m, CHUNK, tid)
        else:
            copy_rows(mDy, sA, base_a, b, m, t, spec.tile_m, CHUNK, tid)
        if const_expr(spec.vectors_x):
            place_rows(rX, sB, base_b, shift, spec.tile_n, CHUNK, tid)
        else:
            copy_rows(mX, sB, base_b, b, n, t + shift, spec.tile_n, CHUNK, tid)


def build(spec: DenseWeightSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    any3 = (None, None, None)
    return compile_for(
        spec.arch,
        DenseWeight(spec),
        fake(spec.dtype, any3, (None, None, 1) if spec.vectors_dy else any3),
        fake(spec.dtype, any3, (None, None, 1) if spec.vectors_x else any3),
        fake(torch.float32, (None, None, None, None), (None, None, None, 1)),
        Int32(0),
        Int32(0),
        keep=keep,
    )
