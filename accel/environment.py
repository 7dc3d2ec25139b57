"""What is installed and what a device is, read once. The only reader of importlib.metadata and torch.cuda.

Ground floor: imports torch and `accel.errors`. Nothing here imports CUTLASS or an upstream.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import threading
from dataclasses import dataclass, field

import torch

from accel.errors import StatusWord
from accel.tracing import constant

# compute capability -> the name the compiler takes; the "a" targets unlock an architecture's own instructions
ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (11, 0): "sm_110a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
_OFF = ("", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What admission and launch need to know of a device.

    `backend` is "cute", "cpu" or None; `detail` says why it is None; `arch` is the compiler's name of the GPU;
    `sm_count` is its number of multiprocessors; `disabled` and `trap` are ACCEL_DISABLE and ACCEL_TRAP; `status` is the
    word in which its kernels report bad device data; `plans` holds what ops have prepared for it.
    """

    device: torch.device
    backend: str | None
    arch: str | None
    detail: str
    sm_count: int
    disabled: bool
    trap: bool
    status: StatusWord
    plans: dict = field(default_factory=dict, compare=False, repr=False)


_facts: dict[torch.device, DeviceFacts] = {}
_lock = threading.Lock()


@constant
def facts(device: torch.device) -> DeviceFacts:
    """The facts of a device; a dict hit after the first call, and a constant of a compiled graph."""
    found = _facts.get(device)
    if found is None:
        with _lock:
            found = _facts.setdefault(device, _probe(device))
    return found


def check() -> None:
    """Wait for the GPUs that `accel` has used, and raise the device error that an earlier call left, if any."""
    for found in tuple(_facts.values()):
        if found.device.type == "cuda":
            torch.cuda.synchronize(found.device)
        found.status.raise_pending()


def forget() -> None:
    """Drop what was read, so that the next call reads it again (tests; a changed ACCEL_DISABLE)."""
    with _lock:
        _facts.clear()
    distribution_version.cache_clear()


@functools.cache
def distribution_version(name: str) -> str | None:
    """The installed version of a distribution, None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() not in _OFF


def _probe(device: torch.device) -> DeviceFacts:
    def answer(backend, arch, detail, sm_count=0):
        word = StatusWord(device)
        return DeviceFacts(device, backend, arch, detail, sm_count, _flag("ACCEL_DISABLE"), _flag("ACCEL_TRAP"), word)

    if device.type == "cpu":
        return answer("cpu", None, "torch on the CPU")
    if device.type != "cuda" or torch.version.hip is not None:
        return answer(None, None, f"no backend for {device.type} devices")
    properties = torch.cuda.get_device_properties(device)
    arch = ARCHITECTURES.get((properties.major, properties.minor))
    if arch is None:
        found = f"{properties.name} is sm_{properties.major}{properties.minor}"
        return answer(None, None, f"{found}; known are {', '.join(ARCHITECTURES.values())}")
    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            return answer(None, arch, f"{package} is not installed")
    return answer("cute", arch, properties.name, properties.multi_processor_count)
