"""`causal_conv1d`: full sequences.

Allocates outputs and launches; admission has checked everything. The autograd node is made only where a gradient is
asked for, and torch.compile, modes and fake tensors get the registered operator instead. On a GPU what serves a call
is found once and kept for calls of the same metadata (plans).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from accel import cpu
from accel.admission import admit
from accel.call import ConvCall
from accel.environment import DeviceFacts
from accel.ops import plans
from accel.ops.door import facts_of, kernels, refuse
from accel.ops.gradients import gradients, keep
from accel.ops.outputs import Layout, allocate, fresh, layout_like, states_layout
from accel.reasons import Decline
from accel.tracing import observed


class ForwardPlan(NamedTuple):
    """What serves every call of the same metadata: the kernel, None where there is nothing to do, and its outputs."""

    function: Callable | None
    y: Layout
    final_states: Layout | None
    differentiable: bool


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
        state_len = like.shape[-1] if isinstance(like, Tensor) and like.dim() else 1
        if like is weight:
            state_len -= 1
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
    plan = admit(call, facts) if is_compiling() else prepare(call, facts)
    if isinstance(plan, Decline):
        refuse("causal_conv1d", plan)
    return run(call, facts, plan)


def prepare(call: ConvCall, facts: DeviceFacts) -> ForwardPlan | Decline | None:
    """Admit a call and plan it, or the failed check; None where `run` needs no plan."""
    x, weight, bias, residual, activation, cu_seqlens, seq_idx, initial, returns, out, length, compact, last = call
    tensors = (x, weight)
    optional = (bias, residual, cu_seqlens, seq_idx, initial)
    present = tuple(tensor is not None for tensor in optional)
    if True in present:
        tensors = (x, weight, *(tensor for tensor in optional if tensor is not None))
    kind = ("forward", activation, present, returns, length, compact, last, torch.is_grad_enabled())
    keep = out is None  # what a given output shares memory with is asked in every call
    if keep and (plan := plans.find(facts.plans, kind, tensors)) is not None:
        return plan
    decline = admit(call, facts)
    if decline is not None:
        return decline
    if facts.backend != "cute" or observed(x):
        return None
    plan = plan_of(call, facts)
    if keep:
        plans.keep(facts.plans, kind, tensors, plan._replace(function=plans.bare(plan.function)))
    return plan


def plan_of(call: ConvCall, facts: DeviceFacts) -> ForwardPlan:
    """The plan of an admitted call on a GPU."""
    y, final_states = layout_like(call), None
    if call.return_final_states and call.final_states_out is None:
        final_states = states_layout(call, call.state_len)
    # without memory: a fresh tensor is aligned, and so are these
    outputs = [None if layout is None else fresh(layout, call.x, "meta") for layout in (y, final_states)]
    if call.final_states_out is not None:
        outputs[1] = call.final_states_out
    function = kernels("conv_fwd").find(call, *outputs, facts.arch)
    return ForwardPlan(function, y, final_states, torch.is_grad_enabled() and _requires_grad(call))


def run(call: ConvCall, facts: DeviceFacts, plan: ForwardPlan | None) -> Tensor | tuple[Tensor, Tensor]:
    """Serve an admitted call; through autograd only where something requires a gradient."""
    if plan is None and observed(call.x):
        outputs = _operator(call)
    elif plan.differentiable if plan is not None else torch.is_grad_enabled() and _requires_grad(call):
        outputs = _Conv.apply(call, facts, plan, call.x, call.weight, call.bias, call.residual, call.initial_states)
    else:
        outputs = forward(call, facts, plan)
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
    def forward(ctx, call: ConvCall, facts: DeviceFacts, plan: ForwardPlan | None, *_):
        keep(ctx, call, facts)
        return forward(call, facts, plan)

    @staticmethod
    def backward(ctx, dy, dfinal_states):
        return None, None, None, *gradients(ctx, ctx.needs_input_grad[3:], dy, dfinal_states)


def forward(call: ConvCall, facts: DeviceFacts, plan: ForwardPlan | None) -> tuple[Tensor, Tensor | None]:
    """y and, where asked for, the final states, without autograd; with a plan on a GPU."""
    facts.status.raise_pending()
    if plan is None:
        y, final_states = allocate(call)
        cpu.conv(call, y, final_states, facts.status)
        return y, final_states
    y = fresh(plan.y, call.x)
    final_states = call.final_states_out if plan.final_states is None else fresh(plan.final_states, call.x)
    if plan.function is not None:
        kernels("conv_fwd").launch(plan.function, call, y, final_states, facts)
    return y, final_states
