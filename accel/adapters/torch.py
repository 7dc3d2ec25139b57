"""torch: `forward` of a causal `nn.Conv1d`, whose class says what its parameters mean."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from accel.call import DenseCall
from accel.dispatch import Adapter
from accel.ops.dense import call_of
from accel.reasons import Decline, Reason

SERVES = "_accel_serves"  # of a module that was looked at: the class whose forward is native for it


def forward_of(owner: type) -> Adapter:
    """The adapter of `owner.forward(module, x)`, whatever it calls x."""

    def read(module: nn.Conv1d, *args: Any, **kwargs: Any) -> DenseCall | Decline:
        if module.__dict__.get(SERVES) is not owner:
            expected = "a module of the model that was accelerated, which states that it is causal"
            return Decline(Reason.UNSUPPORTED_ARGUMENT, "self", expected, f"another {type(module).__name__}")
        (x,) = (*args, *kwargs.values())
        return call_of(x, module.weight, module.bias, module.dilation[0], module.groups, None)

    return Adapter(DenseCall, read, give)


def give(y: Tensor, call: DenseCall) -> Tensor:
    return y
