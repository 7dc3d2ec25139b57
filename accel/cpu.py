"""The CPU backend: the operations in plain torch, so that shim, routes and errors work on any machine.

Imports torch, `accel.call` and `accel.errors`. Accumulates in fp32 and rounds once, as the kernels do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.call import BackwardCall, ConvCall, StatesCall, UpdateCall, rows_view
from accel.errors import (
    CU_SEQLENS_DECREASING,
    CU_SEQLENS_FIRST,
    CU_SEQLENS_LAST,
    SLOT_OUT_OF_RANGE,
    SLOT_USED_TWICE,
    StatusWord,
    pack,
)


def silu(z: Tensor) -> Tensor:
    """z * sigmoid(z) in fp32, right for any finite z: exp(-z) overflows below -88, where the result is still normal."""
    y = F.silu(z)
    low = z < -80
    if bool(low.any()):
        half = torch.exp(0.5 * z.clamp(max=0))  # clamped: an inf in the unused branch would make gradients NaN
        y = torch.where(low, z * half * half, y)
    return y


def update(call: UpdateCall, y: Tensor, status: StatusWord) -> None:
    """Fill y and the state of an admitted update."""
    x, out, residual = (_tokens_of(tensor, call.form) for tensor in (call.x, y, call.residual))
    if call.conv_state_indices is None:
        _steps(x, call.conv_state, call, residual, call.cache_seqlens, out, call.intermediate_states_out)
        return
    live, bad = _check_slots(call, status)
    out.zero_()
    out[bad] = float("nan")
    slots = call.conv_state_indices[live].long()
    state, part = call.conv_state[slots], torch.empty_like(x[live])
    held = call.intermediate_states_out
    kept = None if held is None else held[live]
    ring = None if call.cache_seqlens is None else call.cache_seqlens[live]
    _steps(x[live], state, call, None if residual is None else residual[live], ring, part, kept)
    out[live] = part
    call.conv_state[slots] = state
    if held is not None:
        held[live] = kept


def _tokens_of(tensor: Tensor | None, form: str) -> Tensor | None:
    """[N, D, T] of an update's x, residual or y."""
    if tensor is None or form == "NDT":
        return tensor
    return rows_view(tensor, form).unsqueeze(2)


def _steps(
    x: Tensor,
    state: Tensor | None,
    call: UpdateCall,
    residual: Tensor | None,
    ring: Tensor | None,
    out: Tensor,
    intermediate: Tensor | None,
) -> None:
    """One row a slot: fill out, the state, and the states in between."""
    weight, tokens = call.weight.float(), x.shape[2]
    width = weight.shape[1]
    if state is None:
        past = F.pad(x, (width - 1, 0))
    elif ring is None:
        past = torch.cat((state, x), dim=2)
    else:
        columns = (ring.long()[:, None] + torch.arange(1 - width, tokens, device="cpu")) % state.shape[2]
        columns = columns[:, None].expand(-1, x.shape[1], -1)
        past = torch.cat((state.gather(2, columns[:, :, : width - 1]), x), dim=2)
    recent = past[:, :, past.shape[2] - tokens - (width - 1) :].float()
    pre = recent[:, :, :tokens] * weight[:, :1]
    for tap in range(1, width):
        pre += recent[:, :, tap : tap + tokens] * weight[:, tap : tap + 1]
    if call.bias is not None:
        pre += call.bias.float()[:, None]
    if call.activation is not None:
        pre = silu(pre)
    if residual is not None:
        pre += residual.float()
    out.copy_(pre)
    if state is None:
        return
    length = state.shape[2]
    if intermediate is not None:
        for token in range(tokens):
            intermediate[:, token] = past[:, :, token + 1 : token + 1 + length]
    if ring is None:
        state.copy_(past[:, :, tokens:])
    else:
        for token in range(tokens):  # in order: a short ring is written round more than once
            at = columns[:, :, width - 1 + token, None]
            state.scatter_(2, at, x[:, :, token, None])


def _check_slots(call: UpdateCall, status: StatusWord) -> tuple[Tensor, Tensor]:
    slots = call.conv_state_indices
    padding = slots == call.pad_slot_id
    bad = ~padding & ((slots < 0) | (slots >= call.conv_state.shape[0]))
    live = ~padding & ~bad
    for row in bad.nonzero()[:1, 0].tolist():
        status.view[0] = pack(SLOT_OUT_OF_RANGE, row, int(slots[row]))
    used = slots[live]
    if used.unique().numel() != used.numel():
        ordered, order = used.sort(stable=True)
        at = int((ordered[1:] == ordered[:-1]).nonzero()[0]) + 1
        row = int(live.nonzero()[order[at]])
        status.view[0] = pack(SLOT_USED_TWICE, row, int(slots[row]))
    return live, bad


class _Packing(NamedTuple):
    """Tokens in order and where their sequences lie: all [M] for the M tokens, or [N] for the N sequences."""

    sequence: Tensor  # [M] of each token
    position: Tensor  # [M] of each token in its sequence
    starts: Tensor  # [N]
    lengths: Tensor  # [N]
    valid: bool


def _packing(x: Tensor, cu_seqlens: Tensor | None, status: StatusWord) -> _Packing:
    b, _, t = x.shape
    if cu_seqlens is None:
        starts, lengths, valid = torch.arange(b, device="cpu") * t, torch.full((b,), t, device="cpu"), True
    else:
        bounds = cu_seqlens.long()
        valid = _check_bounds(bounds, b * t, status)
        if not valid:
            bounds = torch.zeros_like(bounds)
        starts, lengths = bounds[:-1], bounds.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
    position = torch.arange(len(sequence), device="cpu") - starts[sequence]
    return _Packing(sequence, position, starts, lengths, valid)


def _check_bounds(bounds: Tensor, tokens: int, status: StatusWord) -> bool:
    smaller = (bounds.diff() < 0).nonzero()
    if int(bounds[0]) != 0:
        word = pack(CU_SEQLENS_FIRST, 0, int(bounds[0]))
    elif len(smaller):
        word = pack(CU_SEQLENS_DECREASING, int(smaller[0]) + 1, int(bounds[int(smaller[0]) + 1]))
    elif int(bounds[-1]) != tokens:
        word = pack(CU_SEQLENS_LAST, len(bounds) - 1, int(bounds[-1]))
    else:
        return True
    status.view[1] = word
    return False


def _tokens(x: Tensor) -> Tensor:
    return x.permute(1, 0, 2).flatten(1)  # [D, M], tokens in order


def _past(tokens: Tensor, initial: Tensor | None, packing: _Packing, column: Tensor, sequence: Tensor) -> Tensor:
    """Tokens at `column` of their `sequence`: negative columns come from the initial state, or are 0."""
    if tokens.shape[1]:
        at = (packing.starts[sequence] + column).clamp(0, tokens.shape[1] - 1)
        values = torch.where(column >= 0, tokens[:, at], 0)
    else:
        values = tokens.new_zeros((tokens.shape[0], *column.shape))
    if initial is None:
        return values
    length = initial.shape[2]
    held = initial[sequence, :, (column + length).clamp(0, length - 1)].movedim(-1, 0)
    return torch.where((column < 0) & (column >= -length), held, values)


def _final(tokens: Tensor, initial: Tensor | None, packing: _Packing, length: int) -> Tensor:
    column = packing.lengths[:, None] - length + torch.arange(length, device="cpu")  # [N, L]
    sequence = torch.arange(len(packing.lengths), device="cpu")[:, None].expand_as(column)
    return _past(tokens, initial, packing, column, sequence).movedim(0, 1)


def _convolve(
    tokens: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial: Tensor | None,
    packing: _Packing,
    seq_idx: Tensor | None,
    silu_: bool,
) -> Tensor:
    """[D, M] in fp32, before residual and rounding; differentiable."""
    width = weight.shape[1]
    out = tokens * weight[:, -1:]
    index = None if seq_idx is None else seq_idx.flatten()
    for back in range(1, width):
        column = packing.position - back
        value = _past(tokens, initial, packing, column, packing.sequence)
        if index is not None:
            # a tap before the batch row belongs to the sequence of the row's first token
            at = packing.starts[packing.sequence] + column.clamp(min=0)
            value = torch.where(index[at] == index, value, 0)
        out = out + value * weight[:, width - 1 - back, None]
    if bias is not None:
        out = out + bias[:, None]
    return silu(out) if silu_ else out


def conv(call: ConvCall, y: Tensor, final_states: Tensor | None, status: StatusWord) -> None:
    """Fill y and the final states of an admitted full-sequence call."""
    b, d, t = call.x.shape
    packing = _packing(call.x, call.cu_seqlens, status)
    if not packing.valid:
        y.fill_(float("nan"))
        if final_states is not None:
            final_states.fill_(float("nan"))
        return
    bias, initial = _float(call.bias), call.initial_states
    tokens = _tokens(call.x)
    out = _convolve(
        tokens.float(), call.weight.float(), bias, _float(initial), packing, call.seq_idx, call.activation is not None
    )
    out = out.unflatten(1, (b, t)).movedim(0, 1)
    if call.residual is not None:
        out = out + call.residual.float()
    if call.seq_idx is not None:
        out = out.masked_fill((call.seq_idx < 0).unsqueeze(1), 0)
    y.copy_(out)
    if final_states is not None:
        final_states.copy_(_final(tokens, initial, packing, call.state_len))


def conv_backward(
    call: BackwardCall,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dinitial: Tensor | None,
    status: StatusWord,
) -> None:
    """Fill the gradients that are asked for: the forward again in fp32, differentiated."""
    outputs = (dx, dweight, dbias, dinitial)
    packing = _packing(call.x, call.cu_seqlens, status)
    if not packing.valid:
        for output in outputs:
            if output is not None:
                output.fill_(float("nan"))
        return
    with torch.enable_grad(), _autograd():
        leaves = [
            None if tensor is None else tensor.detach().float().requires_grad_()
            for tensor in (call.x, call.weight, call.bias, call.initial_states)
        ]
        x, weight, bias, initial = leaves
        tokens = _tokens(x)
        silu_ = call.activation is not None
        total = x.new_zeros(())
        if call.dy is not None:
            out = _convolve(tokens, weight, bias, initial, packing, call.seq_idx, silu_)
            dy = _tokens(call.dy.float())
            if call.seq_idx is not None:
                dy = dy.masked_fill(call.seq_idx.flatten() < 0, 0)
            total = total + (out * dy).sum()
        if call.dfinal_states is not None:
            total = total + (_final(tokens, initial, packing, call.state_len) * call.dfinal_states.float()).sum()
        wanted = [leaf for leaf, output in zip(leaves, outputs, strict=True) if output is not None]
        gradients = iter(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))
    for output in outputs:
        if output is not None:
            output.copy_(next(gradients))


def _autograd() -> AbstractContextManager:
    """Autograd as callers have it: the body of a registered operator runs below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradFunctionality", "ADInplaceOrView"):
        excluded = excluded.remove(torch._C.DispatchKey.__members__[key])
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def states(call: StatesCall, out: Tensor, status: StatusWord) -> None:
    """Fill the last tokens of every sequence."""
    packing = _packing(call.x, call.cu_seqlens, status)
    if not packing.valid:
        out.fill_(float("nan"))
        return
    out.copy_(_final(_tokens(call.x), call.initial_states, packing, call.state_len))


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()
