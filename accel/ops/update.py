"""`causal_conv1d_update`: one decode step. Allocates the output and launches; admission has checked everything."""

from __future__ import annotations

import torch
from torch import Tensor

from accel import cpu
from accel.admission import admit_update
from accel.call import UpdateCall
from accel.environment import DeviceFacts
from accel.ops.door import facts_of, kernels


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
    decline = admit_update(call, facts)
    if decline is not None:
        raise decline.error(f"causal_conv1d_update: {decline}")
    return run(call, facts)


def run(call: UpdateCall, facts: DeviceFacts) -> Tensor:
    """Serve an admitted call on the backend of its device."""
    facts.status.raise_pending()
    y = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    if facts.backend == "cute":
        kernels().conv_update.launch(
            call.x,
            call.form,
            call.conv_state,
            call.weight,
            call.bias,
            call.residual,
            y,
            call.conv_state_indices,
            call.activation is not None,
            call.pad_slot_id,
            facts.status.address,
            facts.arch,
        )
    else:
        cpu.update(call, y, facts.status)
    return y
