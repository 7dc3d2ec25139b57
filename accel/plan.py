"""What switching a target on would mean, found out completely before the first reference changes.

A plan has the target's own rows and those of the targets that it needs: installed, version, import, signatures, nobody
else's patch. The one surprise: a wrapper is made once per original and kept, also after a restore, which makes it dead;
the next plan has the same one, so that a reference which no walk can reach, in a closure or in somebody's wrapper, does
the right thing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

from packaging.version import Version

from accel import dispatch, environment, holders, matrix, patch
from accel.adapters import ADAPTERS
from accel.matrix import MatrixError
from accel.standin import StandIn, vacant
from accel.tables import Closure, Holder, Parameters, PatchPoint, Target, VersionRange, look_up, one_of

log = logging.getLogger("accel")

_made: list[patch.Swap] = []  # every swap so far, also the restored ones
_vacant: dict[tuple[str, str], patch.Swap] = {}  # the replacements of what is nowhere installed, by target and callable
_standins: dict[str, StandIn] = {}


class Refused(Exception):
    """Why a target cannot be switched on; `absent`: what is installed, if anything, is as good as not there."""

    def __init__(self, reason: str, absent: bool = False):
        super().__init__(reason)
        self.absent = absent


class Plan:
    """A target that can be switched on.

    `swaps`: callables to exchange by identity; `vacant`: those that are nowhere installed, whose replacements only fill
    places; `rows`: the rows that count, by target; `named`: the replacements of the callables that have owners.
    """

    def __init__(self, target: str, strict: bool | None):
        self.target = target
        self.strict = strict
        self.swaps: list[patch.Swap] = []
        self.vacant: list[patch.Swap] = []
        self.standins: list[StandIn] = []
        self.rows: dict[str, VersionRange] = {}
        self.named: dict[str, Callable] = {}
        self.notes: list[str] = []

    @property
    def holders(self) -> list[Holder]:
        return [holder for row in self.rows.values() for holder in row.holders]

    def holders_in(self, name: str) -> list[Holder]:
        return [holder for holder in self.holders if holder.owns(name)]

    @property
    def closures(self) -> list[Closure]:
        return [closure for row in self.rows.values() for closure in row.closures]

    @property
    def patterns(self) -> list[tuple[str, PatchPoint]]:
        return [(name, point) for name, row in self.rows.items() for point in row.callables if point.is_pattern]

    @property
    def ours(self) -> dict[int, Callable | None]:
        return what_is_ours(self.swaps, self.vacant, self.standins)

    @property
    def has_places(self) -> bool:
        """Whether modules that are imported later have to be looked at."""
        return bool(self.holders or self.patterns or self.closures)

    @functools.cached_property
    def concerns(self) -> Callable[[str], bool]:
        """Whether there is something to do in a module of this name, now or once it is imported."""
        return one_of(place.module for place in (*self.holders, *self.closures, *(point for _, point in self.patterns)))

    def find_in(self, name: str, module: ModuleType) -> list[patch.Swap]:
        """The swaps of the callables that a module matching a pattern defines; they belong to the plan from now on."""
        found, other = {}, {}
        for target, point in self.patterns:
            function = patch.namespace(module).get(point.attribute)
            if not point.owns(name) or point.attribute in found:
                continue
            known = next((swap for swap in _made if function is swap.replacement), None)
            function = known.original if known else function
            if type(function) is not FunctionType or function.__module__ != name:
                continue  # a name that was imported, None, or a kernel object
            if _difference(point, function):
                other[point.attribute] = (point, function)
                continue
            try:
                found[point.attribute] = _swap(target, point, function, self.strict)
            except Refused as reason:
                log.warning("%s: %s", name, reason)
        for attribute, (point, function) in other.items():
            if attribute not in found:
                log.warning("%s is left alone: %s", name, _difference(point, function))
        self.swaps += [swap for swap in found.values() if swap not in self.swaps]
        return list(found.values())

    def callables_in(self, name: str) -> dict[str, Callable]:
        """The replacements that places in a module of this name are filled with: its own ones first."""
        own = [swap for swap in self.swaps if getattr(swap.original, "__module__", None) == name]
        return self.named | {swap.replacement.__accel__.callable: swap.replacement for swap in own}


def what_is_ours(
    swaps: Iterable[patch.Swap], vacant: Iterable[patch.Swap], standins: Iterable[StandIn]
) -> dict[int, Callable | None]:
    """Replacements and stand-in packages, by identity, each with its original; None where nothing was replaced."""
    ours = {id(swap.replacement): swap.original for swap in swaps}
    return ours | {id(made): None for made in (*(s.replacement for s in vacant), *(s.package for s in standins))}


def preload(names: Iterable[str]) -> dict[str, ModuleType | Exception]:
    """Import the owners of these targets and of what they need, or find out why that fails.

    Apart from the plans, and before the lock that those are made under: another thread may hold an import lock and
    wait for it.
    """
    loaded: dict[str, ModuleType | Exception] = {}
    waiting, done = list(names), set()
    table = matrix.load()
    while waiting:
        name = waiting.pop()
        target = table.targets.get(name)
        if name in done or target is None:
            continue
        done.add(name)
        version = environment.distribution_version(target.distribution)
        row = (version and target.range_of(Version(version))) or target.ranges[-1]
        if version or target.standin:
            waiting += row.needs
        for module in [point.module for point in row.callables if version and not point.is_pattern]:
            if module not in loaded:
                try:
                    loaded[module] = importlib.import_module(module)
                except Exception as error:  # an upstream may fail in any way while it is imported
                    loaded[module] = error
    return loaded


def make(name: str, strict: bool | None, loaded: dict[str, ModuleType | Exception], stand_in: bool = True) -> Plan:
    """The plan of a target, nothing changed yet; Refused says why there is none.

    `stand_in`: whether the target may stand in for its package where that is absent.
    """
    plan = Plan(name, strict)
    _add(plan, name, loaded, stand_in)
    for found, module in holders.loaded(one_of(point.module for _, point in plan.patterns)):
        plan.find_in(found, module)
    return plan


def _add(plan: Plan, name: str, loaded: dict[str, ModuleType | Exception], stand_in: bool) -> None:
    table = matrix.load()
    if name in table.planned:
        raise Refused("not available in this version of accel")
    target = table.targets[name]
    try:
        if name in _standins and _standins[name].is_installed:
            raise Refused(f"{target.distribution} is stood in for", absent=True)
        row, found = _installed(plan, target, loaded)
    except Refused as reason:
        if not reason.absent or target.standin is None or not stand_in:
            raise
        row, found = target.ranges[-1], {}
        lack = str(reason)
        if reason.__cause__ is not None:
            plan.notes.append(f"{reason}; accel stands in for it")
    else:
        lack = f"the installed {target.distribution} does not have it"
    plan.rows[name] = row
    swaps = [_swap(name, point, function, plan.strict) for point, function in found.items()]
    plan.swaps += swaps
    plan.named |= {swap.replacement.__accel__.callable: swap.replacement for swap in swaps}
    if target.standin is not None:
        have = {point.attribute for point in found}
        missing = [point for point in target.ranges[-1].callables if point.attribute not in have]
        made = [_stand_in_swap(name, point, lack) for point in missing]
        plan.vacant += made
        plan.named |= {point.attribute: swap.replacement for point, swap in zip(missing, made, strict=True)}
        if not found:
            if name not in _standins:
                _standins[name] = StandIn(target.standin, missing, [swap.replacement for swap in made])
            plan.standins.append(_standins[name])
    for needed in row.needs:
        if needed not in plan.rows:
            try:
                _add(plan, needed, loaded, True)
            except Refused as reason:
                if not reason.absent:
                    raise Refused(f"it needs {needed}: {reason}") from reason.__cause__
                if environment.distribution_version(table.targets[needed].distribution) is not None:
                    plan.notes.append(f"{needed} is left out: {reason}")


def _installed(
    plan: Plan, target: Target, loaded: dict[str, ModuleType | Exception]
) -> tuple[VersionRange, dict[PatchPoint, Any]]:
    """The row of the installed version, and what its owners hold."""
    version = environment.distribution_version(target.distribution)
    if version is None:
        _refuse_nameless(target)
        raise Refused(f"{target.distribution} is not installed", absent=True)
    row = target.range_of(Version(version))
    installed = f"{target.distribution} {version}"
    if row is None:
        installed += f", outside the proven versions {target.proven[0]} to {target.proven[-1]},"
    points = [point for point in (row or target.ranges[-1]).callables if not point.is_pattern]
    if row is None and not points:
        raise Refused(f"{installed} has no signatures that could be compared", absent=True)
    found = {point: _find(point, installed, loaded, target.standin is not None) for point in points}
    different = [text for point, function in found.items() if (text := _difference(point, function))]
    if different:
        raise Refused(f"{installed} has other signatures: {'; '.join(different)}")
    if row is None:
        plan.notes.append(f"{installed} has the signatures of the newest proven version, and is served like it")
    return row or target.ranges[-1], found


def _refuse_nameless(target: Target) -> None:
    """Refuse to stand in for a package that can be imported although no distribution says its version."""
    if target.standin is None:
        return
    name = target.ranges[-1].callables[0].module.partition(".")[0]
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        raise Refused(f"{name} can be imported, but no distribution {target.distribution} says its version")


def _find(point: PatchPoint, installed: str, loaded: dict[str, ModuleType | Exception], may_lack: bool) -> Any:
    module = loaded[point.module]
    if isinstance(module, Exception):
        reason = f"{installed}: importing {point.module} fails with {type(module).__name__}: {module}"
        # a package built for another torch is as good as none
        raise Refused(reason, absent=may_lack and isinstance(module, ImportError | OSError)) from module
    try:
        return look_up(module, point.attribute)
    except KeyError:
        raise Refused(f"{installed}: {point.module} has no {point.attribute}") from None


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
            raise Refused(f"{point.attribute} was replaced by {link} before accel came; strict=False swaps it anyway")
    if swap is None:
        swap = _wrap(target, point, original)
        _made.append(swap)
    return swap


def _stand_in_swap(target: str, point: PatchPoint, lack: str) -> patch.Swap:
    swap = _vacant.get((target, point.attribute))
    if swap is None:
        function = vacant(point, _adapter(target, point), lack, lambda: swap.replacement.__accel__.live)
        swap = _vacant[target, point.attribute] = _wrap(target, point, function)
    return swap


def _wrap(target: str, point: PatchPoint, original: Callable) -> patch.Swap:
    return patch.Swap(original, dispatch.wrap(_adapter(target, point), target, point.attribute, original))


def _adapter(target: str, point: PatchPoint) -> dispatch.Adapter:
    if point.adapter not in ADAPTERS:
        raise MatrixError(f"targets.{target}: adapter {point.adapter!r} is none of {', '.join(ADAPTERS)}")
    return ADAPTERS[point.adapter]
