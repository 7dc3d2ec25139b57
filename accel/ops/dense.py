"""`causal_conv1d_dense`: dense, dilated causal convolution, forward and backward.

Allocates outputs and launches; the rules of `accel.dense_checks` say which calls torch serves instead, and the route
says so. The one surprise: where a gradient is asked for, the activation is torch's, behind the native convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from accel import dense_torch
from accel.call import DenseBackwardCall, DenseCall
from accel.dense_checks import dense_errors, dense_rules, first
from accel.environment import DeviceFacts
from accel.ops.door import facts_of, kernels, refuse
from accel.ops.gradients import Once
from accel.reasons import Decline
from accel.routes import Route, note, record
from accel.tracing import observed

NAME = ("conv1d", "causal_conv1d_dense")  # target and callable of its routes
AUTOCAST = ("cpu", "cuda")  # torch.compile cannot trace the question whether a device has autocast
_NATIVE = {backend: Route(*NAME, "native", backend, None, "") for backend in ("cute", "cpu")}


def causal_conv1d_dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dilation: int = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """Dense, dilated causal convolution: `torch.nn.functional.conv1d` behind a left pad of (K-1) * dilation zeros.

    y[b, o, t] = act(bias[o] + sum_c sum_k weight[o, c, k] * x[b, c, t - (K-1-k) * dilation]). The pad is never in
    memory. bf16 and fp16 run on tensor cores, accumulate in fp32 and round once; the rules of
    `accel.dense_checks` give other calls to torch (fp32, exact or TF32 by torch's own switch; groups; rows that are no
    whole vectors), and `accel.last_route("conv1d")` tells which of the two it was.

    Args:
        x: [B, Cin, T], any strides; native on a GPU where T is contiguous and 8 divides T, strides and offset.
        weight: [Cout, Cin / groups, K], x's dtype, any K >= 1.
        bias: [Cout], x's dtype.
        dilation, groups: at least 1.
        activation: None, "silu", "swish", "relu" or "gelu" (the exact one), after the bias. Where a gradient is asked
            for, it is torch's own on a y that was rounded before.

    Returns:
        y [B, Cout, T]: dense on the native route; from torch the first T tokens of longer rows.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name.

    Under autocast x, weight and bias are cast as those of `conv1d` are. Gradients reach x, weight and bias, are the
    same bits in every run on the native route, and can be differentiated again where torch computes them.
    Source: `conv1d` of torch.
    """
    facts = facts_of(x)
    call = call_of(x, weight, bias, dilation, groups, activation)
    refuse(NAME[1], first(dense_errors(call)))
    decline = first(dense_rules(call, facts))
    if is_compiling():
        note(*_route(facts, decline))
    else:
        record(_route(facts, decline))
    return run(call, facts) if decline is None else dense_torch.convolve(call)


def _route(facts: DeviceFacts, decline: Decline | None) -> Route:
    if decline is None:
        return _NATIVE[facts.backend]
    return Route(*NAME, "fallback", None, decline.reason.value, str(decline))


def call_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int, groups: int, activation: str | None
) -> DenseCall:
    """The call of these arguments. Autocast casts them, as it does those of torch's conv1d: the caller's own wish."""
    for name, value in (("weight", weight), ("bias", bias)):
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise TypeError(f"{NAME[1]}: {name}: expected a Tensor, got {type(value).__name__}")
    kind = x.device.type
    if kind in AUTOCAST and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = _cast(x, dtype), _cast(weight, dtype), _cast(bias, dtype)
    return DenseCall(x, weight, bias, dilation, groups, activation)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype not in (torch.float64, dtype)
    return tensor.type(dtype) if eligible else tensor


def run(call: DenseCall, facts: DeviceFacts, plan: None = None) -> Tensor:
    """Serve an admitted call; through autograd only where something requires a gradient."""
    needs = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in call[:3])
    if needs and call.activation is not None:
        return dense_torch.activate(run(call._replace(activation=None), facts), call.activation)
    if observed(call.x):
        return torch.ops.accel.causal_conv1d_dense(*call)
    return _Dense.apply(call, facts, *call[:3]) if needs else forward(call, facts)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: DenseCall, facts: DeviceFacts, x, weight, bias):
        keep(ctx, call, facts)
        return forward(call, facts)

    @staticmethod
    def backward(ctx, dy):
        return None, None, *gradients(ctx, ctx.needs_input_grad[2:], dy)


def keep(ctx: Any, call: DenseCall, facts: DeviceFacts) -> None:
    """What `gradients` will need."""
    ctx.facts = facts
    ctx.save_for_backward(call.x, call.weight)
    ctx.dilation, ctx.groups = call.dilation, call.groups


def gradients(ctx: Any, needs: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """Those of x, weight and bias; `needs` says which."""
    x, weight = ctx.saved_tensors
    found = run_backward(DenseBackwardCall(x, dy, weight, ctx.dilation, ctx.groups, *needs), ctx.facts)
    return Once.apply(x, weight, *found) if torch.is_grad_enabled() else found


def allocate(call: DenseCall) -> Tensor:
    """y, unwritten."""
    x = call.x
    return torch.empty((x.shape[0], call.weight.shape[0], x.shape[2]), dtype=x.dtype, device=x.device)


def forward(call: DenseCall, facts: DeviceFacts) -> Tensor:
    """y without autograd."""
    facts.status.raise_pending()
    y = allocate(call)
    if y.numel() == 0:
        return y
    if facts.backend == "cute":
        kernels("dense").launch(call, y, facts)
    else:
        dense_torch.forward(call, y)
    return y


def run_backward(call: DenseBackwardCall, facts: DeviceFacts) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dbias), each None where it is not needed."""
    if not observed(call.x):
        return backward(call, facts)
    found = torch.ops.accel.causal_conv1d_dense_backward(*call)
    return tuple(gradient if needed else None for gradient, needed in zip(found, call[-3:], strict=True))


def allocate_backward(call: DenseBackwardCall) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dbias), unwritten and dense, each None where it is not needed."""
    x, dy, weight, _, _, *needs = call
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(
        torch.empty(shape, dtype=x.dtype, device=x.device) if needed else None
        for shape, needed in zip(shapes, needs, strict=True)
    )


def backward(call: DenseBackwardCall, facts: DeviceFacts) -> tuple[Tensor | None, ...]:
    """The gradients of an admitted call."""
    facts.status.raise_pending()
    outputs = allocate_backward(call)
    if call.x.numel() == 0 or call.dy.numel() == 0:
        for output in outputs:
            if output is not None:
                output.zero_()
    elif facts.backend == "cute":
        kernels("dense").launch_backward(call, *outputs, facts)
    else:
        dense_torch.backward(call, *outputs)
    return outputs
