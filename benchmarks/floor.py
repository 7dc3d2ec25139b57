"""The floor of an eager decode step on the host: the bare compiled TVM-FFI call and one `torch.empty_like`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from benchmarks.cases import UpdateBuffers


def bare_update_call(b: UpdateBuffers) -> Callable[[], torch.Tensor]:
    """Watches one public call to see which compiled function it ends in, with which arguments, and calls just that."""
    jit = importlib.import_module("accel.kernels.jit")
    update = importlib.import_module("accel.ops").causal_conv1d_update
    seen: list[tuple[Callable, tuple[Any, ...]]] = []
    get = jit.get

    def watching(*key: Any) -> Callable:
        function = get(*key)

        def call(*args: Any) -> Any:
            seen.append((function, args))
            return function(*args)

        return call

    update(b.x, b.state, b.weight, b.bias, activation="silu")  # compiled before it is watched
    with mock.patch.object(jit, "get", watching):
        y = update(b.x, b.state, b.weight, b.bias, activation="silu")
    function, args = seen[-1]
    at = next(i for i, arg in enumerate(args) if arg is y)
    before, after, x, dense = args[:at], args[at + 1 :], b.x, torch.contiguous_format

    def bare() -> torch.Tensor:
        y = torch.empty_like(x, memory_format=dense)
        function(*before, y, *after)
        return y

    return bare
