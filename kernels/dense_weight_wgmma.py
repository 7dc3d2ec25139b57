"""Weight gradient of the dense convolution on Hopper's own instructions, host side: the specification and `run`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.dense_mma import tile_of

CHUNK = 64  # tokens that are multiplied at once


class DenseWeightWgmmaSpec(NamedTuple):
    """What the kernel is specialised for."""

    dtype: torch.dtype
    tile_m: int  # output channels of a block
    tile_n: int  # input channels of a block
    arch: str


def run(x: torch.Tensor, dy: torch.Tensor, partial: torch.Tensor, dilation: int, arch: str) -> None:
    """Fill partial [P, K, Cout, Cin] with the sums of its parts of the tokens."""
    _, taps, outputs, inputs = partial.shape
    spec = DenseWeightWgmmaSpec(x.dtype, tile_of(outputs), tile_of(inputs), arch)
    jit.get(spec)(dy.permute(1, 2, 0), x.permute(1, 2, 0), partial, (1 - taps) * dilation, dilation)
