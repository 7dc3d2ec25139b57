"""One decode step of a causal convolution: `ConvUpdate`.

A thread owns `vec` neighbouring channels of one row. It loads state, x and weights together, keeps the shifted
state as raw bits, and stores it where it was. Programmatic dependent launch hides the launch latency: waiting comes
first, so stream order holds. Where slots are indexed, one extra row of blocks looks for a slot that two rows share,
once per call.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from accel.kernels.conv_update import UpdateSpec
from accel.kernels.device import apply_silu, has_dependent_launch, load_vector, report, store_vector
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.device.slots import SLOT_OUT_OF_RANGE, check_slots, slot_of
from accel.kernels.device.tokens import load_weight

THREADS = 128
MAX_GRID_Y = 32768


class ConvUpdate:
    """y = act(bias + sum_j history[-W+j] * weight[:, j]) + residual; state <- history[-L:]."""

    def __init__(self, spec: UpdateSpec):
        self.spec = spec

    def rows_and_channels(self, mX: cute.Tensor) -> cute.Tensor:
        """Drop the unit axis of x, y or residual: a view [N, D]."""
        slices = {"ND": (None, None), "N1D": (None, 0, None), "1ND": (0, None, None), "ND1": (None, None, 0)}
        return mX[slices[self.spec.form]]

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
        pad_slot: Int32,
        status: Int64,
        stream,
    ):
        spec = self.spec
        mX, mY = self.rows_and_channels(mX), self.rows_and_channels(mY)
        if const_expr(mResidual is not None):
            mResidual = self.rows_and_channels(mResidual)
        rows = mX.shape[0] + 1 if const_expr(spec.has_indices) else mX.shape[0]
        grid_y = cutlass.min(rows, MAX_GRID_Y)
        self.kernel(mX, mState, mWeight, mBias, mResidual, mY, mSlots, pad_slot, status).launch(
            grid=[cute.ceil_div(mX.shape[1], THREADS * spec.vec), grid_y, cute.ceil_div(rows, grid_y)],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(spec.arch),
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
        d = (tile * THREADS + tid) * spec.vec
        if row < mX.shape[0] and d < mX.shape[1]:
            slot, live, known = slot_of(mSlots, mState, row, pad_slot)
            if live and known:
                self.step(mX, mState, mWeight, mBias, mResidual, mY, row, slot, d)
            if const_expr(spec.has_indices):
                if not (live and known):
                    self.skip(mY, row, d, live)
                    if live and d == 0:
                        report(status, SLOT_OUT_OF_RANGE, row, slot)
        if const_expr(spec.has_indices):
            if row == mX.shape[0] and tile == 0:
                check_slots(mSlots, mState.shape[0], pad_slot, status, THREADS)

    @cute.jit
    def step(self, mX, mState, mWeight, mBias, mResidual, mY, row: Int32, slot: Int32, d: Int32):
        """Convolve and shift `vec` channels of one row; all loads come before any use."""
        spec = self.spec
        vec, width = spec.vec, spec.width
        rX = load_vector(mX, Int64(row) * mX.stride[0] + d, vec, spec.align_x)
        history, store_state = self.load_state(mState, slot, d)
        rW = load_weight(spec, mWeight, d)
        if const_expr(mResidual is not None):
            rR = load_vector(mResidual, Int64(row) * mResidual.stride[0] + d, vec, spec.align_residual)
        rZ = cute.make_rmem_tensor(vec, Float32)
        for c in cutlass.range_constexpr(vec):
            z = rX[c].to(Float32) * rW[c * width + width - 1].to(Float32)
            if const_expr(spec.length != 0):
                for tap in cutlass.range_constexpr(width - 1):
                    z += history(c, tap - (width - 1)).to(Float32) * rW[c * width + tap].to(Float32)
            if const_expr(mBias is not None):
                z += mBias[d + c].to(Float32)
            rZ[c] = z
        if const_expr(spec.silu):
            apply_silu(rZ, spec.dtype is torch.float32)
        rY = cute.make_rmem_tensor(vec, mY.element_type)
        for c in cutlass.range_constexpr(vec):
            z = rZ[c] + rR[c].to(Float32) if const_expr(mResidual is not None) else rZ[c]
            rY[c] = z.to(mY.element_type)
        store_vector(rY, mY, Int64(row) * mY.stride[0] + d, vec * mY.element_type.width // 8)
        if const_expr(spec.length != 0):
            store_state(rX)

    def load_state(self, mState: cute.Tensor | None, slot: Int32, d: Int32):
        """Load the state; returns history(c, column counted from the end) and store_state(rX)."""
        spec = self.spec
        if spec.length == 0:
            return None, None
        vec, length = spec.vec, spec.length
        base = Int64(slot) * mState.stride[0] + Int64(d) * mState.stride[1]
        if spec.length < 0:
            return self.load_long_state(mState, base)
        rS = cute.make_rmem_tensor(vec * length, mState.element_type)
        if spec.layout == "compact":
            rS = load_vector(mState, base, vec * length, spec.align_state)
            index = lambda c, column: c * length + column  # noqa: E731
        else:
            for column in range(length):
                at = base + Int64(column) * mState.stride[2]
                rColumn = load_vector(mState, at, vec, spec.align_state)
                for c in range(vec):
                    rS[column * vec + c] = rColumn[c]
            index = lambda c, column: column * vec + c  # noqa: E731

        def history(c: int, column: int):
            return rS[index(c, length + column)]

        def store_state(rX: cute.Tensor) -> None:
            rNew = cute.make_rmem_tensor(vec * length, mState.element_type)
            for c in range(vec):
                for column in range(length - 1):
                    rNew[index(c, column)] = rS[index(c, column + 1)]
                rNew[index(c, length - 1)] = rX[c]
            if spec.layout == "compact":
                store_vector(rNew, mState, base, spec.align_state)
            else:
                for column in range(length):
                    rColumn = cute.make_rmem_tensor(vec, mState.element_type)
                    for c in range(vec):
                        rColumn[c] = rNew[column * vec + c]
                    store_vector(rColumn, mState, base + Int64(column) * mState.stride[2], spec.align_state)

        return history, store_state

    def load_long_state(self, mState: cute.Tensor, base: Int64):
        """A state longer than registers hold: read the taps only, and move the columns one by one in memory."""
        length = mState.shape[2]
        last = self.spec.width - 1
        taps = [load_vector(mState, base + Int64(length - last + j) * mState.stride[2], 1, 0)[0] for j in range(last)]

        def history(c: int, column: int):
            return taps[last + column]

        def store_state(rX: cute.Tensor) -> None:
            shift_columns(mState, base, length, rX)

        return history, store_state

    @cute.jit
    def skip(self, mY: cute.Tensor, row: Int32, d: Int32, bad: Boolean):
        """A padding row is 0, a row with a bad slot NaN."""
        value = Float32(0.0)
        if bad:
            value = Float32(float("nan"))
        for c in cutlass.range_constexpr(self.spec.vec):
            mY[row, d + c] = value.to(mY.element_type)


@cute.jit
def shift_columns(mState: cute.Tensor, base: Int64, length: Int32, rX: cute.Tensor):
    """state[j] <- state[j + 1], then x: in place, ascending, so each column is read before it is overwritten."""
    for column in range(length - 1):
        at = base + Int64(column) * mState.stride[2]
        store_vector(load_vector(mState, at + mState.stride[2], 1, 0), mState, at, 0)
    store_vector(rX, mState, base + Int64(length - 1) * mState.stride[2], 0)


def build(spec: UpdateSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    x_stride = {"ND": (None, 1), "N1D": (None, None, 1), "1ND": (None, None, 1), "ND1": (None, 1, None)}[spec.form]
    x_shape = (None,) * len(spec.form)
    length = None if spec.length < 0 else spec.length
    state_stride = {"compact": (None, length, 1), "channel-last": (None, 1, None), "strided": (None, None, None)}
    weight_stride = (spec.width, 1) if spec.weight_rows else (None, None)
    return compile_for(
        spec.arch,
        ConvUpdate(spec),
        fake(spec.dtype, x_shape, x_stride),
        fake(spec.dtype if spec.length else None, (None, None, length), state_stride[spec.layout]),
        fake(spec.weight_dtype, (None, spec.width), weight_stride),
        fake(spec.bias_dtype, (None,), (None,)),
        fake(spec.dtype if spec.has_residual else None, x_shape, x_stride),
        fake(spec.dtype, x_shape, x_stride),
        fake(torch.int32 if spec.has_indices else None, (None,), (None,)),
        Int32(0),
        Int64(0),
        keep=keep,
    )
