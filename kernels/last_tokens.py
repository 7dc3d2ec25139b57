"""The last tokens of every sequence, host side."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.packing import mark_starts


class LastTokensSpec(NamedTuple):
    """What the kernel is specialised for; any strides."""

    dtype: torch.dtype
    index_dtype: torch.dtype | None
    has_initial: bool
    arch: str


def launch(call, states, facts) -> None:
    """Run an admitted call for the last tokens of every sequence; fills `states`."""
    if states.numel() == 0:
        return
    cu_seqlens, words = call.cu_seqlens, None
    if cu_seqlens is not None:
        tokens = call.x.shape[0] * call.x.shape[2]
        words = mark_starts(cu_seqlens, tokens, facts.status.address, facts.trap, facts.arch)
    spec = LastTokensSpec(
        call.x.dtype, None if cu_seqlens is None else cu_seqlens.dtype, call.initial_states is not None, facts.arch
    )
    jit.get(spec)(call.x, call.initial_states, cu_seqlens, words, states)
