"""Weight gradient of the dense convolution on Hopper's own instructions, host side: the specification and `run`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.contract import VECTOR
from accel.kernels.dense_wgmma import grain_of

CHUNK = 64  # tokens that are multiplied at once
PAIR = 2  # tokens of a 32-bit word
WIDE = 256  # output channels of a block that has an SM for itself, and reads x half as often


class DenseWeightWgmmaSpec(NamedTuple):
    """What the kernel is specialised for."""

    dtype: torch.dtype
    tile_m: int  # input channels of a block
    tile_n: int  # output channels of a block
    grain: int  # tokens: what taps are moved by is a multiple of it, a vector, a pair or one
    arch: str


def run(
    x: torch.Tensor, dy: torch.Tensor, partial: torch.Tensor, tile: tuple[int, int], dilation: int, arch: str
) -> None:
    """Fill partial [P, K, Cout, Cin] with the sums of its parts of the tokens; `tile` is of Cout and Cin."""
    taps = partial.shape[1]
    grain = grain_of(taps, dilation)
    grain = grain if grain == VECTOR else min(grain, PAIR)
    spec = DenseWeightWgmmaSpec(x.dtype, tile[1], tile[0], grain, arch)
    moved, still = x.permute(1, 2, 0), dy.permute(1, 2, 0)
    jit.get(spec)(moved, still, partial.transpose(2, 3), (1 - taps) * dilation, dilation)
