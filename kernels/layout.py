"""What the host asks of the layout of tensors: alignments, widths of copies, the way sequences are packed."""

from __future__ import annotations

import torch


def copy_width(tensor: torch.Tensor, row: int) -> int:
    """Bytes of one asynchronous copy, at most an eighth of a row so that a warp has work; 0 where none is possible."""
    if tensor.stride(1) != 1 and tensor.shape[1] != 1:
        return 0
    for width in (16, 4):
        if width <= row // 8 and vector_alignment(tensor, True, width) == width:
            return width
    return 0


def residual_kind(residual: torch.Tensor | None, channel_last: bool) -> str | None:
    """Whether the residual is read in vectors as x is."""
    if residual is None:
        return None
    return "like" if residual.stride(1 if channel_last else 2) == 1 else "strided"


def vector_alignment(tensor: torch.Tensor, channel_last: bool, vector: int) -> int:
    """The alignment in bytes of every vector of a [B, D, T] tensor."""
    size = tensor.element_size()
    sb, sd, st = tensor.stride()
    other = st if channel_last else sd
    batch = sb * size if tensor.shape[0] > 1 else 0
    return alignment(min(vector, 16), size, tensor.data_ptr(), batch, other * size)


def weight_alignment(weight: torch.Tensor, vec: int) -> int:
    """The alignment in bytes of the taps of `vec` neighbouring channels; 0 where weight is not dense."""
    width = weight.shape[1]
    if weight.stride() != (width, 1):
        return 0
    size = weight.element_size()
    return alignment(widest(vec * width * size), size, weight.data_ptr())


def packing_of(call) -> str:
    """How a call says where sequences begin."""
    if call.cu_seqlens is not None:
        return "cu_seqlens"
    return "dense" if call.seq_idx is None else "seq_idx"


def widest(chunk: int) -> int:
    """Bytes of the widest access, at most 16, that divides a chunk of neighbouring bytes."""
    return min(16, chunk & -chunk)


def alignment(limit: int, element: int, *quantities: int) -> int:
    """`limit` bytes where every address and byte stride is a multiple of it, else one element.

    Two answers and not all powers of two between: each one is another kernel to compile.
    """
    bits = limit
    for quantity in quantities:
        bits |= quantity
    return limit if bits & -bits >= limit else element
