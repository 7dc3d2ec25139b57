"""Why a call is not native: the closed list of reasons, and one failed check. Ground floor."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Reason(str, enum.Enum):
    """Why a call is not native; a closed list, one line each."""

    DEVICE = "device"  # no backend for the device, or tensors on several devices
    ARCH = "arch"  # a GPU that the kernels are not compiled for, or the compiler is not installed
    DTYPE = "dtype"  # a dtype, or a mix of dtypes, that the kernels do not take
    SHAPE = "shape"  # shapes that do not fit each other
    WIDTH = "width"  # a filter width outside the kernels' range
    LAYOUT = "layout"  # strides that no kernel reads in place, or memory that overlaps
    ACTIVATION = "activation"  # an activation other than None, silu, swish
    AUTOGRAD = "autograd"  # gradients are asked for where the operation is for inference only
    TENSOR_SUBCLASS = "tensor-subclass"  # DTensor and other subclasses, a nested or sparse tensor
    FUNCTORCH = "functorch"  # inside torch.func transforms
    CONTEXT_PARALLEL = "context-parallel"  # a context-parallel path that calls nothing that is swapped
    UNSUPPORTED_ARGUMENT = "unsupported-argument"  # an argument that this version does not serve
    DISABLED = "disabled"  # ACCEL_DISABLE=1

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
