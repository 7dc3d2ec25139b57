"""`causal_conv1d_update`: one decode step. Allocates the output and launches; admission has checked everything."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from accel import cpu
from accel.admission import admit
from accel.call import UpdateCall, form_of
from accel.environment import DeviceFacts
from accel.ops.door import facts_of, kernels
from accel.reasons import Decline
from accel.tracing import function_modes, observed

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # private to torch; without it every call asks admission
    TensorGuards = None

MAX_PLANS = 32  # kept of one kind of call and device


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

    A decode step repeats the same metadata thousands of times, so an answer is kept behind a guard that compares the
    metadata, dispatch keys included, in C++. What it does not see is looked at in every call: addresses, forward-mode
    differentiation, function modes, and what is part of the kind. `inside`: the registered operator asks.
    """
    x, form, state, weight, bias, residual, activation, cache_seqlens, indices, _, intermediate = call
    one_token = form != "NDT" and cache_seqlens is None and intermediate is None
    keep = one_token and state is not None and TensorGuards is not None and type(activation) in (str, NoneType)
    known = None
    if keep:
        kind = (form, activation, bias is None, residual is None, indices is None, torch.is_grad_enabled())
        tensors = (x, state, weight)
        if bias is not None or residual is not None or indices is not None:
            tensors = tuple(tensor for tensor in (*tensors, bias, residual, indices) if tensor is not None)
        known = facts.plans.get(kind)
        if known is not None and forward_ad._current_level < 0 and not (function_modes() and observed(x)):
            plan = _kept(known, tensors)
            if plan is not None:
                return plan
    decline = admit(call, facts)
    if decline is not None:
        return decline
    if facts.backend != "cute" or x.numel() == 0 or not inside and observed(x):
        return None
    if not one_token:
        return kernels().conv_update_tokens.find(call, facts.arch)
    plan = kernels().conv_update.find(
        x, form, state, weight, bias, residual, indices, activation is not None, facts.arch
    )
    if keep and _aligned(tensors):
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        # the newest first, and only so many: a server with more batch sizes than that asks admission now and then
        bare = getattr(plan, "function", plan)  # of a first call: it is made right after this
        facts.plans[kind] = [(guards, bare), *(known or ())][:MAX_PLANS]
    return plan


def _kept(known: list, tensors: tuple[Tensor, ...]) -> Callable | None:
    for guards, plan in known:
        try:
            if guards.check(*tensors):
                return plan if _aligned(tensors) else None
        except TypeError:  # not a tensor: admission says which
            return None
    return None


def _aligned(tensors: tuple[Tensor, ...]) -> bool:
    """Whether the widest accesses are allowed, as they were when a plan was kept."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return not bits & 15


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
