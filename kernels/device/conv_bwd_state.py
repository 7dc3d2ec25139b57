"""Gradient of the initial states: `StateGradient`, launched only where it is asked for.

A state column is read by the first W-1 tokens of its sequence, and passed on to the final state by a sequence shorter
than that state.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr

from accel.kernels.conv_bwd_state import StateGradientSpec
from accel.kernels.device import has_dependent_launch, multiply_silu_gradient
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.device.last_tokens import flatten_tokens

THREADS = 128


class StateGradient:
    """dinitial[L + s] = sum_k w[W-1-k] g[s + k] over tokens s + k >= 0, plus what the final state passes back."""

    def __init__(self, spec: StateGradientSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mDy: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mInitial: cute.Tensor,
        mDFinal: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mSeqIdx: cute.Tensor | None,
        mDInitial: cute.Tensor,
        stream,
    ):
        if const_expr(self.spec.packing == "cu_seqlens"):
            mX, mDy = flatten_tokens(mX), flatten_tokens(mDy)
        count, channels, _ = mInitial.shape
        self.kernel(mX, mDy, mWeight, mBias, mInitial, mDFinal, mCu, mWords, mSeqIdx, mDInitial).launch(
            grid=[cute.ceil_div(channels, THREADS) * count, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(self.spec.arch),
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mDy: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mInitial: cute.Tensor,
        mDFinal: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mSeqIdx: cute.Tensor | None,
        mDInitial: cute.Tensor,
    ):
        if const_expr(has_dependent_launch(self.spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        channel_blocks = cute.ceil_div(mInitial.shape[1], THREADS)
        n = block // channel_blocks
        d = (block - n * channel_blocks) * THREADS + tid
        if d < mInitial.shape[1]:
            self.gradient(mX, mDy, mWeight, mBias, mInitial, mDFinal, mCu, mWords, mSeqIdx, mDInitial, n, d)

    @cute.jit
    def gradient(self, mX, mDy, mWeight, mBias, mInitial, mDFinal, mCu, mWords, mSeqIdx, mDInitial, n: Int32, d: Int32):
        """All columns of one channel of one sequence."""
        spec = self.spec
        width, halo = spec.width, spec.width - 1
        b, start, length, malformed = n, Int32(0), mX.shape[2], Int32(0)
        if const_expr(spec.packing == "cu_seqlens"):
            b = Int32(0)
            malformed = mWords[0]
            length = Int32(0)
            if malformed == 0:
                start = Int32(mCu[n])
                length = Int32(mCu[n + 1]) - start
        state_len = mInitial.shape[2]
        rValue = cute.make_rmem_tensor(2 * halo, Float32)  # tokens -halo .. halo - 1 of the sequence
        rG = cute.make_rmem_tensor(halo, Float32)
        rIndex = cute.make_rmem_tensor(halo, Int32)
        for i in cutlass.range_constexpr(halo):
            rValue[i] = mInitial[n, d, state_len - halo + i].to(Float32)
            rValue[halo + i] = Float32(0.0)
            rG[i] = Float32(0.0)
            rIndex[i] = Int32(0)
            if i < length:
                rValue[halo + i] = mX[b, d, start + i].to(Float32)
                rG[i] = mDy[b, d, start + i].to(Float32)
                if const_expr(spec.packing == "seq_idx"):
                    rIndex[i] = mSeqIdx[b, i]
        if const_expr(spec.silu):
            rU = cute.make_rmem_tensor(halo, Float32)
            for i in cutlass.range_constexpr(halo):
                u = Float32(0.0)
                if const_expr(mBias is not None):
                    u = mBias[d].to(Float32)
                for k in cutlass.range_constexpr(width):
                    # a token before the first has the index of the first
                    value = rValue[halo + i - k]
                    if rIndex[max(i - k, 0)] != rIndex[i]:
                        value = Float32(0.0)
                    u += value * mWeight[d, width - 1 - k].to(Float32)
                rU[i] = u
            multiply_silu_gradient(rG, rU)
        for i in cutlass.range_constexpr(halo):
            if rIndex[i] != rIndex[0] or rIndex[i] < 0:
                rG[i] = Float32(0.0)
        for column in range(state_len):
            before = column - state_len
            total = Float32(0.0)
            for i in cutlass.range_constexpr(halo):
                for k in cutlass.range_constexpr(1, width):
                    if before + k == i:
                        total += rG[i] * mWeight[d, width - 1 - k].to(Float32)
            if const_expr(spec.has_final):
                at = before - length + mDFinal.shape[2]
                if at >= 0 and malformed == 0:
                    total += mDFinal[n, d, at].to(Float32)
            if malformed != 0:
                total = Float32(float("nan"))
            mDInitial[n, d, column] = total.to(mDInitial.element_type)


def build(spec: StateGradientSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    any3 = (None, None, None)
    packed = spec.packing == "cu_seqlens"
    return compile_for(
        spec.arch,
        StateGradient(spec),
        fake(spec.dtype, any3, any3),
        fake(spec.dtype, any3, any3),
        fake(spec.weight_dtype, (None, spec.width), (None, None)),
        fake(spec.bias_dtype, (None,), (None,)),
        fake(spec.dtype, any3, any3),
        fake(spec.dtype if spec.has_final else None, any3, any3),
        fake(spec.index_dtype if packed else None, (None,), (None,)),
        fake(torch.int32 if packed else None, (None,), (1,)),
        fake(torch.int32 if spec.packing == "seq_idx" else None, (None, None), (None, None)),
        fake(spec.dtype, any3, any3),
        keep=keep,
    )
