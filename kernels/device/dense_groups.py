"""What Hopper's dense kernels share: a ring of stages between one copying warp and two multiplying warp groups.

Step i of a sum uses stage i % stages. `full` of a stage is over when the boxes of a step have come, `empty` when both
groups have read them; a barrier's phase tells one turn of the ring from the next.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

GROUP = 128  # threads of a warp group
COPIER = 2 * GROUP // 32  # the copying warp
THREADS = 2 * GROUP + 32


class Ring(NamedTuple):
    """Barriers of every stage."""

    full: cute.Pointer
    empty: cute.Pointer


@cute.jit
def open_ring(smem: cutlass.Constexpr, stages: cutlass.Constexpr[int], boxes: tuple, warp: Int32):
    """Barriers, ready for all threads; the tensor maps are fetched meanwhile."""
    full, empty = (smem.allocate_array(Int64, stages) for _ in range(2))
    if warp == 0:
        for box in boxes:
            cpasync.prefetch_descriptor(box)
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, COPIER)
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


@cute.jit
def sum_products(mma: cute.TiledMma, sA, sB, rSum, ring, count: Int32, stages: cutlass.Constexpr[int], tid: Int32):
    """rSum = the sum of all steps, by a multiplying group: one product is in flight while the stage before is freed."""
    part = mma.get_slice(cute.arch.make_warp_uniform(tid // GROUP) * GROUP)
    fA, fB = mma.make_fragment_A(part.partition_A(sA)), mma.make_fragment_B(part.partition_B(sB))
    rSum.fill(Float32(0.0))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for i in range(count):
        stage = i % stages
        cute.arch.mbarrier_wait(ring.full + stage, (i // stages) & 1)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(fA, mode=[2])):
            cute.gemm(mma, rSum, fA[None, None, k, stage], fB[None, None, k, stage], rSum)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if i > 0 and tid % 32 == 0:
            cute.arch.mbarrier_arrive(ring.empty + (i - 1) % stages)
    warpgroup.wait_group(0)
