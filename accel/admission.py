"""The one place that decides, before anything is computed or mutated, whether a call is native.

Pure: reads metadata of the call and the facts of its device, touches no data. Limits come from the kernels' contracts.
A check yields a Decline; `admit` takes the first, `explain` all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from accel.call import ROWS, BackwardCall, ConvCall, DenseCall, StatesCall, UpdateCall
from accel.checks import device_checks
from accel.dense_checks import dense_checks
from accel.environment import DeviceFacts
from accel.kernels.contract import CONV, UPDATE, Contract, is_channel_last
from accel.memory import overlap, overlaps_itself, shared
from accel.reasons import Decline, Reason

_INT_DTYPES = (torch.int32, torch.int64)


def admit(call: UpdateCall | ConvCall | BackwardCall | StatesCall | DenseCall, facts: DeviceFacts) -> Decline | None:
    """None where the call is native, else the first failed check."""
    for decline in CHECKS[type(call)](call, facts):  # older torch.compile knows no next() with a default
        return decline
    return None


def update_checks(call: UpdateCall, facts: DeviceFacts) -> Iterator[Decline]:
    """Every failed check of an update."""
    x, form, state, weight, bias, residual, activation, cache_seqlens, indices, _, intermediate = call
    tensors = (x, state, weight, bias, residual, cache_seqlens, indices, intermediate)
    failed, plain = device_checks(x, _UPDATE_NAMES, tensors, facts)
    yield from failed
    if not plain:
        return
    if torch.is_grad_enabled():
        for name, tensor in zip(_UPDATE_NAMES, tensors, strict=True):
            if tensor is not None and tensor.requires_grad:
                yield Decline(
                    Reason.AUTOGRAD, name, "no gradient (decode is inference only)", "requires_grad", RuntimeError
                )
    shape, (rows, channels) = x.shape, ROWS[form]
    if len(shape) != len(form) or form not in ("ND", "NDT") and shape[3 - rows - channels] != 1:
        yield Decline(Reason.SHAPE, "x", "[N, D], [N, D, T] or one token a row", _list(shape))
        return
    n, d = shape[rows], shape[channels]
    yield from _parameter_checks(x, weight, bias, activation, d, UPDATE)
    if weight.dim() != 2:
        return
    any_strides = form == "NDT" or cache_seqlens is not None or intermediate is not None
    if x.stride(channels) != 1 and d != 1 and not any_strides:
        yield Decline(Reason.LAYOUT, "x", "channels with stride 1", f"strides {x.stride()}")
    if residual is not None:
        if residual.shape != shape:
            yield Decline(Reason.SHAPE, "residual", f"x's shape {_list(shape)}", _list(residual.shape))
        elif residual.dtype != x.dtype:
            yield Decline(Reason.DTYPE, "residual", f"{x.dtype}", f"{residual.dtype}", TypeError)
        elif residual.stride(channels) != 1 and d != 1 and not any_strides:
            yield Decline(Reason.LAYOUT, "residual", "channels with stride 1", f"strides {residual.stride()}")
    for name, per_row in (("conv_state_indices", indices), ("cache_seqlens", cache_seqlens)):
        if per_row is not None:
            if per_row.shape != (n,):
                yield Decline(Reason.SHAPE, name, f"[{n}]", _list(per_row.shape))
            elif per_row.dtype != torch.int32:
                yield Decline(Reason.DTYPE, name, "torch.int32", f"{per_row.dtype}", TypeError)
    if state is None:
        if indices is not None or cache_seqlens is not None or intermediate is not None:
            yield Decline(Reason.UNSUPPORTED_ARGUMENT, "conv_state", "a tensor", "None")
        return
    if state.dtype != x.dtype:
        yield Decline(Reason.DTYPE, "conv_state", f"x's dtype {x.dtype}", f"{state.dtype}", TypeError)
    if state.dim() != 3 or state.shape[1] != d or state.shape[2] < weight.shape[1] - 1:
        expected = f"[S, {d}, L >= {weight.shape[1] - 1}]"
        yield Decline(Reason.SHAPE, "conv_state", expected, _list(state.shape))
        return
    if indices is None and state.shape[0] != n:
        yield Decline(Reason.SHAPE, "conv_state", f"{n} slots, one a row", _list(state.shape))
    if overlaps_itself(state):
        yield Decline(Reason.LAYOUT, "conv_state", "memory of its own for each element", f"strides {state.stride()}")
    if intermediate is not None:
        if cache_seqlens is not None:
            yield Decline(Reason.UNSUPPORTED_ARGUMENT, "intermediate_states_out", "None", "a ring", NotImplementedError)
        expected = (n, shape[2] if len(shape) == 3 and form == "NDT" else 1, d, state.shape[2])
        if intermediate.shape != expected:
            yield Decline(Reason.SHAPE, "intermediate_states_out", _list(expected), _list(intermediate.shape))
        if intermediate.dtype != x.dtype:
            yield Decline(Reason.DTYPE, "intermediate_states_out", f"{x.dtype}", f"{intermediate.dtype}", TypeError)
        if overlaps_itself(intermediate) or overlap(intermediate, state):
            yield Decline(Reason.LAYOUT, "intermediate_states_out", "memory of its own", "memory that is shared")


_UPDATE = "x conv_state weight bias residual cache_seqlens conv_state_indices intermediate_states_out"
_UPDATE_NAMES = tuple(_UPDATE.split())


def _x_checks(x: Tensor, d: int, contract: Contract) -> Iterator[Decline]:
    if x.dtype not in contract.dtypes:
        yield Decline(Reason.DTYPE, "x", _dtypes(contract.dtypes), f"{x.dtype}", TypeError)
    if d and max(d, x.numel() // d) > contract.max_extent:
        yield Decline(Reason.SHAPE, "x", f"up to {contract.max_extent} tokens", _list(x.shape), NotImplementedError)


def _parameter_checks(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, d: int, contract: Contract
) -> Iterator[Decline]:
    dtype = x.dtype
    yield from _x_checks(x, d, contract)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != dtype and tensor.dtype not in contract.parameter_dtypes:
            expected = f"{dtype} or {_dtypes(contract.parameter_dtypes)}"
            yield Decline(Reason.DTYPE, name, expected, f"{tensor.dtype}", TypeError)
    if weight.dim() != 2 or weight.shape[0] != d:
        yield Decline(Reason.SHAPE, "weight", f"[{d}, W]", _list(weight.shape))
    elif not contract.min_width <= weight.shape[1] <= contract.max_width:
        expected = f"a width from {contract.min_width} to {contract.max_width}"
        yield Decline(Reason.WIDTH, "weight", expected, f"{weight.shape[1]}", NotImplementedError)
    if bias is not None and bias.shape != (d,):
        yield Decline(Reason.SHAPE, "bias", f"[{d}]", _list(bias.shape))
    if activation not in contract.activations:
        expected = ", ".join(map(repr, contract.activations))
        yield Decline(Reason.ACTIVATION, "activation", expected, repr(activation))


def _list(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def conv_checks(call: ConvCall, facts: DeviceFacts) -> Iterator[Decline]:
    """Every failed check of a full-sequence call."""
    x, weight, bias, residual, activation, cu_seqlens, seq_idx, initial, _, final, state_len, _, channel_last = call
    tensors = (x, weight, bias, residual, cu_seqlens, seq_idx, initial, final)
    failed, plain = device_checks(x, _CONV_NAMES, tensors, facts)
    yield from failed
    if not plain:
        return
    if x.dim() != 3:
        yield Decline(Reason.SHAPE, "x", "[B, D, T]", _list(x.shape))
        return
    b, d, t = x.shape
    yield from _parameter_checks(x, weight, bias, activation, d, CONV)
    if weight.dim() != 2:
        return
    if residual is not None:
        if residual.shape != x.shape:
            yield Decline(Reason.SHAPE, "residual", f"x's shape {_list(x.shape)}", _list(residual.shape))
        if residual.dtype != x.dtype:
            yield Decline(Reason.DTYPE, "residual", f"{x.dtype}", f"{residual.dtype}", TypeError)
    if channel_last and not is_channel_last(x):
        yield Decline(Reason.LAYOUT, "x", "channels with stride 1", f"strides {x.stride()}")
    n = b
    if cu_seqlens is not None:
        if seq_idx is not None:
            yield Decline(Reason.UNSUPPORTED_ARGUMENT, "seq_idx", "only one of cu_seqlens and seq_idx", "both")
        yield from _packed_checks("x", x, cu_seqlens)
        if residual is not None and residual.dim() == 3:
            yield from _packed_checks("residual", residual, cu_seqlens)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            return
        n = cu_seqlens.shape[0] - 1
    if seq_idx is not None:
        if seq_idx.shape != (b, t):
            yield Decline(Reason.SHAPE, "seq_idx", f"[{b}, {t}]", _list(seq_idx.shape))
        if seq_idx.dtype != torch.int32:
            yield Decline(Reason.DTYPE, "seq_idx", "torch.int32", f"{seq_idx.dtype}", TypeError)
        if call.return_final_states:
            found = "return_final_states with seq_idx"
            yield Decline(Reason.UNSUPPORTED_ARGUMENT, "return_final_states", "False", found)
    history = weight.shape[1] - 1
    for name, state in (("initial_states", initial), ("final_states_out", final)):
        if state is None:
            continue
        if state.dtype != x.dtype:
            yield Decline(Reason.DTYPE, name, f"x's dtype {x.dtype}", f"{state.dtype}", TypeError)
        if state.dim() != 3 or state.shape[:2] != (n, d) or state.shape[2] < history:
            yield Decline(Reason.SHAPE, name, f"[{n}, {d}, L >= {history}]", _list(state.shape))
    if type(state_len) is not int:
        yield Decline(Reason.UNSUPPORTED_ARGUMENT, "state_len", "an int", type(state_len).__name__, TypeError)
    elif state_len < history:
        yield Decline(Reason.SHAPE, "state_len", f"at least W - 1 = {history}", f"{state_len}")
    if final is not None:
        if not call.return_final_states:
            yield Decline(Reason.UNSUPPORTED_ARGUMENT, "final_states_out", "return_final_states=True", "False")
        if final.dim() == 3 and final.shape[2] != state_len:
            yield Decline(Reason.SHAPE, "final_states_out", f"{state_len} columns", _list(final.shape))
        if (found := shared(final, zip(_CONV_NAMES[:-1], tensors[:-1], strict=True))) is not None:
            yield Decline(Reason.LAYOUT, "final_states_out", "memory of its own", found)


def backward_checks(call: BackwardCall, facts: DeviceFacts) -> Iterator[Decline]:
    """Every failed check of a functional backward: those of its forward, and dy and dfinal_states."""
    x, dy, dfinal, weight, bias, residual, activation, cu_seqlens, seq_idx, initial, state_len, *_, last, _, dx = call
    forward = ConvCall(
        x, weight, bias, residual, activation, cu_seqlens, seq_idx, initial, False, None, state_len, False, last
    )
    declined = tuple(conv_checks(forward, facts))
    yield from declined
    if x.dim() != 3 or any(decline.reason is Reason.TENSOR_SUBCLASS for decline in declined):
        return
    n = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    gradients = (("dy", dy, x.shape), ("dfinal_states", dfinal, (n, x.shape[1], state_len)), ("dx", dx, x.shape))
    for name, gradient, shape in gradients:
        if gradient is None:
            continue
        failed, plain = device_checks(x, (name,), (gradient,), facts)
        yield from failed
        if not plain:
            return
        if gradient.shape != shape:
            yield Decline(Reason.SHAPE, name, _list(shape), _list(gradient.shape))
        if gradient.dtype != x.dtype:
            yield Decline(Reason.DTYPE, name, f"x's dtype {x.dtype}", f"{gradient.dtype}", TypeError)
    if call.needs_initial and initial is None:
        yield Decline(Reason.UNSUPPORTED_ARGUMENT, "initial_states", "a tensor, to have a gradient", "None")
    if dx is not None:
        inputs = (x, dy, dfinal, weight, bias, residual, cu_seqlens, seq_idx, initial)
        if (found := shared(dx, zip(_BACKWARD_NAMES, inputs, strict=True))) is not None:
            yield Decline(Reason.LAYOUT, "dx", "memory of its own", found)


def states_checks(call: StatesCall, facts: DeviceFacts) -> Iterator[Decline]:
    """Every failed check of a call for the last tokens of each sequence."""
    x, initial, cu_seqlens, state_len, _ = call
    failed, plain = device_checks(x, ("x", "initial_states", "cu_seqlens"), (x, initial, cu_seqlens), facts)
    yield from failed
    if not plain:
        return
    if x.dim() != 3:
        yield Decline(Reason.SHAPE, "x", "[B, D, T]", _list(x.shape))
        return
    yield from _x_checks(x, x.shape[1], CONV)
    n = x.shape[0]
    if cu_seqlens is not None:
        yield from _packed_checks("x", x, cu_seqlens)
        n = cu_seqlens.shape[0] - 1 if cu_seqlens.dim() == 1 else -1
    if type(state_len) is not int:
        yield Decline(Reason.UNSUPPORTED_ARGUMENT, "state_len", "an int", type(state_len).__name__, TypeError)
    elif state_len < 1:
        yield Decline(Reason.SHAPE, "state_len", "at least 1", f"{state_len}")
    if initial is not None:
        if initial.dtype != x.dtype:
            yield Decline(Reason.DTYPE, "initial_states", f"x's dtype {x.dtype}", f"{initial.dtype}", TypeError)
        if initial.dim() != 3 or initial.shape[:2] != (n, x.shape[1]):
            yield Decline(Reason.SHAPE, "initial_states", f"[{n}, {x.shape[1]}, L]", _list(initial.shape))


def _packed_checks(name: str, x: Tensor, cu_seqlens: Tensor) -> Iterator[Decline]:
    if cu_seqlens.dtype not in _INT_DTYPES:
        yield Decline(Reason.DTYPE, "cu_seqlens", _dtypes(_INT_DTYPES), f"{cu_seqlens.dtype}", TypeError)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        yield Decline(Reason.SHAPE, "cu_seqlens", "[N + 1]", _list(cu_seqlens.shape))
    b, _, t = x.shape
    if b > 1 and t > 0 and x.stride(0) != t * x.stride(2):
        found = f"strides {x.stride()}"
        yield Decline(Reason.LAYOUT, name, "B * T tokens at one stride, to be read as packed", found)


_CONV_NAMES = ("x", "weight", "bias", "residual", "cu_seqlens", "seq_idx", "initial_states", "final_states_out")
_BACKWARD_NAMES = ("x", "dy", "dfinal_states", *_CONV_NAMES[1:-1])


CHECKS = {
    UpdateCall: update_checks,
    ConvCall: conv_checks,
    BackwardCall: backward_checks,
    StatesCall: states_checks,
    DenseCall: dense_checks,
}
