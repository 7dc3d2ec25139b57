"""`causal_conv1d_update`: one decode step. Allocates the output and launches; admission has checked everything."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from accel import cpu
from accel.admission import admit
from accel.call import UpdateCall, form_of, is_one_token
from accel.environment import DeviceFacts
from accel.ops import plans
from accel.ops.door import facts_of, kernels
from accel.reasons import Decline
from accel.tracing import observed


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    intermediate_states_out: Tensor | None = None,
) -> Tensor:
    """Convolve one token a row, or a few, with its state, and shift the tokens into the state.

    history = concat(state, x); state <- history[-L:], bit for bit;
    y = act(bias + sum_j history[-W+j] * weight[:, j]) + residual, in fp32 with one rounding.

    Args:
        x: [N, D] with any row stride (slices are read in place), or [N, D, T]; bf16, fp16, fp32.
        conv_state: [S, D, L] with L >= W-1, x's dtype, any strides, mutated in place. None: no history, nothing stored.
        weight: [D, W], W from 2 to 8, x's dtype or fp32.
        bias: [D], x's dtype or fp32.
        activation: None, "silu" or "swish".
        residual: like x.
        cache_seqlens: [N] int32. The state is a ring then: token t of a row goes to column (cache_seqlens + t) % L, and
            its history are the W-1 columns before that one.
        conv_state_indices: [N] int32, the slot of each row; S = N slots in order where None.
        pad_slot_id: the index that marks a padding row: its output is 0 and no slot is touched.
        intermediate_states_out: [N, T, D, L], receives the state after each token, for speculative decoding; not with
            a ring.

    Returns:
        y, x's shape and dtype, dense.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument that does not fit, by name.
        RuntimeError: a tensor requires grad while grad is enabled; this operation is for inference.
        StateIndexError: at a later call or `accel.check()`, for a slot out of range (that row is NaN and not applied)
            or one that two rows share (which of them wins is unspecified).

    Source: `causal_conv1d_update` of causal-conv1d 1.7.0, and FLA's, whose residual it takes.
    """
    facts = facts_of(x)
    call = UpdateCall(
        x,
        form_of(x, residual),
        conv_state,
        weight,
        bias,
        residual,
        activation,
        cache_seqlens,
        conv_state_indices,
        pad_slot_id,
        intermediate_states_out,
    )
    plan = admit(call, facts) if is_dynamo_compiling() else prepare(call, facts)
    if isinstance(plan, Decline):
        raise plan.error(f"causal_conv1d_update: {plan}")
    return run(call, facts, plan)


def prepare(call: UpdateCall, facts: DeviceFacts, inside: bool = False) -> Callable | None | Decline:
    """Admit a call and find the compiled kernel for it, or the failed check; None where `run` needs no kernel.

    `inside`: the registered operator asks.
    """
    x, form, state, weight, bias, residual, activation, _, indices, *_ = call
    one_token = is_one_token(call)
    keep = one_token and state is not None
    if keep:
        kind = (form, activation, bias is None, residual is None, indices is None, torch.is_grad_enabled())
        tensors = (x, state, weight)
        if bias is not None or residual is not None or indices is not None:
            tensors = tuple(tensor for tensor in (*tensors, bias, residual, indices) if tensor is not None)
        plan = plans.find(facts.plans, kind, tensors)
        if plan is not None:
            return plan
    decline = admit(call, facts)
    if decline is not None:
        return decline
    if facts.backend != "cute" or x.numel() == 0 or not inside and observed(x):
        return None
    if not one_token:
        return kernels("conv_update_tokens").find(call, facts.arch)
    plan = kernels("conv_update").find(
        x, form, state, weight, bias, residual, indices, activation is not None, facts.arch
    )
    if keep:
        plans.keep(facts.plans, kind, tensors, plans.bare(plan))
    return plan


def run(call: UpdateCall, facts: DeviceFacts, plan: Callable | None, inside: bool = False) -> Tensor:
    """Serve a prepared call on the backend of its device; through the registered operator where somebody observes."""
    if plan is None and not inside and observed(call.x):
        return torch.ops.accel.causal_conv1d_update(*call)
    status = facts.status
    status.raise_pending()
    x, _, state, weight, bias, residual, _, _, indices, pad_slot_id, _ = call
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if plan is not None:
        plan(x, state, weight, bias, residual, y, indices, pad_slot_id, status.address)
    elif facts.backend == "cpu":
        cpu.update(call, y, status)
    return y
