"""Where the elements of tensors lie, from their metadata alone. Ground floor: torch only."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from accel.tracing import abstract


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may share memory."""
    axes = [(stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
    for axis, (stride, _) in enumerate(axes):
        # not sorted, because torch.compile cannot sort symbolic strides
        inner = [(extent - 1) * step for other, (step, extent) in enumerate(axes) if other != axis and step <= stride]
        if stride <= sum(inner):
            return True
    return False


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory: by byte ranges, for one address may be wrapped in two storages."""
    if abstract(a) or a.numel() == 0 or b.numel() == 0:
        return False  # without data there are no addresses: the registered operator asks again when it runs
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def shared(output: Tensor, inputs: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """What keeps an output from having memory of its own: its strides, or the first input that it overlaps."""
    if overlaps_itself(output):
        return f"strides {output.stride()}"
    for name, tensor in inputs:
        if tensor is not None and overlap(output, tensor):
            return f"memory shared with {name}"
    return None


def _end(tensor: Tensor) -> int:
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
