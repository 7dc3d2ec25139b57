"""`causal_conv1d_varlen_states`: the last tokens of every sequence. Allocates the states and launches."""

from __future__ import annotations

import torch
from torch import Tensor

from accel import cpu
from accel.admission import admit
from accel.call import StatesCall
from accel.environment import DeviceFacts
from accel.ops.door import facts_of, kernels, refuse
from accel.ops.outputs import fresh, states_layout
from accel.tracing import observed


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last `state_len` tokens of each packed sequence, zeros before its start.

    Args:
        x: [T, D], any strides, bf16, fp16 or fp32.
        cu_seqlens: [N+1] int32 or int64.
        state_len: columns of the states.

    Returns:
        [N, D, state_len], channel-last (stride 1 over D); no gradient.

    Source: `causal_conv1d_varlen_states` of causal-conv1d 1.7.0.
    """
    facts = facts_of(x)
    if x.dim() != 2:
        raise ValueError(f"causal_conv1d_varlen_states: x: expected [T, D], got {list(x.shape)}")
    call = StatesCall(x.detach().t().unsqueeze(0), None, cu_seqlens, state_len, False)
    refuse("causal_conv1d_varlen_states", admit(call, facts))
    return run(call, facts)


def run(call: StatesCall, facts: DeviceFacts, plan: None = None) -> Tensor:
    """The last tokens of every sequence, after its initial state."""
    if observed(call.x):
        return torch.ops.accel.causal_conv1d_states(*call)
    return forward(call, facts)


def allocate(call: StatesCall) -> Tensor:
    """The states, unwritten."""
    return fresh(states_layout(call, call.state_len), call.x)


def forward(call: StatesCall, facts: DeviceFacts) -> Tensor:
    """The states of an admitted call."""
    facts.status.raise_pending()
    states = allocate(call)
    if facts.backend == "cute":
        kernels("last_tokens").launch(call, states, facts)
    else:
        cpu.states(call, states, facts.status)
    return states
