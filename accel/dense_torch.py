"""The dense causal convolution in plain torch: where a rule gives it to torch, and the CPU backend.

The best form that torch has: the convolution pads both sides by itself, and what it computed past the end is cut off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.call import DenseBackwardCall, DenseCall

_ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "relu": F.relu, "gelu": F.gelu}


def activate(y: Tensor, activation: str | None) -> Tensor:
    """The activation of a call; gelu is the exact one."""
    return y if activation is None else _ACTIVATIONS[activation](y)


def convolve(call: DenseCall) -> Tensor:
    """y of a call in torch's own arithmetic: its autograd, its TF32 switch, any device; rows longer than they look."""
    x, weight, bias, dilation, groups, activation = call
    pad = (weight.shape[2] - 1) * dilation
    tokens = x.shape[2]
    if tokens == 0:  # torch convolves no empty rows on a GPU
        x = F.pad(x, (0, 1))
    y = F.conv1d(x, weight, bias, padding=pad, dilation=dilation, groups=groups)
    return activate(y if y.shape[2] == tokens else y[:, :, :tokens], activation)


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
