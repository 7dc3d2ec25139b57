"""First calls while a CUDA graph is captured: compiling and loading code must not end the capture.

The driver lets a capturing thread load no module, for that is "potentially unsafe", unless the thread says that it
means it. What is loaded is not part of the graph; the launch is. Later calls come by here no more. Imports ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _exchange() -> Callable[[Any], int] | None:
    """The driver's cuThreadExchangeStreamCaptureMode; None where there is no driver, and so no capture."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """This thread may load code inside, whatever it or another thread captures."""
    exchange = _exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # `mode` then holds the one before
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


class FirstCall:
    """A compiled function until its first call, which loads its code onto the GPU; `done` is told afterwards."""

    def __init__(self, function: Callable, done: Callable[[Callable], None]):
        self.function = function
        self._done = done

    def __call__(self, *args: Any) -> Any:
        with relaxed():
            result = self.function(*args)
        self._done(self.function)
        return result
