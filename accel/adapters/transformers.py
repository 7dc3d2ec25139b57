"""Transformers' own convolution functions: their signatures written out, to and from a call. Views only, no decisions.

Since 5.15 every modeling module defines a pair of them, in front of the package causal_conv1d and of a torch fallback;
earlier only Qwen3-Next and its kin define one, a torch update. Shapes are our own: x [B, D, T], states [B, D, L].
"""

from __future__ import annotations

from torch import Tensor

from accel.call import ConvCall, UpdateCall, form_of
from accel.dispatch import Adapter
from accel.reasons import Decline, Reason


def _read_fn(hidden_states, weight, bias=None, activation=None, **kwargs) -> ConvCall | Decline:
    # the model's keywords arrive unfiltered, those of attention among them; the package reads seq_idx and no cu_seqlens
    for name in ("initial_states", "return_final_states", "final_states_out"):
        if kwargs.get(name) is not None:
            return Decline(Reason.UNSUPPORTED_ARGUMENT, name, "None", "a value that only causal-conv1d reads")
    seq_idx = kwargs.get("seq_idx")
    cu_seqlens = kwargs.get("cu_seqlens") if seq_idx is None else None
    columns = weight.shape[1] - 1
    return ConvCall(
        hidden_states, weight, bias, None, activation, cu_seqlens, seq_idx, None, False, None, columns, False, False
    )


def _read_update(hidden_states, conv_state, weight, bias=None, activation=None) -> UpdateCall | Decline:
    if conv_state is None:
        # here the state is what the caller wants to have updated
        return Decline(Reason.UNSUPPORTED_ARGUMENT, "conv_state", "a tensor", "None", TypeError)
    form = form_of(hidden_states)
    return UpdateCall(hidden_states, form, conv_state, weight, bias, None, activation, None, None, -1)


def _read_torch_update(hidden_states, conv_state, weight, bias=None, activation=None) -> UpdateCall | Decline:
    # it applies SiLU, whatever activation says
    return _read_update(hidden_states, conv_state, weight, bias, "silu")


def _again_update(
    step, hidden_states=None, conv_state=None, weight=None, bias=None, activation=None, *more, **others
) -> Tensor | None:
    return None if more or others else step(hidden_states, conv_state, weight, bias, activation)


def _again_torch_update(
    step, hidden_states=None, conv_state=None, weight=None, bias=None, activation=None, *more, **others
) -> Tensor | None:
    return None if more or others else step(hidden_states, conv_state, weight, bias, "silu")


ADAPTERS = {
    "transformers.causal_conv1d_fn": Adapter(ConvCall, _read_fn),
    "transformers.causal_conv1d_update": Adapter(UpdateCall, _read_update, again=_again_update),
    "transformers.torch_causal_conv1d_update": Adapter(UpdateCall, _read_torch_update, again=_again_torch_update),
}
