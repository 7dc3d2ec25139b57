"""The library's exceptions, and the status word through which kernels report bad device data.

Ground floor. A kernel that meets a bad slot or bad `cu_seqlens` writes one 64-bit word into pinned host memory; the
host looks at it at the next call, so nothing synchronises and the CUDA context survives.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

from accel.tracing import dispatch_modes


class AccelError(RuntimeError):
    """Base of every error that only `accel` raises."""


class PackedMetadataError(AccelError, ValueError):
    """`cu_seqlens` of an earlier call on this device was malformed; the outputs it touched are NaN."""


class StateIndexError(AccelError, IndexError):
    """`conv_state_indices` of an earlier call on this device named a bad slot; the rows it touched are undefined."""


# A word is code << 60 | row << 32 | value: one store, so that a reader never sees half of it. 0 means no error.
SLOT_OUT_OF_RANGE, SLOT_USED_TWICE = 1, 2
CU_SEQLENS_FIRST, CU_SEQLENS_DECREASING, CU_SEQLENS_LAST = 3, 4, 5

_MEANING = {
    SLOT_OUT_OF_RANGE: (StateIndexError, "conv_state_indices[{row}] = {value} is not a slot of conv_state"),
    SLOT_USED_TWICE: (StateIndexError, "conv_state_indices[{row}] = {value} names a slot that another row uses too"),
    CU_SEQLENS_FIRST: (PackedMetadataError, "cu_seqlens[{row}] = {value}: expected cu_seqlens to start with 0"),
    CU_SEQLENS_DECREASING: (PackedMetadataError, "cu_seqlens[{row}] = {value} is smaller than the entry before it"),
    CU_SEQLENS_LAST: (PackedMetadataError, "cu_seqlens[{row}] = {value}: expected it to end with the token count"),
}


def pack(code: int, row: int, value: int) -> int:
    """One status word; `row` is clamped to 28 bits, `value` keeps its low 32 bits."""
    return code << 60 | min(row, (1 << 28) - 1) << 32 | value & 0xFFFFFFFF


class StatusWord:
    """Two words of one device, the first for slots and the second for `cu_seqlens`, polled in about 0.1 us."""

    def __init__(self, device: torch.device):
        self.device = device
        # the first call on a device may be one that a fake-tensor mode traces; looking for modes costs imports, though
        looking = dispatch_modes() or torch._ops._len_torch_dispatch_stack_pre_dispatch()
        with _disable_current_modes() if looking else nullcontext():
            self._words = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.address = self._words.data_ptr()
        self.view = (ctypes.c_int64 * 2).from_address(self.address)
        self._lock = threading.Lock()

    def raise_pending(self) -> None:
        """Raise the error that an earlier call left, once, in one of the threads that come by."""
        view = self.view
        if view[0] or view[1]:
            with self._lock:
                index = 0 if view[0] else 1
                word, view[index] = view[index], 0
            if word:  # else another thread has it
                raise _error(word, self.device)


def _error(word: int, device: torch.device) -> AccelError:
    kind, text = _MEANING[word >> 60]
    value = (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
    message = text.format(row=word >> 32 & 0xFFFFFFF, value=value)
    return kind(f"{message} (an earlier call on {device})")
