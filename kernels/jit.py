"""From a specification to its compiled function: this process's memory, then the disk, then the compiler.

A specification is a NamedTuple of everything that a kernel is specialised for, and nothing else: no tensor, no B, T, N.
It is the compile key as it stands. Its kernel is in the module of the same name under `accel.kernels.device`, which
imports the compiler; `get` is the only way there, so a kernel that the disk holds costs no such import. The function
takes torch tensors by position through TVM-FFI, switches to their device and launches on its current torch stream.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

from accel.kernels import cache, capture

_functions: dict[Any, Callable] = {}
_lock = threading.Lock()
_compilations = 0


def compilations() -> int:
    """How many kernels this process has compiled; those that came from the disk do not count."""
    return _compilations


def specifications() -> list[Any]:
    """Those whose functions this process holds."""
    return list(_functions)


def get(spec: Any) -> Callable:
    """The function of a specification; it is made once, whichever thread comes first.

    Until it has been called it is a `capture.FirstCall`, so that a CUDA graph may be captured around its first call.
    """
    function = _functions.get(spec)
    if function is None:
        with _lock, capture.relaxed():
            function = _functions.get(spec)
            if function is None:
                made = cache.get(spec, _compile)
                function = _functions[spec] = capture.FirstCall(made, functools.partial(_functions.__setitem__, spec))
    return function


def body(spec: Any) -> Any:
    """The module with the kernel of a specification; importing it imports the compiler."""
    return importlib.import_module(f"{__package__}.device.{type(spec).__module__.rpartition('.')[2]}")


def _compile(spec: Any) -> Any:
    global _compilations
    _compilations += 1
    return body(spec).build(spec)
