"""Weight gradient of the dense convolution, host side: the specification, how the sum is split, and `launch`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.dense_mma import reads_vectors, tile_of

CHUNK = 32  # tokens that are multiplied at once
FEWEST = 16  # chunks of a block, so that writing its sums costs little beside making them
WAVES = 2  # of blocks on the GPU


class DenseWeightSpec(NamedTuple):
    """What the kernel is specialised for."""

    dtype: torch.dtype
    vectors_x: bool
    vectors_dy: bool
    tile_m: int  # output channels of a block
    tile_n: int  # input channels of a block
    arch: str


def split(chunks: int, tiles: int, sm_count: int) -> int:
    """How many blocks share the tokens of one tile of the gradient: a function of shapes and device alone."""
    return max(1, min(chunks // FEWEST, -(-WAVES * sm_count // tiles)))


def launch(x: torch.Tensor, dy: torch.Tensor, dweight: torch.Tensor, dilation: int, facts) -> None:
    """dweight[o, c, k] = sum_b sum_t dy[b, o, t] * x[b, c, t - (K-1-k) * dilation], the same bits in every run."""
    outputs, inputs, taps = dweight.shape
    spec = DenseWeightSpec(x.dtype, reads_vectors(x), reads_vectors(dy), tile_of(outputs), tile_of(inputs), facts.arch)
    tiles = -(-outputs // spec.tile_m) * -(-inputs // spec.tile_n) * taps
    chunks = x.shape[0] * -(-x.shape[2] // CHUNK)
    parts = split(chunks, tiles, facts.sm_count)
    partial = torch.empty((parts, taps, outputs, inputs), dtype=torch.float32, device=x.device)
    jit.get(spec)(dy, x, partial, (1 - taps) * dilation, dilation)
    dweight.copy_(partial.sum(0).permute(1, 2, 0))
