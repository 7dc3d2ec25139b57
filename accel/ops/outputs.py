"""Fresh tensors of the full-sequence operations: their layouts, and their allocation."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.call import BackwardCall, ConvCall, StatesCall
from accel.kernels.contract import is_channel_last

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # size and stride


def fresh(layout: Layout, x: Tensor, device: str | None = None) -> Tensor:
    """An unwritten tensor of that layout, on x's device where no other is given."""
    return torch.empty_strided(*layout, dtype=x.dtype, device=x.device if device is None else device)


def layout_like(call: ConvCall | BackwardCall) -> Layout:
    """Of y and of dx: dense in x's order of axes.

    A slice of a wider projection gives a dense [B, T, D] behind it, a slice of a matrix [D, B * T] a dense one. Packed
    batch rows need that order too: their tokens lie at one stride.
    """
    x = call.x
    b, d, t = x.shape
    sb, sd, st = x.stride()
    if is_channel_last(x):
        if b > 1 and 0 < sb < st and not call.channel_last:
            return (b, d, t), (d, 1, b * d)
        return (b, d, t), (t * d, 1, d)
    if b > 1 and 0 < sb < sd:
        return (b, d, t), (t, b * t, 1)
    return (b, d, t), (d * t, t, 1)


def states_layout(call: ConvCall | BackwardCall | StatesCall, length: int) -> Layout:
    """Of the states of all sequences, [N, D, length]."""
    b, d, _ = call.x.shape
    count = b if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    return (count, d, length), (d * length, length, 1) if call.compact_states else (d * length, 1, d)


def allocate(call: ConvCall) -> tuple[Tensor, Tensor | None]:
    """y and the final states, unwritten."""
    y = fresh(layout_like(call), call.x)
    if not call.return_final_states:
        return y, None
    if call.final_states_out is not None:
        return y, call.final_states_out
    return y, fresh(states_layout(call, call.state_len), call.x)


def allocate_backward(call: BackwardCall, dx: Tensor | None) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dbias, dinitial_states), unwritten, each None where it is not needed; `dx` where there is one."""
    if dx is None and call.needs_x:
        dx = fresh(layout_like(call), call.x)
    dweight = torch.empty_like(call.weight, memory_format=torch.contiguous_format) if call.needs_weight else None
    dbias = torch.empty_like(call.bias, memory_format=torch.contiguous_format) if call.needs_bias else None
    dinitial = fresh(states_layout(call, call.initial_states.shape[2]), call.x) if call.needs_initial else None
    return dx, dweight, dbias, dinitial
