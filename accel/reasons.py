"""Why a call is not native: the closed list of reasons, and one failed check. Ground floor."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Reason(str, enum.Enum):
    """Why a call is not native; a closed list. `meaning`: what the call has; `fix`: what would make it native."""

    meaning: str
    fix: str

    DEVICE = (
        "device",
        "a device that no backend serves, or tensors on several devices",
        "put every tensor of the call on one NVIDIA GPU, or on the CPU",
    )
    ARCH = (
        "arch",
        "a GPU that the kernels are not compiled for, or no compiler installed",
        "`python -m accel doctor` says which GPUs are served and which package is missing",
    )
    DTYPE = (
        "dtype",
        "a dtype, or a mix of dtypes, that the kernels do not take",
        "x and its states in one of bfloat16, float16, float32; weight and bias like x or in float32",
    )
    SHAPE = ("shape", "shapes that do not fit each other", "give the argument the shape that the check wanted")
    WIDTH = ("width", "a filter width outside the kernels' range", "nothing but another width")
    LAYOUT = (
        "layout",
        "strides that no kernel reads in place, memory that overlaps, or dense rows that are no whole vectors",
        "`.contiguous()` before the call, an output in memory of its own, a T that 8 divides",
    )
    ACTIVATION = (
        "activation",
        "an activation other than None, silu, swish",
        "activation None, and the other function after the call",
    )
    AUTOGRAD = (
        "autograd",
        "a gradient to compute where the operation is for inference only",
        "decode under `torch.no_grad()` or `torch.inference_mode()`",
    )
    TENSOR_SUBCLASS = (
        "tensor-subclass",
        "a tensor subclass (a DTensor for example), a nested or a sparse tensor",
        "a plain tensor: `DTensor.to_local()` for example",
    )
    FUNCTORCH = ("functorch", "a `torch.func` transform around it", "`loss.backward()` or `torch.autograd.grad`")
    CONTEXT_PARALLEL = (
        "context-parallel",
        'a context-parallel path that calls nothing that is swapped (FLA 0.6.0 with `backend="cuda"`)',
        "nothing: this path is the upstream's",
    )
    UNSUPPORTED_ARGUMENT = (
        "unsupported-argument",
        "an argument that this version does not serve",
        "leave the argument out",
    )
    DISABLED = ("disabled", "`ACCEL_DISABLE=1` in the environment", "unset `ACCEL_DISABLE`")

    def __new__(cls, value: str, meaning: str, fix: str) -> Reason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning, member.fix = meaning, fix
        return member

    def __str__(self) -> str:
        return self.value


class Decline(NamedTuple):
    """One failed check: its reason, the argument, what was expected, what came, and the error an op raises for it."""

    reason: Reason
    argument: str
    expected: str
    found: str
    error: type[Exception] = ValueError

    def __str__(self) -> str:
        return f"{self.argument}: expected {self.expected}, got {self.found}"
