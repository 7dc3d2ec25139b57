"""Fills places that hold nothing because a package is absent, and empties them again.

Knows nothing of convolutions or upstreams: what is filled with what is given as tables.Holder. The one surprise: most
upstreams test such a name at import or construction, so a module that was imported meanwhile, or an instance built
meanwhile, holds the replacement by itself; emptying looks for those too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from accel import patch
from accel.tables import Closure, Holder

_NOTHING = object()  # an entry that is not there


class Filled(NamedTuple):
    """One place that was filled: by which rule, in what (held weakly), what was found, and what was put there."""

    rule: Holder
    holder: Callable[[], Any]
    found: Any
    put: Any

    @property
    def key(self) -> tuple[int, Holder]:
        return id(self.holder()), self.rule

    def __str__(self) -> str:
        return str(patch.Place(self.holder, self.rule.attribute))


def fill(rules: Sequence[Holder], holder: Any, callables: Mapping[str, Callable]) -> list[Filled]:
    """Fill the places of a module, or of an instance, that hold nothing; the rules are those of its name.

    Flags come last: they say whether the other places are filled.
    """
    filled = []
    for rule in sorted(rules, key=lambda rule: rule.form == "all"):
        space = _space(rule, patch.namespace(holder))
        if space is None:
            continue
        name = rule.entry or rule.attribute
        found = space.get(name, _NOTHING)
        put = _value(rule, patch.namespace(holder), callables)
        if put is not None and _is_empty(rule, found, put):
            space[name] = put
            filled.append(Filled(rule, patch.weak(holder), found, put))
    return filled


def adopt(rules: Sequence[Holder], instance: Any, put: Collection[Any]) -> list[Filled]:
    """The places of an instance that was built while its module's were filled with one of these, as if filled too."""
    namespace = patch.namespace(instance)
    held = [(rule, namespace.get(rule.attribute)) for rule in rules]
    return [
        Filled(rule, patch.weak(instance), None, value)
        for rule, value in held
        if any(value is filling for filling in put)
    ]


def empty(filled: Sequence[Filled]) -> list[str]:
    """Put back what was found; returns the places that hold something else by now, which stay as they are."""
    displaced = []
    for place in reversed(filled):
        rule, reference, found, put = place
        holder = reference()
        space = None if holder is None else _space(rule, patch.namespace(holder))
        name = rule.entry or rule.attribute
        if space is None or (now := space.get(name, _NOTHING)) is found:
            continue
        if now is not put:
            displaced.append(str(place))
        elif found is _NOTHING:
            del space[name]
        else:
            space[name] = found
    return displaced


def forget(
    rules: Sequence[Holder], closures: Sequence[Closure], module: ModuleType, ours: Mapping[int, Callable | None]
) -> None:
    """Undo what a module captured by itself: at its import, or since, from a module that held what is ours.

    `ours`: by identity, replacements and stand-in packages, with the original or None where there is none. A place that
    holds one without an original holds nothing again, and flags follow; a closure has the original, or its own.
    """
    namespace = patch.namespace(module)
    for rule in rules:
        space, name = _space(rule, namespace), rule.entry or rule.attribute
        if rule.form in ("callable", "package") and space is not None and id(space.get(name)) in ours:
            if ours[id(space[name])] is None:
                space[name] = None
    for rule in rules:
        if rule.form == "all" and namespace.get(rule.attribute) is True and not _value(rule, namespace, {}):
            namespace[rule.attribute] = False
    for closure in closures:
        function = namespace.get(closure.attribute)
        code = function.__code__ if type(function) is FunctionType else None
        cells = {} if code is None else dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if not cells.keys() >= {closure.cell, closure.own, closure.flag, closure.parameters}:
            continue
        captured = id(cells[closure.cell].cell_contents)
        if captured in ours and ours[captured] is not None:
            cells[closure.cell].cell_contents = ours[captured]
        elif captured in ours:
            own = cells[closure.cell].cell_contents = cells[closure.own].cell_contents
            cells[closure.flag].cell_contents = False
            cells[closure.parameters].cell_contents = tuple(inspect.signature(own).parameters)


def loaded(concerns: Callable[[str], bool]) -> Iterator[tuple[str, ModuleType]]:
    """The modules that are there and concerned, by the names that they are imported by; each once."""
    seen = set()
    for name, module in sys.modules.copy().items():
        if concerns(name) and id(module) not in seen and isinstance(patch.namespace(module), dict):
            seen.add(id(module))
            yield name, module


def _space(rule: Holder, namespace: Any) -> dict | None:
    """The dict that the place is a key of; None where the place does not exist."""
    if not isinstance(namespace, dict) or rule.attribute not in namespace:
        return None
    if not rule.entry:
        return namespace
    held = namespace[rule.attribute]
    return held if isinstance(held, dict) else None


def _value(rule: Holder, namespace: Mapping[str, Any], callables: Mapping[str, Callable]) -> Any:
    """What belongs into a place; None where it cannot be had."""
    if rule.form == "all":
        return True if all(namespace.get(name) for name in rule.names) else None
    if rule.form == "package":
        return sys.modules.get(rule.names[0])
    values = tuple(callables.get(name) for name in rule.names)
    if None in values:
        return None
    return values if rule.form == "tuple" else values[0]


def _is_empty(rule: Holder, found: Any, put: Any) -> bool:
    """Whether a place holds nothing; for a tuple, or originals in their order: no walk by identity sees into it."""
    if rule.form == "all":
        return found is False
    if rule.form == "tuple" and type(found) is tuple and len(found) == len(put):
        pairs = zip(found, put, strict=True)
        return all(value is None or value is getattr(filling, "__wrapped__", None) for value, filling in pairs)
    return found is None or found is _NOTHING and bool(rule.entry)
