"""Full-sequence causal convolution, host side: the specification of a call, `find` and `launch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.contract import is_channel_last
from accel.kernels.layout import packing_of, residual_kind, vector_alignment, weight_alignment
from accel.kernels.packing import mark_starts

MAX_GRID_YZ = 32768
SMALL = 1 << 21  # elements under which more and smaller threads fill the GPU better
FIRST_THREADS = 128  # of a channel-first block


class ConvSpec(NamedTuple):
    """What the kernel is specialised for. Alignments are in bytes."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    residual: str | None  # like: vectors as in x; strided: element by element
    silu: bool
    width: int
    packing: str  # dense, cu_seqlens or seq_idx
    index_dtype: torch.dtype | None
    has_initial: bool
    has_final: bool
    channel_last: bool
    unit_stride: bool  # stride 1 along the direction of the vectors
    vec: int
    rows: int
    warps: int
    weight_rows: bool  # weight is [D, W] with strides (W, 1)
    align_x: int
    align_y: int
    align_weight: int
    align_residual: int
    flat: bool  # channel-last: a grid dimension would pass its limit; channel-first: short sequences side by side
    arch: str


def specify(call, y, final_states, arch: str) -> ConvSpec:
    """The specification that serves a call: metadata and addresses only."""
    x, weight = call.x, call.weight
    b, d, t = x.shape
    size = x.element_size()
    width = weight.shape[1]
    channel_last = is_channel_last(x)
    packed = call.cu_seqlens is not None
    tokens = b * t if packed else t
    if channel_last:
        small = x.numel() < SMALL
        unit_stride = x.stride(1) == 1 or d == 1
        vec = 1 if d & 1 or not unit_stride else 2 if small or d & 3 else 4
        rows, warps = (4, 2) if small else (8, 2)
        extra = 0 if final_states is None else final_states.shape[0] if packed else 1
        flat = -(-tokens // (rows * warps)) + extra > MAX_GRID_YZ or b > MAX_GRID_YZ
        vector = vec * size
    else:
        unit_stride, vec, rows, warps = True, 1, 8, FIRST_THREADS // 32
        flat = tokens < 4 * FIRST_THREADS * rows
        vector = rows * size
    weight_rows = weight.stride() == (width, 1)
    return ConvSpec(
        x.dtype,
        weight.dtype,
        None if call.bias is None else call.bias.dtype,
        residual_kind(call.residual, channel_last),
        call.activation is not None,
        width,
        packing_of(call),
        call.cu_seqlens.dtype if packed else None,
        call.initial_states is not None,
        final_states is not None,
        channel_last,
        unit_stride,
        vec,
        rows,
        warps,
        weight_rows,
        vector_alignment(x, channel_last, vector) if unit_stride else 0,
        vector_alignment(y, channel_last, vector),
        weight_alignment(weight, vec),
        0 if call.residual is None else vector_alignment(call.residual, channel_last, vector),
        flat,
        arch,
    )


def find(call, y, final_states, arch: str) -> Callable | None:
    """The compiled function for such a call, None where there is nothing to do.

    It serves every call of the same layouts and alignments.
    """
    if y.numel() == 0 and (final_states is None or final_states.numel() == 0):
        return None
    return jit.get(specify(call, y, final_states, arch))


def launch(function: Callable, call, y, final_states, facts) -> None:
    """Run an admitted full-sequence call on x's device and its current stream; fills y and the final states."""
    words = None
    if call.cu_seqlens is not None:
        tokens = call.x.shape[0] * call.x.shape[2]
        words = mark_starts(call.cu_seqlens, tokens, facts.status.address, facts.trap, facts.arch)
    function(
        call.x,
        call.weight,
        call.bias,
        call.residual,
        call.initial_states,
        call.cu_seqlens,
        words,
        call.seq_idx,
        y,
        final_states,
    )
