"""The one door to the kernels, opened at the first native call on a GPU, and what every operation begins with.

A launcher is imported by the first call that needs it: all of them would cost a first call 10 ms.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from torch import Tensor

from accel.environment import DeviceFacts, facts
from accel.reasons import Decline


@functools.cache
def kernels(name: str) -> ModuleType:
    """A module of `accel.kernels`; the compiler is imported where a kernel is not on the disk."""
    return importlib.import_module(f"accel.kernels.{name}")


def facts_of(x: Tensor) -> DeviceFacts:
    """The facts of x's device; TypeError where x is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a Tensor, got {type(x).__name__}")
    return facts(x.device)


def refuse(name: str, decline: Decline | None) -> None:
    """Raise the error of a failed check."""
    if decline is not None:
        raise decline.error(f"{name}: {decline}")
