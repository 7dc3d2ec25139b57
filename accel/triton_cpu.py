"""A stand-in Triton driver: upstream Triton kernels run on a machine without a GPU, in Triton's interpreter.

Ground: imports no other part of accel. The surprise: TRITON_INTERPRET=1 must be set before Triton is imported, because
`triton.jit` decides at decoration time. Importing this module imports Triton, so only the demo and the tests do it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver, interpreter


class HostDriver(DriverBase):
    """What Triton and others ask a driver, answered for the host. It compiles nothing; the interpreter never asks."""

    # No shared memory and one processor: what a library sizes by them comes out at its smallest.
    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": 0, "multiprocessor_count": 1})

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(f"the host driver compiles nothing, so {ty!r} has no C++ type")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self):
        return torch.cpu

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(0)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        return first_wins


def first_wins(kernel_call: Callable[[], object], *, quantiles: Sequence[float] = (0.5,), **_: object) -> list[float]:
    """One time for every configuration, nothing run: the autotuner takes the first one, every time.

    Interpreted time says nothing about a configuration; a search by it would cost seconds a shape and make results
    depend on the machine's load.
    """
    return [0.0] * len(quantiles)


def install() -> bool:
    """Make the host driver Triton's active one, unless a real device has its own. True when the stand-in is active."""
    try:
        return isinstance(driver.active, HostDriver)
    except RuntimeError:  # Triton's word for "no active driver"
        pass
    if not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "no GPU here, so Triton kernels can only be interpreted: set TRITON_INTERPRET=1 before importing triton "
            f"(found {os.environ.get('TRITON_INTERPRET')!r})"
        )
    driver.set_active(HostDriver())
    _index_by_item()
    if not hasattr(torch.cpu, "device"):  # FLA before 0.4.2 enters this context, as it does torch.cuda.device
        torch.cpu.device = nullcontext
    return True


def _index_by_item() -> None:
    """Let a loop's bound be a computed scalar: NumPy 2.4 makes no int of the interpreter's one-element array."""
    patch = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = with_index
