"""The operations as torch.library operators: what compilers, exporters and modes see, and what they call at run time.

`torch.ops.accel.*`: a schema that says what is mutated, a fake implementation, which is the allocation alone, and
autograd. The body of an operator admits its call: addresses, and with them alignment and aliasing, are known only here.
Outputs that were not asked for are empty, because an operator returns tensors. Eager calls do not come by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from accel.admission import admit
from accel.call import BackwardCall, ConvCall, DenseBackwardCall, DenseCall, StatesCall, UpdateCall
from accel.dense_checks import dense_errors, first
from accel.environment import facts
from accel.ops import conv, dense, gradients, outputs, states, update
from accel.ops.door import refuse
from accel.reasons import Decline

_library = torch.library.Library("accel", "DEF")
# the second where torch has no first: inputs come to a compiled graph's operator as they were when it was traced
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_TAGS = (torch.Tag.pt2_compliant_tag, _STRIDES)


def _register(schema: str, body: Callable, fake: Callable) -> str:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, body, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")
    return f"accel::{name}"


def _all(x: Tensor, outputs: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(0) if output is None else output for output in outputs)


def _conv_call(*arguments) -> ConvCall:
    """The operator's arguments are the call's fields without `final_states_out`, which the caller fills by a copy."""
    return ConvCall(*arguments[:9], None, *arguments[9:])


def _conv(*arguments) -> tuple[Tensor, ...]:
    call = _conv_call(*arguments)
    found = facts(call.x.device)
    refuse("causal_conv1d", admit(call, found))
    plan = conv.plan_of(call, found) if found.backend == "cute" else None
    return _all(call.x, conv.forward(call, found, plan))


def _conv_fake(*arguments) -> tuple[Tensor, ...]:
    call = _conv_call(*arguments)
    return _all(call.x, outputs.allocate(call))


def _keep(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    call = _conv_call(*inputs)
    gradients.keep(ctx, call, facts(call.x.device))
    ctx.returns_final_states = call.return_final_states


def _gradients(ctx, dy: Tensor | None, dfinal_states: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    wanted = (*needs[:4], needs[7])
    found = gradients.gradients(ctx, wanted, dy, dfinal_states if ctx.returns_final_states else None)
    return *found[:4], None, None, None, found[4], None, None, None, None


def _backward(*arguments) -> tuple[Tensor, ...]:
    call = BackwardCall(*arguments)
    found = facts(call.x.device)
    refuse("causal_conv1d", admit(call, found))
    return _all(call.x, gradients.backward(call, found))


def _backward_fake(*arguments) -> tuple[Tensor, ...]:
    call = BackwardCall(*arguments)
    return _all(call.x, outputs.allocate_backward(call, None))


def _second_derivative(ctx, *gradients):
    raise RuntimeError("causal_conv1d: the second derivative is not implemented")


def _update(*arguments) -> Tensor:
    call = UpdateCall(*arguments)
    found = facts(call.x.device)
    plan = update.prepare(call, found, inside=True)
    if isinstance(plan, Decline):
        raise plan.error(f"causal_conv1d_update: {plan}")
    return update.run(call, found, plan, inside=True)


def _update_fake(x: Tensor, *_) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _states(*arguments) -> Tensor:
    call = StatesCall(*arguments)
    found = facts(call.x.device)
    refuse("causal_conv1d_states", admit(call, found))
    return states.forward(call, found)


def _states_fake(*arguments) -> Tensor:
    return states.allocate(StatesCall(*arguments))


def _dense(*arguments) -> Tensor:
    call = DenseCall(*arguments)
    refuse(dense.NAME[1], first(dense_errors(call)))
    return dense.forward(call, facts(call.x.device))


def _dense_fake(*arguments) -> Tensor:
    return dense.allocate(DenseCall(*arguments))


def _dense_keep(ctx, inputs: tuple, output: Tensor) -> None:
    call = DenseCall(*inputs)
    dense.keep(ctx, call, facts(call.x.device))
    ctx.activation = call.activation


def _dense_gradients(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.activation is not None:
        raise RuntimeError("causal_conv1d_dense: an operator with an activation has no gradient")
    return *dense.gradients(ctx, ctx.needs_input_grad[:3], dy), None, None, None


def _dense_backward(*arguments) -> tuple[Tensor, ...]:
    call = DenseBackwardCall(*arguments)
    return _all(call.x, dense.backward(call, facts(call.x.device)))


def _dense_backward_fake(*arguments) -> tuple[Tensor, ...]:
    call = DenseBackwardCall(*arguments)
    return _all(call.x, dense.allocate_backward(call))


CONV = _register(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str? activation, Tensor? cu_seqlens, "
    "Tensor? seq_idx, Tensor? initial_states, bool return_final_states, SymInt state_len, bool compact_states, "
    "bool channel_last) -> (Tensor y, Tensor final_states)",
    _conv,
    _conv_fake,
)
BACKWARD = _register(
    "causal_conv1d_backward(Tensor x, Tensor? dy, Tensor? dfinal_states, Tensor weight, Tensor? bias, "
    "Tensor? residual, str? activation, Tensor? cu_seqlens, Tensor? seq_idx, Tensor? initial_states, "
    "SymInt state_len, bool needs_x, bool needs_weight, bool needs_bias, bool needs_initial, bool channel_last, "
    "bool compact_states) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_states)",
    _backward,
    _backward_fake,
)
UPDATE = _register(
    "causal_conv1d_update(Tensor x, str form, Tensor(a!)? conv_state, Tensor weight, Tensor? bias, Tensor? residual, "
    "str? activation, Tensor? cache_seqlens, Tensor? conv_state_indices, int pad_slot_id, "
    "Tensor(b!)? intermediate_states_out) -> Tensor",
    _update,
    _update_fake,
)
STATES = _register(
    "causal_conv1d_states(Tensor x, Tensor? initial_states, Tensor? cu_seqlens, SymInt state_len, "
    "bool compact_states) -> Tensor",
    _states,
    _states_fake,
)
DENSE = _register(
    "causal_conv1d_dense(Tensor x, Tensor weight, Tensor? bias, SymInt dilation, int groups, str? activation) "
    "-> Tensor",
    _dense,
    _dense_fake,
)
DENSE_BACKWARD = _register(
    "causal_conv1d_dense_backward(Tensor x, Tensor dy, Tensor weight, SymInt dilation, int groups, bool needs_x, "
    "bool needs_weight, bool needs_bias) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _dense_backward,
    _dense_backward_fake,
)
torch.library.register_autograd(CONV, _gradients, setup_context=_keep, lib=_library)
torch.library.register_autograd(BACKWARD, _second_derivative, lib=_library)
torch.library.register_autograd(DENSE, _dense_gradients, setup_context=_dense_keep, lib=_library)
torch.library.register_autograd(DENSE_BACKWARD, _second_derivative, lib=_library)
