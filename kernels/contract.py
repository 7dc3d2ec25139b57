"""What each kernel takes, as data: the one place where a limit of the native backends is written.

Imports torch only, so that admission, tests and the docs can read it on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Every architecture that the kernels are compiled for in CI, by the compiler's name.
ARCHITECTURES = (
    "sm_80",
    "sm_86",
    "sm_87",
    "sm_89",
    "sm_90a",
    "sm_100a",
    "sm_103a",
    "sm_110a",
    "sm_120a",
    "sm_121a",
)


@dataclass(frozen=True)
class Contract:
    """The limits of one operation, the same on every native backend.

    dtypes: of x, the states and the residual; weight and bias have x's dtype or one of `parameter_dtypes`.
    widths: of the filter. activations: accepted names, None among them. max_extent: channels, and tokens of all rows.
    """

    op: str
    dtypes: tuple[torch.dtype, ...]
    parameter_dtypes: tuple[torch.dtype, ...]
    min_width: int
    max_width: int
    activations: tuple[str | None, ...]
    max_extent: int = 2**31 - 1  # of D and of B * T: coordinates have 32 bits, offsets 64


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ACTIVATIONS = (None, "silu", "swish")

UPDATE = Contract("causal_conv1d_update", _DTYPES, (torch.float32,), 2, 8, _ACTIVATIONS)
CONV = Contract("causal_conv1d", _DTYPES, (torch.float32,), 2, 8, _ACTIVATIONS)


@dataclass(frozen=True)
class DenseContract:
    """The limits of the dense convolution's kernels; weight and bias have x's dtype, and any K and dilation will do.

    dtypes: what the tensor cores multiply. max_extent: of x, of the channels, and of (K-1) * dilation.
    """

    op: str
    dtypes: tuple[torch.dtype, ...]
    activations: tuple[str | None, ...]
    max_extent: int = 2**30  # sums of two coordinates have 32 bits


VECTOR = 8  # elements of 16 bits in a vector, which is what the dense kernels read at once

DENSE = DenseContract("causal_conv1d_dense", (torch.bfloat16, torch.float16), (None, "silu", "swish", "relu", "gelu"))


def is_channel_last(x: torch.Tensor) -> bool:
    """Whether vectors run along D: stride 1 there, or nowhere (then element by element)."""
    _, d, t = x.shape
    _, sd, st = x.stride()
    return sd == 1 and d > 1 or not (st == 1 and t > 1)


def has_whole_vectors(x: torch.Tensor) -> bool:
    """Whether every row of [B, C, T] is a whole number of vectors, as far as metadata tell."""
    b, c, t = x.shape
    sb, sc, st = x.stride()
    steps = (x.storage_offset(), t, sc if c > 1 else 0, sb if b > 1 else 0)
    return st == 1 and not any(step % VECTOR for step in steps)
