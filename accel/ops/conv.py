"""`causal_conv1d`: full sequences, forward and backward.

Allocates outputs and launches; admission has checked everything. The autograd node is made only where a gradient is
asked for, and torch.compile, modes and fake tensors get the registered operator instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accel import cpu
from accel.admission import admit
from accel.call import BackwardCall, ConvCall
from accel.environment import DeviceFacts
from accel.kernels.contract import is_channel_last
from accel.ops.door import facts_of, kernels
from accel.reasons import Decline
from accel.tracing import observed


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    state_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution of full sequences, differentiable once.

    y[b, d, t] = act(bias[d] + sum_j weight[d, j] * x[b, d, t - (W-1) + j]) + residual[b, d, t], in fp32 with one
    rounding; x before a sequence comes from its initial state, else it is 0.

    Args:
        x: [B, D, T], bf16, fp16 or fp32; channel-last (stride 1 over D) or channel-first (stride 1 over T), any other
            strides, no copy.
        weight: [D, W], W from 2 to 8, x's dtype or fp32.
        bias: [D], x's dtype or fp32.
        activation: None, "silu" or "swish".
        residual: like x, added after the activation.
        cu_seqlens: [N+1] int32 or int64, ascending from 0 to B*T: the B*T tokens in order are N packed sequences.
        seq_idx: [B, T] int32: a tap counts only where its token has the index of the output's token; a negative index
            is padding, y = 0 there. Initial states belong to the sequence of seq_idx[:, 0].
        initial_states: [N, D, L], L >= W-1 (N = B without cu_seqlens): column L + t holds the token at t < 0.
        return_final_states: also return the last `state_len` tokens of every sequence.
        final_states_out: [N, D, state_len] to write them to, in memory of its own.
        state_len: columns of the final states, at least W-1, which is the default.

    Returns:
        y, in the memory format of x; with `return_final_states`, (y, final_states), where a sequence shorter than
        state_len keeps the tail of its initial state, or zeros.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument that does not fit, by name.
        PackedMetadataError: at a later call or `accel.check()`, for malformed `cu_seqlens`; the outputs are then NaN.

    Gradients reach x, weight, bias, residual and initial_states, also through the final states, and are the same bits
    in every run. Source: `causal_conv1d_fn` of causal-conv1d 1.7.0.
    """
    facts = facts_of(x)
    if state_len is None:
        like = weight if final_states_out is None else final_states_out
        state_len = like.shape[-1] - (like is weight) if isinstance(like, Tensor) and like.dim() else 0
    call = ConvCall(
        x,
        weight,
        bias,
        residual,
        activation,
        cu_seqlens,
        seq_idx,
        initial_states,
        return_final_states,
        final_states_out,
        state_len,
        False,
        False,
    )
    refuse("causal_conv1d", admit(call, facts))
    return run(call, facts)


def refuse(name: str, decline: Decline | None) -> None:
    """Raise the error of a failed check."""
    if decline is not None:
        raise decline.error(f"{name}: {decline}")


def run(call: ConvCall, facts: DeviceFacts, plan: None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Serve an admitted call; through autograd only where something requires a gradient."""
    if observed(call.x):
        outputs = _operator(call)
    elif torch.is_grad_enabled() and _requires_grad(call):
        outputs = _Conv.apply(call, facts, call.x, call.weight, call.bias, call.residual, call.initial_states)
    else:
        outputs = forward(call, facts)
    return outputs if call.return_final_states else outputs[0]


def _operator(call: ConvCall) -> tuple[Tensor, Tensor]:
    arguments = [value for name, value in zip(call._fields, call, strict=True) if name != "final_states_out"]
    y, final_states = torch.ops.accel.causal_conv1d(*arguments)
    if call.final_states_out is not None:
        final_states = call.final_states_out.copy_(final_states)
    return y, final_states


def _requires_grad(call: ConvCall) -> bool:
    for tensor in (call.x, call.weight, call.bias, call.residual, call.initial_states):
        if tensor is not None and tensor.requires_grad:
            return True
    return False


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: ConvCall, facts: DeviceFacts, x, weight, bias, residual, initial_states):
        keep(ctx, call, facts)
        return forward(call, facts)

    @staticmethod
    def backward(ctx, dy, dfinal_states):
        return None, None, *gradients(ctx, ctx.needs_input_grad[2:], dy, dfinal_states)


def keep(ctx: Any, call: ConvCall, facts: DeviceFacts) -> None:
    """What `gradients` will need."""
    ctx.facts = facts
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(call.x, call.weight, call.bias, call.initial_states, call.cu_seqlens, call.seq_idx)
    ctx.activation, ctx.state_len = call.activation, call.state_len


def gradients(
    ctx: Any, needs: tuple[bool, ...], dy: Tensor | None, dfinal_states: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Those of x, weight, bias, residual and initial states; `needs` says which."""
    x, weight, bias, initial_states, cu_seqlens, seq_idx = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual, needs_initial = needs
    if dy is None and dfinal_states is None:
        return (None,) * 5
    call = BackwardCall(
        x,
        dy,
        dfinal_states,
        weight,
        bias,
        None,
        ctx.activation,
        cu_seqlens,
        seq_idx,
        initial_states,
        ctx.state_len,
        needs_x,
        needs_weight,
        needs_bias,
        needs_initial,
        False,
    )
    found = run_backward(call, ctx.facts)
    if torch.is_grad_enabled():
        found = Once.apply(x, weight, *found)
    dx, dweight, dbias, dinitial = found
    dresidual = dy if needs_residual else None
    if dresidual is not None and seq_idx is not None:
        dresidual = dy.masked_fill((seq_idx < 0).unsqueeze(1), 0)
    return dx, dweight, dbias, dresidual, dinitial


class Once(torch.autograd.Function):
    """Passes gradients on and refuses to be differentiated: under create_graph they would look like constants."""

    @staticmethod
    def forward(ctx, x, weight, *gradients):
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("causal_conv1d: the second derivative is not implemented")


def allocate(call: ConvCall) -> tuple[Tensor, Tensor | None]:
    """y and the final states, unwritten."""
    y = _like(call)
    if not call.return_final_states:
        return y, None
    if call.final_states_out is not None:
        return y, call.final_states_out
    count = call.x.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    return y, states_of(call.x, count, call.state_len, call.compact_states)


def forward(call: ConvCall, facts: DeviceFacts) -> tuple[Tensor, Tensor | None]:
    """y and, where asked for, the final states, without autograd."""
    facts.status.raise_pending()
    y, final_states = allocate(call)
    if facts.backend == "cute":
        kernels().conv_fwd.launch(call, y, final_states, facts)
    else:
        cpu.conv(call, y, final_states, facts.status)
    return y, final_states


def allocate_backward(call: BackwardCall, dx: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dbias, dinitial_states), unwritten, each None where it is not needed; `dx` where there is one."""
    if dx is None and call.needs_x:
        dx = _like(call)
    dweight = torch.empty_like(call.weight, memory_format=torch.contiguous_format) if call.needs_weight else None
    dbias = torch.empty_like(call.bias, memory_format=torch.contiguous_format) if call.needs_bias else None
    dinitial = None
    if call.needs_initial:
        count, _, length = call.initial_states.shape
        dinitial = states_of(call.x, count, length, call.compact_states)
    return dx, dweight, dbias, dinitial


def run_backward(call: BackwardCall, facts: DeviceFacts, plan: None = None) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dbias, dinitial_states), each None where it is not needed."""
    if not observed(call.x):
        return backward(call, facts)
    found = torch.ops.accel.causal_conv1d_backward(*call[:-1])
    needs = (call.needs_x, call.needs_weight, call.needs_bias, call.needs_initial)
    dx, *others = (gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
    return call.dx.copy_(dx) if call.dx is not None else dx, *others


def backward(call: BackwardCall, facts: DeviceFacts) -> tuple[Tensor | None, ...]:
    """The gradients of an admitted call, in a given dx where there is one."""
    facts.status.raise_pending()
    given = call.dx
    direct = given is not None and _takes(given, call)
    dx, dweight, dbias, dinitial = allocate_backward(call, given if direct else None)
    if facts.backend == "cute":
        kernels().conv_bwd.launch(call, dx, dweight, dbias, dinitial, facts)
    else:
        cpu.conv_backward(call, dx, dweight, dbias, dinitial, facts.status)
    if given is not None and not direct:
        dx = given.copy_(dx)
    return dx, dweight, dbias, dinitial


def _like(call: ConvCall | BackwardCall) -> Tensor:
    # dense in x's order of axes: a slice of a wider projection gives a dense [B, T, D] behind it, a slice of a matrix
    # [D, B * T] a dense one. Packed batch rows need that order too: their tokens lie at one stride
    x = call.x
    b, d, t = x.shape
    sb, sd, st = x.stride()
    if is_channel_last(x):
        if b > 1 and 0 < sb < st and not call.channel_last:
            return torch.empty((t, b, d), dtype=x.dtype, device=x.device).permute(1, 2, 0)
        return torch.empty((b, t, d), dtype=x.dtype, device=x.device).transpose(1, 2)
    if b > 1 and 0 < sb < sd:
        return torch.empty((d, b, t), dtype=x.dtype, device=x.device).transpose(0, 1)
    return torch.empty((b, d, t), dtype=x.dtype, device=x.device)


def _takes(dx: Tensor, call: BackwardCall) -> bool:
    """Whether the kernels write into a given dx: vectors along the axis of x's, packed batch rows at one stride."""
    if dx.stride(1 if is_channel_last(call.x) else 2) != 1:
        return False
    b, _, t = dx.shape
    return call.cu_seqlens is None or b == 1 or dx.stride(0) == t * dx.stride(2)


def states_of(x: Tensor, count: int, length: int, compact: bool) -> Tensor:
    """Unwritten states [count, D, length]."""
    d = x.shape[1]
    if compact:
        return torch.empty((count, d, length), dtype=x.dtype, device=x.device)
    return torch.empty((count, length, d), dtype=x.dtype, device=x.device).transpose(1, 2)
