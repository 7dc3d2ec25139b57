"""Dense causal convolution, host side: which kernels run for a forward and a backward, and in which order."""

from __future__ import annotations

import torch

from accel.kernels import dense_mma, dense_weight, dense_wgmma
from accel.kernels.contract import VECTOR


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[K, M, C] of weight [M, C, K], C filled up with zeros to whole vectors: the one copy, of the weight alone."""
    m, c, taps = weight.shape
    whole = -(-c // VECTOR) * VECTOR
    packed = torch.empty((taps, m, whole), dtype=weight.dtype, device=weight.device)
    if c < whole:
        packed[:, :, c:].zero_()
    packed[:, :, :c].copy_(weight.permute(2, 0, 1))
    return packed


def convolve(packed, source, bias, out, activation, first: int, step: int, arch: str) -> None:
    """`dense_mma.launch`, on Hopper's own instructions where they serve."""
    kernel = dense_wgmma if dense_wgmma.serves(source, arch) else dense_mma
    kernel.launch(packed, source, bias, out, activation, first, step, arch)


def launch(call, y: torch.Tensor, facts) -> None:
    """Run an admitted forward on x's device and its current stream; fills y."""
    taps = call.weight.shape[2]
    convolve(
        pack(call.weight),
        call.x,
        call.bias,
        y,
        "silu" if call.activation == "swish" else call.activation,
        (1 - taps) * call.dilation,
        call.dilation,
        facts.arch,
    )


def launch_backward(call, dx, dweight, dbias, facts) -> None:
    """Run an admitted backward; fills the gradients that are given."""
    taps = call.weight.shape[2]
    if dx is not None:
        packed = pack(call.weight.transpose(0, 1))
        convolve(packed, call.dy, None, dx, None, (taps - 1) * call.dilation, -call.dilation, facts.arch)
    if dweight is not None:
        dense_weight.launch(call.x, call.dy, dweight, call.dilation, facts)
    if dbias is not None:
        # both axes in one sum take up to three times as long
        rows = call.dy.sum(2, dtype=torch.float32)
        dbias.copy_(rows.sum(0) if rows.shape[0] > 1 else rows[0])
