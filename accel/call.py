"""One vocabulary for every upstream: what a call asks for, after its adapter has read it. Ground floor: torch only."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# How the rows of an update lie in x: the axes of (rows, channels); a third one has one element, or with NDT the tokens.
ROWS = {"ND": (0, 1), "N1D": (0, 2), "1ND": (1, 2), "ND1": (0, 1), "NDT": (0, 1)}


class UpdateCall(NamedTuple):
    """One decode step of one token a row, or of a few.

    x: [N, D], or with a unit axis or T tokens as `form` says; conv_state: [S, D, L], mutated in place, or None for no
    history; weight: [D, W]; bias: [D]; residual: like x; cache_seqlens: [N] int32, where the state is a ring;
    conv_state_indices: [N] int32, `pad_slot_id` marks padding rows; intermediate_states_out: [N, T, D, L].
    """

    x: Tensor
    form: str
    conv_state: Tensor | None
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    activation: str | None
    cache_seqlens: Tensor | None
    conv_state_indices: Tensor | None
    pad_slot_id: int
    intermediate_states_out: Tensor | None = None


def is_one_token(call: UpdateCall) -> bool:
    """Whether an update is one token a row and nothing else: no ring, no states in between."""
    return call.form != "NDT" and call.cache_seqlens is None and call.intermediate_states_out is None


class ConvCall(NamedTuple):
    """A full sequence.

    x: [B, D, T]; weight: [D, W]; bias: [D]; residual: like x; initial_states: [N, D, L]; cu_seqlens: [N+1];
    seq_idx: [B, T]; final states have `state_len` columns, channel-last or compact, or go to `final_states_out`.
    `channel_last`: the caller needs a y whose channels are neighbours, whatever x is.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    activation: str | None
    cu_seqlens: Tensor | None
    seq_idx: Tensor | None
    initial_states: Tensor | None
    return_final_states: bool
    final_states_out: Tensor | None
    state_len: int
    compact_states: bool
    channel_last: bool


class BackwardCall(NamedTuple):
    """The gradients of a ConvCall: dy is like x in shape, of any strides; one of dy and dfinal_states may be None.

    The initial states' gradient is compact or channel-last. `dx`: memory for the gradient of x, written in place.
    """

    x: Tensor
    dy: Tensor | None
    dfinal_states: Tensor | None
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    activation: str | None
    cu_seqlens: Tensor | None
    seq_idx: Tensor | None
    initial_states: Tensor | None
    state_len: int
    needs_x: bool
    needs_weight: bool
    needs_bias: bool
    needs_initial: bool
    channel_last: bool
    compact_states: bool = True
    dx: Tensor | None = None


class StatesCall(NamedTuple):
    """The last `state_len` tokens of every sequence of x [B, D, T], after its initial state."""

    x: Tensor
    initial_states: Tensor | None
    cu_seqlens: Tensor | None
    state_len: int
    compact_states: bool


class InnerCall(NamedTuple):
    """A call that the upstream takes apart: what it does around the convolution `call` stays its own.

    `callable` is the name by which it calls that convolution; it is swapped too, and has the route.
    """

    callable: str
    call: ConvCall


class DenseCall(NamedTuple):
    """A dense, dilated causal convolution.

    x: [B, Cin, T]; weight: [Cout, Cin / groups, K]; bias: [Cout]; the activation comes after the bias.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dilation: int
    groups: int
    activation: str | None


class DenseBackwardCall(NamedTuple):
    """The gradients of a DenseCall without activation: dy is [B, Cout, T], of any strides."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    dilation: int
    groups: int
    needs_x: bool
    needs_weight: bool
    needs_bias: bool


def form_of(x: Tensor, residual: Tensor | None = None) -> str:
    """The form of x [N, D] or [N, D, T]: a single token whose channels are neighbours is read like [N, D]."""
    if x.dim() == 2:
        return "ND"
    like = residual if isinstance(residual, Tensor) and residual.dim() == 3 else x
    return "ND1" if x.dim() == 3 and x.size(2) == 1 and x.stride(1) == like.stride(1) == 1 else "NDT"


def rows_view(tensor: Tensor, form: str) -> Tensor:
    """The [N, D] view of an update's x, residual or y."""
    if form in ("ND", "NDT"):
        return tensor
    return tensor.select({"N1D": 1, "1ND": 0, "ND1": 2}[form], 0)
