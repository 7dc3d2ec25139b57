"""`causal_conv1d_update`: one decode step. Allocates the output and launches; admission has checked everything."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accel import cpu
from accel.admission import PLAIN, admit, in_transform
from accel.call import UpdateCall
from accel.environment import DeviceFacts
from accel.ops.door import facts_of, kernels
from accel.reasons import Decline

MAX_PLANS = 4096  # kept per device; a server with that many batch sizes starts over


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
) -> Tensor:
    """Convolve one token a row with its state, and shift the token into the state.

    history = concat(state, x); state <- history[-L:], bit for bit;
    y = act(bias + sum_j history[-W+j] * weight[:, j]) + residual, in fp32 with one rounding.

    Args:
        x: [N, D] with any row stride (slices are read in place), or [N, D, 1]; bf16, fp16, fp32.
        conv_state: [S, D, L] with L >= W-1, x's dtype, any strides, mutated in place. None: no history, nothing stored.
        weight: [D, W], W from 2 to 8, x's dtype or fp32.
        bias: [D], x's dtype or fp32.
        activation: None, "silu" or "swish".
        residual: like x.
        cache_seqlens: not served in this version.
        conv_state_indices: [N] int32, the slot of each row; S = N slots in order where None.
        pad_slot_id: the index that marks a padding row: its output is 0 and no slot is touched.

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
    form = "ND" if x.dim() == 2 else "ND1"
    call = UpdateCall(
        x, form, conv_state, weight, bias, residual, activation, cache_seqlens, conv_state_indices, pad_slot_id
    )
    plan = prepare(call, facts)
    if isinstance(plan, Decline):
        raise plan.error(f"causal_conv1d_update: {plan}")
    return run(call, facts, plan)


def prepare(call: UpdateCall, facts: DeviceFacts) -> Callable | None | Decline:
    """Admit a call and find the compiled kernel for it, or the failed check; None where no kernel is needed.

    A decode step repeats the same metadata thousands of times: the answer is kept by it. What metadata does not say,
    transforms and addresses, is looked at in every call.
    """
    x, form, state, weight, bias, residual, activation, cache_seqlens, indices, pad_slot_id = call
    key = None if cache_seqlens is not None or in_transform() else _key(call)
    plan = facts.plans.get(key)
    if plan is not None:
        return plan
    decline = admit(call, facts)
    if decline is not None:
        return decline
    if facts.backend != "cute" or x.numel() == 0:
        return None
    plan = kernels().conv_update.find(
        x, form, state, weight, bias, residual, indices, activation is not None, facts.arch
    )
    if key is not None:
        if len(facts.plans) >= MAX_PLANS:
            facts.plans.clear()
        facts.plans[key] = plan
    return plan


def run(call: UpdateCall, facts: DeviceFacts, plan: Callable | None) -> Tensor:
    """Serve a prepared call on the backend of its device."""
    status = facts.status
    status.raise_pending()
    x, _, state, weight, bias, residual, _, _, indices, pad_slot_id = call
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if plan is not None:
        plan(x, state, weight, bias, residual, y, indices, pad_slot_id, status.address)
    elif facts.backend == "cpu":
        cpu.update(call, y, status)
    return y


def _key(call: UpdateCall) -> tuple | None:
    """The metadata of a call whose addresses allow the widest accesses; None where the call has to be looked at."""
    x, form, state, weight, bias, residual, activation, _, indices, _ = call
    if activation is not None and type(activation) is not str:
        return None
    if type(x) not in PLAIN or type(state) not in PLAIN or type(weight) not in PLAIN:
        return None
    if (
        (x.data_ptr() | state.data_ptr() | weight.data_ptr()) & 15
        or type(residual) in PLAIN
        and residual.data_ptr() & 15
    ):
        return None
    return (
        form,
        activation,
        torch.is_grad_enabled(),
        _meta(x),
        _meta(state),
        _meta(weight),
        bias if bias is None else _meta(bias),
        residual if residual is None else _meta(residual),
        indices if indices is None else _meta(indices),
    )


def _meta(tensor: Tensor) -> tuple | type:
    if type(tensor) not in PLAIN:
        return type(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.requires_grad
