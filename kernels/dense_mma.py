"""Dense convolution with mma instructions, host side: the specification of a forward or a dx, and `launch`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit
from accel.kernels.contract import VECTOR, has_whole_vectors


class DenseSpec(NamedTuple):
    """What the kernel is specialised for; K, dilation and the direction in time are not part of it."""

    dtype: torch.dtype
    has_bias: bool
    activation: str | None
    vectors: bool  # rows of the source are read in vectors, else element by element with any strides
    pairs: bool  # rows of the output take two elements at once
    tile_m: int  # output channels of a block
    arch: str


def reads_vectors(source: torch.Tensor) -> bool:
    """Whether every row of [B, C, T] is a whole number of aligned vectors."""
    return has_whole_vectors(source) and source.data_ptr() % (VECTOR * source.element_size()) == 0


def tile_of(channels: int) -> int:
    """Channels of a block: half a tile where a whole one would be half empty."""
    return 64 if channels <= 64 else 128


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
    """out[b, m, t] = act(bias[m] + sum_k sum_c packed[k, m, c] * source[b, c, t + first + k * step]).

    packed: [K, M, C rounded up to vectors]; source: [B, C, T], 0 outside; out: [B, M, T], dense.
    """
    spec = DenseSpec(
        source.dtype,
        bias is not None,
        activation,
        reads_vectors(source),
        out.shape[2] % 2 == 0,
        tile_of(out.shape[1]),
        arch,
    )
    jit.get(spec)(packed, source, bias, out, first, step)
