"""What is installed and what a device is, read once. The only reader of importlib.metadata and torch.cuda.

Ground floor: imports torch and `accel.errors`. Nothing here imports CUTLASS or an upstream.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

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
            if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return _answer(device, detail="the first call ever, in the capture of a CUDA graph: make one before it")
            found = _facts.setdefault(device, _probe(device))
    return found


def check() -> None:
    """Wait for the GPUs that `accel` has used, and raise the device error that an earlier call left, if any."""
    for found in tuple(_facts.values()):
        if found.backend == "cute":
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


def driver_version() -> str | None:
    """The version of the NVIDIA kernel driver, None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() not in _OFF


def _probe(device: torch.device) -> DeviceFacts:
    if device.type == "cpu":
        return _answer(device, "cpu", detail="torch on the CPU")
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return _answer(device, detail=f"no backend for {device.type} devices")  # a fake tensor may name an absent one
    properties = torch.cuda.get_device_properties(device)
    arch = ARCHITECTURES.get((properties.major, properties.minor))
    if arch is None:
        found = f"{properties.name} is sm_{properties.major}{properties.minor}"
        return _answer(device, detail=f"{found}; known are {', '.join(ARCHITECTURES.values())}")
    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            return _answer(device, arch=arch, detail=f"{package} is not installed")
    return _answer(device, "cute", arch, properties.name, properties.multi_processor_count)


def _answer(
    device: torch.device, backend: str | None = None, arch: str | None = None, detail: str = "", sm_count: int = 0
) -> DeviceFacts:
    word = StatusWord(device if backend else torch.device("cpu"))  # nothing is pinned for a device that is not served
    return DeviceFacts(device, backend, arch, detail, sm_count, _flag("ACCEL_DISABLE"), _flag("ACCEL_TRAP"), word)
