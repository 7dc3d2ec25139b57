"""`cu_seqlens` as one bit a token, "a sequence starts here", made and validated on the device in one small launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit


class PackingSpec(NamedTuple):
    """What the kernel is specialised for; `trap` stops the device at malformed data."""

    index_dtype: torch.dtype
    trap: bool
    arch: str


def mark_starts(cu_seqlens: torch.Tensor, tokens: int, status: int, trap: bool, arch: str) -> torch.Tensor:
    """Launch it: the words for `tokens` tokens, on cu_seqlens' device and its current stream."""
    words = torch.empty(1 + (tokens + 31) // 32, dtype=torch.int32, device=cu_seqlens.device)
    jit.get(PackingSpec(cu_seqlens.dtype, trap, arch))(cu_seqlens, words, tokens, status)
    return words
