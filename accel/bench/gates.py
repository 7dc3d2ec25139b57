"""What has to hold before a provider is timed: values and gradients against float64, state bits, its route."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import Tensor

from accel.bench.cases import (
    ConvBuffers,
    Decode,
    require,
    require_bits,
    require_close,
    update_buffers,
    update_reference,
)
from accel.bench.providers import ConvCalls, Provider


def reason_of(error: Exception) -> str:
    """One line: what was raised, its first words, and the last frames, innermost first."""
    words = (str(error).strip().splitlines() or [""])[0][:200]
    frames = traceback.extract_tb(error.__traceback__)
    at = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames[-3:]))
    return f"{type(error).__name__}: {words} [{at}]"


def poison(nbytes: int, device: torch.device) -> None:
    """Leaves NaN in the block that the allocator hands out next: an element nobody wrote shows up."""
    if nbytes:
        torch.full((nbytes // 4 + 1,), float("nan"), device=device)


@torch.no_grad()
def update_gate(provider: Provider, case: Decode, device: torch.device) -> None:
    """y against float64, state bits, route, cache identity (in the call), on fresh buffers and poisoned memory."""
    buffers = update_buffers(case, device)
    want, state = update_reference(buffers)
    x = buffers.x.clone()
    call = provider.update(buffers)
    for again in range(2):  # the first call may compile or tune
        if again:
            buffers.state.copy_(torch.randn_like(buffers.state))
            want, state = update_reference(buffers)
        poison(2 * case.N * case.D, device)
        y = call().reshape(case.N, case.D)
        require_close("y", y, want, provider.ours, elements=True)
        require_bits("state", buffers.state, state)
        require_bits("x", buffers.x, x)
        provider.verify("update")


def forward_gate(provider: Provider, b: ConvBuffers, want: dict[str, Tensor]) -> ConvCalls:
    """y against float64, final states bit for bit, route; the calls that gave them."""
    calls = provider.conv(b)
    poison(2 * b.x.numel(), b.x.device)
    with torch.enable_grad():
        y, final = calls.forward()
    require(y.dtype == b.x.dtype, f"y is {y.dtype}")
    require_close("y", y.transpose(1, 2) if calls.transposed else y, want["y"], provider.ours, elements=True)
    provider.verify("forward")
    if b.case.states:
        require_bits("final states", final[..., 1 - b.case.width :], want["final"])
    return calls


def backward_gate(provider: Provider, b: ConvBuffers, want: dict[str, Tensor], calls: ConvCalls) -> None:
    """Gradients against float64, route; ours also twice the same bits."""
    backward = calls.backward()
    poison(2 * b.x.numel(), b.x.device)
    grads = backward()
    provider.verify("backward")
    names = ["dx", "dw", *(["db"] if b.bias is not None else []), *(["dinitial"] if b.case.states else [])]
    for name, grad in zip(names, grads, strict=True):
        grad = grad.transpose(1, 2) if name == "dx" and calls.transposed else grad
        grad = grad[..., 1 - b.case.width :] if name == "dinitial" else grad
        require_close(name, grad, want[name], provider.ours)
    if provider.ours:
        for name, first, second in zip(names, grads, backward(), strict=True):
            require_bits(f"{name} of a second run", second, first)
