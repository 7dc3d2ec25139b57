"""flash-linear-attention's callables: their signatures written out, to and from a call. Views only, no decisions.

Shapes are FLA's: x [B, T, D], states [N, D, W] with W columns of real data; the convolution reads the last W-1.
Where parameters or their meaning differ between versions, the name of the adapter ends with the first that has them.
`chunk_indices`, `cu_seqlens_cpu` and the block sizes belong to FLA's own schedule and are not needed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accel.call import BackwardCall, ConvCall, InnerCall, StatesCall, UpdateCall
from accel.dispatch import Adapter
from accel.reasons import Decline, Reason


def _read_update(x, cache, residual=None, weight=None, bias=None, activation=None) -> UpdateCall:
    # x is [N, D], [1, N, D] or [N, 1, D]
    form = "ND" if x.dim() == 2 else "1ND" if x.size(0) == 1 else "N1D"
    return UpdateCall(x, form, cache, weight, bias, residual, activation, None, None, -1)


def _again_update(
    step, x=None, cache=None, residual=None, weight=None, bias=None, activation=None, *more, **others
) -> tuple[Tensor, Tensor] | None:
    if residual is not None or more or others:
        return None
    y = step(x, cache, weight, bias, activation)
    return None if y is None else (y, cache)


def _give_update(y: Tensor, call: UpdateCall) -> tuple[Tensor, Any]:
    return y, call.conv_state


def _read_step(self, x, residual, cache, output_final_state=False, cu_seqlens=None) -> InnerCall | Decline:
    if self.backend != "triton":
        return Decline(Reason.UNSUPPORTED_ARGUMENT, "backend", "'triton'", repr(self.backend))
    call = _read_update(x, cache, residual, self.weight.squeeze(1), self.bias, self.activation)
    return InnerCall("causal_conv1d_update", call)


def _again_step(
    step, self=None, x=None, residual=None, cache=None, output_final_state=False, cu_seqlens=None, *more, **others
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    parameters = getattr(self, "_parameters", {})
    weight = parameters.get("weight")
    if weight is None or residual is not None or self.backend != "triton" or more or others:
        return None
    y = step(x, cache, weight.squeeze(1), parameters.get("bias"), self.activation)
    return None if y is None else (y, cache if output_final_state else None)


def _channels(x: Tensor) -> Tensor:
    """[B, T, D] or [B, T, H, d] as [B, D, T]; heads that do not flatten in place fail here: the call is declined."""
    return (x.view(*x.shape[:2], -1) if x.dim() == 4 else x).transpose(1, 2)


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
) -> ConvCall:
    return ConvCall(
        _channels(x),
        weight,
        bias,
        None if residual is None else _channels(residual),
        activation,
        cu_seqlens,
        None,
        initial_state,
        bool(output_final_state),
        None,
        weight.shape[1],
        True,
        True,
    )


def _read_conv_060(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
    backend="triton", cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs
) -> ConvCall | InnerCall | Decline:  # fmt: skip
    if cp_context is not None:
        if backend == "cuda":
            found = "'cuda', whose path calls no function of FLA's"
            return Decline(Reason.CONTEXT_PARALLEL, "backend", "'triton' with a cp_context", found)
        return _parallel(x, weight, bias, residual, activation, cp_context)
    if backend != "triton":
        return Decline(Reason.UNSUPPORTED_ARGUMENT, "backend", "'triton'", repr(backend))
    return _conv(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)


def _parallel(x, weight, bias, residual, activation, cp_context) -> InnerCall:
    # the halo comes as an initial state [N, D, W] of x's dtype, which is served whatever the rest is
    call = _conv(x, weight, bias, residual, None, False, activation, cp_context.cu_seqlens)
    return InnerCall("causal_conv1d_fwd", call)


def _read_conv_042(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
    backend="triton", cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs
) -> ConvCall | InnerCall | Decline:  # fmt: skip
    if cp_context is not None:  # backend and residual are not looked at then
        return _parallel(x, weight, bias, None, activation, cp_context)
    return _read_conv_060(x, weight, bias, residual, initial_state, output_final_state, activation, backend, cu_seqlens)


def _read_conv_041(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
    backend="triton", cu_seqlens=None, chunk_indices=None, **kwargs
) -> ConvCall | Decline:  # fmt: skip
    return _read_conv_060(x, weight, bias, residual, initial_state, output_final_state, activation, backend, cu_seqlens)


def _read_conv_032(
    x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None,
    backend="triton", cu_seqlens=None, **kwargs
) -> ConvCall | Decline:  # fmt: skip
    return _read_conv_060(x, weight, bias, residual, initial_state, output_final_state, activation, backend, cu_seqlens)


def _give_conv(outputs: Tensor | tuple[Tensor, Tensor], call: ConvCall) -> tuple[Tensor, Tensor | None]:
    y, final_state = outputs if call.return_final_states else (outputs, None)
    return y.transpose(1, 2), final_state


def _read_fwd_060(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False
) -> ConvCall:  # fmt: skip
    return _conv(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)


def _read_fwd_051(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None,
    cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, BT=64, layout_fallback=False
) -> ConvCall:  # fmt: skip
    return _conv(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)


def _read_fwd_042(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None,
    cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, BT=64
) -> ConvCall:  # fmt: skip
    return _conv(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)


def _read_fwd_041(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None,
    cu_seqlens=None, chunk_indices=None
) -> ConvCall:  # fmt: skip
    return _conv(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)


def _read_fwd_032(
    x, weight, bias, residual, initial_state=None, output_final_state=False, activation=None, cu_seqlens=None
) -> ConvCall:
    return _conv(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)


def _backward(x, dy, dht, weight, bias, residual, initial_state, activation, cu_seqlens) -> BackwardCall:
    return BackwardCall(
        _channels(x),
        _channels(dy),
        dht,
        weight,
        bias,
        None if residual is None else _channels(residual),
        activation,
        cu_seqlens,
        None,
        initial_state,
        weight.shape[1],
        True,
        True,
        bias is not None,
        initial_state is not None,
        True,
    )


def _read_bwd_060(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, chunk_size=64, layout_fallback=False
) -> BackwardCall:  # fmt: skip
    return _backward(x, dy, dht, weight, bias, residual, initial_state, activation, cu_seqlens)


def _read_bwd_051(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, BT=64, layout_fallback=False
) -> BackwardCall:  # fmt: skip
    return _backward(x, dy, dht, weight, bias, residual, initial_state, activation, cu_seqlens)


def _read_bwd_042(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, BT=64
) -> BackwardCall:  # fmt: skip
    return _backward(x, dy, dht, weight, bias, residual, initial_state, activation, cu_seqlens)


def _read_bwd_041(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None,
    chunk_indices=None
) -> BackwardCall:  # fmt: skip
    return _backward(x, dy, dht, weight, bias, residual, initial_state, activation, cu_seqlens)


def _read_bwd_032(
    x, dy, dht, weight=None, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None
) -> BackwardCall:
    return _backward(x, dy, dht, weight, bias, residual, initial_state, activation, cu_seqlens)


def _give_bwd(gradients: tuple[Tensor | None, ...], call: BackwardCall) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias, dinitial = gradients
    dresidual = None if call.residual is None else call.dy.transpose(1, 2)
    return dx.transpose(1, 2), dweight, dbias, dresidual, dinitial


def _read_states(x, state_len, initial_state=None, cu_seqlens=None) -> StatesCall:
    if x.dim() == 2:
        x = x.unsqueeze(0)  # FLA takes packed tokens [T, D] too
    return StatesCall(x.transpose(1, 2), initial_state, cu_seqlens, state_len, True)


def _give_states(states: Tensor, call: StatesCall) -> Tensor:
    return states


ADAPTERS = {
    "fla.causal_conv1d_update": Adapter(UpdateCall, _read_update, _give_update, _again_update),
    "fla.ShortConvolution.step": Adapter(UpdateCall, _read_step, again=_again_step, inner="causal_conv1d_update"),
    "fla.causal_conv1d@0.3.2": Adapter(ConvCall, _read_conv_032, _give_conv),
    "fla.causal_conv1d@0.4.1": Adapter(ConvCall, _read_conv_041, _give_conv),
    "fla.causal_conv1d@0.4.2": Adapter(ConvCall, _read_conv_042, _give_conv),
    "fla.causal_conv1d@0.6.0": Adapter(ConvCall, _read_conv_060, _give_conv),
    "fla.causal_conv1d_fwd@0.3.2": Adapter(ConvCall, _read_fwd_032, _give_conv),
    "fla.causal_conv1d_fwd@0.4.1": Adapter(ConvCall, _read_fwd_041, _give_conv),
    "fla.causal_conv1d_fwd@0.4.2": Adapter(ConvCall, _read_fwd_042, _give_conv),
    "fla.causal_conv1d_fwd@0.5.1": Adapter(ConvCall, _read_fwd_051, _give_conv),
    "fla.causal_conv1d_fwd@0.6.0": Adapter(ConvCall, _read_fwd_060, _give_conv),
    "fla.causal_conv1d_bwd@0.3.2": Adapter(BackwardCall, _read_bwd_032, _give_bwd),
    "fla.causal_conv1d_bwd@0.4.1": Adapter(BackwardCall, _read_bwd_041, _give_bwd),
    "fla.causal_conv1d_bwd@0.4.2": Adapter(BackwardCall, _read_bwd_042, _give_bwd),
    "fla.causal_conv1d_bwd@0.5.1": Adapter(BackwardCall, _read_bwd_051, _give_bwd),
    "fla.causal_conv1d_bwd@0.6.0": Adapter(BackwardCall, _read_bwd_060, _give_bwd),
    "fla.causal_conv1d_update_states": Adapter(StatesCall, _read_states, _give_states),
}
