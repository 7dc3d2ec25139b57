"""Sums of the partial weight gradients, host side."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit


class ReduceSpec(NamedTuple):
    """What the kernel is specialised for."""

    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    width: int
    arch: str


def launch(partial: torch.Tensor, dweight: torch.Tensor | None, dbias: torch.Tensor | None, width: int, arch) -> None:
    """Fill dweight [D, W] and dbias [D] from partials [P, W or W + 1, D]."""
    spec = ReduceSpec(None if dweight is None else dweight.dtype, None if dbias is None else dbias.dtype, width, arch)
    jit.get(spec)(partial, dweight, dbias)
