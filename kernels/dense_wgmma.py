"""Dense convolution on Hopper's own instructions, host side: when they serve a call, the specification, `launch`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.contract import VECTOR
from accel.kernels.dense_mma import reads_vectors, tile_of

DEPTH = 64  # channels that are multiplied at once
SHORT = 8  # steps of a sum that are too few to hide what comes before and after them: then two blocks share an SM


class DenseWgmmaSpec(NamedTuple):
    """What the kernel is specialised for; K, dilation and the direction in time are not part of it."""

    dtype: torch.dtype
    has_bias: bool
    activation: str | None
    tile_m: int  # output channels of a block
    tile_n: int  # tokens that a block multiplies
    grain: int  # tokens: what taps are moved by is a multiple of it, up to a vector
    arch: str


def serves(source: torch.Tensor, arch: str) -> bool:
    """Whether [B, C, T] can be read in boxes: rows of whole vectors, no two of them in one place."""
    apart = all(step > 0 and step % VECTOR == 0 for step in source.stride()[:2])
    return arch == "sm_90a" and apart and reads_vectors(source)


def grain_of(taps: int, step: int) -> int:
    """The power of two that divides what every tap is moved by, up to a vector."""
    return math.gcd(step, VECTOR) if taps > 1 else VECTOR


def launch(
    packed: torch.Tensor,
    source: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None,
    first: int,
    step: int,
    arch: str,
) -> None:
    """As `dense_mma.launch`, of a source that `serves` allows."""
    tile_m = tile_of(out.shape[1])
    taps = packed.shape[0]
    grain = grain_of(taps, step)
    short = taps * -(-packed.shape[2] // DEPTH) <= SHORT
    # sums that are moved by single tokens leave no registers for the wide tile
    tile_n = 128 if tile_m == 64 or short or grain == 1 else 256
    spec = DenseWgmmaSpec(source.dtype, bias is not None, activation, tile_m, tile_n, grain, arch)
    jit.get(spec)(packed.permute(1, 2, 0), source.permute(2, 1, 0), bias, out, first, step)
