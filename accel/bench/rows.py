"""The rows of `python -m accel bench`: each provider of each case, gated first and timed only where the gate holds.

A row that has no time has a reason. The clock and the order are those of a user's machine; benchmarks/ has the careful
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from accel.bench import cases, clock, dense, gates
from accel.bench.providers import PROVIDERS, Provider
from accel.bench.shapes import Shape

Call = Callable[[], Any]
DENSE = {dense.OURS: True, "pad + conv": False, "conv + chomp": False}  # and whether it is ours
INTERPRETED = ("accel (FLA)", "FLA")  # without a GPU they could only be interpreted


@dataclass(frozen=True)
class Row:
    """One provider of one case. `seconds` is None where the result was not right, or there was none: `reason` says."""

    op: str
    shape: Shape
    provider: str
    ours: bool
    bytes: int  # each input and output once
    flops: int  # of a dense convolution, else 0
    seconds: float | None = None
    reason: str = ""

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second."""
        return None if self.seconds is None else self.bytes / self.seconds


def peers(op: str, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Who can serve an operation here, and why the others cannot."""
    if op == "dense":
        return list(DENSE), {}
    ready, absent = [], {}
    for provider in PROVIDERS.values():
        if device.type == "cpu" and provider.name in INTERPRETED:
            reason = "needs a GPU"
        else:
            reason = provider.why_not("update" if op == "update" else "conv")
        if reason is None:
            ready.append(provider.name)
        else:
            absent[provider.name] = reason
    return ready, absent


def measure(wanted: Mapping[str, Sequence[Shape]], device: torch.device) -> Iterator[Row]:
    """A row for each operation, shape and provider of it that is here."""
    for op, shapes in wanted.items():
        names, _ = peers(op, device)
        for shape in shapes:
            yield from _MEASURES[op](op, shape, names, device)


def _update(op: str, shape: Shape, names: list[str], device: torch.device) -> Iterator[Row]:
    case = cases.Decode(shape.B, shape.D, width=shape.W)
    for provider in map(PROVIDERS.__getitem__, names):

        def make(provider: Provider = provider) -> Call:
            gates.update_gate(provider, case, device)
            return provider.update(cases.update_buffers(case, device))

        with torch.no_grad():
            row = _row(Row(op, shape, provider.name, provider.ours, case.bytes, 0), provider.scope, make, device)
        yield row


def _conv(op: str, shape: Shape, names: list[str], device: torch.device) -> Iterator[Row]:
    case = cases.Sequence(shape.B, shape.T, shape.D, width=shape.W)
    prepared = cache(lambda: _conv_case(case, device))  # a failure is each row's own

    for provider in map(PROVIDERS.__getitem__, names):

        def make(provider: Provider = provider) -> Call:
            buffers, want = prepared()
            calls = gates.forward_gate(provider, buffers, want)
            if op == "backward":
                gates.backward_gate(provider, buffers, want, calls)
                return calls.backward()
            return torch.no_grad()(calls.forward)

        moved = 2 * shape.B * shape.T * shape.D * (2 if op == "forward" else 3)  # x, y; or x, dy, dx
        weights = 2 * shape.D * shape.W * (1 if op == "forward" else 2)
        yield _row(Row(op, shape, provider.name, provider.ours, moved + weights, 0), provider.scope, make, device)


def _dense(op: str, shape: Shape, names: list[str], device: torch.device) -> Iterator[Row]:
    case = dense.Dense(shape.B, shape.D, shape.D, shape.W, shape.dilation, shape.T, "bf16")
    prepared = cache(lambda: _dense_case(case, device))
    moved = 2 * (2 * shape.B * shape.T * shape.D + shape.D * shape.D * shape.W)

    for name in names:

        def make(name: str = name) -> Call:
            buffers, want = prepared()
            dense.gate(name, buffers, want)
            return dense.forward_call(name, buffers)

        yield _row(Row(op, shape, name, DENSE[name], moved, case.flops), nullcontext, make, device)


_MEASURES = {"update": _update, "forward": _conv, "backward": _conv, "dense": _dense}


def _conv_case(case: cases.Sequence, device: torch.device) -> tuple[cases.ConvBuffers, dict[str, torch.Tensor]]:
    buffers = cases.conv_buffers(case, device)
    return buffers, cases.conv_reference(buffers)


def _dense_case(case: dense.Dense, device: torch.device) -> tuple[dense.Buffers, dict[str, torch.Tensor]]:
    buffers = dense.buffers(case, device)
    return buffers, dense.reference(buffers)


def _row(row: Row, scope: Callable[[], Any], make: Callable[[], Call], device: torch.device) -> Row:
    try:
        with scope():
            call = make()
            return replace(row, seconds=clock.seconds(call, device))
    except Exception as error:  # whatever a peer raises is why it has no number
        return replace(row, reason=gates.reason_of(error))
