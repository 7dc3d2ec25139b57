"""Gradients of the full-sequence convolution, channel-first: the specification of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels.layout import packing_of, vector_alignment, weight_alignment

ROWS = 8  # tokens of a thread
WARPS = 4
TILE = 32 * ROWS  # tokens of a warp
WARPS_IN_FLIGHT = 1 << 15  # enough for any GPU; more batch rows than that share a warp


class BackwardFirstSpec(NamedTuple):
    """What the kernel is specialised for. Alignments are in bytes; 0 for a dy that is read element by element."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    silu: bool
    width: int
    packing: str  # dense, cu_seqlens or seq_idx
    index_dtype: torch.dtype | None
    has_initial: bool
    has_final: bool
    needs_x: bool
    needs_parameters: bool
    weight_rows: bool
    align_x: int
    align_dy: int
    align_dx: int
    align_weight: int
    arch: str
    vec: int = 1


def specify(call, dy, dx, needs_parameters: bool, arch: str) -> BackwardFirstSpec:
    """The specification that serves a channel-first call: metadata and addresses only."""
    x, weight = call.x, call.weight
    width = weight.shape[1]
    weight_rows = weight.stride() == (width, 1)
    vector = ROWS * x.element_size()
    return BackwardFirstSpec(
        x.dtype,
        weight.dtype,
        None if call.bias is None else call.bias.dtype,
        call.activation is not None,
        width,
        packing_of(call),
        None if call.cu_seqlens is None else call.cu_seqlens.dtype,
        call.initial_states is not None,
        call.dfinal_states is not None,
        dx is not None,
        needs_parameters,
        weight_rows,
        vector_alignment(x, False, vector),
        vector_alignment(dy, False, vector) if dy.stride(2) == 1 else 0,
        0 if dx is None else vector_alignment(dx, False, vector),
        weight_alignment(weight, 1),
        arch,
    )
