"""Dense causal convolution as a matrix product over taps and channels, with Hopper's wgmma: `DenseWgmma`.

One or two warp groups multiply, one warp more copies. A step of the sum is one tap and DEPTH channels; its weights
and its tokens come as boxes of tensor maps, the tokens' box moved by the tap's offset. A box may begin before the first
token or end after the last: what does not exist arrives as zeros, so that the causal pad costs nothing.

A box has to begin at a whole vector, or the instruction is illegal. So an offset is taken as whole vectors and a phase
from 0 to 7: y[t] is the sum over phases p of s_p[t + p], where s_p is the sum of the taps of that phase, moved by their
vectors alone. Taps go by falling phase, and what came before is moved along in registers from phase to phase. The last
vector of a block's tokens has nothing behind it then, and is another block's.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from accel.kernels.contract import VECTOR
from accel.kernels.dense_wgmma import DEPTH, DenseWgmmaSpec
from accel.kernels.device.compiler import CUTE_DTYPE, compile_for, fake
from accel.kernels.device.dense_end import finish_rows, move_sums
from accel.kernels.device.dense_groups import GROUP, WARPS, add_products, claim, open_ring, start_sums


class DenseWgmma:
    """out[b, m, t] = act(bias[m] + sum_k sum_c packed[m, c, k] * source[t + first + k * step, c, b])."""

    def __init__(self, spec: DenseWgmmaSpec):
        self.spec = spec
        self.shared = spec.tile_n == 128  # an SM, with another block
        bytes_of_stage = (spec.tile_m + spec.tile_n) * DEPTH * 2
        self.stages = (100 if self.shared else 200) * 1024 // bytes_of_stage
        self.bytes_of_stage = bytes_of_stage
        self.tile = (spec.tile_m, spec.tile_n, DEPTH)
        self.groups = spec.tile_m // 64
        self.phases = VECTOR // spec.grain
        self.tokens = spec.tile_n - (VECTOR if self.phases > 1 else 0)  # that a block makes

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
            (self.groups, 1, 1),
            (64, spec.tile_n),
        )
        tile_a = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, self.tile, dtype, self.stages)
        tile_b = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, self.tile, dtype, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        box_a, tA = cpasync.make_tiled_tma_atom(
            load, mPacked, cute.slice_(tile_a, (None, None, 0)), (spec.tile_m, DEPTH)
        )
        box_b, tB = cpasync.make_tiled_tma_atom(load, mIn, cute.slice_(tile_b, (None, None, 0)), (spec.tile_n, DEPTH))
        batch, channels, tokens = mOut.shape
        blocks = cute.ceil_div(channels, spec.tile_m) * cute.ceil_div(tokens, self.tokens) * batch
        self.kernel(mma, box_a, tA, box_b, tB, tile_a, tile_b, mBias, mOut, first, step).launch(
            grid=[blocks, 1, 1],
            block=[self.groups * GROUP + 32, 1, 1],
            stream=stream,
            use_pdl=True,
            # sums that are moved by single tokens need more registers than two blocks would leave them
            min_blocks_per_mp=2 if self.shared and spec.grain > 1 else 1,
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
        ring = open_ring(smem, self.stages, self.groups, (box_a, box_b), warp)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        _, depth, taps = tA.shape
        chunks = cute.ceil_div(depth, DEPTH)
        if warp == self.groups * WARPS:
            self.copy(box_a, tA, box_b, tB, sA, sB, ring, b, m, t, taps, chunks, first, step)
        else:
            self.multiply(mma, sA, sB, ring, mBias, mOut, b, m, t, taps, chunks, first, step, tid)

    def place(self, mOut: cute.Tensor) -> tuple[Int32, Int32, Int32]:
        """(batch row, tile of channels, tile of tokens) of this block; blocks of the same tokens are neighbours."""
        _, channels, tokens = mOut.shape
        block, _, _ = cute.arch.block_idx()
        rows, columns = cute.ceil_div(channels, self.spec.tile_m), cute.ceil_div(tokens, self.tokens)
        tile = block // rows
        b = tile // columns
        return b, block - tile * rows, tile - b * columns

    def first_tap(self, phase: Int32, first: Int32, step: Int32) -> Int32:
        """The first tap of a phase, which counts grains; the others follow at distances of `phases`.

        step / grain is odd, and an odd number is its own inverse modulo 2, 4 and 8.
        """
        return ((phase - first // self.spec.grain) * (step // self.spec.grain)) & (self.phases - 1)

    @cute.jit
    def copy(
        self, box_a, tA, box_b, tB, sA, sB, ring, b: Int32, m: Int32, t: Int32, taps: Int32, chunks: Int32,
        first: Int32, step: Int32,
    ):  # fmt: skip
        """The copying warp: every step into the next stage, as soon as both groups have left it."""
        one = cute.make_layout(1)
        gA = cute.local_tile(tA, (self.spec.tile_m, DEPTH), (m, None, None))
        to_a, from_a = cpasync.tma_partition(box_a, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        i = Int32(0)
        for turn in range(self.phases):
            phase = self.phases - 1 - turn
            for tap in range(self.first_tap(phase, first, step), taps, self.phases):
                begin = t * self.tokens + first + tap * step - phase * self.spec.grain
                gB = cute.local_tile(
                    cute.domain_offset((begin, 0), tB[None, None, b]), (self.spec.tile_n, DEPTH), (0, None)
                )
                to_b, from_b = cpasync.tma_partition(
                    box_b, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
                )
                for chunk in range(chunks):
                    claim(ring, i, self.stages, self.bytes_of_stage)
                    stage = i % self.stages
                    cute.copy(box_a, from_a[None, chunk, tap], to_a[None, stage], tma_bar_ptr=ring.full + stage)
                    cute.copy(box_b, from_b[None, chunk], to_b[None, stage], tma_bar_ptr=ring.full + stage)
                    i += 1

    @cute.jit
    def multiply(
        self, mma, sA, sB, ring, mBias, mOut, b: Int32, m: Int32, t: Int32, taps: Int32, chunks: Int32, first: Int32,
        step: Int32, tid: Int32,
    ):  # fmt: skip
        """A multiplying group."""
        spec = self.spec
        rSum = start_sums(mma, (spec.tile_m, spec.tile_n))
        if const_expr(self.phases == 1):
            add_products(mma, sA, sB, rSum, ring, Int32(0), taps * chunks, self.stages, True, tid)
        else:
            done, distance = Int32(0), Int32(0)
            for turn in range(self.phases):
                phase = self.phases - 1 - turn
                of_phase = cutlass.max(taps - self.first_tap(phase, first, step) + self.phases - 1, 0) // self.phases
                if of_phase > 0:
                    if done > 0:
                        move_sums(rSum, distance, spec.grain)
                    distance = Int32(0)
                    end = done + of_phase * chunks
                    add_products(mma, sA, sB, rSum, ring, done, end, self.stages, False, tid)
                    done = end
                distance += spec.grain
            # the turn of phase 0 has added one distance too many
            move_sums(rSum, distance - spec.grain, spec.grain)
        tC = mma.get_slice(tid).partition_C(cute.make_identity_tensor((spec.tile_m, spec.tile_n)))
        finish_rows(spec, rSum, tC, mBias, mOut, b, m * spec.tile_m, t * self.tokens, self.tokens)


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
