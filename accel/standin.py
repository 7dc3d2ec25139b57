"""A package that is not installed, stood in for: modules that import like it, whose callables accel serves.

Knows no upstream by name. The one surprise: under the wrapper of such a callable there is no original, so a declined
call raises what declined it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from accel import tables
from accel.dispatch import Adapter, declines


def vacant(point: tables.PatchPoint, adapter: Adapter, lack: str, is_on: Callable[[], bool]) -> Callable:
    """What is under the wrapper of a callable that is nowhere installed; `lack` says so, `is_on` whether accel serves.

    It has the callable's name and signature, and raises what declined the call, with the error that an op would raise
    for it; ImportError where the wrapper was restored.
    """

    def function(*args: Any, **kwargs: Any):
        if not is_on():
            raise ImportError(f"{point.attribute}: {lack}, and accel, which served it, is switched off")
        declined = declines(adapter, args, kwargs)
        what = "; ".join(map(str, declined))
        raise declined[0].error(f"{point.attribute}: {what} ({lack}, so accel alone serves it)")

    function.__name__ = function.__qualname__ = point.attribute
    function.__module__ = point.module
    function.__doc__ = f"`{point.attribute}` of {point.module}, served by accel: {lack}."
    function.__signature__ = inspect.signature(adapter.read).replace(return_annotation=inspect.Signature.empty)
    return function


class StandIn:
    """The modules of one package, made once and put into sys.modules while a target needs them."""

    def __init__(self, table: tables.StandIn, points: Sequence[tables.PatchPoint], wrappers: Sequence[Callable]):
        self.name = points[0].module.partition(".")[0]
        self.modules = {name: _module(name, name == self.name, table) for name in (self.name, *_submodules(points))}
        for point, wrapper in zip(points, wrappers, strict=True):
            vars(self.modules[point.module])[point.attribute] = wrapper
            if point.attribute in table.exports:
                vars(self.modules[self.name])[point.attribute] = wrapper
        for name in self.modules.keys() - {self.name}:
            vars(self.modules[self.name])[name.rpartition(".")[2]] = self.modules[name]
        self._hidden: dict[str, ModuleType] = {}  # what a package that cannot be imported has left behind

    @property
    def package(self) -> ModuleType:
        return self.modules[self.name]

    @property
    def is_installed(self) -> bool:
        return sys.modules.get(self.name) is self.package

    def install(self) -> None:
        for name, module in self.modules.items():
            if sys.modules.get(name) is not module:
                if name in sys.modules:
                    self._hidden[name] = sys.modules[name]
                sys.modules[name] = module

    def remove(self) -> None:
        """Take out what is still ours; what somebody else has put there since stays."""
        for name, module in self.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
                if name in self._hidden:
                    sys.modules[name] = self._hidden.pop(name)


def _submodules(points: Sequence[tables.PatchPoint]) -> list[str]:
    return list(dict.fromkeys(point.module for point in points if "." in point.module))


def _module(name: str, is_package: bool, table: tables.StandIn) -> ModuleType:
    module = ModuleType(name, f"{name}, stood in for by accel because the package cannot be imported.")
    # find_spec wants one; without a loader nothing can be reloaded
    module.__spec__ = ModuleSpec(name, None, origin="accel", is_package=is_package)
    module.__package__ = name if is_package else name.rpartition(".")[0]
    module.__accel__ = True
    if is_package:
        module.__path__ = []
        module.__version__ = str(table.version)
    return module
