"""Weight gradient of the dense convolution, host side: how the sum is split, which kernel makes it, and `launch`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import dense_weight_wgmma, dense_wgmma, jit
from accel.kernels.dense_mma import reads_vectors, tile_of

CHUNK = 32  # tokens that are multiplied at once
SHARE = 512  # tokens of a block at least, so that writing its sums costs little beside making them
SHARED = 2  # blocks of an SM


class DenseWeightSpec(NamedTuple):
    """What the kernel is specialised for."""

    dtype: torch.dtype
    vectors_x: bool
    vectors_dy: bool
    tile_m: int  # output channels of a block
    tile_n: int  # input channels of a block
    arch: str


def split(tokens: int, tiles: int, sm_count: int) -> int:
    """How many blocks share the tokens of one tile of the gradient: a function of shapes and device alone.

    All run at once: a few too many would wait for the others.
    """
    return max(1, min(tokens // SHARE, SHARED * sm_count // tiles))


def launch(x: torch.Tensor, dy: torch.Tensor, dweight: torch.Tensor, dilation: int, facts) -> None:
    """dweight[o, c, k] = sum_b sum_t dy[b, o, t] * x[b, c, t - (K-1-k) * dilation], the same bits in every run."""
    outputs, inputs, taps = dweight.shape
    tiles = -(-outputs // tile_of(outputs)) * -(-inputs // tile_of(inputs)) * taps
    parts = split(x.shape[0] * x.shape[2], tiles, facts.sm_count)
    partial = torch.empty((parts, taps, outputs, inputs), dtype=torch.float32, device=x.device)
    if all(dense_wgmma.serves(source, facts.arch) for source in (x, dy)):
        dense_weight_wgmma.run(x, dy, partial, dilation, facts.arch)
    else:
        spec = DenseWeightSpec(
            x.dtype, reads_vectors(x), reads_vectors(dy), tile_of(outputs), tile_of(inputs), facts.arch
        )
        jit.get(spec)(dy, x, partial, (1 - taps) * dilation, dilation)
    dweight.copy_(partial.sum(0).permute(1, 2, 0))
