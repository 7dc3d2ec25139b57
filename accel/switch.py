"""Switching targets on and off: what compat_matrix.yaml names, swapped by patch.py for what dispatch.wrap makes of it.

A target is planned completely (installed, version, import, signatures, nobody else's patch) before the first reference
changes. The one surprise: a wrapper is made once per original and kept. A restore makes it dead, the next accelerate
revives it, so that a reference which no walk can reach, in a closure or in somebody's wrapper, does the right thing.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from packaging.version import Version

from accel import dispatch, environment, matrix, modules, patch
from accel.adapters import ADAPTERS
from accel.matrix import MatrixError, Parameters, PatchPoint

log = logging.getLogger("accel")

_active: dict[str, list[patch.Swap]] = {}
_made: list[patch.Swap] = []  # every swap so far, also the restored ones


class _Refused(Exception):
    """Why a target cannot be switched on."""


def accelerate(
    targets: str | Iterable[str] = "all", *, model: Any = None, strict: bool | None = None, verbose: bool = True
) -> tuple[str, ...]:
    """Swap the callables of the targets for native ones; returns the names of the targets that are on.

    Targets given by name are a contract: all of them, or ImportError with each one's reason and nothing changed. "all"
    switches on what is installed and logs why the rest is not. `model` is an nn.Module whose instances captured a
    callable when they were built; giving it again later adds to what is on. The target `conv1d`, which "all" leaves
    out, serves the modules of that model that state to be a causal nn.Conv1d (accel/modules.py). `strict=False` also
    swaps a callable that somebody else had replaced before: a fallback then calls that replacement. `verbose` logs a
    line for each target (logger `accel`, INFO).
    """
    if model is not None and not callable(getattr(model, "modules", None)):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    names = _names(targets)
    with patch.LOCK:
        plans, refused, causal = {}, {}, []
        for name in names:
            try:
                if name in matrix.load().modules:
                    causal = _causal_modules(model)
                    plans[name] = []
                elif name not in _active:
                    plans[name] = _plan(name, strict)
            except _Refused as reason:
                refused[name] = reason
        if refused and targets != "all":
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            cause = next(iter(refused.values())).__cause__
            raise ImportError(f"accel changed nothing, because it cannot serve {reasons}") from cause
        on = {name: plans[name] if name in plans else _active[name] for name in names if name not in refused}
        _switch([swap for swaps in on.values() for swap in swaps], model)
        modules.serve(causal)
        _active.update(on)
    for name, reason in refused.items():
        log.warning("%s is not accelerated: %s", name, reason)
    if verbose:
        for name, swaps in plans.items():
            served = [swap.replacement.__name__ for swap in swaps] or [f"{len(causal)} modules of the model"]
            log.info("%s is accelerated: %s", name, ", ".join(served))
    return tuple(on)


def accelerate_fla(
    targets: str | Iterable[str] = "short_conv",
    *,
    model: Any = None,
    strict: bool | None = None,
    verbose: bool = True,
) -> tuple[str, ...]:
    """`accelerate` for flash-linear-attention."""
    return accelerate(targets, model=model, strict=strict, verbose=verbose)


def restore(targets: str | Iterable[str] | None = None) -> None:
    """Put the originals back, everywhere; None means every target. A target that is not on is no error.

    What somebody else has replaced since stays, and is logged as a warning.
    """
    with patch.LOCK:
        for name in list(_active) if targets is None else _names(targets):
            swaps = _active.pop(name, [])
            for swap in swaps:
                swap.replacement.__accel__.live = False
            displaced = modules.release() if name in matrix.load().modules else patch.release(swaps)
            for place in displaced:
                log.warning("%s was replaced after accel swapped it, and is left as it is", place)


def is_accelerated(target: str | None = None) -> bool:
    """Whether a target is on; without a name, whether any is."""
    return bool(_active) if target is None else matrix.load().canonical(target) in _active


@contextmanager
def accelerated(
    targets: str | Iterable[str] = "all", *, model: Any = None, strict: bool | None = None, verbose: bool = True
) -> Iterator[tuple[str, ...]]:
    """`accelerate` for a block: restores afterwards what it switched on, and not what was on before."""
    with patch.LOCK:
        before = set(_active)
        on = accelerate(targets, model=model, strict=strict, verbose=verbose)
    try:
        yield on
    finally:
        restore([name for name in on if name not in before])


def _names(targets: str | Iterable[str]) -> list[str]:
    """Canonical names, each once, in the order given."""
    table = matrix.load()
    if targets == "all":
        return list(table.targets)
    given = [targets] if isinstance(targets, str) else targets
    return list(dict.fromkeys(table.canonical(name) for name in given))


def _causal_modules(model: Any) -> list[Any]:
    if model is None:
        raise _Refused("it serves the modules of a model, and needs model=")
    found, wrong = modules.stated(model)
    for name in wrong:
        log.warning("%s states to be causal and is not served: it computes something else, or could not be tried", name)
    if not found:
        raise _Refused("the model has no nn.Conv1d that states to be causal and is")
    return found


def _switch(swaps: list[patch.Swap], model: Any) -> None:
    was_live = [swap.replacement.__accel__.live for swap in swaps]
    for swap in swaps:
        swap.replacement.__accel__.live = True
    try:
        patch.engage(swaps, model)
    except BaseException:
        for swap, live in zip(swaps, was_live, strict=True):
            swap.replacement.__accel__.live = live
        raise


def _plan(name: str, strict: bool | None) -> list[patch.Swap]:
    """The swaps of a target, nothing changed yet; _Refused says why there are none."""
    table = matrix.load()
    if name in table.planned:
        raise _Refused("not available in this version of accel")
    target = table.targets[name]
    version = environment.distribution_version(target.distribution)
    if version is None:
        raise _Refused(f"{target.distribution} is not installed")
    row = target.range_of(Version(version))
    installed = f"{target.distribution} {version}"
    if row is None:
        installed += f", outside the proven versions {target.proven[0]} to {target.proven[-1]},"
    points = (row or target.ranges[-1]).callables
    found = [_find(point, installed) for point in points]
    different = [text for point, function in zip(points, found, strict=True) if (text := _difference(point, function))]
    if different:
        raise _Refused(f"{installed} has other signatures: {'; '.join(different)}")
    swaps = [_swap(name, point, function, strict) for point, function in zip(points, found, strict=True)]
    if row is None:
        log.warning("%s has the signatures of the newest proven version, and is served like it", installed)
    return swaps


def _find(point: PatchPoint, installed: str) -> Any:
    try:
        module = importlib.import_module(point.module)
    except Exception as error:  # an upstream may fail in any way while it is imported
        reason = f"{installed}: importing {point.module} fails with {type(error).__name__}: {error}"
        raise _Refused(reason) from error
    if point.attribute not in vars(module):
        raise _Refused(f"{installed}: {point.module} has no {point.attribute}")
    return vars(module)[point.attribute]


def _difference(point: PatchPoint, function: Any) -> str | None:
    try:
        parameters = Parameters.of(function)
    except (TypeError, ValueError):
        return f"{point.attribute} has none that can be read"
    if parameters == point.parameters:
        return None
    return f"{point.attribute} expected ({point.parameters}), found ({parameters})"


def _swap(target: str, point: PatchPoint, function: Any, strict: bool | None) -> patch.Swap:
    swap = next((made for made in _made if function is made.original or function is made.replacement), None)
    original = function if swap is None else swap.original
    if strict is not False:
        link = patch.foreign_link(original, (point.module.partition(".")[0], "torch", "triton"))
        if link is not None:
            raise _Refused(f"{point.attribute} was replaced by {link} before accel came; strict=False swaps it anyway")
    if swap is None:
        if point.adapter not in ADAPTERS:
            raise MatrixError(f"targets.{target}: adapter {point.adapter!r} is none of {', '.join(ADAPTERS)}")
        swap = patch.Swap(original, dispatch.wrap(ADAPTERS[point.adapter], target, point.attribute, original))
        _made.append(swap)
    return swap
