"""FLA's conv callables in one process, as found and as swapped, and which backend FLA chooses for its own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from packaging.version import Version

import accel
from accel import environment, matrix, patch
from accel.tables import PatchPoint, look_up


def importable(*names: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - see why_not
                return f"{name}: {type(error).__name__}: {error}"[:200]
        return None

    return missing


@cache
def points() -> dict[str, PatchPoint]:
    """The conv callables of the installed FLA by name, as the matrix has them; ModuleNotFoundError without one."""
    target = matrix.load().targets["short_conv"]
    version = environment.distribution_version(target.distribution)
    row = target.range_of(Version(version)) if version else None
    if row is None:
        raise ModuleNotFoundError(f"{target.distribution} {version} is not served" if version else "not installed")
    return {point.attribute: point for point in row.callables}


def owner(name: str) -> ModuleType:
    """The module whose globals FLA's own code reads the callable from."""
    return importlib.import_module(points()[name].module)


@cache
def fla_missing() -> str | None:
    try:
        return importable(*(point.module for point in points().values()))()
    except ModuleNotFoundError as error:
        return str(error)


class FlaSwitch:
    """FLA's conv callables as found and as `accelerate_fla` leaves them, exchanged by attribute.

    Both alternate in one process, call by call, at no cost to either: no wrapper stands before the original.
    """

    def __init__(self) -> None:
        functions = {id(fla(name)) for name in points()}
        bound = [(holder, patch.namespace(holder).copy()) for holder in patch.spaces()]
        self.slots = [(holder, name) for holder, held in bound for name in held if id(held[name]) in functions]
        self.found = self.current()
        accel.accelerate_fla(targets="short_conv", verbose=False)
        self.swapped = self.current()

    def current(self) -> list[Any]:
        return [patch.namespace(holder)[name] for holder, name in self.slots]

    def put(self, callables: list[Any]) -> None:
        for (holder, name), function in zip(self.slots, callables, strict=True):
            setattr(holder, name, function)

    @contextmanager
    def original(self) -> Iterator[None]:
        self.put(self.found)
        try:
            yield
        finally:
            self.put(self.swapped)

    def swaps(self, name: str) -> bool:
        """Whether the owner of a callable holds ours now."""
        index = self.slots.index((owner(name), name))
        return self.found[index] is not self.swapped[index]

    def restore_gate(self) -> str:
        """Restores; says whether every slot holds the very object that was found."""
        self.put(self.swapped)
        accel.restore()
        same = all(now is then for now, then in zip(self.current(), self.found, strict=True))
        return "restored: every FLA callable is the object that was found" if same else "NOT RESTORED"


@cache
def fla_switch() -> FlaSwitch:
    return FlaSwitch()


@cache
def accel_fla_missing() -> str | None:
    reason = fla_missing()
    if reason is None:
        try:
            fla_switch()
        except Exception as error:  # noqa: BLE001 - see why_not
            reason = f"accelerate_fla: {type(error).__name__}: {error}"[:200]
    return reason


@contextmanager
def fla_original() -> Iterator[None]:
    """FLA as installed, with the backend it chooses by default."""
    if accel_fla_missing() is not None:
        yield
        return
    with fla_switch().original():
        yield


@contextmanager
def fla_gluon() -> Iterator[None]:
    """FLA 0.6 reads FLA_CONV_GLUON at every dispatched call, so the variable switches inside one process."""
    with fla_original():
        os.environ["FLA_CONV_GLUON"] = "1"
        try:
            yield
        finally:
            del os.environ["FLA_CONV_GLUON"]


def fla(name: str) -> Callable:
    return look_up(owner(name), name)
