"""A small run of every kernel, each result against the float64 oracle, for compute-sanitizer:

  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  compute-sanitizer --tool memcheck --error-exitcode 9 python3 tests/sanitize.py
  compute-sanitizer --tool racecheck --error-exitcode 9 python3 tests/sanitize.py
  python3 tests/sanitize.py --device cpu                      the same cases on the CPU backend
  python3 tests/sanitize.py --part 2/8                        every eighth case, so that processes share the compiling

Every input's memory ends with its last element: without the allocator's cache, memcheck sees a read past it. The exit
status is 1 where a result is wrong.
"""

import argparse
import sys
import time
import traceback
from dataclasses import dataclass
from unittest import mock

import reference
import test_dense as dense
import test_ops_conv as conv
import test_ops_update as update
import torch

import accel
from accel import dense_checks, ops

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def tight(view, device):
    """The same view on the device, in memory that ends with its last element."""
    if view is None:
        return None
    reach = 1 + sum((extent - 1) * step for extent, step in zip(view.shape, view.stride(), strict=True))
    whole = torch.as_strided(view, (view.storage_offset() + reach,), (1,), 0).to(device, copy=True)
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


@dataclass(frozen=True)
class Conv:
    """Forward, backward and the gradient of the initial states."""

    family: conv.Family
    shape: conv.Shape

    def check(self, device):
        TightConv(self.family, self.shape).check(device)


class TightConv(conv.Case):
    def leaves(self, device):
        return {k: None if v is None else tight(v, device).requires_grad_() for k, v in self.tensors.items()}

    def run(self, device):
        leaves = self.leaves(device)
        result = ops.causal_conv1d(**leaves, **self.options(device))
        y, final = result if self.family.state_len is not None else (result, None)
        return y, final, self.gradients(leaves, y, final, tight(self.dy, device))


@dataclass(frozen=True)
class Update:
    """One decode step."""

    family: update.Family
    shape: update.Shape

    def check(self, device):
        case = TightUpdate(self.family, self.shape, device)
        layout = case.state.shape, case.state.stride()
        case.state = tight(case.buffer.cpu().as_strided(*layout), device)
        y = case.run()
        reference.assert_close_ulp(y, case.expected, case.slack)
        reference.assert_same_bits(case.state, case.expected_buffer.as_strided(*layout))


class TightUpdate(update.Case):
    move_rows = staticmethod(tight)


@dataclass(frozen=True)
class Stateless:
    """One decode step with nothing before it."""

    dtype: torch.dtype

    def check(self, device):
        x, weight = torch.randn(5, 35).to(self.dtype), torch.randn(35, 4).to(self.dtype)
        expected, _ = reference.causal_conv1d_update(x, None, weight, activation="silu")
        pre, _ = reference.causal_conv1d_update(x, None, weight)
        size = reference.magnitude(reference.causal_conv1d_update, x, None, weight)
        y = ops.causal_conv1d_update(tight(x, device), None, tight(weight, device), activation="silu")
        reference.assert_close_ulp(y, expected, reference.fp32_error(pre, size, 4, "silu"))


@dataclass(frozen=True)
class VarlenStates:
    """The last tokens of packed sequences, an empty and a short one among them."""

    dtype: torch.dtype
    index_dtype: torch.dtype
    pitch: int

    def check(self, device):
        x = reference.rows(torch.randn(21, 19), self.dtype, pitch=self.pitch)
        bounds = torch.tensor([0, 2, 2, 13, 21], dtype=self.index_dtype)
        states = ops.causal_conv1d_varlen_states(tight(x, device), tight(bounds, device), 5)
        reference.assert_same_bits(states, reference.causal_conv1d_varlen_states(x, bounds, 5))


@dataclass(frozen=True)
class BadPacking:
    """One boundary below the one before it: NaN, an error later, no access out of bounds."""

    layout: str

    def check(self, device):
        x = reference.sequences(torch.randn(1, 19, 40), BF16, layout=self.layout)
        leaves = [tight(t, device).requires_grad_() for t in (x, torch.randn(19, 4).to(BF16))]
        bounds = torch.tensor([0, 30, 9, 40], dtype=torch.int32)
        y, states = ops.causal_conv1d(*leaves, cu_seqlens=tight(bounds, device), return_final_states=True)
        expect(accel.PackedMetadataError)
        assert y.isnan().all() and states.isnan().all(), "an output of malformed packing is not NaN"
        gradients = torch.autograd.grad(y, leaves, torch.ones(1, 19, 40, dtype=BF16).to(device))
        expect(accel.PackedMetadataError)
        assert all(gradient.isnan().all() for gradient in gradients), "a gradient of malformed packing is not NaN"


@dataclass(frozen=True)
class BadSlot:
    """A slot out of range: its row is NaN and nothing else changes. A slot twice: an error."""

    slot: int

    def check(self, device):
        x, state, weight = torch.randn(3, 35), torch.randn(4, 35, 4), torch.randn(35, 4)
        slots = torch.tensor([2, self.slot, 0], dtype=torch.int32)
        expected, after = reference.causal_conv1d_update(x, state, weight, conv_state_indices=slots)
        size = reference.magnitude(reference.causal_conv1d_update, x, state, weight, conv_state_indices=slots)
        x, state, weight, slots = (tight(tensor, device) for tensor in (x, state, weight, slots))
        y = ops.causal_conv1d_update(x, state, weight, conv_state_indices=slots)
        expect(accel.StateIndexError)
        if 0 <= self.slot < 4:
            return
        reference.assert_close_ulp(y, expected, reference.fp32_error(expected, size, 4, None).nan_to_num())
        reference.assert_same_bits(state, after)


@dataclass(frozen=True)
class Dense:
    """A dense convolution, forward and backward."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str = "dense"

    def check(self, device):
        dilation = self.shape[4]
        tensors = dense.made("cpu", self.dtype, self.shape)
        x, weight, bias = tensors = [dense.serve_like(self.layout, tensors[0]), *tensors[1:]]
        leaves = [tight(tensor, device).requires_grad_() for tensor in tensors]
        with mock.patch.object(dense_checks, "FASTER", ()):  # the kernels themselves, for any rows
            y = ops.causal_conv1d_dense(*leaves, dilation=dilation)
        dense.close(y.cpu(), *dense.reference(x, weight, bias, dilation), self.dtype, slack=1.3)
        dy = torch.randn(y.shape).to(self.dtype)
        found = torch.autograd.grad(y, leaves, tight(dy, device))
        for gradient, wanted in zip(found, dense.gradients(tensors, dilation, dy), strict=True):
            dense.close(gradient.cpu(), *wanted, self.dtype, slack=1.3)


def expect(error):
    try:
        accel.check()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def conv_cases():
    aligned = conv.Shape(batch=2, dim=136, length=33, seed=1)
    odd = conv.Shape(batch=2, dim=35, length=50, pitch=2, offset=1, dy="split", seed=2)
    long = conv.Shape(batch=1, dim=520, length=4100, sequences=5, seed=3)  # more elements than the small tiles serve
    for layout in ("channel-last", "channel-first"):
        for mode in ("dense", "int32", "seq_idx"):
            packed = mode == "seq_idx"
            family = conv.Family(BF16, BF16, BF16, 4, layout, mode, True, "silu", 3, None if packed else 4)
            yield Conv(family, aligned)
            yield Conv(family, odd)
        plain = conv.Family(BF16, BF16, None, 4, layout, "dense", False, "silu", None, None)
        for shape in (conv.Shape(length=3, dim=2, dy="expanded"), conv.Shape(length=70, dy="transposed"), long):
            yield Conv(plain, shape)
        yield Conv(conv.Family(FP16, FP32, None, 8, layout, "int64", False, None, 9, 7), odd)
        yield Conv(conv.Family(FP32, FP32, FP32, 2, layout, "dense", False, None, 2, 1), odd)
        yield Conv(conv.Family(FP32, FP32, FP32, 3, layout, "seq_idx", False, "silu", None, None), aligned)
    yield Conv(conv.Family(BF16, BF16, None, 4, "channel-last", "int32", False, "silu", None, None), long)


def update_cases():
    aligned = update.Shape(3, 64, seed=1)
    odd = update.Shape(5, 33, pitch=2, offset=1, weight_offset=1, padding_rows=1, seed=2)
    gaps = update.Shape(4, 34, spare_slots=2, slot_gap=5, state_pitch=1, unit_axis=True, seed=4)
    fla = update.Family(BF16, BF16, None, 4, 4, "compact", False, "silu", False)
    indexed = update.Family(BF16, FP32, FP32, 4, 3, "channel-last", True, "silu", True)
    for family in (fla, indexed):
        for shape in (aligned, odd, gaps):
            yield Update(family, shape)
    wide = update.Family(BF16, BF16, BF16, 4, 4, "channel-last", False, "silu", False)
    yield Update(wide, update.Shape(1024, 264, seed=5))  # rows enough for the widest vectors
    yield Update(update.Family(FP16, FP16, FP16, 2, 1, "compact", True, None, True), gaps)
    yield Update(update.Family(FP32, FP32, FP32, 8, 7, "channel-last", False, "silu", False), odd)
    yield Update(update.Family(FP32, FP32, None, 3, 20, "compact", False, "silu", True), odd)
    yield Update(update.Family(FP16, FP32, None, 5, 8, "compact", True, "silu", False), gaps)
    yield Stateless(BF16)
    yield from (BadSlot(slot) for slot in (4, -7, 2))


def dense_cases():
    yield Dense(BF16, (2, 72, 136, 3, 5, 264))
    yield Dense(FP16, (1, 264, 72, 3, 7, 136))
    yield Dense(BF16, (1, 40, 40, 2, 129, 264))
    yield Dense(BF16, (2, 136, 72, 3, 6, 264))
    yield Dense(BF16, (2, 33, 65, 3, 2, 77))
    yield Dense(BF16, (1, 72, 264, 7, 5, 5128))  # the wide tile of a weight gradient, on a GPU of up to 140 SMs
    yield Dense(FP16, (1, 24, 16, 4, 1, 48), "sliced")
    yield Dense(BF16, (1, 16, 24, 3, 2, 40), "channel-last")


def cases():
    yield from update_cases()
    yield from conv_cases()
    yield from dense_cases()
    yield VarlenStates(BF16, torch.int32, 0)
    yield VarlenStates(FP32, torch.int64, 3)
    yield from (BadPacking(layout) for layout in ("channel-last", "channel-first"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--part", default="0/1", help="K/N: the cases K, K + N, K + 2N, ...")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    begin, wrong, chosen = time.monotonic(), 0, list(cases())[part::parts]
    for case in chosen:
        torch.manual_seed(0)
        try:
            case.check(options.device)
            accel.check()
        except Exception:
            wrong += 1
            print(f"WRONG {case}\n{traceback.format_exc()}", flush=True)
    took = time.monotonic() - begin
    print(f"part {options.part} on {options.device}: {len(chosen)} cases, {wrong} wrong, {took:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
