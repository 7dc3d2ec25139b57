"""The floor of an eager decode step on the host: the bare compiled TVM-FFI call and one `torch.empty_like`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from benchmarks.cases import UpdateBuffers


def bare_update_call(b: UpdateBuffers) -> Callable[[], torch.Tensor]:
    """The function that `accel.ops` ends in for these buffers, and the allocation of its output: nothing else."""
    facts = importlib.import_module("accel.environment").facts(b.x.device)
    find = importlib.import_module("accel.kernels.conv_update").find
    function = find(b.x, "ND", b.state, b.weight, b.bias, None, None, True, facts.arch)
    x, state, weight, bias, status, dense = (
        b.x,
        b.state,
        b.weight,
        b.bias,
        facts.status.address,
        torch.contiguous_format,
    )

    def bare() -> torch.Tensor:
        y = torch.empty_like(x, memory_format=dense)
        function(x, state, weight, bias, None, y, None, -1, status)
        return y

    return bare
