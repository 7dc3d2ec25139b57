"""The model of the end-to-end runs, FLA's GatedDeltaNet with random weights, and its variants: FLA, accel, stub."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch
from torch import Tensor, nn

from accel.bench.cases import require
from accel.bench.fla_switch import owner

LAYER = "fla.layers.gated_deltanet"
TINY = {"hidden_size": 64, "num_heads": 2, "head_dim": 16, "vocab_size": 128, "intermediate_size": 64}
TINY |= {"fuse_cross_entropy": False}  # that kernel refuses the CPU


def build(layers: int, device: torch.device, expand_v: float = 2.0, tiny: bool = False) -> nn.Module:
    """Random weights in bf16; 8 heads of 256 in a hidden size of 2048."""
    models = importlib.import_module("fla.models.gated_deltanet")
    sizes = TINY if tiny else {"hidden_size": 2048, "num_heads": 8, "head_dim": 256}
    config = models.GatedDeltaNetConfig(num_hidden_layers=layers, expand_v=expand_v, **sizes)
    torch.manual_seed(0)
    return models.GatedDeltaNetForCausalLM(config).to(device=device, dtype=torch.bfloat16)


def stub_update(x: Tensor, cache: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return x, cache


def stub_conv(x: Tensor, initial_state: Tensor | None = None, **_: object) -> tuple[Tensor, Tensor | None]:
    return x, initial_state


@contextmanager
def stubbed() -> Iterator[None]:
    """Every short convolution of a decode step returns its input: the bound for what a faster one can give."""
    name = "causal_conv1d_update"
    with mock.patch.object(owner(name), name, stub_update):
        yield


@contextmanager
def stubbed_training() -> Iterator[None]:
    with mock.patch.object(importlib.import_module(LAYER), "causal_conv1d", stub_conv):
        yield


def accelerated() -> AbstractContextManager:
    return importlib.import_module("accel").accelerated("short_conv")


VARIANTS: dict[str, Callable[[], AbstractContextManager]] = {
    "FLA": nullcontext,
    "accel": accelerated,
    "stub": stubbed,
}


def native_calls(run: Callable[[], object]) -> int:
    """Runs it accelerated; how many calls were recorded, all of them native."""
    accel = importlib.import_module("accel")
    with accelerated(), accel.record_routes() as routes:
        run()
    declined = [f"{route.callable} {route}: {route.detail}" for route in routes if route.path != "native"]
    require(not declined, f"{len(declined)} of {len(routes)} calls were not native, first: {(declined or [''])[0]}")
    require(bool(routes), "no call was recorded")
    return len(routes)
