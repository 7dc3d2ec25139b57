"""The last tokens of every sequence: what final states are made of, as device code and as a kernel of its own."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr

from accel.kernels.device import has_dependent_launch
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.last_tokens import LastTokensSpec

THREADS = 128


class LastTokens:
    """states[n, d, j] = token (length of n) - L + j of sequence n; before its start its initial state, else 0."""

    def __init__(self, spec: LastTokensSpec):
        self.spec = spec

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,
        mInitial: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mStates: cute.Tensor,
        stream,
    ):
        if const_expr(mCu is not None):
            mX = flatten_tokens(mX)
        count, channels, _ = mStates.shape
        self.kernel(mX, mInitial, mCu, mWords, mStates).launch(
            grid=[cute.ceil_div(channels, THREADS) * count, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=has_dependent_launch(self.spec.arch),
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mInitial: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mWords: cute.Tensor | None,
        mStates: cute.Tensor,
    ):
        if const_expr(has_dependent_launch(self.spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        channel_blocks = cute.ceil_div(mStates.shape[1], THREADS)
        n = block // channel_blocks
        d = (block - n * channel_blocks) * THREADS + tid
        if d < mStates.shape[1]:
            b = Int32(0) if const_expr(mCu is not None) else n
            copy_last_tokens(mX, mInitial, mCu, mWords, mStates, b, n, d, 1, Int32(0), 1)


@cute.jit
def copy_last_tokens(
    mX: cute.Tensor,
    mInitial: cute.Tensor | None,
    mCu: cute.Tensor | None,
    mWords: cute.Tensor | None,
    mStates: cute.Tensor,
    b: Int32,
    n: Int32,
    d: Int32,
    vec: cutlass.Constexpr[int],
    first: Int32,
    step: cutlass.Constexpr[int],
):
    """Columns first, first + step, ... of `vec` channels: exact copies, NaN where the metadata is malformed."""
    start, length, malformed = Int32(0), mX.shape[2], Int32(0)
    if const_expr(mCu is not None):
        malformed = mWords[0]
        if malformed == 0:
            start = Int32(mCu[n])
            length = Int32(mCu[n + 1]) - start
    state_len = mStates.shape[2]
    for column in range(first, state_len, step):
        token = length - state_len + column
        for c in cutlass.range_constexpr(vec):
            value = mX.element_type(0.0)
            if malformed != 0:
                value = Float32(float("nan")).to(mX.element_type)
            elif token >= 0:
                value = mX[b, d + c, start + token]
            else:
                if const_expr(mInitial is not None):
                    if token + mInitial.shape[2] >= 0:
                        value = mInitial[n, d + c, mInitial.shape[2] + token]
            mStates[n, d + c, column] = value


def flatten_tokens(mX: cute.Tensor) -> cute.Tensor:
    """[B, D, T] whose tokens lie at one stride as [1, D, B * T]."""
    batch, channels, tokens = mX.shape
    return cute.make_tensor(mX.iterator, cute.make_layout((1, channels, batch * tokens), stride=mX.stride))


def build(spec: LastTokensSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    any3 = (None, None, None)
    packed = spec.index_dtype is not None
    return compile_for(
        spec.arch,
        LastTokens(spec),
        fake(spec.dtype, any3, any3),
        fake(spec.dtype if spec.has_initial else None, any3, any3),
        fake(spec.index_dtype, (None,), (None,)),
        fake(torch.int32 if packed else None, (None,), (1,)),
        fake(spec.dtype, any3, any3),
        keep=keep,
    )
