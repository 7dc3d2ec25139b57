"""A fresh process and its first native call, timed: `python -m benchmarks.first_call OP DEVICE [compiler]`.

Started by `benchmarks.cold`. It says "ready", waits for a line so that many start at one moment, and prints JSON.
Imports are timed apart from the call; `compiler` imports the compiler beforehand too, where the cache is known empty.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from accel.bench import cases

DECODE, SEQUENCE = cases.Decode(1, 2048), cases.Sequence(1, 512, 2048)
DRY = cases.Sequence(2, 9, 32)  # on the CPU
WARM_CALLS = 30


def decode(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """The call, and the gate for what the first one returned."""
    ops = importlib.import_module("accel.ops")
    b = cases.update_buffers(DECODE, device)
    want, state = cases.update_reference(b)
    kept = b.fresh()

    def check(y: torch.Tensor) -> None:
        again = ops.causal_conv1d_update(kept.x, kept.state, kept.weight, activation="silu")
        cases.require_close("y", y, want, ours=True, elements=True)
        cases.require_bits("y of another call", again, y)
        cases.require_bits("state", kept.state, state)

    return lambda: ops.causal_conv1d_update(b.x, b.state, b.weight, activation="silu"), check


def forward(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    ops = importlib.import_module("accel.ops")
    b = cases.conv_buffers(SEQUENCE if device.type == "cuda" else DRY, device)
    x, weight, want = b.x.detach().transpose(1, 2), b.weight.detach(), cases.conv_reference(b)

    def check(y: torch.Tensor) -> None:
        cases.require_close("y", y.transpose(1, 2), want["y"], ours=True, elements=True)

    return lambda: ops.causal_conv1d(x, weight, activation="silu"), check


def training(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    ops = importlib.import_module("accel.ops")
    b = cases.conv_buffers(SEQUENCE if device.type == "cuda" else DRY, device)
    want = cases.conv_reference(b)

    def call() -> tuple[torch.Tensor, ...]:
        y = ops.causal_conv1d(b.x.transpose(1, 2), b.weight, activation="silu")
        return torch.autograd.grad(y, (b.x, b.weight), b.dy.transpose(1, 2))

    def check(gradients: tuple[torch.Tensor, ...]) -> None:
        for name, gradient in zip(("dx", "dw"), gradients, strict=True):
            cases.require_close(name, gradient, want[name], ours=True)

    return call, check


OPS = {"decode": decode, "forward": forward, "forward+backward": training}


def seconds(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def main(op: str, kind: str, compiler: bool) -> dict[str, Any]:
    device = torch.device(kind)
    begin = time.perf_counter()
    names = ["accel", "accel.ops", "accel.kernels.jit", "tvm_ffi"]
    names += ["accel.kernels.device.compiler"] if compiler else []
    for name in names:
        importlib.import_module(name)
    imports = time.perf_counter() - begin
    torch.manual_seed(0)
    call, check = OPS[op](device)
    print("ready", flush=True)
    sys.stdin.readline()
    result, first = seconds(call, device)
    loaded = "cutlass" in sys.modules
    warm = statistics.median(seconds(call, device)[1] for _ in range(WARM_CALLS))
    check(result)
    return {
        "first_ms": first * 1e3,
        "warm_ms": warm * 1e3,
        "imports_ms": imports * 1e3,
        "compiled": importlib.import_module("accel.kernels.jit").compilations(),
        "compiler": loaded,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3:] == ["compiler"])))
