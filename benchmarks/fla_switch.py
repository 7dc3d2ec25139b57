"""FLA's conv callables in one process, as found and as swapped, and which backend FLA chooses for its own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

FLA_NAMES = (
    "causal_conv1d",
    "causal_conv1d_fwd",
    "causal_conv1d_bwd",
    "causal_conv1d_update",
    "causal_conv1d_update_states",
)
FLA_MODULES = ("fla.modules.causal_conv1d.ops", "fla.modules.causal_conv1d")


def importable(*names: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - see why_not
                return f"{name}: {type(error).__name__}: {error}"[:200]
        return None

    return missing


class FlaSwitch:
    """FLA's conv callables as found and as `accelerate_fla` leaves them, exchanged by attribute.

    Both alternate in one process, call by call, at no cost to either: no wrapper stands before the original.
    """

    def __init__(self) -> None:
        modules = [importlib.import_module(name) for name in FLA_MODULES]
        self.accel = importlib.import_module("accel")
        self.slots = [(module, name) for module in modules for name in FLA_NAMES]
        self.found = self.current()
        self.accel.accelerate_fla(targets="short_conv", verbose=False)
        self.swapped = self.current()

    def current(self) -> list[Any]:
        return [getattr(module, name) for module, name in self.slots]

    def put(self, callables: list[Any]) -> None:
        for (module, name), function in zip(self.slots, callables, strict=True):
            setattr(module, name, function)

    @contextmanager
    def original(self) -> Iterator[None]:
        self.put(self.found)
        try:
            yield
        finally:
            self.put(self.swapped)

    def swaps(self, name: str) -> bool:
        index = next(i for i, slot in enumerate(self.slots) if slot[1] == name)
        return self.found[index] is not self.swapped[index]

    def restore_gate(self) -> str:
        """Restores; says whether every slot holds the very object that was found."""
        self.put(self.swapped)
        self.accel.restore()
        same = all(now is then for now, then in zip(self.current(), self.found, strict=True))
        return "restored: every FLA callable is the object that was found" if same else "NOT RESTORED"


@cache
def fla_switch() -> FlaSwitch:
    return FlaSwitch()


@cache
def accel_fla_missing() -> str | None:
    reason = importable(*FLA_MODULES)()
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
    return getattr(importlib.import_module(FLA_MODULES[0]), name)
