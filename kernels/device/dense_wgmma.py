"""Dense causal convolution as a matrix product over taps and channels, with Hopper's wgmma: `DenseWgmma`.

Two warp groups multiply, one warp more copies. A step of the sum is one tap and DEPTH channels; its weights
and its tokens come as boxes of tensor maps, the tokens' box moved by the tap's offset. A box may begin before the first
token or end after the last: what does not exist arrives as zeros, so that the causal pad costs nothing.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from accel.kernels.dense_wgmma import DEPTH, DenseWgmmaSpec
from accel.kernels.device.compiler import CUTE_DTYPE, compile_for, fake
from accel.kernels.device.dense_end import finish_rows
from accel.kernels.device.dense_groups import COPIER, THREADS, claim, open_ring, sum_products


class DenseWgmma:
    """out[b, m, t] = act(bias[m] + sum_k sum_c packed[m, c, k] * source[t + first + k * step, c, b])."""

    def __init__(self, spec: DenseWgmmaSpec):
        self.spec = spec
        self.shared = spec.tile_n == 128  # an SM, with another block
        bytes_of_stage = (spec.tile_m + spec.tile_n) * DEPTH * 2
        self.stages = (100 if self.shared else 200) * 1024 // bytes_of_stage
        self.bytes_of_stage = bytes_of_stage
        self.tile = (spec.tile_m, spec.tile_n, DEPTH)
        # the two groups share the channels, or where they are few the tokens
        self.groups = (2, 1, 1) if spec.tile_m == 128 else (1, 2, 1)

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
        spec = self.spec
        dtype = CUTE_DTYPE[spec.dtype]
        mma = hopper.make_trivial_tiled_mma(
            dtype,
            dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            self.groups,
            (64, spec.tile_n // self.groups[1]),
        )
        tile_a = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, self.tile, dtype, self.stages)
        tile_b = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, self.tile, dtype, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        box_a, tA = cpasync.make_tiled_tma_atom(
            load, mPacked, cute.slice_(tile_a, (None, None, 0)), (spec.tile_m, DEPTH)
        )
        box_b, tB = cpasync.make_tiled_tma_atom(load, mIn, cute.slice_(tile_b, (None, None, 0)), (spec.tile_n, DEPTH))
        batch, channels, tokens = mOut.shape
        blocks = cute.ceil_div(channels, spec.tile_m) * cute.ceil_div(tokens, spec.tile_n) * batch
        self.kernel(mma, box_a, tA, box_b, tB, tile_a, tile_b, mBias, mOut, first, step).launch(
            grid=[blocks, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=2 if self.shared else 1,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        box_a: cute.CopyAtom,
        tA: cute.Tensor,
        box_b: cute.CopyAtom,
        tB: cute.Tensor,
        tile_a: cute.ComposedLayout,
        tile_b: cute.ComposedLayout,
        mBias: cute.Tensor | None,
        mOut: cute.Tensor,
        first: Int32,
        step: Int32,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        b, m, t = self.place(mOut)
        smem = cutlass.memory.SmemAllocator()
        dtype = CUTE_DTYPE[spec.dtype]
        sA = smem.allocate_tensor(dtype, tile_a.outer, 1024, tile_a.inner)
        sB = smem.allocate_tensor(dtype, tile_b.outer, 1024, tile_b.inner)
        ring = open_ring(smem, self.stages, (box_a, box_b), warp)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        _, depth, taps = tA.shape
        chunks = cute.ceil_div(depth, DEPTH)
        if warp == COPIER:
            self.copy(box_a, tA, box_b, tB, sA, sB, ring, b, m, t, taps, chunks, first, step)
        else:
            self.multiply(mma, sA, sB, ring, mBias, mOut, taps * chunks, b, m, t, tid)

    def place(self, mOut: cute.Tensor) -> tuple[Int32, Int32, Int32]:
        """(batch row, tile of channels, tile of tokens) of this block; blocks of the same tokens are neighbours."""
        _, channels, tokens = mOut.shape
        block, _, _ = cute.arch.block_idx()
        rows, columns = cute.ceil_div(channels, self.spec.tile_m), cute.ceil_div(tokens, self.spec.tile_n)
        tile = block // rows
        b = tile // columns
        return b, block - tile * rows, tile - b * columns

    @cute.jit
    def copy(
        self, box_a, tA, box_b, tB, sA, sB, ring, b: Int32, m: Int32, t: Int32, taps: Int32, chunks: Int32,
        first: Int32, step: Int32,
    ):  # fmt: skip
        """The copying warp: every step into the next stage, as soon as both groups have left it."""
        one = cute.make_layout(1)
        gA = cute.local_tile(tA, (self.spec.tile_m, DEPTH), (m, None, None))
        to_a, from_a = cpasync.tma_partition(box_a, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        for tap in range(taps):
            moved = cute.domain_offset((first + tap * step, 0), tB[None, None, b])
            gB = cute.local_tile(moved, (self.spec.tile_n, DEPTH), (t, None))
            to_b, from_b = cpasync.tma_partition(box_b, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
            for chunk in range(chunks):
                i = tap * chunks + chunk
                claim(ring, i, self.stages, self.bytes_of_stage)
                stage = i % self.stages
                cute.copy(box_a, from_a[None, chunk, tap], to_a[None, stage], tma_bar_ptr=ring.full + stage)
                cute.copy(box_b, from_b[None, chunk], to_b[None, stage], tma_bar_ptr=ring.full + stage)

    @cute.jit
    def multiply(self, mma, sA, sB, ring, mBias, mOut, count: Int32, b: Int32, m: Int32, t: Int32, tid: Int32):
        """A multiplying group."""
        spec = self.spec
        rSum = cute.make_rmem_tensor(mma.partition_shape_C((spec.tile_m, spec.tile_n)), Float32)
        sum_products(mma, sA, sB, rSum, ring, count, self.stages, tid)
        tC = mma.get_slice(tid).partition_C(cute.make_identity_tensor((spec.tile_m, spec.tile_n)))
        finish_rows(spec, rSum, tC, mBias, mOut, b, m * spec.tile_m, t * spec.tile_n)


def build(spec: DenseWgmmaSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    return compile_for(
        spec.arch,
        DenseWgmma(spec),
        fake(spec.dtype, (None, None, None), (None, 1, None)),
        fake(spec.dtype, (None, None, None), (1, None, None)),
        fake(spec.dtype if spec.has_bias else None, (None,), (None,)),
        fake(spec.dtype, (None, None, None), (None, None, 1)),
        Int32(0),
        Int32(0),
        keep=keep,
    )
