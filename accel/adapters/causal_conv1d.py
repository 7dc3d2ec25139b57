"""causal-conv1d's callables: their signatures written out, to and from a call. Views only, no decisions.

Shapes are our own: x [B, D, T], states [B, D, W-1]. The functions of `cpp_functions` (1.5.1 and later) are what
mamba_ssm and FLA call from their own autograd nodes; they write into the final states and the dx that they are given.
Where the order of parameters differs between versions, the name of the adapter ends with the first version that has it.
"""

from __future__ import annotations

from torch import Tensor

from accel.call import BackwardCall, ConvCall, StatesCall, UpdateCall, form_of
from accel.dispatch import Adapter
from accel.reasons import Decline, Reason


def _read_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
) -> ConvCall:
    # final_states_out counts only where final states are asked for
    out = final_states_out if return_final_states else None
    return _conv(x, weight, bias, seq_idx, initial_states, bool(return_final_states), out, activation)


def _read_fwd_function(x, weight, bias, seq_idx, initial_states, final_states_out, silu_activation) -> ConvCall:
    returns = final_states_out is not None
    return _conv(x, weight, bias, seq_idx, initial_states, returns, final_states_out, _activation(silu_activation))


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: bool,
    final_states_out: Tensor | None,
    activation: str | None,
) -> ConvCall:
    return ConvCall(
        x,
        weight,
        bias,
        None,
        activation,
        None,
        seq_idx,
        initial_states,
        return_final_states,
        final_states_out,
        weight.shape[1] - 1,
        False,
        False,
    )


def _activation(silu: bool) -> str | None:
    return "silu" if silu else None


def _give_fwd_function(outputs: Tensor | tuple[Tensor, Tensor], call: ConvCall) -> Tensor:
    return outputs[0] if call.return_final_states else outputs


def _read_bwd_function(
    x,
    weight,
    bias,
    dout,
    seq_idx,
    initial_states,
    dfinal_states,
    dx,
    return_dinitial_states,
    silu_activation,
) -> BackwardCall:
    return BackwardCall(
        x,
        dout,
        dfinal_states,
        weight,
        bias,
        None,
        _activation(silu_activation),
        None,
        seq_idx,
        initial_states,
        weight.shape[1] - 1,
        True,
        True,
        bias is not None,
        bool(return_dinitial_states),
        False,
        False,
        dx,
    )


def _read_update_150(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
) -> UpdateCall | Decline:
    return _update(x, form_of(x), conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)


def _read_update_140(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None) -> UpdateCall | Decline:
    return _read_update_150(x, conv_state, weight, bias, activation, cache_seqlens)


def _again_update_150(
    step, x=None, conv_state=None, weight=None, bias=None, activation=None, cache_seqlens=None,
    conv_state_indices=None, *more, **others
) -> Tensor | None:  # fmt: skip
    if cache_seqlens is not None or conv_state_indices is not None or more or others:
        return None
    return step(x, conv_state, weight, bias, activation)


def _again_update_140(
    step, x=None, conv_state=None, weight=None, bias=None, activation=None, cache_seqlens=None, *more, **others
) -> Tensor | None:
    if cache_seqlens is not None or more or others:
        return None
    return step(x, conv_state, weight, bias, activation)


def _read_update_function(
    x, conv_state, weight, bias, silu_activation, cache_seqlens, conv_state_indices
) -> UpdateCall | Decline:
    # x has a token axis here, always
    form = form_of(x) if x.dim() == 3 else "NDT"
    activation = _activation(silu_activation)
    return _update(x, form, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)


def _update(x, form, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices) -> UpdateCall | Decline:
    if conv_state is None:
        # FLA's absent cache is a zero history; here the state is what the caller wants to have updated
        return Decline(Reason.UNSUPPORTED_ARGUMENT, "conv_state", "a tensor", "None", TypeError)
    return UpdateCall(x, form, conv_state, weight, bias, None, activation, cache_seqlens, conv_state_indices, -1)


def _read_states(x, cu_seqlens, state_len) -> StatesCall:
    # packed tokens [T, D]; there is no gradient
    return StatesCall(x.detach().t().unsqueeze(0), None, cu_seqlens, state_len, False)


ADAPTERS = {
    "causal_conv1d.causal_conv1d_fn": Adapter(ConvCall, _read_fn),
    "causal_conv1d.causal_conv1d_update@1.4.0": Adapter(UpdateCall, _read_update_140, again=_again_update_140),
    "causal_conv1d.causal_conv1d_update@1.5.0": Adapter(UpdateCall, _read_update_150, again=_again_update_150),
    "causal_conv1d.causal_conv1d_varlen_states": Adapter(StatesCall, _read_states),
    "causal_conv1d.causal_conv1d_fwd_function": Adapter(ConvCall, _read_fwd_function, _give_fwd_function),
    "causal_conv1d.causal_conv1d_bwd_function": Adapter(BackwardCall, _read_bwd_function),
    "causal_conv1d.causal_conv1d_update_function": Adapter(UpdateCall, _read_update_function),
}
