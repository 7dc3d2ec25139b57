"""The second half of the weight gradient: sum the blocks' partials in order, and cast."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr

from accel.kernels import jit
from accel.kernels.device import has_dependent_launch

GROUPS = 8  # warps of a block; each sums every GROUPS-th partial, then the groups are summed in order


class ReduceSpec(NamedTuple):
    """What the kernel is specialised for."""

    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    width: int
    arch: str


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
        smem = cutlass.utils.SmemAllocator()
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


def build(spec: ReduceSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    return jit.compile_for(
        spec.arch,
        ReducePartials(spec),
        jit.fake(torch.float32, (None, None, None), (None, None, 1)),
        jit.fake(spec.weight_dtype, (None, spec.width), (spec.width, 1)),
        jit.fake(spec.bias_dtype, (None,), (1,)),
        keep=keep,
    )


def launch(partial: torch.Tensor, dweight: torch.Tensor | None, dbias: torch.Tensor | None, width: int, arch) -> None:
    """Fill dweight [D, W] and dbias [D] from partials [P, W or W + 1, D]."""
    spec = ReduceSpec(None if dweight is None else dweight.dtype, None if dbias is None else dbias.dtype, width, arch)
    jit.get(spec, build)(partial, dweight, dbias)
