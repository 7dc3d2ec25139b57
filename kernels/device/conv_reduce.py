"""Weight and bias gradients: a block's sums become one partial, all partials one gradient, in a fixed order."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr

from accel.kernels.conv_reduce import ReduceSpec
from accel.kernels.device import has_dependent_launch
from accel.kernels.device.compiler import compile_for, fake

GROUPS = 8  # warps of a block; each sums every GROUPS-th partial, then the groups are summed in order


class ReducePartials:
    """dweight[d, j] = sum_p partial[p, j, d]; dbias[d] = sum_p partial[p, W, d]. The order is fixed."""

    def __init__(self, spec: ReduceSpec):
        self.spec = spec

    @cute.jit
    def __call__(self, mPartial: cute.Tensor, mDWeight: cute.Tensor | None, mDBias: cute.Tensor | None, stream):
        sums = mPartial.shape[1]
        self.kernel(mPartial, mDWeight, mDBias).launch(
            grid=[cute.ceil_div(mPartial.shape[2], 32), sums, 1],
            block=[32 * GROUPS, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(self.spec.arch),
        )

    @cute.kernel
    def kernel(self, mPartial: cute.Tensor, mDWeight: cute.Tensor | None, mDBias: cute.Tensor | None):
        if const_expr(has_dependent_launch(self.spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        channel_block, j, _ = cute.arch.block_idx()
        lane, group = tid % 32, tid // 32
        parts, _, channels = mPartial.shape
        d = channel_block * 32 + lane
        smem = cutlass.memory.SmemAllocator()
        sSum = smem.allocate_tensor(Float32, cute.make_layout((32, GROUPS)), byte_alignment=16)
        total = Float32(0.0)
        if d < channels:
            for part in range(group, parts, GROUPS):
                total += mPartial[part, j, d]
        sSum[lane, group] = total
        cute.arch.sync_threads()
        if group == 0 and d < channels:
            total = Float32(0.0)
            for g in cutlass.range_constexpr(GROUPS):
                total += sSum[lane, g]
            self.write(mDWeight, mDBias, total, d, j)

    @cute.jit
    def write(self, mDWeight, mDBias, total: Float32, d: Int32, j: Int32):
        """Row W of the sums is the bias."""
        if const_expr(mDWeight is not None):
            if j < self.spec.width:
                mDWeight[d, j] = total.to(mDWeight.element_type)
        if const_expr(mDBias is not None):
            if j == self.spec.width:
                mDBias[d] = total.to(mDBias.element_type)


@cute.jit
def write_partial(
    sFree: cute.Tensor,
    rSum: cute.Tensor,
    mPartial: cute.Tensor,
    sums: cutlass.Constexpr[int],
    vec: cutlass.Constexpr[int],
    warps: cutlass.Constexpr[int],
    warp: Int32,
    lane: Int32,
):
    """Sum the warps of a block in order, through shared memory that is free by now; partial [block, sum, channel]."""
    row = 32 * vec
    cute.arch.sync_threads()
    pointer = cute.make_ptr(Float32, sFree.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    sSum = cute.make_tensor(pointer, cute.make_layout((row, sums, warps), stride=(1, row, row * sums)))
    for j in cutlass.range_constexpr(sums):
        for c in cutlass.range_constexpr(vec):
            sSum[lane * vec + c, j, warp] = rSum[j * vec + c]
    cute.arch.sync_threads()
    channel_block, block, _ = cute.arch.block_idx()
    for index in range(warp * 32 + lane, row * sums, 32 * warps):
        j = index // row
        channel = index - j * row
        total = Float32(0.0)
        for w in cutlass.range_constexpr(warps):
            total += sSum[channel, j, w]
        if channel_block * row + channel < mPartial.shape[2]:
            mPartial[block, j, channel_block * row + channel] = total


def build(spec: ReduceSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    return compile_for(
        spec.arch,
        ReducePartials(spec),
        fake(torch.float32, (None, None, None), (None, None, 1)),
        fake(spec.weight_dtype, (None, spec.width), (spec.width, 1)),
        fake(spec.bias_dtype, (None,), (1,)),
        keep=keep,
    )
