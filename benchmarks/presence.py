"""causal-conv1d as it is found, as if it were not there, and accelerated either way, in one process.

What mamba_ssm and Transformers took of it at their import are names in modules: they are exchanged around a turn.
"""

from __future__ import annotations

import importlib
import logging
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from accel.bench.cases import require

PACKAGE = "causal-conv1d"
TORCH = "torch"
OURS = "accel"
ALONE = "accel alone"  # without causal-conv1d
Scope = Callable[[], AbstractContextManager]


class Place(NamedTuple):
    """A name in a module, or an attribute of a layer, and what it is without causal-conv1d."""

    holder: Any
    name: str
    without: Any

    @property
    def held(self) -> Any:
        return vars(self.holder)[self.name]


@contextmanager
def put(places: Sequence[Place]) -> Iterator[None]:
    """Every place as it is without causal-conv1d."""
    found = [place.held for place in places]
    for place in places:
        setattr(place.holder, place.name, place.without)
    try:
        yield
    finally:
        for place, value in zip(places, found, strict=True):
            setattr(place.holder, place.name, value)


@contextmanager
def absent() -> Iterator[None]:
    """An import of causal_conv1d fails."""
    found = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "causal_conv1d"}
    for name in found:
        del sys.modules[name]
    sys.modules["causal_conv1d"] = None
    try:
        yield
    finally:
        del sys.modules["causal_conv1d"]
        sys.modules.update(found)


def accelerated(target: str) -> AbstractContextManager:
    # it would say at every turn that causal-conv1d is absent
    logging.getLogger("accel").setLevel(logging.ERROR)
    return importlib.import_module("accel").accelerated(target, verbose=False)


@contextmanager
def without(places: Sequence[Place], target: str | None = None) -> Iterator[None]:
    """The torch path; with a target, what accel makes of a machine where causal-conv1d is not installed."""
    with ExitStack() as stack:
        stack.enter_context(put(places))
        if target:
            stack.enter_context(absent())
            stack.enter_context(accelerated(target))
        yield


def variants(places: Sequence[Place], target: str) -> dict[str, Scope]:
    return {
        PACKAGE: nullcontext,
        TORCH: lambda: without(places),
        OURS: lambda: accelerated(target),
        ALONE: lambda: without(places, target),
    }


def native_calls(run: Callable[[], object], expected: int) -> None:
    """Runs it: so many calls are counted in all threads, for a backward has one of its own; all of them are native."""
    routes = importlib.import_module("accel.routes")
    routes.reset_routes()
    run()
    counts = routes.route_counts()
    firsts = [f"{kind.callable} {kind.path}: {first.detail}" for kind, first in routes.first_of_kinds().items()]
    declined, calls = sum(n for route, n in counts.items() if route.path != "native"), sum(counts.values())
    require(not declined, f"{declined} of {calls} calls were not native, first: {(firsts or [''])[0]}")
    require(calls == expected, f"{calls} native calls, expected {expected}")


def limit_of(variant: str, limit: float) -> float:
    """The torch path rounds what goes into its activation, layer by layer, and may be further away."""
    return 2 * limit if variant == TORCH else limit


@contextmanager
def wrong(model: nn.Module) -> Iterator[None]:
    """Every short convolution's taps moved by one: a gate that this passes is none."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv1d)]
    found = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.data.roll(1, -1)
    try:
        yield
    finally:
        for weight, data in zip(weights, found, strict=True):
            weight.data = data


def require_seen(gap: float, limit: float) -> None:
    print(f"  wrong taps are {gap:.3f} away, the limit is {limit}", flush=True)
    require(gap > 2 * limit, f"wrong taps are {gap:.2e} away: a limit of {limit} would hardly see them")


def restores(places: Sequence[Place], scopes: Mapping[str, Scope]) -> str:
    """Every variant entered and left: the very objects that were there are there again."""
    package = importlib.import_module("causal_conv1d")
    found = [place.held for place in places]
    for name, scope in scopes.items():
        with scope():
            changed = [place.held is not value for place, value in zip(places, found, strict=True)]
            require(all(changed) if name != PACKAGE else not any(changed), f"{name} changed {sum(changed)} places")
        same = all(place.held is value for place, value in zip(places, found, strict=True))
        require(same and importlib.import_module("causal_conv1d") is package, f"{name} was not taken back")
    return f"{len(places)} places, restored after each of {len(scopes)} variants"


def compared(spent: Mapping[str, Sequence[float]], name: str) -> dict[str, float]:
    """How many times as fast as each other one: neighbours in time, the median of the pairs.

    A shared machine's speed drifts more than the variants differ.
    """
    mine = spent[name]
    return {
        other: statistics.median(theirs / ours for theirs, ours in zip(samples, mine, strict=True))
        for other, samples in spent.items()
        if other != name
    }


def words(row: Mapping[str, Any]) -> str:
    over = ", ".join(f"{ratio:.3f} x {other}" for other, ratio in row["over"].items())
    return f"  {row['provider']:<14}{row['step_ms']:10.3f} ms {row['tokens_per_s']:12.1f} tokens/s   {over}"


def stand_in() -> None:
    """For a dry run: the tests' stand-ins for extensions that are not built, and for what is asked of CUDA."""
    require(os.environ.get("TRITON_INTERPRET") == "1", "a dry run interprets Triton's kernels: TRITON_INTERPRET=1")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    for name in ("conv_extension", "mamba_extensions"):
        importlib.import_module(name)
