"""Decode of several tokens a row, of a ring of states, and of what speculation keeps: `UpdateTokens`.

A thread owns one channel of one row and walks its tokens; the window stays in registers. One token without a ring has a
faster kernel of its own, `accel.kernels.conv_update`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, const_expr

from accel.kernels.conv_update_tokens import UpdateTokensSpec
from accel.kernels.device import apply_silu, has_dependent_launch, report
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.device.slots import SLOT_OUT_OF_RANGE, check_slots, slot_of

THREADS = 128
MAX_GRID_Y = 32768


class UpdateTokens:
    """y[t] as one step after the other; state <- last L columns of (state ++ tokens), or a ring's columns in place."""

    def __init__(self, spec: UpdateTokensSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mState: cute.Tensor | None,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mResidual: cute.Tensor | None,
        mY: cute.Tensor,
        mSlots: cute.Tensor | None,
        mSeqlens: cute.Tensor | None,
        mIntermediate: cute.Tensor | None,
        pad_slot: Int32,
        status: Int64,
        stream,
    ):
        rows = mX.shape[0] + 1 if const_expr(self.spec.has_indices) else mX.shape[0]
        grid_y = cutlass.min(rows, MAX_GRID_Y)
        self.kernel(
            mX, mState, mWeight, mBias, mResidual, mY, mSlots, mSeqlens, mIntermediate, pad_slot, status
        ).launch(
            grid=[cute.ceil_div(mX.shape[1], THREADS), grid_y, cute.ceil_div(rows, grid_y)],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(self.spec.arch),
            min_blocks_per_mp=1,  # else the assembler spills a register or two for an occupancy that nobody needs
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mState: cute.Tensor | None,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mResidual: cute.Tensor | None,
        mY: cute.Tensor,
        mSlots: cute.Tensor | None,
        mSeqlens: cute.Tensor | None,
        mIntermediate: cute.Tensor | None,
        pad_slot: Int32,
        status: Int64,
    ):
        spec = self.spec
        if const_expr(has_dependent_launch(spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        tile, by, bz = cute.arch.block_idx()
        _, grid_y, _ = cute.arch.grid_dim()
        row = by + bz * grid_y
        d = tile * THREADS + tid
        if row < mX.shape[0] and d < mX.shape[1]:
            slot, live, known = slot_of(mSlots, mState, row, pad_slot)
            if live and known:
                self.walk(mX, mState, mWeight, mBias, mResidual, mY, mSeqlens, mIntermediate, row, slot, d)
            if const_expr(spec.has_indices):
                if not (live and known):
                    value = Float32(0.0)
                    if live:
                        value = Float32(float("nan"))
                        if d == 0:
                            report(status, SLOT_OUT_OF_RANGE, row, slot)
                    for t in range(mX.shape[2]):
                        mY[row, d, t] = value.to(mY.element_type)
        if const_expr(spec.has_indices):
            if row == mX.shape[0] and tile == 0:
                check_slots(mSlots, mState.shape[0], pad_slot, status, THREADS)

    @cute.jit
    def walk(
        self, mX, mState, mWeight, mBias, mResidual, mY, mSeqlens, mIntermediate, row: Int32, slot: Int32, d: Int32
    ):
        """All tokens of one channel of one row, then its state."""
        spec = self.spec
        width, tokens = spec.width, mX.shape[2]
        rW = cute.make_rmem_tensor(width, Float32)
        for j in cutlass.range_constexpr(width):
            rW[j] = mWeight[d, j].to(Float32)
        bias = Float32(0.0)
        if const_expr(mBias is not None):
            bias = mBias[d].to(Float32)
        rWindow = cute.make_rmem_tensor(width - 1, Float32)  # token k + 1 rows back at [k]
        first = Int32(0)
        if const_expr(spec.ring):
            first = (mSeqlens[row] % mState.shape[2] + mState.shape[2]) % mState.shape[2]
        for k in cutlass.range_constexpr(width - 1):
            rWindow[k] = Float32(0.0)
            if const_expr(spec.has_state):
                column = mState.shape[2] - 1 - k
                if const_expr(spec.ring):
                    column = (first + column) % mState.shape[2]
                rWindow[k] = mState[slot, d, column].to(Float32)
        for t in range(tokens):
            x = mX[row, d, t]
            rZ = cute.make_rmem_tensor(1, Float32)
            z = bias + x.to(Float32) * rW[width - 1]
            for k in cutlass.range_constexpr(width - 1):
                z += rWindow[k] * rW[width - 2 - k]
            rZ[0] = z
            if const_expr(spec.silu):
                apply_silu(rZ, spec.dtype is torch.float32)
            if const_expr(mResidual is not None):
                rZ[0] = rZ[0] + mResidual[row, d, t].to(Float32)
            mY[row, d, t] = rZ[0].to(mY.element_type)
            for k in cutlass.range_constexpr(width - 2, 0, -1):
                rWindow[k] = rWindow[k - 1]
            rWindow[0] = x.to(Float32)
            if const_expr(spec.ring):
                mState[slot, d, (first + t) % mState.shape[2]] = x
            if const_expr(spec.has_intermediate):
                for column in range(mIntermediate.shape[3]):
                    mIntermediate[row, t, d, column] = shifted(mX, mState, row, slot, d, column + t + 1)
        if const_expr(spec.has_state and not spec.ring):
            # ascending: a column is read before a later one is written over it
            for column in range(mState.shape[2]):
                mState[slot, d, column] = shifted(mX, mState, row, slot, d, column + tokens)


@cute.jit
def shifted(mX, mState, row: Int32, slot: Int32, d: Int32, column: Int32):
    """Column of (state ++ tokens)."""
    value = mX.element_type(0.0)
    if column < mState.shape[2]:
        value = mState[slot, d, column]
    else:
        value = mX[row, d, column - mState.shape[2]]
    return value


def build(spec: UpdateTokensSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    any3 = (None, None, None)
    return compile_for(
        spec.arch,
        UpdateTokens(spec),
        fake(spec.dtype, any3, any3),
        fake(spec.dtype if spec.has_state else None, any3, any3),
        fake(spec.weight_dtype, (None, spec.width), (None, None)),
        fake(spec.bias_dtype, (None,), (None,)),
        fake(spec.dtype if spec.has_residual else None, any3, any3),
        fake(spec.dtype, any3, any3),
        fake(torch.int32 if spec.has_indices else None, (None,), (None,)),
        fake(torch.int32 if spec.ring else None, (None,), (None,)),
        fake(spec.dtype if spec.has_intermediate else None, (None,) * 4, (None,) * 4),
        Int32(0),
        Int64(0),
        keep=keep,
    )
