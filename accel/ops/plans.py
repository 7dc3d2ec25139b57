"""Plans that are kept: a call whose metadata were admitted before is not asked again.

A decode step and a training step repeat the same metadata thousands of times, so what was found for a call is kept
behind a guard that compares the metadata, dispatch keys included, in C++. What the guard does not see is looked at in
every call: addresses, forward-mode differentiation, who observes, and what is part of the kind.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from accel.tracing import dispatch_modes, function_modes, observed

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # private to torch; without it every call asks admission
    TensorGuards = None

MAX_PLANS = 32  # kept of one kind of call and device


def find(plans: dict, kind: Hashable, tensors: tuple[Tensor, ...]) -> Any:
    """The plan kept for such a call, None where there is none. The first of `tensors` is x."""
    try:
        known = plans.get(kind)
    except TypeError:  # an odd activation or flag: admission says what is wrong
        return None
    for guards, plan in known or ():
        if fits(guards, tensors):
            return plan
    return None


def fits(guards: Any, tensors: tuple[Tensor, ...]) -> bool:
    """Whether a call of these tensors, x first, is one of those that the guards were made for, and nobody observes."""
    # guards look past those dispatch modes that ask torch.compile to do so, selective checkpointing's among them
    if forward_ad._current_level >= 0 or dispatch_modes() or function_modes() and observed(tensors[0]):
        return False
    try:
        if not guards.check(*tensors):
            return False
    except TypeError:  # not a tensor: admission says which
        return False
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return not bits & 15  # as they were when it was kept: the widest accesses are allowed


def guards_of(tensors: tuple[Tensor, ...]) -> Any:
    """Guards for the next call of the same metadata; None where none can be made or these tensors are not aligned."""
    if TensorGuards is None or any(tensor.data_ptr() & 15 for tensor in tensors):
        return None
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def keep(plans: dict, kind: Hashable, tensors: tuple[Tensor, ...], plan: Any) -> None:
    """Keep the plan of an admitted call for the next one of the same kind and metadata."""
    guards = guards_of(tensors)
    if guards is None:
        return
    # the newest first, and only so many: a server with more shapes than that asks admission now and then
    plans[kind] = [(guards, plan), *plans.get(kind, ())][:MAX_PLANS]


def bare(function: Any) -> Any:
    """A compiled function without what its first call needs (kernels.capture), which is made right after this."""
    return getattr(function, "function", function)
