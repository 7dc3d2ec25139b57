"""Switching targets on and off: the plans of accel/plan.py carried out, and taken back.

Identities are exchanged by patch.py, places that hold nothing filled by holders.py, modules imported later served by
the hook of imports.py. The one surprise: targets share swaps, stand-ins and fills through what they need; each goes
when the last target that claims it goes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from accel import holders, matrix, modules, patch, plan
from accel.imports import Hook
from accel.plan import Plan, Refused
from accel.tables import one_of

log = logging.getLogger("accel")

_active: dict[str, Plan] = {}
_filled: list[holders.Filled] = []


def accelerate(
    targets: str | Iterable[str] = "all", *, model: Any = None, strict: bool | None = None, verbose: bool = True
) -> tuple[str, ...]:
    """Swap the callables of the targets for native ones; returns the names of the targets that are on.

    Targets given by name are a contract: all of them, or ImportError with each one's reason and nothing changed. "all"
    switches on what is installed and logs why the rest is not. A target brings the callables of those that it needs:
    `mamba` and `transformers` those of `causal_conv1d`, whose package accel stands in for where it cannot be imported;
    their calls carry their own target's name in routes. `model` is an nn.Module whose instances captured a callable
    when they were built; giving it again later adds to what is on. The target `conv1d`, which "all" leaves out, serves
    the modules of that model that state to be a causal nn.Conv1d (accel/modules.py). `strict=False` also swaps a
    callable that somebody else had replaced before: a fallback then calls that replacement. `verbose` logs a line for
    each target (logger `accel`, INFO).
    """
    if model is not None and not callable(getattr(model, "modules", None)):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    names = _names(targets)
    loaded = plan.preload(names)
    with patch.LOCK:
        plans, refused, causal = {}, {}, []
        for name in names:
            try:
                if name in matrix.load().modules:
                    causal = _causal_modules(model)
                    plans[name] = Plan(name, strict)
                elif name not in _active:
                    plans[name] = plan.make(name, strict, loaded, stand_in=targets != "all")
            except Refused as reason:
                refused[name] = reason
        if targets == "all":
            # what another target stands in for already is no wish of its own any more
            needed = {name for made in (*plans.values(), *_active.values()) for name in made.rows}
            for name in needed & refused.keys():
                plans[name] = plan.make(name, strict, loaded)
                del refused[name]
        if refused and targets != "all":
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            cause = next(iter(refused.values())).__cause__
            raise ImportError(f"accel changed nothing, because it cannot serve {reasons}") from cause
        on = {name: plans.get(name) or _active[name] for name in names if name not in refused}
        _switch(on, model)
        modules.serve(causal)
    for name, reason in refused.items():
        log.warning("%s is not accelerated: %s", name, reason)
    for name, made in plans.items():
        for note in made.notes:
            log.warning("%s: %s", name, note)
        if verbose:
            swapped = dict.fromkeys(swap.replacement.__name__ for swap in (*made.swaps, *made.vacant))
            swapped = swapped or [f"{len(causal)} modules of the model"]
            stands_in = "".join(f" (accel stands in for {standin.name})" for standin in made.standins)
            log.info("%s is accelerated: %s%s", name, ", ".join(swapped), stands_in)
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


def accelerate_mamba(
    targets: str | Iterable[str] = "mamba",
    *,
    model: Any = None,
    strict: bool | None = None,
    verbose: bool = True,
) -> tuple[str, ...]:
    """`accelerate` for mamba_ssm."""
    return accelerate(targets, model=model, strict=strict, verbose=verbose)


def accelerate_transformers(
    targets: str | Iterable[str] = "transformers",
    *,
    model: Any = None,
    strict: bool | None = None,
    verbose: bool = True,
) -> tuple[str, ...]:
    """`accelerate` for Transformers."""
    return accelerate(targets, model=model, strict=strict, verbose=verbose)


def restore(targets: str | Iterable[str] | None = None) -> None:
    """Put the originals back, everywhere; None means every target. A target that is not on is no error.

    What somebody else has replaced since stays, and is logged as a warning.
    """
    with patch.LOCK:
        names = list(_active) if targets is None else _names(targets)
        gone = [_active.pop(name) for name in names if name in _active]
        displaced = _let_go(gone)
        if any(made.target in matrix.load().modules for made in gone):
            displaced += modules.release()
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
        raise Refused("it serves the modules of a model, and needs model=")
    found, wrong = modules.stated(model)
    for name in wrong:
        log.warning("%s states to be causal and is not served: it computes something else, or could not be tried", name)
    if not found:
        raise Refused("the model has no nn.Conv1d that states to be causal and is")
    return found


def _switch(on: dict[str, Plan], model: Any) -> None:
    """Carry out plans, all or none."""
    swaps = [swap for made in on.values() for swap in made.swaps]
    bindings = [swap.replacement.__accel__ for made in on.values() for swap in (*made.swaps, *made.vacant)]
    was_live = [binding.live for binding in bindings]
    new = [name for name in on if name not in _active]
    for binding in bindings:
        binding.live = True
    try:
        for made in on.values():
            for name, module in holders.loaded(made.concerns):
                _forget(made, name, module)
        patch.engage(swaps, model)
        _active.update(on)
        for made in on.values():
            for standin in made.standins:
                standin.install()
            _fill(made, model)
            _clear_caches([made])
        if any(made.has_places for made in _active.values()):
            _hook.install()
    except BaseException:
        for binding, live in zip(bindings, was_live, strict=True):
            binding.live = live
        _let_go([_active.pop(name) for name in new if name in _active])
        raise


def _let_go(gone: Sequence[Plan]) -> list[str]:
    """Take back what these plans did and no active one claims; returns the places that somebody else has changed."""
    kept = list(_active.values())
    swaps, empty = _unclaimed("swaps", gone, kept), _unclaimed("vacant", gone, kept)
    for swap in (*swaps, *empty):
        swap.replacement.__accel__.live = False
    rules = {rule for made in kept for rule in made.holders}
    emptied = [place for place in _filled if place.rule not in rules]
    _filled[:] = [place for place in _filled if place.rule in rules]
    displaced = holders.empty(emptied)
    # what was emptied is no foreign patch, though it does not hold the original
    displaced += [place for place in patch.release(swaps) if place not in set(map(str, emptied))]
    standins = _unclaimed("standins", gone, kept)
    _forget_everywhere(plan.what_is_ours(swaps, empty, standins))
    for standin in standins:
        standin.remove()
    _clear_caches(gone)
    if not any(made.has_places for made in kept):
        _hook.remove()
    return displaced


def _unclaimed(kind: str, gone: Sequence[Plan], kept: Sequence[Plan]) -> list[Any]:
    """What of this kind the first plans have and the others have not, each once."""
    claimed = {id(item) for made in kept for item in getattr(made, kind)}
    return list({id(item): item for made in gone for item in getattr(made, kind) if id(item) not in claimed}.values())


def _forget_everywhere(ours: Mapping[int, Callable | None]) -> None:
    """Undo what modules captured, also those of targets that are off: they may have been imported meanwhile."""
    rows = [row for target in matrix.load().targets.values() for row in target.ranges]
    rules = list(dict.fromkeys(rule for row in rows for rule in row.holders))
    closures = list(dict.fromkeys(closure for row in rows for closure in row.closures))
    for name, module in holders.loaded(one_of(place.module for place in (*rules, *closures))):
        own = [closure for closure in closures if closure.owns(name)]
        holders.forget([rule for rule in rules if rule.owns(name)], own, module, ours)


def _forget(made: Plan, name: str, module: ModuleType) -> None:
    """What a module captured from a stand-in, at its import, is not what it would hold without one."""
    filled = {place.key for place in _filled}
    rules = [rule for rule in made.holders_in(name) if (id(module), rule) not in filled]
    holders.forget(rules, [closure for closure in made.closures if closure.owns(name)], module, made.ours)


def _fill(made: Plan, model: Any) -> None:
    for name, module in holders.loaded(made.concerns):
        _fill_module(made, name, module)
    vacant = [swap.replacement for swap in made.vacant]
    for instance in () if model is None else model.modules():
        name = type(instance).__module__
        rules = [rule for rule in made.holders_in(name) if rule.form == "callable"]
        known = {place.key for place in _filled}
        put = [place.put for place in _filled if place.holder() is sys.modules.get(name)]
        # what wraps a function of the module's own goes back to that one, by identity
        foreign = [function for function in put if getattr(function, "__module__", None) != name]
        filled = holders.fill(rules, instance, made.callables_in(name))
        filled += holders.adopt(rules, instance, [*vacant, *foreign])
        _filled.extend(place for place in filled if place.key not in known)


def _fill_module(made: Plan, name: str, module: ModuleType) -> None:
    _filled.extend(holders.fill(made.holders_in(name), module, made.callables_in(name)))


def _serve_import(name: str, module: ModuleType) -> None:
    """What the hook calls after a module that some target concerns was imported."""
    with patch.LOCK:
        for made in _active.values():
            if made.concerns(name):
                _forget(made, name, module)
                if found := made.find_in(name, module):
                    patch.engage(found)
                _fill_module(made, name, module)


def _clear_caches(plans: Sequence[Plan]) -> None:
    for cache in dict.fromkeys(cache for made in plans for row in made.rows.values() for cache in row.caches):
        module, _, name = cache.rpartition(".")
        function = patch.namespace(sys.modules.get(module)).get(name)
        if hasattr(function, "cache_clear"):
            function.cache_clear()


_hook = Hook(lambda name: any(made.concerns(name) for made in list(_active.values())), _serve_import)
