"""Swaps one object for another wherever it is referenced, by identity, and swaps it back.

Knows nothing of convolutions, versions or upstreams; imports nothing of `accel`. References are the attributes of every
module in sys.modules under whatever name, of the classes there (also inside a staticmethod), and of the instances of a
given model. Restoring walks again, so a module that captured the replacement later gets the original back, and a place
that holds something else by then is left alone.

The one surprise: attribute access is avoided throughout. A lazy module imports on the first `module.name`, and asking a
proxy for its `__class__` resolves it, so namespaces are read below their own `__getattribute__`.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

LOCK = threading.RLock()  # switching on and off, one thread at a time; calls never take it


class Place(NamedTuple):
    """Where a reference was swapped. The holder is weak: a model must not live longer for having been accelerated."""

    holder: Callable[[], Any]
    name: str

    def __str__(self) -> str:
        holder = self.holder()
        if _is_class(holder):
            return f"{holder.__module__}.{holder.__qualname__}.{self.name}"
        found = namespace(holder)
        return f"{found.get('__name__', type(holder).__qualname__)}.{self.name}"


class Swap:
    """An original, what stands in for it, and the places where it does."""

    def __init__(self, original: Any, replacement: Any):
        self.original = original
        self.replacement = replacement
        self.places: list[Place] = []
        # staticmethod objects that held the original, each with the one made for the replacement
        self.staticmethods: list[tuple[staticmethod, staticmethod]] = []

    def forward(self, found: Any) -> Any:
        """What `found` becomes when this swap is made; `found` itself where it is not concerned."""
        return self._exchange(found, self.original, self.replacement, self.staticmethods)

    def backward(self, found: Any) -> Any:
        """What `found` becomes when this swap is undone."""
        return self._exchange(found, self.replacement, self.original, [pair[::-1] for pair in self.staticmethods])

    def _exchange(self, found: Any, old: Any, new: Any, pairs: Sequence[tuple[staticmethod, staticmethod]]) -> Any:
        if found is old:
            return new
        if type(found) is staticmethod and found.__func__ is old:
            for held, made in pairs:
                if found is held:
                    return made
            made = staticmethod(new)
            if new is self.replacement:
                self.staticmethods.append((found, made))
            return made
        return found


def engage(swaps: Sequence[Swap], model: Any = None) -> None:
    """Make all swaps everywhere, or none: what fails halfway is undone before the error goes on."""
    with LOCK:
        try:
            _walk(swaps, Swap.forward, [] if model is None else list(model.modules()))
            if model is not None:
                _note_late_instances(swaps, model)
        except BaseException:
            release(swaps)
            raise


def release(swaps: Sequence[Swap]) -> list[str]:
    """Undo swaps everywhere; returns the places that somebody else has changed since, which stay as they are."""
    with LOCK:
        holders = [holder for swap in swaps for place in swap.places if (holder := place.holder()) is not None]
        _walk(swaps, Swap.backward, holders)
        displaced = [str(place) for swap in swaps for place in swap.places if _displaced(place, swap)]
        for swap in swaps:
            swap.places.clear()
    return displaced


def foreign_link(function: Any, packages: Sequence[str]) -> str | None:
    """The first link of a chain of wrappers that comes from outside `packages`; None where nobody else replaced it."""
    roots = tuple(path for name in packages for path in _paths(name))
    seen = set()
    while id(function) not in seen:
        seen.add(id(function))
        code = getattr(function, "__code__", None)
        if code is None:
            # compiled functions name their module, callable objects their type's
            module = getattr(function, "__module__", None) or type(function).__module__
            if module.partition(".")[0] not in packages:
                return f"{type(function).__qualname__} of {module}"
        elif not os.path.realpath(code.co_filename).startswith(roots):
            return f"{code.co_name} in {code.co_filename}"
        function = getattr(function, "__wrapped__", function)
    return None


def _walk(swaps: Sequence[Swap], direction: Callable[[Swap, Any], Any], instances: Iterable[Any]) -> None:
    watched = {id(held): swap for swap in swaps for held in (swap.original, swap.replacement)}
    for holder in spaces(instances):
        # a copy: another thread may import while this one walks
        for name, found in namespace(holder).copy().items():
            inner = found.__func__ if type(found) is staticmethod else found
            swap = watched.get(id(inner))
            if swap is None or (wanted := direction(swap, found)) is found:
                continue
            if _write(holder, name, found, wanted) and direction is Swap.forward:
                swap.places.append(Place(weak(holder), name))


def spaces(instances: Iterable[Any] = ()) -> Iterator[Any]:
    """Every module once, however many names it goes by, every class found in one, then the instances."""
    seen = set()
    for module in sys.modules.copy().values():
        if id(module) in seen or not isinstance(namespace(module), dict):
            continue
        seen.add(id(module))
        yield module
        for value in namespace(module).copy().values():
            if _is_class(value) and id(value) not in seen:
                seen.add(id(value))
                yield value
    for instance in instances:
        if id(instance) not in seen:
            seen.add(id(instance))
            yield instance


def namespace(holder: Any) -> Any:
    """The holder's own attributes: a dict, the read-only view of a class, or {} where it has none."""
    try:
        return (type if _is_class(holder) else object).__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}


def _write(holder: Any, name: str, found: Any, wanted: Any) -> bool:
    space = namespace(holder)
    if space.get(name) is not found:  # somebody changed it since it was read
        return False
    if _is_class(holder):
        type.__setattr__(holder, name, wanted)
    else:
        space[name] = wanted
    return True


def _note_late_instances(swaps: Sequence[Swap], model: Any) -> None:
    """Instances built after the swap captured the replacement by themselves; restoring has to find them too."""
    for swap in swaps:
        known = {(id(place.holder()), place.name) for place in swap.places}
        for instance in model.modules():
            for name, found in namespace(instance).copy().items():
                if found is swap.replacement and (id(instance), name) not in known:
                    swap.places.append(Place(weak(instance), name))


def _displaced(place: Place, swap: Swap) -> bool:
    holder = place.holder()
    if holder is None:
        return False
    found = namespace(holder).get(place.name, swap.original)
    return swap.original is not (found.__func__ if type(found) is staticmethod else found)


def _is_class(value: Any) -> bool:
    return issubclass(type(value), type)  # isinstance would ask a proxy for its __class__


def weak(holder: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder


def _paths(package: str) -> list[str]:
    """Where a package's files are: folders that end in a separator, or the file of a plain module."""
    found = namespace(sys.modules.get(package))
    folders = [os.path.join(os.path.realpath(path), "") for path in found.get("__path__", ())]
    return folders or [os.path.realpath(file) for file in [found.get("__file__")] if file]
