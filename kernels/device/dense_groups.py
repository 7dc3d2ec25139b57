"""What Hopper's dense kernels share: a ring of stages between one copying warp and the multiplying warp groups.

Step i of a sum uses stage i % stages. `full` of a stage is over when the boxes of a step have come, `empty` when all
groups have read them; a barrier's phase tells one turn of the ring from the next. The copying warp is the last one.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

GROUP = 128  # threads of a warp group
WARPS = GROUP // 32


class Ring(NamedTuple):
    """Barriers of every stage."""

    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def open_ring(
    smem: cutlass.Constexpr,
    stages: cutlass.Constexpr[int],
    groups: cutlass.Constexpr[int],
    boxes: tuple,
    warp: Int32,
):
    """Barriers, ready for all threads; the tensor maps are fetched meanwhile."""
    full, empty = (smem.allocate_array(Int64, stages) for _ in range(2))
    if warp == 0:
        for box in boxes:
            cpasync.prefetch_descriptor(box)
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, groups * WARPS)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return Ring(full, empty)


@cute.jit
def claim(ring, i: Int32, stages: cutlass.Constexpr[int], bytes_of_stage: cutlass.Constexpr[int]):
    """Before the copies of step i: its stage is free, and its barrier knows how much will come."""
    stage, turn = i % stages, i // stages
    if turn > 0:
        cute.arch.mbarrier_wait(ring.empty + stage, (turn - 1) & 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, bytes_of_stage)


def start_sums(mma: cute.TiledMma, tile: tuple[int, int]) -> cute.Tensor:
    """A thread's sums of a tile, at 0, for `add_products`."""
    rSum = cute.make_rmem_tensor(mma.partition_shape_C(tile), Float32)
    rSum.fill(Float32(0.0))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    return rSum


@cute.jit
def add_products(
    mma: cute.TiledMma,
    sA,
    sB,
    rSum,
    ring,
    begin: Int32,
    end: Int32,
    stages: cutlass.Constexpr[int],
    ahead: cutlass.Constexpr[bool],
    tid: Int32,
):
    """rSum += the steps from `begin` up to `end`, by a multiplying group.

    `ahead`: one step is in flight while the stage before it is freed; the last stage of all is not freed. Sums that
    are touched between two calls forbid that: the assembler would then wait for each single product.
    """
    part = mma.get_slice(cute.arch.make_warp_uniform(tid // GROUP) * GROUP)
    fA, fB = mma.make_fragment_A(part.partition_A(sA)), mma.make_fragment_B(part.partition_B(sB))
    for i in range(begin, end):
        stage = i % stages
        cute.arch.mbarrier_wait(ring.full + stage, (i // stages) & 1)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(fA, mode=[2])):
            cute.gemm(mma, rSum, fA[None, None, k, stage], fB[None, None, k, stage], rSum)
        warpgroup.commit_group()
        if const_expr(ahead):
            warpgroup.wait_group(1)
            if i > begin and tid % 32 == 0:
                cute.arch.mbarrier_arrive(ring.empty + (i - 1) % stages)
        else:
            warpgroup.wait_group(0)
            if tid % 32 == 0:
                cute.arch.mbarrier_arrive(ring.empty + stage)
    warpgroup.wait_group(0)
