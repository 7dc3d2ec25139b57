"""Who can serve a case: ours (through the swapped FLA callable and through `accel.ops`), the peers, plain torch.

A provider binds the buffers of a case to calls without arguments. Layout views are taken at binding, outside the timed
call, as each library's own documentation calls it; what a library does inside its call is its own cost.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from accel import last_route, ops
from accel.bench.cases import ConvBuffers, GateError, UpdateBuffers, require
from accel.bench.fla_switch import (
    accel_fla_missing,
    fla,
    fla_gluon,
    fla_missing,
    fla_original,
    fla_switch,
    importable,
)


@dataclass
class ConvCalls:
    """forward() -> (y, final [N, D, width - 1 or width] or None); inputs: what backward differentiates, in order."""

    forward: Callable[[], tuple[Tensor, Tensor | None]]
    inputs: list[Tensor]  # x, weight, then bias and the initial states where there are any
    dy: Tensor
    transposed: bool  # x, y, dy are [B, D, T] views

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        """Runs the forward once, on the current stream, and gives the call that runs its backward."""
        with torch.enable_grad():
            y, _ = self.forward()
        inputs, dy = self.inputs, self.dy
        return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


@dataclass(frozen=True)
class Provider:
    name: str
    missing: Callable[[], str | None]  # why it cannot run here
    update: Callable[[UpdateBuffers], Callable[[], Tensor]] | None = None
    conv: Callable[[ConvBuffers], ConvCalls] | None = None
    scope: Callable[[], AbstractContextManager] = nullcontext
    ours: bool = False
    verify: Callable[[str], None] = lambda what: None  # raises where another route than the named one served the call

    def why_not(self, op: str) -> str | None:
        try:
            return self.missing() or (None if getattr(self, op) else f"serves no {op}")
        except Exception as error:  # noqa: BLE001 - an installation that breaks at import is a reason, not a crash
            return f"{type(error).__name__}: {error}"[:200]


def on_gpu(missing: Callable[[], str | None]) -> Callable[[], str | None]:
    return lambda: missing() if torch.accelerator.is_available() else "needs a GPU"


def fla_update(b: UpdateBuffers) -> Callable[[], Tensor]:
    function, x, state, weight, bias = fla("causal_conv1d_update"), b.x.unsqueeze(1), b.state, b.weight, b.bias

    def call() -> Tensor:
        y, cache = function(x=x, cache=state, residual=None, weight=weight, bias=bias, activation="silu")
        if cache is not state:
            raise GateError("the returned cache is another object than the one passed in")
        return y

    return call


def fla_conv(b: ConvBuffers) -> ConvCalls:
    function, states = fla("causal_conv1d"), b.case.states

    def forward() -> tuple[Tensor, Tensor | None]:
        return function(
            x=b.x,
            weight=b.weight,
            bias=b.bias,
            initial_state=b.initial_fla,
            output_final_state=states,
            activation="silu",
            cu_seqlens=b.cu_seqlens,
        )

    return ConvCalls(forward, b.inputs(b.initial_fla), b.dy, transposed=False)


def gluon_conv(b: ConvBuffers) -> ConvCalls:
    require(not b.case.states, "FLA hands state gradients to Triton")
    return fla_conv(b)


def gluon_missing() -> str | None:
    return fla_missing() or importable("fla.modules.causal_conv1d.backends.gluon")()


def gluon_verify(what: str) -> None:
    """FLA notes each backend that served a function in its registry."""
    name = {"forward": "causal_conv1d_fwd", "backward": "causal_conv1d_bwd"}.get(what)
    if name is None:
        return
    registry = importlib.import_module("fla.backends")._function_registries[inspect.unwrap(fla(name))]
    require(any(key.endswith(f"{name}:gluon") for key in registry._logged), f"{name} was not served by Gluon")


def accel_route(what: str) -> None:
    route = last_route()
    require(route is not None and route.path == "native", f"{what} took {route}: {route.detail if route else ''}")


def accel_fla_update(b: UpdateBuffers) -> Callable[[], Tensor]:
    require(fla_switch().swaps("causal_conv1d_update"), "accelerate_fla did not swap causal_conv1d_update")
    return fla_update(b)


def accel_fla_conv(b: ConvBuffers) -> ConvCalls:
    require(fla_switch().swaps("causal_conv1d"), "accelerate_fla does not swap causal_conv1d in this version")
    return fla_conv(b)


def ops_update(b: UpdateBuffers) -> Callable[[], Tensor]:
    function, x, state, weight, bias = ops.causal_conv1d_update, *four(b)
    return lambda: function(x, state, weight, bias, activation="silu")


def ops_conv(b: ConvBuffers) -> ConvCalls:
    function, states = ops.causal_conv1d, b.case.states
    x, dy = b.x.detach().transpose(1, 2).requires_grad_(), b.dy.transpose(1, 2)

    def forward() -> tuple[Tensor, Tensor | None]:
        out = function(
            x,
            b.weight,
            b.bias,
            activation="silu",
            cu_seqlens=b.cu_seqlens32,
            initial_states=b.initial,
            return_final_states=states,
        )
        return out if states else (out, None)

    return ConvCalls(forward, [x, *b.inputs(b.initial)[1:]], dy, transposed=True)


def four(b: UpdateBuffers) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return b.x, b.state, b.weight, b.bias


def package_update(b: UpdateBuffers) -> Callable[[], Tensor]:
    function, x, state, weight, bias = importlib.import_module("causal_conv1d").causal_conv1d_update, *four(b)
    return lambda: function(x, state, weight, bias, activation="silu")


def package_conv(b: ConvBuffers) -> ConvCalls:
    function, states = importlib.import_module("causal_conv1d").causal_conv1d_fn, b.case.states
    require(not (states and b.case.lengths), "serves no states of packed sequences")
    x, dy = b.x.detach().transpose(1, 2).requires_grad_(), b.dy.transpose(1, 2)

    def forward() -> tuple[Tensor, Tensor | None]:
        out = function(
            x,
            b.weight,
            b.bias,
            seq_idx=b.seq_idx,
            initial_states=b.initial,
            return_final_states=states,
            activation="silu",
        )
        return out if states else (out, None)

    return ConvCalls(forward, [x, *b.inputs(b.initial)[1:]], dy, transposed=True)


def cudnn_update(b: UpdateBuffers) -> Callable[[], Tensor]:
    function, x, state, weight, bias = importlib.import_module("cudnn.ops").causal_conv1d_update, *four(b)
    return lambda: function(x, state, weight, bias, activation="silu")


def cudnn_conv(b: ConvBuffers) -> ConvCalls:
    function, states = importlib.import_module("cudnn.ops").causal_conv1d, b.case.states
    require(not b.case.strided, "its CuTe route wants a dense channel-last x")
    x, dy = b.x.detach().transpose(1, 2).requires_grad_(), b.dy.transpose(1, 2)

    def forward() -> tuple[Tensor, Tensor | None]:
        out = function(
            x,
            b.weight,
            b.bias,
            "silu",
            cu_seqlens=b.cu_seqlens32,
            initial_states=b.initial,
            return_final_states=states,
        )
        return out if states else (out, None)

    return ConvCalls(forward, [x, *b.inputs(b.initial)[1:]], dy, transposed=True)


def cudnn_verify(what: str) -> None:
    if what == "forward":
        # `cudnn.ops.causal_conv1d` names both a module and the function that hides it: only sys.modules has the module
        route = sys.modules["cudnn.ops.causal_conv1d"]._get_causal_conv1d_last_route()
        require(str(route).startswith("native"), f"took {route}")


def torch_update(b: UpdateBuffers) -> Callable[[], Tensor]:
    """A step as modeling code writes it: the window shifted, then a convolution of one output."""
    x, state, weight, bias = four(b)
    weight, channels = weight.unsqueeze(1), x.shape[1]

    def call() -> Tensor:
        state.copy_(torch.cat([state[..., 1:], x.unsqueeze(-1)], -1))
        return F.silu(F.conv1d(state, weight, bias, groups=channels))[..., 0]

    return call


def torch_conv(b: ConvBuffers) -> ConvCalls:
    require(not b.case.lengths, "serves no packed sequences")
    reach, states = b.case.width - 1, b.case.states
    x, dy = b.x.detach().transpose(1, 2).requires_grad_(), b.dy.transpose(1, 2)

    def forward() -> tuple[Tensor, Tensor | None]:
        wide = torch.cat([b.initial, x], -1) if states else F.pad(x, (reach, 0))
        y = F.silu(F.conv1d(wide, b.weight.unsqueeze(1), b.bias, groups=x.shape[1]))
        return y, wide[..., -reach:] if states else None

    return ConvCalls(forward, [x, *b.inputs(b.initial)[1:]], dy, transposed=True)


PROVIDERS = {
    p.name: p
    for p in (
        Provider("accel (FLA)", accel_fla_missing, accel_fla_update, accel_fla_conv, ours=True, verify=accel_route),
        Provider("accel (ops)", lambda: None, ops_update, ops_conv, ours=True),
        Provider("FLA", fla_missing, fla_update, fla_conv, fla_original),
        Provider("FLA Gluon", on_gpu(gluon_missing), None, gluon_conv, fla_gluon, verify=gluon_verify),
        Provider("cuDNN FE", on_gpu(importable("cudnn.ops")), cudnn_update, cudnn_conv, verify=cudnn_verify),
        Provider("causal-conv1d", on_gpu(importable("causal_conv1d")), package_update, package_conv),
        Provider("torch", lambda: None, torch_update, torch_conv),
    )
}


def interpret() -> None:
    """Without a GPU, FLA's originals run in Triton's interpreter, where TRITON_INTERPRET=1 asks for it."""
    if os.environ.get("TRITON_INTERPRET") == "1" and not torch.accelerator.is_available():
        importlib.import_module("accel.triton_cpu").install()


def selected(names: str, op: str) -> list[Provider]:
    """Providers by name (comma-separated, any unambiguous part of it) that can serve `op` here; says who cannot."""
    interpret()
    wanted = [part.strip().lower() for part in names.split(",") if part.strip()]
    chosen = []
    for provider in PROVIDERS.values():
        if wanted and not any(part in provider.name.lower() for part in wanted):
            continue
        if not wanted and provider.name == "torch":  # no contender: benchmarks/ times it where it is named
            continue
        reason = provider.why_not(op)
        print(f"  {provider.name}: {reason or 'ready'}", flush=True)
        if reason is None:
            chosen.append(provider)
    return chosen
