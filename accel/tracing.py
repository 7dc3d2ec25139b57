"""Who sees a call: eager code, or torch's own machinery, which has to see one registered operator. Ground floor.

torch.compile and torch.export, dispatch and function modes, fake and functional tensors go by the operators that
`accel.ops.registered` registers; a launch from Python would pass them by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_tracing as is_jit_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)
TRACERS = (FakeTensor, FunctionalTensor)  # tensors without data, which stand for plain ones


def abstract(x: Tensor) -> bool:
    """Whether x stands for a tensor: it has metadata and neither data nor an address."""
    return is_compiling() or type(x) in TRACERS


def kinds_like(x: Tensor) -> tuple[type, ...]:
    """The types that the tensors of a call of x may have."""
    return (*PLAIN, *TRACERS) if abstract(x) else PLAIN


def observed(x: Tensor) -> bool:
    """Whether a call of x goes to the registered operator: x is abstract, a mode is on, or torch.jit.trace listens.

    A default device is a function mode too, but one that changes factories and looks at nothing.
    """
    if is_compiling() or dispatch_modes() or type(x) in TRACERS or is_jit_tracing():
        return True
    return function_modes() > 0 and _looking()


def _looking() -> bool:
    modes = (torch._C._get_function_stack_at(index) for index in range(function_modes()))
    return any(type(mode).__name__ != "DeviceContext" for mode in modes)


def in_transform() -> bool:
    """Whether this thread is inside a torch.func transform or forward-mode differentiation."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` while torch.compile traces, and take its answer as a constant of the graph.

    This is torch.compiler.assume_constant_result, which would import torch._dynamo.
    """
    function._dynamo_marked_constant = True
    return function
