"""Gradient of the initial states, host side."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.layout import packing_of


class StateGradientSpec(NamedTuple):
    """What the kernel is specialised for; any strides."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    silu: bool
    width: int
    packing: str
    index_dtype: torch.dtype | None
    has_final: bool
    arch: str


def launch(call, dy, words, dinitial, arch: str) -> None:
    """Fill the gradient of the initial states."""
    spec = StateGradientSpec(
        call.x.dtype,
        call.weight.dtype,
        None if call.bias is None else call.bias.dtype,
        call.activation is not None,
        call.weight.shape[1],
        packing_of(call),
        None if call.cu_seqlens is None else call.cu_seqlens.dtype,
        call.dfinal_states is not None,
        arch,
    )
    jit.get(spec)(
        call.x,
        dy,
        call.weight,
        call.bias,
        call.initial_states,
        call.dfinal_states,
        call.cu_seqlens,
        words,
        call.seq_idx,
        dinitial,
    )
