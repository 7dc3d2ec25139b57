"""`cu_seqlens` as one bit a token, "a sequence starts here", made and validated on the device in one small launch.

The convolution kernels then read a word with their rows instead of searching `cu_seqlens`. Word 0 of the result is 1
where `cu_seqlens` is malformed, so that they write NaN and touch nothing else.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr

from accel.kernels.device import has_dependent_launch, report, trap
from accel.kernels.device.compiler import compile_for, fake
from accel.kernels.packing import PackingSpec

CU_SEQLENS_FIRST, CU_SEQLENS_DECREASING, CU_SEQLENS_LAST = 3, 4, 5  # as accel.errors reads them
THREADS = 1024
CTAS = 32  # each reads all of cu_seqlens and owns a share of the words, so none waits for another


class MarkStarts:
    """words[0] = malformed; bit t % 32 of words[1 + t // 32] = a sequence starts at token t."""

    def __init__(self, spec: PackingSpec):
        self.spec = spec

    @cute.jit
    def __call__(self, mCu: cute.Tensor, mWords: cute.Tensor, tokens: Int32, status: Int64, stream):
        self.kernel(mCu, mWords, tokens, status).launch(
            grid=[CTAS, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=has_dependent_launch(self.spec.arch)
        )

    @cute.kernel
    def kernel(self, mCu: cute.Tensor, mWords: cute.Tensor, tokens: Int32, status: Int64):
        if const_expr(has_dependent_launch(self.spec.arch)):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        malformed = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        share = cute.ceil_div(mWords.shape[0] - 1, CTAS)
        first = cta * share
        last = cutlass.min(first + share, mWords.shape[0] - 1)
        if tid == 0:
            malformed[0] = 0
        for word in range(first + tid, last, THREADS):
            mWords[1 + word] = 0
        cute.arch.sync_threads()
        sequences = mCu.shape[0] - 1
        for entry in range(tid, sequences + 1, THREADS):
            start = Int64(mCu[entry])
            before = Int64(0)
            if entry > 0:
                before = Int64(mCu[entry - 1])
            code = Int32(0)
            if entry == sequences and start != Int64(tokens):
                code = Int32(CU_SEQLENS_LAST)
            if start < before:
                code = Int32(CU_SEQLENS_DECREASING)
            if entry == 0 and start != 0:
                code = Int32(CU_SEQLENS_FIRST)
            if code != 0:
                malformed[0] = 1
                if cta == 0:
                    report(status + 8, code, entry, Int32(start))
            if start >= 0 and start < Int64(tokens):
                word = Int32(start) // 32
                if word >= first and word < last:
                    cute.arch.atomic_or(mWords.iterator + (1 + word), Int32(1) << (Int32(start) & 31))
        cute.arch.sync_threads()
        if tid == 0:
            mWords[0] = malformed[0]
            if const_expr(self.spec.trap):
                if malformed[0] != 0:
                    trap()


def build(spec: PackingSpec, keep: bool = False):
    """Compile one specification; no GPU is needed."""
    return compile_for(
        spec.arch,
        MarkStarts(spec),
        fake(spec.index_dtype, (None,), (None,)),
        fake(torch.int32, (None,), (1,)),
        Int32(0),
        Int64(0),
        keep=keep,
    )
