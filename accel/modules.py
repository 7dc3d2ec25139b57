"""Target conv1d: causal `nn.Conv1d` modules of a model, served in place. Knows no upstream.

Nothing is guessed. A module is served that is an `nn.Conv1d` of a class with a forward of its own, says `causal = True`
or `is_causal = True`, and computes what it says: a copy of it is tried on a few random tokens first. The one surprise:
its class gets the new forward, so that copies and pickles of a model stay what they are; other instances of the class
go to the original, as every call does that is not native.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from accel import dispatch
from accel.adapters.torch import SERVES, forward_of
from accel.call import DenseCall
from accel.dense_torch import convolve
from accel.nn import CausalConv1d

FLAGS = ("causal", "is_causal")
_TOLERANCE = 0.05  # of the largest output: far above rounding, far below another pad, scale or activation


class _Forward(NamedTuple):
    """The forward of a class, and what stands in for it."""

    original: Callable
    replacement: Callable


_forwards: dict[type, _Forward] = {}  # every class so far, also the restored ones
_served: weakref.WeakSet[nn.Conv1d] = weakref.WeakSet()


def stated(model: nn.Module) -> tuple[list[nn.Conv1d], list[str]]:
    """The modules that state to be causal and are, and the names of those that state it and compute something else."""
    found, wrong = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and any(getattr(module, flag, None) is True for flag in FLAGS):
            if isinstance(module, CausalConv1d):
                continue
            if _owner(module) is not nn.Conv1d and _is_causal(module):
                found.append(module)
            else:
                wrong.append(name or type(module).__name__)
    return found, wrong


def serve(modules: Iterable[nn.Conv1d]) -> None:
    """Give the classes of these modules the native forward, for these modules."""
    for module in modules:
        owner = _owner(module)
        present = vars(owner)["forward"]
        made = _forwards.get(owner)
        if made is None or present is not made.original and present is not made.replacement:
            name = f"{owner.__qualname__}.forward"
            made = _forwards[owner] = _Forward(present, dispatch.wrap(forward_of(owner), "conv1d", name, present))
        made.replacement.__accel__.live = True
        owner.forward = made.replacement
        module.__dict__[SERVES] = owner
        _served.add(module)


def release() -> list[str]:
    """Undo it everywhere; returns the classes whose forward somebody else has changed since, which keep that one."""
    displaced = []
    for owner, made in _forwards.items():
        if not made.replacement.__accel__.live:
            continue
        made.replacement.__accel__.live = False
        if vars(owner)["forward"] is made.replacement:
            owner.forward = made.original
        else:
            displaced.append(f"{owner.__module__}.{owner.__qualname__}.forward")
    for module in list(_served):
        module.__dict__.pop(SERVES, None)
    _served.clear()
    return displaced


def _owner(module: nn.Conv1d) -> type:
    return next(kind for kind in type(module).__mro__ if "forward" in vars(kind))


@torch.no_grad()
def _is_causal(module: nn.Conv1d) -> bool:
    if module.stride != (1,) or module.weight.is_meta:
        return False
    twin = copy.deepcopy(module).eval()  # a forward may write to its module
    generator = torch.Generator().manual_seed(0)
    reach = (module.kernel_size[0] - 1) * module.dilation[0]
    x = torch.randn(1, module.in_channels, reach + 7, generator=generator).to(module.weight)
    try:
        found = twin.forward(x)
    except Exception:  # it wants more than x, say
        return False
    wanted = convolve(DenseCall(x, twin.weight, twin.bias, module.dilation[0], module.groups, None))
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape:
        return False
    return bool((found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())
