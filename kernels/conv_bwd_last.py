"""Gradients of the full-sequence convolution, channel-last: the specification of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels.layout import copy_width, packing_of, vector_alignment, weight_alignment

BATCH = 4  # rows that a ring stage holds of x and of dy
WARPS, PER_SM, STAGES = 4, 2, 4  # a third block an SM takes registers that the masked batch needs


class BackwardSpec(NamedTuple):
    """What the kernel is specialised for. `piece_*` are bytes of one asynchronous copy, 0 for plain loads."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    silu: bool
    width: int
    packing: str  # dense, cu_seqlens or seq_idx
    index_dtype: torch.dtype | None
    has_initial: bool
    has_final: bool  # a gradient comes through the final states
    needs_x: bool
    needs_parameters: bool
    vec: int
    warps: int  # of a block
    per_sm: int  # blocks that fit an SM
    stages: int
    weight_rows: bool
    piece_x: int
    piece_dy: int
    align_dx: int
    align_weight: int
    arch: str


def specify(call, dy, dx, needs_parameters: bool, arch: str) -> BackwardSpec:
    """The specification that serves a channel-last call: metadata and addresses only."""
    x, weight = call.x, call.weight
    d = x.shape[1]
    size = x.element_size()
    widest = 8 // size if weight.shape[1] <= 5 else 2  # registers hold no more
    vec = 1 if d & 1 else widest if d % widest == 0 else 2
    weight_rows = weight.stride() == (weight.shape[1], 1)
    row = 32 * vec * size
    return BackwardSpec(
        x.dtype,
        weight.dtype,
        None if call.bias is None else call.bias.dtype,
        call.activation is not None,
        weight.shape[1],
        packing_of(call),
        None if call.cu_seqlens is None else call.cu_seqlens.dtype,
        call.initial_states is not None,
        call.dfinal_states is not None,
        dx is not None,
        needs_parameters,
        vec,
        WARPS,
        PER_SM,
        STAGES,
        weight_rows,
        copy_width(x, row),
        copy_width(dy, row),
        0 if dx is None else vector_alignment(dx, True, vec * size),
        weight_alignment(weight, vec),
        arch,
    )
