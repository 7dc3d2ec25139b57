"""The floor of an eager call on the host: the compiled TVM-FFI calls that it ends in, and its allocations."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from accel.bench.cases import UpdateBuffers, require
from benchmarks.harness import Call

ALLOCATIONS = ("empty", "empty_like")


def bare_update_call(b: UpdateBuffers) -> Call:
    """The function that `accel.ops` ends in for these buffers, and the allocation of its output: nothing else."""
    facts = importlib.import_module("accel.environment").facts(b.x.device)
    find = importlib.import_module("accel.kernels.conv_update").find
    x, state, weight, bias, status, dense = (
        b.x,
        b.state,
        b.weight,
        b.bias,
        facts.status.address,
        torch.contiguous_format,
    )

    for _ in range(2):  # until it was called, the function is one that loads its code
        function = find(x, "ND", state, weight, bias, None, None, True, facts.arch)
        function(x, state, weight, bias, None, torch.empty_like(x, memory_format=dense), None, -1, status)

    def bare() -> torch.Tensor:
        y = torch.empty_like(x, memory_format=dense)
        function(x, state, weight, bias, None, y, None, -1, status)
        return y

    return bare


def bare_calls(run: Callable[[], Any]) -> Call:
    """What `run` launches and allocates, in order and on the same arguments, without what is around it.

    The launches write where the first run did, so the floor allocates what it does not use: as many as `run` does.
    """
    jit, plans = importlib.import_module("accel.kernels.jit"), importlib.import_module("accel.ops.plans")
    get, made = jit.get, []

    def noting(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append((function, args, kwargs))
            return function(*args, **kwargs)

        return call

    run()  # compiles; what a first call does beside the launch is not of the floor
    with ExitStack() as patches:
        for name in ALLOCATIONS:
            patches.enter_context(mock.patch.object(torch, name, noting(getattr(torch, name))))
        patches.enter_context(mock.patch.object(jit, "get", lambda spec: noting(get(spec))))
        # a kept plan holds its function already, and would keep a noting one
        patches.enter_context(mock.patch.object(plans, "find", lambda *_: None))
        patches.enter_context(mock.patch.object(plans, "keep", lambda *_: None))
        kept = run()
    require(any(not isinstance(function, type(torch.empty)) for function, _, _ in made), "no launch was seen")

    def bare() -> Any:
        for function, args, kwargs in made:
            function(*args, **kwargs)
        return kept

    return bare
