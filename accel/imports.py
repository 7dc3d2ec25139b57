"""Calls back after modules of certain names were imported. Knows nothing of convolutions; imports nothing of `accel`.

The hook is a finder that lets the others find and puts a loader around theirs, which takes itself away before the
module runs: the module's `__spec__` and `__loader__` are what they would be without it. The one surprise: the callback
runs while the module's import lock is held, so nobody who holds a lock that the callback takes may import anything.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger("accel")


class Hook:
    """While installed, calls `served(name, module)` after each import of a module whose name `concerns` wants."""

    def __init__(self, concerns: Callable[[str], bool], served: Callable[[str, ModuleType], None]):
        self.concerns = concerns
        self.served = served
        self._asking = threading.local()

    def install(self) -> None:
        if not any(finder is self for finder in sys.meta_path):
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Leave sys.meta_path; the other finders, and their order, stay."""
        for index, finder in enumerate(sys.meta_path):
            if finder is self:
                del sys.meta_path[index]
                return

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.concerns(name) or getattr(self._asking, "name", None) == name:
            return None  # asked again by a finder that asks all others, as this one does
        self._asking.name = name
        try:
            spec = self._find(name, path, target)
        finally:
            self._asking.name = None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec

    def _find(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None


class _Loader:
    """A module's own loader, and the hook's callback after it."""

    def __init__(self, inner: Any, hook: Hook):
        self._inner = inner
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        try:
            name = module.__spec__.name
            self._hook.served(name, sys.modules.get(name, module))
        except Exception:  # an import must not fail because of us
            log.exception("%s was imported, and is not accelerated", module.__name__)
