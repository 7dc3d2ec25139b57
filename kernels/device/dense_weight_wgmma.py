"""Weight gradient of the dense convolution with Hopper's wgmma: `DenseWeightWgmma`.

The work of `dense_weight`, moved and multiplied as `dense_wgmma` does: a step is CHUNK tokens of one batch row, a box
of dy and one of x that is moved by the tap's offset. Tokens that do not exist are zeros in both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from accel.kernels.dense_weight_wgmma import CHUNK, DenseWeightWgmmaSpec
from accel.kernels.device.compiler import CUTE_DTYPE, compile_for, fake
from accel.kernels.device.dense_end import store_partial
from accel.kernels.device.dense_groups import GROUP, WARPS, add_products, claim, open_ring, start_sums

STAGE_BYTES = 100 * 1024  # of all stages: two blocks share an SM
GROUPS = 2  # they share the output channels, or where these are few the input channels


class DenseWeightWgmma:
    """partial[p, k, o, c] = the sum over part p of the tokens of dy[o, t, b] * x[c, t + first + k * step, b]."""

    def __init__(self, spec: DenseWeightWgmmaSpec):
        self.spec = spec
        self.bytes_of_stage = (spec.tile_m + spec.tile_n) * CHUNK * 2
        self.stages = STAGE_BYTES // self.bytes_of_stage
        self.tile = (spec.tile_m, spec.tile_n, CHUNK)
        self.groups = (2, 1, 1) if spec.tile_m == 128 else (1, 2, 1)

    @cute.jit
    def __call__(self, mDy: cute.Tensor, mX: cute.Tensor, mPartial: cute.Tensor, first: Int32, step: Int32, stream):
        spec = self.spec
        dtype = CUTE_DTYPE[spec.dtype]
        along = OperandMajorMode.K
        columns = spec.tile_n // self.groups[1]
        mma = hopper.make_trivial_tiled_mma(dtype, dtype, along, along, Float32, self.groups, (64, columns))
        tile_a = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, self.tile, dtype, self.stages)
        tile_b = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, self.tile, dtype, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        one_a, one_b = (cute.slice_(tile, (None, None, 0)) for tile in (tile_a, tile_b))
        box_a, tA = cpasync.make_tiled_tma_atom(load, mDy, one_a, (spec.tile_m, CHUNK))
        box_b, tB = cpasync.make_tiled_tma_atom(load, mX, one_b, (spec.tile_n, CHUNK))
        parts, taps, outputs, inputs = mPartial.shape
        blocks = cute.ceil_div(outputs, spec.tile_m) * cute.ceil_div(inputs, spec.tile_n) * taps * parts
        self.kernel(mma, box_a, tA, box_b, tB, tile_a, tile_b, mPartial, first, step).launch(
            grid=[blocks, 1, 1],
            block=[GROUPS * GROUP + 32, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=2,
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
        mPartial: cute.Tensor,
        first: Int32,
        step: Int32,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        m, n, tap, part = self.place(mPartial)
        smem = cutlass.memory.SmemAllocator()
        dtype = CUTE_DTYPE[spec.dtype]
        sA = smem.allocate_tensor(dtype, tile_a.outer, 1024, tile_a.inner)
        sB = smem.allocate_tensor(dtype, tile_b.outer, 1024, tile_b.inner)
        ring = open_ring(smem, self.stages, GROUPS, (box_a, box_b), warp)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        _, tokens, batch = tA.shape
        per_row = cute.ceil_div(tokens, CHUNK)
        share = cute.ceil_div(batch * per_row, mPartial.shape[0])
        begin = part * share
        count = cutlass.max(cutlass.min(batch * per_row - begin, share), 0)
        if warp == GROUPS * WARPS:
            self.copy(box_a, tA, box_b, tB, sA, sB, ring, m, n, first + tap * step, begin, count, per_row)
        else:
            rSum = start_sums(mma, (spec.tile_m, spec.tile_n))
            add_products(mma, sA, sB, rSum, ring, Int32(0), count, self.stages, True, tid)
            tC = mma.get_slice(tid).partition_C(cute.make_identity_tensor((spec.tile_m, spec.tile_n)))
            store_partial(rSum, tC, mPartial, part, tap, m * spec.tile_m, n * spec.tile_n)

    def place(self, mPartial: cute.Tensor) -> tuple[Int32, Int32, Int32, Int32]:
        """(tile of output channels, tile of input channels, tap, part); blocks of the same tokens are neighbours."""
        _, taps, outputs, inputs = mPartial.shape
        block, _, _ = cute.arch.block_idx()
        rows, columns = cute.ceil_div(outputs, self.spec.tile_m), cute.ceil_div(inputs, self.spec.tile_n)
        tile = block // rows
        tap = tile // columns
        part = tap // taps
        return block - tile * rows, tile - tap * columns, tap - part * taps, part

    @cute.jit
    def copy(
        self, box_a, tA, box_b, tB, sA, sB, ring, m: Int32, n: Int32, shift: Int32, begin: Int32, count: Int32,
        per_row: Int32,
    ):  # fmt: skip
        """The copying warp: every chunk into the next stage, as soon as both groups have left it."""
        one = cute.make_layout(1)
        gA = cute.local_tile(tA, (self.spec.tile_m, CHUNK), (m, None, None))
        gB = cute.local_tile(cute.domain_offset((0, shift, 0), tB), (self.spec.tile_n, CHUNK), (n, None, None))
        to_a, from_a = cpasync.tma_partition(box_a, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        to_b, from_b = cpasync.tma_partition(box_b, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
        for i in range(count):
            b = (begin + i) // per_row
            chunk = begin + i - b * per_row
            claim(ring, i, self.stages, self.bytes_of_stage)
            stage = i % self.stages
            cute.copy(box_a, from_a[None, chunk, b], to_a[None, stage], tma_bar_ptr=ring.full + stage)
            cute.copy(box_b, from_b[None, chunk, b], to_b[None, stage], tma_bar_ptr=ring.full + stage)


def build(spec: DenseWeightWgmmaSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    any3 = (None, None, None)
    return compile_for(
        spec.arch,
        DenseWeightWgmma(spec),
        fake(spec.dtype, any3, (None, 1, None)),
        fake(spec.dtype, any3, (None, 1, None)),
        fake(torch.float32, (None, None, None, None), (None, None, None, 1)),
        Int32(0),
        Int32(0),
        keep=keep,
    )
