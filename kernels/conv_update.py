"""One decode step of a causal convolution, host side: the specification of a call, and `find`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.layout import alignment, widest

MAX_REGISTER_COLUMNS = 8  # longer states shift in memory, one channel a thread


class UpdateSpec(NamedTuple):
    """What the kernel is specialised for. Alignments are in bytes; `length` 0 means no state, -1 a long one."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    has_residual: bool
    has_indices: bool
    silu: bool
    form: str
    width: int
    length: int
    layout: str  # of the state: compact, channel-last or strided
    vec: int
    weight_rows: bool  # weight is [D, W] with strides (W, 1)
    align_x: int
    align_state: int
    align_weight: int
    align_residual: int
    arch: str


def specify(x, form, state, weight, bias, residual, indices, activation: bool, arch: str) -> UpdateSpec:
    """The specification that serves these tensors: metadata and addresses only."""
    shape, strides = x.shape, x.stride()
    rows, channels = (1, 2) if form == "1ND" else (0, 2 if form == "N1D" else 1)
    n, d = shape[rows], shape[channels]
    size = x.element_size()
    width = weight.shape[1]
    length, layout, align_state = 0, "strided", 0
    vec = 1 if d & 1 else 2
    if state is not None:
        length = state.shape[2]
        s0, s1, s2 = state.stride()
        if length > MAX_REGISTER_COLUMNS:
            length, vec = -1, 1
        elif s2 == 1 and s1 == length:
            layout = "compact"
            align_state = alignment(widest(vec * length * size), size, state.data_ptr(), s0 * size)
        elif s1 == 1:
            layout = "channel-last"
            if d % 8 == 0 and n * d >= 1 << 18:
                vec = 16 // size
            align_state = alignment(vec * size, size, state.data_ptr(), s0 * size, s2 * size)
        else:
            vec = 1
    weight_rows = weight.stride() == (width, 1)
    weight_size = weight.element_size()
    row_bytes = vec * size
    return UpdateSpec(
        x.dtype,
        weight.dtype,
        None if bias is None else bias.dtype,
        residual is not None,
        indices is not None,
        activation,
        form,
        width,
        length,
        layout,
        vec,
        weight_rows,
        alignment(row_bytes, size, x.data_ptr(), strides[rows] * size if n > 1 else 0),
        align_state,
        alignment(widest(vec * width * weight_size), weight_size, weight.data_ptr()) if weight_rows else 0,
        0 if residual is None else alignment(row_bytes, size, residual.data_ptr(), residual.stride(rows) * size),
        arch,
    )


def find(x, form, state, weight, bias, residual, indices, activation: bool, arch: str):
    """The compiled function for these tensors. It is called with (x, state, weight, bias, residual, y, indices,
    pad_slot_id, status), on tensors of the same layouts and alignments, and fills y and shifts the state in place.
    """
    return jit.get(specify(x, form, state, weight, bias, residual, indices, activation, arch))
