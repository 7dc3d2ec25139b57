"""The dense causal convolution in plain torch: where a rule gives it to torch, and the CPU backend.

The best forms that torch has, and they are two: benchmarks/NOTES.md has the figures.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from accel.call import DenseBackwardCall, DenseCall
from accel.tracing import in_transform

_ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "relu": F.relu, "gelu": F.gelu}


def activate(y: Tensor, activation: str | None) -> Tensor:
    """The activation of a call; gelu is the exact one."""
    return y if activation is None else _ACTIVATIONS[activation](y)


def convolve(call: DenseCall) -> Tensor:
    """y of a call in torch's own arithmetic: its autograd, its TF32 switch, any device; rows longer than they look."""
    x, weight, bias, dilation, groups, activation = call
    if any(t is not None and t.requires_grad for t in call[:3]) and not (is_compiling() or in_transform()):
        return activate(_Convolution.apply(x, weight, bias, dilation, groups), activation)
    return activate(chomped(x, weight, bias, dilation, groups), activation)


def chomped(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int, groups: int) -> Tensor:
    """The convolution, padded by itself on both sides, and what it computed past the end cut off."""
    pad = (weight.shape[2] - 1) * dilation
    tokens = x.shape[2]
    if tokens == 0:  # torch convolves no empty rows on a GPU
        x = F.pad(x, (0, 1))
    y = F.conv1d(x, weight, bias, padding=pad, dilation=dilation, groups=groups)
    return y if y.shape[2] == tokens else y[:, :, :tokens]


class _Convolution(torch.autograd.Function):
    """The quicker of torch's forms each way: cut off behind in the forward, padded in front in the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, dilation, groups):
        ctx.save_for_backward(x, weight)
        ctx.dilation, ctx.groups = dilation, groups
        return chomped(x, weight, bias, dilation, groups)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        pad = (weight.shape[2] - 1) * ctx.dilation
        spare = 1 if x.shape[2] == 0 else 0
        found = torch.ops.aten.convolution_backward(
            F.pad(dy, (0, spare)) if spare else dy,
            F.pad(x, (pad, spare)),
            weight,
            [weight.shape[0]],
            [1],
            [0],
            [ctx.dilation],
            False,
            [0],
            ctx.groups,
            ctx.needs_input_grad[:3],
        )
        dx, *others = found
        return None if dx is None else dx[:, :, pad : pad + x.shape[2]], *others, None, None


def forward(call: DenseCall, y: Tensor) -> None:
    """Fill y on the CPU: 16-bit dtypes are computed in fp32 and rounded once, as the kernels do."""
    x, weight, bias, *others = call
    y.copy_(convolve(DenseCall(_wide(x), _wide(weight), _wide(bias), *others)))


def backward(call: DenseBackwardCall, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None) -> None:
    """Fill the gradients that are asked for, on the CPU."""
    pad = (call.weight.shape[2] - 1) * call.dilation
    found = torch.ops.aten.convolution_backward(
        F.pad(_wide(call.dy), (0, pad)),
        _wide(call.x),
        _wide(call.weight),
        [call.weight.shape[0]],
        [1],
        [pad],
        [call.dilation],
        False,
        [0],
        call.groups,
        [call.needs_x, call.needs_weight, call.needs_bias],
    )
    for output, gradient in zip((dx, dweight, dbias), found, strict=True):
        if output is not None:
            output.copy_(gradient)


def _wide(tensor: Tensor | None) -> Tensor | None:
    return tensor.float() if tensor is not None and tensor.element_size() == 2 else tensor
