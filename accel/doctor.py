"""`python -m accel doctor`: what is here, what can be switched on, and whether each operation computes what it should.

Top floor, beside cli.py. Imports no upstream by itself: whether a target can be on is found out by trying. The
self-check has a reference of its own, in float64 on the CPU, that shares nothing with the operations.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel import accelerate, check, environment, matrix, ops, restore
from accel.kernels import cache

DISTRIBUTIONS = (
    "fla-accel",
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "fla-core",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
    "transformers",
)
B, T, D, W = 2, 11, 37, 4
TOLERANCE = 1e-5  # of the largest value, for float32 with float32 accumulation


def examine() -> dict[str, Any]:
    """Everything that doctor says, ready for JSON."""
    table = matrix.load()
    refusals = {name: _refusal(name) for name in (*table.targets, *table.planned)}
    kept = cache.info()
    devices = [environment.facts(device) for device in _devices()]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "driver": environment.driver_version(),
        "cuda": torch.version.cuda,
        "versions": {name: environment.distribution_version(name) for name in DISTRIBUTIONS},
        "devices": [
            {"device": str(facts.device), "backend": facts.backend, "arch": facts.arch, "detail": facts.detail}
            for facts in devices
        ],
        "targets": {name: {"enabled": not reason, "reason": reason} for name, reason in refusals.items()},
        "architectures": {
            arch: {"compiled": True, "run": arch in table.architectures.run} for arch in table.architectures.compiled
        },
        "cache": {"folder": str(kept.folder), "kernels": kept.entries, "bytes": kept.size, "problem": kept.problem},
        "disabled": devices[0].disabled,
        "checks": [
            self_check(name, facts) for facts in devices if facts.backend and not facts.disabled for name in CHECKS
        ],
    }


def self_check(name: str, facts: environment.DeviceFacts) -> dict[str, Any]:
    """Run one operation on one device: its largest error, relative to the largest value, or why it failed."""
    answer = {"operation": name, "device": str(facts.device), "holds": False, "error": None, "detail": ""}
    start = time.perf_counter()
    try:
        error = CHECKS[name](facts.device)
        check()
        answer["holds"] = error <= TOLERANCE
        if math.isfinite(error):
            answer["error"] = error
        else:  # JSON has no infinity
            answer["detail"] = "NaN, or a state with other bits"
    except Exception as error:  # whatever a broken installation raises is what doctor has to say
        answer["detail"] = f"{type(error).__name__}: {error}"
    return answer | {"seconds": round(time.perf_counter() - start, 3)}


def paste(found: dict[str, Any]) -> str:
    """What belongs into an issue, as a fenced block."""
    lines = [f"Python {found['python']}, {found['platform']}, {found['processor']}"]
    lines.append(f"NVIDIA driver {found['driver'] or 'none'}, CUDA of torch {found['cuda'] or 'none'}")
    lines += [f"{name} {version}" for name, version in found["versions"].items() if version]
    lines += [f"{d['device']}: {d['backend']}, {d['arch']}, {d['detail']}" for d in found["devices"]]
    lines += [f"{name}: {t['reason'] or 'can be switched on'}" for name, t in found["targets"].items()]
    lines += [_outcome(result) for result in found["checks"]]
    kept = found["cache"]
    lines.append(f"cache: {kept['kernels']} kernels, {kept['bytes']} bytes{kept['problem'] and ', ' + kept['problem']}")
    if found["disabled"]:
        lines.append("ACCEL_DISABLE is set")
    return "\n".join(["```text", *lines, "```"])


def _outcome(result: dict[str, Any]) -> str:
    error = result["detail"] if result["error"] is None else f"relative error {result['error']:.1e}"
    return f"{result['operation']} on {result['device']}: {'ok' if result['holds'] else 'FAILED'}, {error}"


def _devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        found += [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    return found


def _refusal(target: str) -> str:
    """Why a target cannot be switched on, found by trying; empty when it can."""
    try:
        accelerate([target], verbose=False)
    except ImportError as error:
        return str(error).partition(f"{target}: ")[2] or str(error)
    restore([target])
    return ""


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Float32 on the CPU, the same in every run, and without a trace in torch's own generator."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _convolve(history: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """silu(bias + sum_j weight[:, j] * v[..., t + j]) of v = history ++ x, [..., D, T]."""
    values, length = torch.cat([history, x], -1), x.shape[-1]
    taps = [weight[:, j, None] * values[..., j : j + length] for j in range(weight.shape[1])]
    return F.silu(sum(taps) + bias[:, None])


def _error(actual: Tensor, exact: Tensor) -> float:
    difference = (actual.detach().cpu().double() - exact.detach()).abs().max() / exact.detach().abs().max()
    return float(torch.nan_to_num(difference, nan=float("inf")))


def _check_conv(device: torch.device) -> float:
    """Forward and all gradients, of a channel-last x."""
    inputs = _random((B, T, D), (D, W), (D,))
    (dy,) = _random((B, D, T))
    here = [value.to(device).requires_grad_() for value in inputs]
    y = ops.causal_conv1d(here[0].transpose(1, 2), here[1], here[2], activation="silu")
    found = [y, *torch.autograd.grad(y, here, dy.to(device))]
    exact = [value.double().requires_grad_() for value in inputs]
    wanted = _convolve(torch.zeros(B, D, W - 1, dtype=torch.double), exact[0].transpose(1, 2), *exact[1:])
    return max(map(_error, found, [wanted, *torch.autograd.grad(wanted, exact, dy.double())]))


def _check_update(device: torch.device) -> float:
    """One token of a slice of a wider projection; the state has to be right bit for bit."""
    projection, state, weight, bias = _random((B, 3 * D), (B, D, W), (D, W), (D,))
    x, kept = projection.to(device)[:, D : 2 * D], state.to(device, copy=True)
    y = ops.causal_conv1d_update(x, kept, weight.to(device), bias.to(device), activation="silu")
    token = projection[:, D : 2 * D, None]
    if not torch.equal(kept.cpu(), torch.cat([state[..., 1:], token], -1)):
        return float("inf")
    exact = _convolve(state[..., 1:].double(), token.double(), weight.double(), bias.double())
    return _error(y, exact[..., 0])


def _check_states(device: torch.device) -> float:
    """The last tokens of two sequences, the first of them shorter than the state, bit for bit."""
    (x,) = _random((T, D))
    bounds = torch.tensor([0, W - 2, T], dtype=torch.int32)
    found = ops.causal_conv1d_varlen_states(x.to(device), bounds.to(device), W)
    short = F.pad(x[: W - 2].t(), (2, 0))
    return 0.0 if torch.equal(found.cpu(), torch.stack([short, x[-W:].t()])) else float("inf")


CHECKS: dict[str, Callable[[torch.device], float]] = {
    "causal_conv1d": _check_conv,
    "causal_conv1d_update": _check_update,
    "causal_conv1d_varlen_states": _check_states,
}
