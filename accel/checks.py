"""The check that every kind of call has in common: plain tensors on one device that a backend serves. Metadata only."""

from __future__ import annotations

import torch
from torch import Tensor

from accel.environment import DeviceFacts
from accel.reasons import Decline, Reason
from accel.tracing import abstract, in_transform, kinds_like


def device_checks(
    x: Tensor, names: tuple[str, ...], tensors: tuple[Tensor | None, ...], facts: DeviceFacts
) -> tuple[list[Decline], bool]:
    """Failed checks of every tensor alone, and whether all are plain, so that their metadata can be asked for."""
    failed, plain = [], True  # no generator: torch.compile takes the result of a `yield from` for None
    if facts.disabled:
        failed.append(Decline(Reason.DISABLED, "ACCEL_DISABLE", "unset", "1", NotImplementedError))
    if in_transform():
        failed.append(Decline(Reason.FUNCTORCH, "x", "no torch.func transform", "a transform", NotImplementedError))
    device = facts.device
    traced, kinds = abstract(x), kinds_like(x)
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            if name == "weight":
                plain = False
                failed.append(Decline(Reason.UNSUPPORTED_ARGUMENT, name, "a tensor", "None", TypeError))
        else:
            if type(tensor) not in kinds or tensor.layout is not torch.strided or tensor.is_nested:
                plain = False
                found = type(tensor).__name__ if type(tensor) not in kinds else "a sparse or nested one"
                failed.append(Decline(Reason.TENSOR_SUBCLASS, name, "a plain tensor", found, TypeError))
            elif not traced and tensor.is_neg():
                failed.append(Decline(Reason.LAYOUT, name, "memory that holds its values", "a negated view"))
            elif tensor.device != device:
                failed.append(Decline(Reason.DEVICE, name, f"a tensor on {device}", f"one on {tensor.device}"))
    if facts.backend is None:
        reason = Reason.ARCH if device.type == "cuda" else Reason.DEVICE
        failed.append(Decline(reason, "x", "a device that a backend serves", facts.detail, NotImplementedError))
    return failed, plain
