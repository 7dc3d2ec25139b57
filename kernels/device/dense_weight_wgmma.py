"""Weight gradient of the dense convolution with Hopper's wgmma: `DenseWeightWgmma`.

The work of `dense_weight`, moved and multiplied as `dense_wgmma` does: a step is CHUNK tokens of one batch row, a box
of dy and one of x that is moved by the tap's offset. Tokens that do not exist are zeros in both.

Both operands have tokens along their rows, and neither a box nor an operand in shared memory may begin inside a vector.
So an offset is taken as whole vectors, by which the box of x is moved, and a phase from 0 to 7: x goes to the product
by way of registers, and is read that many tokens further on. The vector behind a chunk is a small box of its own.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from accel.kernels.contract import VECTOR
from accel.kernels.dense_weight_wgmma import CHUNK, PAIR, WIDE, DenseWeightWgmmaSpec
from accel.kernels.device.compiler import CUTE_DTYPE, compile_for, fake
from accel.kernels.device.dense_end import store_partial
from accel.kernels.device.dense_groups import GROUP, WARPS, add_products, claim, open_ring, start_sums

STAGE_BYTES = 104 * 1024  # of all stages where two blocks share an SM
GROUPS = 2  # they share the input channels, or where these are few the output channels
UNITS = CHUNK // VECTOR
IN_FLIGHT = 1  # products that may go on while the next one's registers are loaded


class DenseWeightWgmma:
    """partial[p, k, c, o] = the sum over part p of the tokens of x[c, t + first + k * step, b] * dy[o, t, b]."""

    def __init__(self, spec: DenseWeightWgmmaSpec):
        self.spec = spec
        self.moved = spec.grain < VECTOR  # inside a vector
        self.bytes_of_stage = ((spec.tile_m + spec.tile_n) * CHUNK + (spec.tile_m * VECTOR if self.moved else 0)) * 2
        self.alone = spec.tile_n == WIDE
        self.stages = STAGE_BYTES * (2 if self.alone else 1) // self.bytes_of_stage
        self.tile = (spec.tile_m, spec.tile_n, CHUNK)
        self.groups = (2, 1, 1) if spec.tile_m == 128 else (1, 2, 1)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mDy: cute.Tensor, mPartial: cute.Tensor, first: Int32, step: Int32, stream):
        spec = self.spec
        dtype = CUTE_DTYPE[spec.dtype]
        along = OperandMajorMode.K
        columns = spec.tile_n // self.groups[1]
        source = warpgroup.OperandSource.RMEM if self.moved else warpgroup.OperandSource.SMEM
        mma = hopper.make_trivial_tiled_mma(dtype, dtype, along, along, Float32, self.groups, (64, columns), source)
        tile_x = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, self.tile, dtype, self.stages)
        tile_dy = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, self.tile, dtype, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        one_x, one_dy = (cute.slice_(tile, (None, None, 0)) for tile in (tile_x, tile_dy))
        box_x, tX = cpasync.make_tiled_tma_atom(load, mX, one_x, (spec.tile_m, CHUNK))
        box_dy, tDy = cpasync.make_tiled_tma_atom(load, mDy, one_dy, (spec.tile_n, CHUNK))
        box_tail, tTail = None, None
        if const_expr(self.moved):
            one_tail = cute.make_layout((spec.tile_m, VECTOR), stride=(VECTOR, 1))
            box_tail, tTail = cpasync.make_tiled_tma_atom(load, mX, one_tail, (spec.tile_m, VECTOR))
        parts, taps, inputs, outputs = mPartial.shape
        blocks = cute.ceil_div(inputs, spec.tile_m) * cute.ceil_div(outputs, spec.tile_n) * taps * parts
        self.kernel(mma, box_x, tX, box_dy, tDy, box_tail, tTail, tile_x, tile_dy, mPartial, first, step).launch(
            grid=[blocks, 1, 1],
            block=[GROUPS * GROUP + 32, 1, 1],
            stream=stream,
            use_pdl=True,
            # where two are asked for, the compiler has 96 registers a thread: too few to keep a product in flight
            # beside those of the next. It takes 101 at most, and 112 would fit
            min_blocks_per_mp=1 if self.moved or self.alone else 2,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        box_x: cute.CopyAtom,
        tX: cute.Tensor,
        box_dy: cute.CopyAtom,
        tDy: cute.Tensor,
        box_tail: cute.CopyAtom | None,
        tTail: cute.Tensor | None,
        tile_x: cute.ComposedLayout,
        tile_dy: cute.ComposedLayout,
        mPartial: cute.Tensor,
        first: Int32,
        step: Int32,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        m, n, tap, part = self.place(mPartial)
        shift = first + tap * step
        phase = shift & (VECTOR - 1)
        smem = cutlass.memory.SmemAllocator()
        dtype = CUTE_DTYPE[spec.dtype]
        sX = smem.allocate_tensor(dtype, tile_x.outer, 1024, tile_x.inner)
        sDy = smem.allocate_tensor(dtype, tile_dy.outer, 1024, tile_dy.inner)
        sTail, maps = None, (box_x, box_dy)
        if const_expr(self.moved):
            maps = (box_x, box_dy, box_tail)
            layout = cute.make_layout((spec.tile_m, VECTOR, self.stages), stride=(VECTOR, 1, spec.tile_m * VECTOR))
            sTail = smem.allocate_tensor(dtype, layout, 128)
        ring = open_ring(smem, self.stages, GROUPS, maps, warp)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        _, tokens, batch = tDy.shape
        per_row = cute.ceil_div(tokens, CHUNK)
        share = cute.ceil_div(batch * per_row, mPartial.shape[0])
        begin = part * share
        count = cutlass.max(cutlass.min(batch * per_row - begin, share), 0)
        if warp == GROUPS * WARPS:
            self.copy(
                box_x, tX, box_dy, tDy, box_tail, tTail, sX, sDy, sTail, ring, m, n, shift - phase, begin, count,
                per_row,
            )  # fmt: skip
        else:
            rSum = start_sums(mma, (spec.tile_m, spec.tile_n))
            if const_expr(self.moved):
                self.add_moved(mma, sX, sTail, sDy, rSum, ring, phase, count, tid)
            else:
                add_products(mma, sX, sDy, rSum, ring, Int32(0), count, self.stages, True, tid)
            tC = mma.get_slice(tid).partition_C(cute.make_identity_tensor((spec.tile_m, spec.tile_n)))
            store_partial(rSum, tC, mPartial, part, tap, m * spec.tile_m, n * spec.tile_n)

    def place(self, mPartial: cute.Tensor) -> tuple[Int32, Int32, Int32, Int32]:
        """(tile of input channels, tile of output channels, tap, part); blocks of the same tokens are neighbours."""
        _, taps, inputs, outputs = mPartial.shape
        block, _, _ = cute.arch.block_idx()
        rows, columns = cute.ceil_div(inputs, self.spec.tile_m), cute.ceil_div(outputs, self.spec.tile_n)
        tile = block // rows
        tap = tile // columns
        part = tap // taps
        return block - tile * rows, tile - tap * columns, tap - part * taps, part

    @cute.jit
    def copy(
        self, box_x, tX, box_dy, tDy, box_tail, tTail, sX, sDy, sTail, ring, m: Int32, n: Int32, shift: Int32,
        begin: Int32, count: Int32, per_row: Int32,
    ):  # fmt: skip
        """The copying warp: every chunk into the next stage, as soon as both groups have left it."""
        spec = self.spec
        to_x, from_x = boxes(box_x, sX, cute.domain_offset((0, shift, 0), tX), (spec.tile_m, CHUNK), m)
        to_dy, from_dy = boxes(box_dy, sDy, tDy, (spec.tile_n, CHUNK), n)
        to_tail, from_tail = None, None
        if const_expr(self.moved):
            behind = cute.domain_offset((0, shift + CHUNK, 0), tTail)
            to_tail, from_tail = boxes(box_tail, sTail, behind, (spec.tile_m, VECTOR), m)
        for i in range(count):
            b = (begin + i) // per_row
            chunk = begin + i - b * per_row
            claim(ring, i, self.stages, self.bytes_of_stage)
            stage = i % self.stages
            full = ring.full + stage
            cute.copy(box_x, from_x[None, chunk, b], to_x[None, stage], tma_bar_ptr=full)
            cute.copy(box_dy, from_dy[None, chunk, b], to_dy[None, stage], tma_bar_ptr=full)
            if const_expr(self.moved):
                cute.copy(box_tail, from_tail[None, chunk * UNITS, b], to_tail[None, stage], tma_bar_ptr=full)

    @cute.jit
    def add_moved(self, mma, sX, sTail, sDy, rSum, ring, phase: Int32, count: Int32, tid: Int32):
        """As `add_products`, x read `phase` tokens further on."""
        part = mma.get_slice(cute.arch.make_warp_uniform(tid // GROUP) * GROUP)
        fX = mma.make_fragment_A(mma.partition_shape_A((self.spec.tile_m, CHUNK)))
        fDy = mma.make_fragment_B(part.partition_B(sDy))
        rX = cute.recast_tensor(fX, Int32)
        row = (tid // 32 * 16) % self.spec.tile_m + tid % 32 // 4
        word = tid % 4 + phase // PAIR
        # bytes of two words that make one: the words' own, or their neighbours in the middle
        chosen = cutlass.select_(phase % PAIR == 0, Int32(0x3210), Int32(0x5432))
        for i in range(count):
            stage = i % self.stages
            cute.arch.mbarrier_wait(ring.full + stage, (i // self.stages) & 1)
            for k in cutlass.range_constexpr(cute.size(fX, mode=[2])):
                warpgroup.wait_group(IN_FLIGHT)  # the product that read these registers is over
                if const_expr(k == IN_FLIGHT):  # and so are all of the chunk before
                    if i > 0 and tid % 32 == 0:
                        cute.arch.mbarrier_arrive(ring.empty + (i - 1) % self.stages)
                for j in cutlass.range_constexpr(4):
                    unit, at = 2 * k + j // 2, row + j % 2 * 8
                    rX[4 * k + j] = self.load_word(sX, sTail, stage, at, unit, word)
                    if const_expr(self.spec.grain == 1):
                        behind = self.load_word(sX, sTail, stage, at, unit, word + 1)
                        rX[4 * k + j] = Int32(cute.arch.prmt(rX[4 * k + j], behind, chosen))
                warpgroup.fence()
                cute.gemm(mma, rSum, fX[None, None, k], fDy[None, None, k, stage], rSum)
                warpgroup.commit_group()
        warpgroup.wait_group(0)

    def load_word(self, sX, sTail, stage: Int32, row: Int32, unit: int, word: Int32) -> Int32:
        """Two tokens of a row, `word` pairs (fewer than two vectors) behind the beginning of a vector of the chunk."""
        rows = self.spec.tile_m
        further = word // 4
        # a row is 128 bytes, in which vectors change places by the row of eight
        at = sX.iterator.toint() + (stage * rows + row) * (CHUNK * 2) + (((unit + further) ^ (row % 8)) * 16)
        if const_expr(unit == UNITS - 1):
            at = cutlass.select_(further > 0, sTail.iterator.toint() + (stage * rows + row) * (VECTOR * 2), at)
        pointer = cute.make_ptr(Int32, at + word % 4 * 4, cute.AddressSpace.smem, assumed_align=4)
        return cute.make_tensor(pointer, cute.make_layout(1))[0]


def boxes(box, sTo, tFrom, shape: tuple[int, int], row: Int32):
    """What `box` copies: a tensor by stages, and one by places of tiles of that shape."""
    gFrom = cute.local_tile(tFrom, shape, (row, None, None))
    return cpasync.tma_partition(
        box, 0, cute.make_layout(1), cute.group_modes(sTo, 0, 2), cute.group_modes(gFrom, 0, 2)
    )


def build(spec: DenseWeightWgmmaSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    any3 = (None, None, None)
    return compile_for(
        spec.arch,
        DenseWeightWgmma(spec),
        fake(spec.dtype, any3, (None, 1, None)),
        fake(spec.dtype, any3, (None, 1, None)),
        fake(torch.float32, (None, None, None, None), (None, None, 1, None)),
        Int32(0),
        Int32(0),
        keep=keep,
    )
