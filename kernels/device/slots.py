"""Slots of a state pool: which one a row has, and which of them two rows of one call share."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from accel.kernels.device import report

SLOT_OUT_OF_RANGE, SLOT_USED_TWICE = 1, 2  # as accel.errors reads them
BITMAP_SLOTS = 1 << 15  # slots that one pass of the duplicate check covers, in 4 KiB of shared memory


@cute.jit
def slot_of(mSlots: cute.Tensor | None, mState: cute.Tensor | None, row: Int32, pad_slot: Int32):
    """(slot of a row, whether the row is no padding, whether the slot exists); without indices a row has its own."""
    slot, live, known = row, Boolean(True), Boolean(True)
    if const_expr(mSlots is not None):
        slot = mSlots[row]
        live = slot != pad_slot
        known = slot >= 0 and slot < mState.shape[0]
    return slot, live, known


@cute.jit
def check_slots(
    mSlots: cute.Tensor, slot_count: Int32, pad_slot: Int32, status: Int64, threads: cutlass.Constexpr[int]
):
    """Mark every slot in a bitmap, `BITMAP_SLOTS` a pass, and report one marked before; by one block, once a call."""
    smem = cutlass.memory.SmemAllocator()
    bitmap = smem.allocate_tensor(Int32, cute.make_layout(BITMAP_SLOTS // 32), byte_alignment=16)
    tid, _, _ = cute.arch.thread_idx()
    rows = mSlots.shape[0]
    for first in range(0, slot_count, BITMAP_SLOTS):
        for word in range(tid, BITMAP_SLOTS // 32, threads):
            bitmap[word] = 0
        cute.arch.sync_threads()
        for row in range(tid, rows, threads):
            slot = mSlots[row]
            bit = slot - first
            if slot != pad_slot and slot < slot_count and bit >= 0 and bit < BITMAP_SLOTS:
                mask = Int32(1) << (bit & 31)
                before = cute.arch.atomic_or(bitmap.iterator + bit // 32, mask)
                if before & mask != 0:
                    report(status, SLOT_USED_TWICE, row, slot)
        cute.arch.sync_threads()
