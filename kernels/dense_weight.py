"""Weight gradient of the dense convolution, host side: how the sum is split, which kernel makes it, and `launch`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import dense_weight_wgmma, dense_wgmma, jit
from accel.kernels.dense_mma import reads_vectors, tile_of

CHUNK = 32  # tokens that are multiplied at once
SHARE = 512  # tokens of a block at least, so that writing its sums costs little beside making them
SHARED = 2  # blocks of an SM, where none has one for itself


class DenseWeightSpec(NamedTuple):
    """What the kernel is specialised for."""

    dtype: torch.dtype
    vectors_x: bool
    vectors_dy: bool
    tile_m: int  # output channels of a block
    tile_n: int  # input channels of a block
    arch: str


def split(tokens: int, tiles: int, blocks: int) -> int:
    """How many blocks share the tokens of one tile of the gradient, of so many that run at once.

    A few too many would wait for the others.
    """
    return max(1, min(tokens // SHARE, blocks // tiles))


def tiles_of(dweight: torch.Tensor, tile: tuple[int, int]) -> int:
    """Tiles of a gradient [Cout, Cin, K]; `tile` is of Cout and Cin."""
    outputs, inputs, taps = dweight.shape
    return -(-outputs // tile[0]) * -(-inputs // tile[1]) * taps


def launch(x: torch.Tensor, dy: torch.Tensor, dweight: torch.Tensor, dilation: int, facts) -> None:
    """dweight[o, c, k] = sum_b sum_t dy[b, o, t] * x[b, c, t - (K-1-k) * dilation], the same bits in every run."""
    outputs, inputs, taps = dweight.shape
    tokens = x.shape[0] * x.shape[2]
    tile, blocks = (tile_of(outputs), tile_of(inputs)), SHARED * facts.sm_count
    wgmma = all(dense_wgmma.serves(source, facts.arch) for source in (x, dy))
    if wgmma and outputs > tile[0]:
        wide = (dense_weight_wgmma.WIDE, tile[1])
        if tiles_of(dweight, wide) * (tokens // SHARE) >= facts.sm_count:
            tile, blocks = wide, facts.sm_count
    parts = split(tokens, tiles_of(dweight, tile), blocks)
    partial = torch.empty((parts, taps, outputs, inputs), dtype=torch.float32, device=x.device)
    if wgmma:
        dense_weight_wgmma.run(x, dy, partial, tile, dilation, facts.arch)
    else:
        spec = DenseWeightSpec(x.dtype, reads_vectors(x), reads_vectors(dy), *tile, facts.arch)
        jit.get(spec)(dy, x, partial, (1 - taps) * dilation, dilation)
    dweight.copy_(partial.sum(0).permute(1, 2, 0))
