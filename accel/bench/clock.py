"""How long a call takes, and what a copy on the same device moves: Triton's do_bench on a GPU, plain repeats elsewhere.

Imports torch; Triton only where there is a GPU to time.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

CPU_SECONDS = 0.3  # of repeats, and at least REPEATS of them
REPEATS = 5
COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes: more than any cache holds
PROTOCOL = {
    "cuda": "triton.testing.do_bench: events around a call, L2 written before, median; the host's time where longer",
    "cpu": f"one call to warm up, then repeats for {CPU_SECONDS} s and at least {REPEATS}: median",
}


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median of one call."""
    if device.type != "cpu":
        return importlib.import_module("triton.testing").do_bench(call, return_mode="median") / 1e3
    call()
    spent: list[float] = []
    while len(spent) < REPEATS or sum(spent) < CPU_SECONDS:
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy moves, reads and writes counted."""
    source = torch.ones(COPIED[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device)
