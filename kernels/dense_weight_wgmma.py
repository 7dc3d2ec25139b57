"""Weight gradient of the dense convolution on Hopper's own instructions, host side: the specification and `run`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.contract import VECTOR
from accel.kernels.dense_mma import tile_of
from accel.kernels.dense_wgmma import grain_of

CHUNK = 64  # tokens that are multiplied at once
PAIR = 2  # tokens of a 32-bit word


class DenseWeightWgmmaSpec(NamedTuple):
    """What the kernel is specialised for."""

    dtype: torch.dtype
    tile_m: int  # input channels of a block
    tile_n: int  # output channels of a block
    grain: int  # tokens: what taps are moved by is a multiple of it, a vector, a pair or one
    arch: str


def run(x: torch.Tensor, dy: torch.Tensor, partial: torch.Tensor, dilation: int, arch: str) -> None:
    """Fill partial [P, K, Cout, Cin] with the sums of its parts of the tokens."""
    _, taps, outputs, inputs = partial.shape
    grain = grain_of(taps, dilation)
    grain = grain if grain == VECTOR else min(grain, PAIR)
    spec = DenseWeightWgmmaSpec(x.dtype, tile_of(inputs), tile_of(outputs), grain, arch)
    moved, still = x.permute(1, 2, 0), dy.permute(1, 2, 0)
    jit.get(spec)(moved, still, partial.transpose(2, 3), (1 - taps) * dilation, dilation)
