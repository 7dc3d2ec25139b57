"""`accel.ops.causal_conv1d_update` against the oracle: values, state bits, errors, bad slots, what only a GPU shows."""

import importlib
import itertools
import os
import random
from dataclasses import dataclass

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

import accel
from accel import ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The CPU backend is plain torch: it lifts columns to float32 (_to_copy), writes y and the state (copy_, index_put_),
# gathers slots (index), shifts the state (cat). A native GPU call runs no aten op at all but the empty output.
CPU_OPS = frozenset(
    "_to_copy copy_ cat index index_put_ index_copy_ zero_ zeros full fill_ masked_fill_ where add add_ mul mul_ "
    "addcmul_ sigmoid silu silu_ exp div eq ne lt ge gt any all __and__ __or__ bitwise_and bitwise_or bitwise_not "
    "is_nonzero nonzero sort _unique2 _local_scalar_dense lift_fresh".split()
)


@dataclass(frozen=True)
class Family:
    """What a kernel is specialised for, alignment aside: few of them, so that a GPU run compiles few kernels."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    width: int
    state_len: int
    layout: str
    residual: bool
    activation: str | None
    indices: bool


def families():
    draw = random.Random(7)
    found = []
    for number, (width, layout, slot) in enumerate(itertools.product(range(2, 9), ("compact", "channel-last"), (0, 1))):
        dtype = torch.bfloat16 if slot == 0 else DTYPES[1 + (number // 2 + width) % 2]
        lengths = (width - 1, width, width + 1, width + 3, 20)
        weight_dtype = draw.choice((dtype, torch.float32))
        bias_dtype = draw.choice((None, weight_dtype, torch.float32))
        activation = (None, "silu", "swish", "silu")[draw.randrange(4)]
        found.append(
            Family(
                dtype,
                weight_dtype,
                bias_dtype,
                width,
                lengths[number % 5],
                layout,
                draw.random() < 0.5,
                activation,
                draw.random() < 0.6,
            )
        )
    # what FLA runs: width 4, state of width columns, no residual, silu
    found += [Family(d, d, None, 4, 4, "compact", False, "silu", False) for d in DTYPES]
    return tuple(found)


FAMILIES = families()
PARTS = 12  # of the drawn layouts, so that several processes share the compiling


def label(family):
    return f"{str(family.dtype)[6:]}-W{family.width}-L{family.state_len}-{family.layout}"


@dataclass(frozen=True)
class Shape:
    """One layout within a family: everything that must not lead to another kernel but through its alignment."""

    n: int
    dim: int
    pitch: int = 0
    offset: int = 0
    unit_axis: bool = False
    spare_slots: int = 0
    slot_gap: int = 0
    state_pitch: int = 0
    weight_offset: int = 0
    padding_rows: int = 0
    seed: int = 0


SHAPES = st.builds(
    Shape,
    n=st.sampled_from((1, 2, 3, 5, 17, 40)),
    dim=st.sampled_from((1, 2, 3, 8, 17, 63, 64, 96, 130, 256, 520)),
    pitch=st.sampled_from((0, 0, 1, 3, 8, 64)),
    offset=st.sampled_from((0, 0, 0, 1, 2, 8)),
    unit_axis=st.booleans(),
    spare_slots=st.integers(0, 4),
    slot_gap=st.sampled_from((0, 0, 1, 5)),
    state_pitch=st.sampled_from((0, 0, 1, 8)),
    weight_offset=st.sampled_from((0, 0, 1)),
    padding_rows=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)


def state_view(values, dtype, layout, slot_gap, state_pitch):
    """(buffer, view [S, D, L]) in the layout, slots apart by `slot_gap` elements, rows of a slot by `state_pitch`."""
    slots, dim, length = values.shape
    outer, inner = (dim, length) if layout == "compact" else (length, dim)
    row = inner + state_pitch
    stride = outer * row + slot_gap
    buffer = torch.full((slots * stride + inner,), float("nan"), dtype=dtype)
    strides = (stride, row, 1) if layout == "compact" else (stride, 1, row)
    buffer.as_strided(values.shape, strides).copy_(values)
    return buffer, strides


class Case:
    """The tensors of one drawn call, on the device, and the oracle's answer for them, on the CPU."""

    def __init__(self, family, shape, device, scale=1.0):
        draw = torch.Generator().manual_seed(shape.seed)

        def normal(*size):
            return torch.randn(size, generator=draw, dtype=torch.float64) * scale

        n, dim, dtype = shape.n, shape.dim, family.dtype
        slots = n + shape.spare_slots if family.indices else n
        values = normal(slots, dim, family.state_len).to(dtype)
        unread = family.state_len - (family.width - 1)
        if unread and shape.seed % 2:  # columns that are shifted but never read: their bits, NaN ones too, must survive
            values[:, :, :unread] = float("nan")
        values[values == 0] = -0.0
        buffer, strides = state_view(values, dtype, family.layout, shape.slot_gap, shape.state_pitch)
        self.buffer = buffer.to(device)
        self.state = self.buffer.as_strided(values.shape, strides)
        x = reference.rows(normal(n, dim), dtype, pitch=shape.pitch, offset=shape.offset)
        residual = reference.rows(normal(n, dim), dtype, pitch=shape.pitch + 1) if family.residual else None
        weight = (normal(dim, family.width) / scale).to(family.weight_dtype)
        bias = None if family.bias_dtype is None else normal(dim).to(family.bias_dtype)
        self.indices = None
        if family.indices:
            order = torch.randperm(slots, generator=draw)[:n].to(torch.int32)
            order[torch.randperm(n, generator=draw)[: shape.padding_rows]] = -1
            self.indices = order
        self.x, self.residual = self.move_rows(x, device), self.move_rows(residual, device)
        self.weight = self.move_weight(weight, shape.weight_offset, device)
        self.bias = None if bias is None else bias.to(device)
        if shape.unit_axis:
            self.x = self.x[:, :, None]
            self.residual = None if self.residual is None else self.residual[:, :, None]
        self.activation = family.activation
        expected_buffer = self.buffer.cpu().clone()
        options = dict(activation=self.activation, conv_state_indices=self.indices)
        residual = None if residual is None else residual.reshape(self.x.shape)
        x = x.reshape(self.x.shape)
        state = expected_buffer.as_strided(values.shape, strides)
        self.expected, new_state = reference.causal_conv1d_update(x, state, weight, bias, residual=residual, **options)
        pre, _ = reference.causal_conv1d_update(x, state, weight, bias, conv_state_indices=self.indices)
        size = reference.magnitude(
            reference.causal_conv1d_update, x, state, weight, bias, conv_state_indices=self.indices
        )
        self.slack = reference.fp32_error(pre, size, family.width, self.activation, residual)
        state.copy_(new_state)
        self.expected_buffer = expected_buffer

    @staticmethod
    def move_rows(view, device):
        if view is None:
            return None
        whole = torch.as_strided(view, (view.untyped_storage().nbytes() // view.element_size(),), (1,), 0).to(device)
        return whole.as_strided(view.shape, view.stride(), view.storage_offset())

    @staticmethod
    def move_weight(weight, offset, device):
        buffer = torch.full((weight.numel() + offset,), float("nan"), dtype=weight.dtype, device=device)
        return buffer[offset:].view(weight.shape).copy_(weight)

    def options(self):
        return dict(
            activation=self.activation,
            residual=self.residual,
            conv_state_indices=None if self.indices is None else self.indices.to(self.x.device),
        )

    def run(self):
        return ops.causal_conv1d_update(self.x, self.state, self.weight, self.bias, **self.options())

    def check(self, y):
        assert y.dtype == self.x.dtype and y.shape == self.x.shape and y.is_contiguous()
        assert y.device == self.x.device and not y.requires_grad
        reference.assert_close_ulp(y, self.expected, self.slack)
        reference.assert_same_bits(self.buffer, self.expected_buffer)


@given(family=st.sampled_from(FAMILIES), shape=SHAPES)
def test_against_the_oracle(device, family, shape):
    case = Case(family, shape, device)
    before = case.state.data_ptr(), case.state.stride()
    case.check(case.run())
    assert (case.state.data_ptr(), case.state.stride()) == before


@pytest.mark.parametrize("family", FAMILIES, ids=label)
def test_every_family_aligned_and_odd(device, family):
    for shape in (Shape(3, 64, seed=1), Shape(5, 33, pitch=2, offset=1, weight_offset=1, padding_rows=1, seed=2)):
        case = Case(family, shape, device)
        case.check(case.run())


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_equal_the_whole(device, dtype):
    """Any split into calls is one call: twelve steps against the oracle's full sequence; the state ends as its tail."""
    x = torch.randn(3, 12, 40).to(dtype)
    weight = torch.randn(40, 4).to(dtype)
    whole, tail = reference.causal_conv1d(x.transpose(1, 2), weight, activation="silu", state_len=5)
    size = reference.magnitude(reference.causal_conv1d, x.transpose(1, 2), None, weight)
    pre, _ = reference.preactivation(x.transpose(1, 2), weight)
    slack = reference.fp32_error(pre, size, 4, "silu")
    state = torch.zeros(3, 40, 5, dtype=dtype, device=device)
    x, weight = x.to(device), weight.to(device)
    for t in range(12):
        y = ops.causal_conv1d_update(x[:, t], state, weight, activation="silu")
        reference.assert_close_ulp(y, whole[:, :, t], slack[:, :, t])
    reference.assert_same_bits(state, tail.to(dtype))


@pytest.mark.parametrize("activation", (None, "silu"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_state_the_history_is_zero(device, dtype, activation):
    x, weight, bias = torch.randn(5, 24).to(dtype), torch.randn(24, 4).to(dtype), torch.randn(24).to(dtype)
    expected, _ = reference.causal_conv1d_update(x, None, weight, bias, activation=activation)
    pre, _ = reference.causal_conv1d_update(x, None, weight, bias)
    size = reference.magnitude(reference.causal_conv1d_update, x, None, weight, bias)
    y = ops.causal_conv1d_update(x.to(device), None, weight.to(device), bias.to(device), activation=activation)
    reference.assert_close_ulp(y, expected, reference.fp32_error(pre, size, 4, activation))


@pytest.mark.parametrize("n, dim", ((0, 64), (0, 1), (1, 1), (7, 1)))
def test_empty_and_tiny(device, n, dim):
    for layout in ("compact", "channel-last"):
        family = Family(torch.bfloat16, torch.bfloat16, torch.bfloat16, 4, 4, layout, True, "silu", False)
        case = Case(family, Shape(n, dim), device)
        case.check(case.run())


def test_final_state_layout_of_the_full_sequence_is_taken_as_it_is(device):
    """A channel-last view, a slice of the slots of a pool and a slice of its columns: all updated in place."""
    pool = torch.randn(9, 6, 40).to(device, torch.bfloat16)  # [S, L, D]
    weight = torch.randn(32, 4).to(device, torch.bfloat16)
    before = pool.clone()
    state = pool[2:5, 1:5, 4:36].transpose(1, 2)  # [3, 32, 4]
    x = torch.randn(3, 32).to(device, torch.bfloat16)
    expected, new = reference.causal_conv1d_update(x.cpu(), state.cpu(), weight.cpu())
    size = reference.magnitude(reference.causal_conv1d_update, x.cpu(), state.cpu(), weight.cpu())
    y = ops.causal_conv1d_update(x, state, weight)
    reference.assert_close_ulp(y, expected, reference.fp32_error(expected, size, 4, None))
    before[2:5, 1:5, 4:36] = new.transpose(1, 2).to(device)
    reference.assert_same_bits(pool, before)


@pytest.mark.parametrize("pad", (-1, 0, -7, 1000))
def test_the_callers_padding_slot_is_honoured(device, pad):
    state = torch.randn(4, 16, 3).to(device)
    before = state.clone()
    x, weight, bias = torch.randn(4, 16).to(device), torch.randn(16, 4).to(device), torch.randn(16).to(device)
    indices = torch.tensor([2, pad, 1, pad], dtype=torch.int32)
    expected, new = reference.causal_conv1d_update(
        x.cpu(), state.cpu(), weight.cpu(), bias.cpu(), conv_state_indices=indices, pad_slot_id=pad
    )
    y = ops.causal_conv1d_update(
        x, state, weight, bias, conv_state_indices=indices.to(device), pad_slot_id=pad, residual=torch.ones_like(x)
    )
    accel.check()
    live = torch.tensor([0, 2])
    reference.assert_close_ulp(y.cpu()[live], expected[live] + 1, 2.0**-18)
    assert not y.cpu()[[1, 3]].any()
    reference.assert_same_bits(state, new)
    reference.assert_same_bits(state[[0, 3]], before[[0, 3]])


def test_all_rows_padding(device):
    state = torch.randn(2, 8, 3).to(device)
    before = state.clone()
    indices = torch.full((5,), -1, dtype=torch.int32, device=device)
    y = ops.causal_conv1d_update(
        torch.randn(5, 8).to(device), state, torch.ones(8, 4).to(device), conv_state_indices=indices
    )
    assert y.shape == (5, 8) and not y.any()
    reference.assert_same_bits(state, before)


@pytest.mark.parametrize("family", FAMILIES[::9], ids=label)
def test_no_copy_on_the_way(device, family, no_copies):
    case = Case(family, Shape(5, 33, pitch=2, offset=1, seed=3), device)
    options = case.options()
    ops.causal_conv1d_update(case.x, case.state.clone(), case.weight, case.bias, **options)  # compiled, loaded
    with no_copies(allow=CPU_OPS if device == "cpu" else ()):
        y = ops.causal_conv1d_update(case.x, case.state, case.weight, case.bias, **options)
    case.check(y)


EXTREMES = (
    -150.0,
    -104.0,
    -100.0,
    -90.0,
    -88.5,
    -87.5,
    -87.0,
    -60.0,
    -20.0,
    -8.0,
    -1.278,
    -1e-4,
    1e-30,
    6.25,
    87,
    100.0,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_keeps_its_digits_at_the_extremes(device, dtype):
    """One tap carries the value into the activation: the output is silu of it to 1 ulp, where silu is 1e-36 too."""
    z = torch.tensor(EXTREMES).repeat(4).to(dtype)[None]
    weight = torch.zeros(z.shape[1], 4, dtype=dtype)
    weight[:, 3] = 1
    expected = reference.activate(z.double(), "silu")
    state = torch.zeros(1, z.shape[1], 3, dtype=dtype, device=device)
    y = ops.causal_conv1d_update(z.to(device), state, weight.to(device), activation="silu")
    reference.assert_close_ulp(y, expected, reference.fp32_error(z.double(), z.double().abs(), 4, "silu"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_values_overflow_only_where_they_must(device, dtype):
    big = torch.finfo(dtype).max / 4
    x = torch.tensor([[big, -big, big, 1.0]], dtype=torch.float64).to(dtype)
    weight = torch.tensor([[0.0, 3.0], [0.0, 2.0], [0.0, 8.0], [0.0, 1.0]]).to(dtype)
    expected, _ = reference.causal_conv1d_update(x, None, weight)
    y = ops.causal_conv1d_update(x.to(device), None, weight.to(device)).cpu()
    reference.assert_close_ulp(y[:, :2], expected[:, :2], 0)
    assert y[0, 2] == float("inf") and y[0, 3] == 1


def good(device):
    tensors = dict(
        x=torch.randn(4, 16).to(torch.bfloat16),
        conv_state=torch.randn(4, 16, 4).to(torch.bfloat16),
        weight=torch.randn(16, 4).to(torch.bfloat16),
        bias=torch.randn(16).to(torch.bfloat16),
        residual=torch.randn(4, 16).to(torch.bfloat16),
        conv_state_indices=torch.arange(4, dtype=torch.int32),
    )
    return {name: tensor.to(device) for name, tensor in tensors.items()}


BAD = {
    "x rank": ("x", lambda a: a["x"][0], ValueError),
    "x float64": ("x", lambda a: a["x"].double(), TypeError),
    "x integer": ("x", lambda a: a["x"].to(torch.int32), TypeError),
    "x channels apart": ("x", lambda a: a["x"].repeat(1, 2)[:, ::2], ValueError),
    "weight rank": ("weight", lambda a: a["weight"][:, None], ValueError),
    "weight channels": ("weight", lambda a: a["weight"][:8], ValueError),
    "weight dtype": ("weight", lambda a: a["weight"].half(), TypeError),
    "width 1": ("weight", lambda a: a["weight"][:, :1], NotImplementedError),
    "width 9": ("weight", lambda a: a["weight"].repeat(1, 3)[:, :9], NotImplementedError),
    "bias shape": ("bias", lambda a: a["bias"][:8], ValueError),
    "bias rank": ("bias", lambda a: a["bias"][None], ValueError),
    "bias dtype": ("bias", lambda a: a["bias"].half(), TypeError),
    "residual shape": ("residual", lambda a: a["residual"][:2], ValueError),
    "residual dtype": ("residual", lambda a: a["residual"].float(), TypeError),
    "state dtype": ("conv_state", lambda a: a["conv_state"].half(), TypeError),
    "state rank": ("conv_state", lambda a: a["conv_state"][0], ValueError),
    "state channels": ("conv_state", lambda a: a["conv_state"][:, :8], ValueError),
    "state too short": ("conv_state", lambda a: a["conv_state"][:, :, :2], ValueError),
    "state expanded": ("conv_state", lambda a: a["conv_state"][:1].expand(4, 16, 4), ValueError),
    "indices shape": ("conv_state_indices", lambda a: a["conv_state_indices"][:2], ValueError),
    "indices float": ("conv_state_indices", lambda a: a["conv_state_indices"].float(), TypeError),
    "indices int64": ("conv_state_indices", lambda a: a["conv_state_indices"].long(), TypeError),
    "indices, no state": ("conv_state", lambda a: None, ValueError),
    "activation": ("activation", lambda a: "relu", ValueError),
    "ring shape": ("cache_seqlens", lambda a: a["conv_state_indices"][:2], ValueError),
    "ring int64": ("cache_seqlens", lambda a: a["conv_state_indices"].long(), TypeError),
    "intermediate shape": ("intermediate_states_out", lambda a: a["conv_state"], ValueError),
    "x no tensor": ("x", lambda a: a["x"].tolist(), TypeError),
    "weight no tensor": ("weight", lambda a: a["weight"].tolist(), TypeError),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(device, name):
    argument, spoil, error = BAD[name]
    arguments = good(device)
    state, before = arguments["conv_state"], arguments["conv_state"].clone()
    arguments[argument] = spoil(arguments)
    with pytest.raises(error, match=rf"\b{argument}\b") as caught:
        ops.causal_conv1d_update(**arguments)
    assert type(caught.value) is error
    reference.assert_same_bits(state, before)


def test_number_of_slots_without_indices(device):
    arguments = good(device)
    arguments["conv_state_indices"] = None
    arguments["conv_state"] = arguments["conv_state"][:3]
    with pytest.raises(ValueError, match=r"\bconv_state\b"):
        ops.causal_conv1d_update(**arguments)


@pytest.mark.parametrize("argument", ("x", "conv_state", "weight", "bias", "residual"))
def test_gradients_are_refused(device, argument):
    arguments = good(device)
    before = arguments["conv_state"].clone()
    arguments[argument].requires_grad_()
    with pytest.raises(RuntimeError, match=rf"\b{argument}\b.*grad"):
        ops.causal_conv1d_update(**arguments)
    reference.assert_same_bits(arguments["conv_state"], before)
    with torch.no_grad():
        ops.causal_conv1d_update(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ("conv_state", "weight", "bias", "residual", "conv_state_indices"))
def test_tensors_on_two_devices_are_refused(argument):
    arguments = good("cuda")
    arguments[argument] = arguments[argument].cpu()
    with pytest.raises((ValueError, TypeError), match="cuda:0"):
        ops.causal_conv1d_update(**arguments)


def settle(device):
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("layout", ("compact", "channel-last"))
@pytest.mark.parametrize("slot", (6, 7, 2**31 - 1, -2, -(2**31)))
def test_a_slot_out_of_range(device, slot, layout):
    dim = 96
    state = torch.randn(6, dim, 4)
    state = (state if layout == "compact" else state.transpose(1, 2).contiguous().transpose(1, 2)).to(device)
    x, weight = torch.randn(4, dim).to(device), torch.randn(dim, 4).to(device)
    indices = torch.tensor([5, slot, 0, -1], dtype=torch.int32)
    expected, new = reference.causal_conv1d_update(x.cpu(), state.cpu(), weight.cpu(), conv_state_indices=indices)
    y = ops.causal_conv1d_update(x, state, weight, conv_state_indices=indices.to(device))
    assert y[1].isnan().all()
    reference.assert_close_ulp(y, expected, 2.0**-18)
    reference.assert_same_bits(state, new)
    settle(device)
    with pytest.raises(accel.StateIndexError, match=rf"1.*{slot}"):
        accel.check()
    accel.check()  # once


def test_a_bad_slot_is_raised_by_the_next_call_and_then_all_is_well(device):
    state, x, weight = torch.randn(3, 8, 3).to(device), torch.randn(2, 8).to(device), torch.randn(8, 4).to(device)
    bad = torch.tensor([0, 3], dtype=torch.int32, device=device)
    fine = torch.tensor([0, 1], dtype=torch.int32, device=device)
    ops.causal_conv1d_update(x, state, weight, conv_state_indices=bad)
    settle(device)
    before = state.clone()
    with pytest.raises(accel.StateIndexError):
        ops.causal_conv1d_update(x, state, weight, conv_state_indices=fine)
    reference.assert_same_bits(state, before, "state of the call that raised")
    expected, new = reference.causal_conv1d_update(x.cpu(), state.cpu(), weight.cpu(), conv_state_indices=fine.cpu())
    y = ops.causal_conv1d_update(x, state, weight, conv_state_indices=fine)
    reference.assert_close_ulp(y, expected, 2.0**-18)
    reference.assert_same_bits(state, new)


@pytest.mark.parametrize("indices", ([1, 1, 2], [0, 2, 0], [3, 3, 3]), ids=str)
def test_a_slot_used_twice(device, indices):
    state, x = torch.randn(5, 40, 4).to(device), torch.randn(3, 40).to(device)
    weight = torch.randn(40, 4).to(device)
    before = state.clone()
    y = ops.causal_conv1d_update(
        x, state, weight, conv_state_indices=torch.tensor(indices, dtype=torch.int32, device=device)
    )
    for row, slot in enumerate(indices):
        if indices.count(slot) == 1:
            only = torch.tensor([slot], dtype=torch.int32)
            expected, new = reference.causal_conv1d_update(
                x[row : row + 1].cpu(), before.cpu(), weight.cpu(), conv_state_indices=only
            )
            reference.assert_close_ulp(y[row : row + 1], expected, 2.0**-18)
            reference.assert_same_bits(state[slot], new[slot])
    unused = [slot for slot in range(5) if slot not in indices]
    reference.assert_same_bits(state[unused], before[unused])
    settle(device)
    with pytest.raises(accel.StateIndexError, match="[0-9]"):
        accel.check()


def test_padding_rows_are_no_duplicates(device):
    state, x = torch.randn(5, 8, 3).to(device), torch.randn(4, 8).to(device)
    indices = torch.tensor([-1, 2, -1, -1], dtype=torch.int32, device=device)
    ops.causal_conv1d_update(x, state, torch.randn(8, 4).to(device), conv_state_indices=indices)
    settle(device)
    accel.check()


@pytest.mark.gpu
@pytest.mark.parametrize("slots", ("own", "pool", "padded"))
def test_graph_replay(slots):
    """Eight replays of one captured step, rows padded as serving pads them, against eight steps of the oracle."""
    n, dim = 6, 256
    state = torch.randn(9 if slots != "own" else n, dim, 4, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(dim, 4, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(n, 3 * dim, device="cuda", dtype=torch.bfloat16)[:, dim : 2 * dim]
    lists = {"own": None, "pool": [8, 0, 3, 1, 7, 2], "padded": [8, 0, 3, -1, -1, -1]}
    indices = None if slots == "own" else torch.tensor(lists[slots], dtype=torch.int32, device="cuda")
    expected_state = state.cpu()
    ops.causal_conv1d_update(x, state.clone(), weight, activation="silu", conv_state_indices=indices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.causal_conv1d_update(x, state, weight, activation="silu", conv_state_indices=indices)
    reference.assert_same_bits(state, expected_state, "state after capture alone")
    for _ in range(8):
        x.copy_(torch.randn(n, dim))
        options = dict(conv_state_indices=None if indices is None else indices.cpu())
        size = reference.magnitude(reference.causal_conv1d_update, x.cpu(), expected_state, weight.cpu(), **options)
        pre, _ = reference.causal_conv1d_update(x.cpu(), expected_state, weight.cpu(), **options)
        expected, expected_state = reference.causal_conv1d_update(
            x.cpu(), expected_state, weight.cpu(), activation="silu", **options
        )
        graph.replay()
        torch.cuda.synchronize()
        reference.assert_close_ulp(y, expected, reference.fp32_error(pre, size, 4, "silu"))
        reference.assert_same_bits(state, expected_state)


@pytest.mark.gpu
def test_a_bad_slot_inside_a_replayed_graph_is_reported():
    state, x = torch.randn(3, 64, 4, device="cuda"), torch.randn(2, 64, device="cuda")
    weight, indices = torch.randn(64, 4, device="cuda"), torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    ops.causal_conv1d_update(x, state, weight, conv_state_indices=indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.causal_conv1d_update(x, state, weight, conv_state_indices=indices)
    indices.copy_(torch.tensor([0, 9]))
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(accel.StateIndexError):
        accel.check()
    assert y[1].isnan().all() and y[0].isfinite().all()
    indices.copy_(torch.tensor([2, 1]))
    graph.replay()
    torch.cuda.synchronize()
    accel.check()
    assert y.isfinite().all()


@pytest.mark.gpu
def test_side_stream():
    """The launch goes to the current stream: behind a long kernel there, and before its consumer."""
    x, state = torch.zeros(8, 512, device="cuda"), torch.zeros(8, 512, 4, device="cuda")
    weight = torch.ones(512, 4, device="cuda")
    ops.causal_conv1d_update(x, state.clone(), weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
        y = ops.causal_conv1d_update(x, state, weight)
        total = y.sum()
    stream.synchronize()
    assert total.item() == 2.0 * 8 * 512 and (state[:, :, 3] == 2).all()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("compact", "channel-last"))
@pytest.mark.parametrize("indexed", (False, True))
def test_more_rows_than_a_grid_dimension(layout, indexed):
    n, dim = 65536 + 70, 24
    state = torch.randn(n, dim, 4, device="cuda", dtype=torch.bfloat16)
    state = state if layout == "compact" else state.transpose(1, 2).contiguous().transpose(1, 2)
    x, weight = torch.randn(n, dim, device="cuda", dtype=torch.bfloat16), torch.ones(dim, 4, device="cuda")
    order = torch.randperm(n, device="cuda") if indexed else torch.arange(n, device="cuda")
    after = torch.cat([state[order][:, :, 1:], x[:, :, None]], dim=2)
    expected = after.double().sum(dim=2)
    y = ops.causal_conv1d_update(
        x, state, weight.bfloat16(), conv_state_indices=order.to(torch.int32) if indexed else None
    )
    reference.assert_close_ulp(y, expected, 2.0**-18)
    reference.assert_same_bits(state[order], after)
    accel.check()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("compact", "channel-last"))
def test_state_beyond_2_31_elements(layout):
    dim, length = 4096, 4
    slots = 2**31 // (dim * length) + 9
    pool = torch.empty(slots * dim * length, device="cuda", dtype=torch.bfloat16)
    pool = pool.view(slots, dim, length) if layout == "compact" else pool.view(slots, length, dim).transpose(1, 2)
    picks = torch.tensor([slots - 1, 0, slots - 8, 2**31 // (dim * length), 1], dtype=torch.int32)
    around = torch.tensor([2, slots - 2, slots - 7])  # a wrapped offset would land at the front
    for slot in picks.tolist():
        pool[slot].copy_(torch.randn(dim, length))
    before = {slot: pool[slot].clone() for slot in around.tolist()}
    x = torch.randn(5, dim, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(dim, 4, device="cuda", dtype=torch.bfloat16)
    history = torch.stack([pool[slot] for slot in picks.tolist()]).cpu()
    expected, new = reference.causal_conv1d_update(x.cpu(), history, weight.cpu())
    size = reference.magnitude(reference.causal_conv1d_update, x.cpu(), history, weight.cpu())
    y = ops.causal_conv1d_update(x, pool, weight, conv_state_indices=picks.cuda())
    reference.assert_close_ulp(y, expected, reference.fp32_error(expected, size, 4, None))
    reference.assert_same_bits(torch.stack([pool[slot] for slot in picks.tolist()]), new)
    for slot, value in before.items():
        reference.assert_same_bits(pool[slot], value)


@pytest.mark.gpu
def test_x_rows_further_apart_than_2_31_elements():
    n, dim, ld = 5, 64, 2**29 + 8
    buffer = torch.empty(4 * ld + dim, device="cuda", dtype=torch.bfloat16)
    x = buffer.as_strided((n, dim), (ld, 1))
    x.copy_(torch.randn(n, dim))
    state, weight = torch.randn(n, dim, 4).bfloat16(), torch.randn(dim, 4).bfloat16()
    expected, new = reference.causal_conv1d_update(x.cpu(), state, weight)
    size = reference.magnitude(reference.causal_conv1d_update, x.cpu(), state, weight)
    state = state.cuda()
    y = ops.causal_conv1d_update(x, state, weight.cuda())
    reference.assert_close_ulp(y, expected, reference.fp32_error(expected, size, 4, None))
    reference.assert_same_bits(state, new)


@pytest.mark.gpu
def test_bad_slots_leave_the_context_usable():
    state = torch.randn(64, 2048, 4, device="cuda", dtype=torch.bfloat16)
    before = state.clone()
    x = torch.randn(256, 2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2048, 4, device="cuda", dtype=torch.bfloat16)
    indices = torch.randint(64, 2**31 - 1, (256,), device="cuda").to(torch.int32)
    indices[::2] = -indices[::2]
    y = ops.causal_conv1d_update(x, state, weight, conv_state_indices=indices)
    torch.cuda.synchronize()
    assert y.isnan().all()
    reference.assert_same_bits(state, before)
    with pytest.raises(accel.StateIndexError):
        accel.check()
    assert torch.ones(8, device="cuda").sum().item() == 8


@pytest.mark.gpu
def test_no_compilation_but_for_the_alignment():
    """N, D, S and the strides vary within one alignment: one kernel serves them all."""
    jit = importlib.import_module("accel.kernels.jit")

    def step(n, dim, ld, slots):
        x = torch.randn(n, ld, device="cuda", dtype=torch.bfloat16)[:, :dim]
        state = torch.randn(slots, dim, 4, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(dim, 4, device="cuda", dtype=torch.bfloat16)
        indices = torch.arange(n, dtype=torch.int32, device="cuda")
        ops.causal_conv1d_update(x, state, weight, activation="silu", conv_state_indices=indices)

    step(4, 2048, 6144, 8)
    before = jit.specifications()  # loaded from the disk or compiled, there must be no other
    for n, dim, ld, slots in ((1, 2048, 2048, 1), (128, 4096, 12288, 200), (33, 1024, 1088, 64), (7, 8192, 8256, 7)):
        step(n, dim, ld, slots)
    assert jit.specifications() == before


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_random_layouts(part):
    """ACCEL_LAYOUTS (default 60) more drawn layouts than the grid; a part has its own families."""
    draw = random.Random(int(os.environ.get("ACCEL_SEED", "0")) + part)
    for number in range(part, int(os.environ.get("ACCEL_LAYOUTS", "60")), PARTS):
        shape = Shape(
            n=draw.choice((1, 2, 7, 33, 70)),
            dim=draw.choice((1, 5, 8, 64, 129, 256, 1000, 2048)),
            pitch=draw.choice((0, 1, 2, 8, 24, 2048)),
            offset=draw.choice((0, 0, 1, 2, 4, 8)),
            unit_axis=draw.random() < 0.3,
            spare_slots=draw.randrange(6),
            slot_gap=draw.choice((0, 0, 1, 4, 8)),
            state_pitch=draw.choice((0, 0, 1, 8)),
            weight_offset=draw.choice((0, 0, 1, 2)),
            padding_rows=draw.randrange(4),
            seed=number,
        )
        case = Case(draw.choice(FAMILIES[part::PARTS]), shape, "cuda")
        case.check(case.run())
