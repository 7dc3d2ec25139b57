"""Gradients of `causal_conv1d`: what autograd keeps and gets, and the launch that functional callables share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel import cpu
from accel.call import BackwardCall, ConvCall
from accel.environment import DeviceFacts
from accel.kernels.contract import is_channel_last
from accel.ops import plans
from accel.ops.door import kernels
from accel.ops.outputs import Layout, allocate_backward, fresh
from accel.tracing import observed


class BackwardPlan(NamedTuple):
    """What serves every call of the same metadata: the kernels' own `Found`, and dx."""

    found: Any
    dx: Layout | None


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
    if facts.backend == "cute" and given is None:
        return _planned(call, facts)
    direct = given is not None and _takes(given, call)
    dx, dweight, dbias, dinitial = allocate_backward(call, given if direct else None)
    if facts.backend == "cute":
        conv_bwd = kernels("conv_bwd")
        dy = conv_bwd.dense_enough(call.dy, call)
        found = conv_bwd.find(call, dy, dx, call.needs_weight or call.needs_bias, facts)
        conv_bwd.launch(found, call, dy, dx, dweight, dbias, dinitial, facts)
    else:
        cpu.conv_backward(call, dx, dweight, dbias, dinitial, facts.status)
    if given is not None and not direct:
        dx = given.copy_(dx)
    return dx, dweight, dbias, dinitial


def _planned(call: BackwardCall, facts: DeviceFacts) -> tuple[Tensor | None, ...]:
    """The gradients on a GPU, by a plan that is kept for calls of the same metadata."""
    x, dy, dfinal, weight, bias, _, activation, cu_seqlens, seq_idx, initial, *options, _ = call
    optional = (dy, dfinal, bias, cu_seqlens, seq_idx, initial)
    kind = ("backward", activation, tuple(tensor is not None for tensor in optional), *options)
    tensors = (x, weight, *(tensor for tensor in optional if tensor is not None))
    plan = plans.find(facts.plans, kind, tensors)
    conv_bwd = kernels("conv_bwd")
    dx = None if plan is None or plan.dx is None else fresh(plan.dx, x)
    dx, dweight, dbias, dinitial = allocate_backward(call, dx)
    dy = conv_bwd.dense_enough(dy, call)
    if plan is not None:
        found = plan.found
    else:
        found = conv_bwd.find(call, dy, dx, call.needs_weight or call.needs_bias, facts)
        bare = None if found is None else found._replace(function=plans.bare(found.function))
        layout = None if dx is None else (dx.shape, dx.stride())
        plans.keep(facts.plans, kind, tensors, BackwardPlan(bare, layout))
    conv_bwd.launch(found, call, dy, dx, dweight, dbias, dinitial, facts)
    return dx, dweight, dbias, dinitial


def _takes(dx: Tensor, call: BackwardCall) -> bool:
    """Whether the kernels write into a given dx: vectors along the axis of x's, packed batch rows at one stride."""
    if dx.stride(1 if is_channel_last(call.x) else 2) != 1:
        return False
    b, _, t = dx.shape
    return call.cu_seqlens is None or b == 1 or dx.stride(0) == t * dx.stride(2)
