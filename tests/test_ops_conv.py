"""`accel.ops.causal_conv1d`, forward and backward, against the oracle; bad packing; what only a GPU shows.

Also `causal_conv1d_varlen_states`.
"""

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
MODES = ("dense", "dense", "int32", "int64", "seq_idx")
DY_KINDS = ("dense", "dense", "split", "transposed", "expanded", "strided")


@dataclass(frozen=True)
class Family:
    """What a kernel is specialised for, alignment aside: few of them, so that a GPU run compiles few kernels."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    width: int
    layout: str
    mode: str
    residual: bool
    activation: str | None
    history: int | None  # columns of initial_states
    state_len: int | None  # columns of final_states; None: not returned


def families():
    draw = random.Random(11)
    found = []
    for number, (width, layout, slot) in enumerate(
        itertools.product(range(2, 9), ("channel-last", "channel-first"), (0, 1))
    ):
        dtype = torch.bfloat16 if slot == 0 else DTYPES[1 + (number // 2 + width) % 2]
        mode = MODES[number % 5]
        weight_dtype = draw.choice((dtype, torch.float32))
        found.append(
            Family(
                dtype,
                weight_dtype,
                draw.choice((None, weight_dtype, torch.float32)),
                width,
                layout,
                mode,
                draw.random() < 0.4,
                (None, "silu", "silu", "swish")[draw.randrange(4)],
                (None, width - 1, width)[draw.randrange(3)],
                None if mode == "seq_idx" else (None, width - 1, width, width + 3)[draw.randrange(4)],
            )
        )
    for dtype in DTYPES:  # what FLA and Mamba run
        found.append(Family(dtype, dtype, None, 4, "channel-last", "dense", False, "silu", None, 4))
        found.append(Family(dtype, dtype, dtype, 4, "channel-last", "int64", False, "silu", 4, 4))
        found.append(Family(dtype, dtype, dtype, 4, "channel-first", "dense", False, "silu", None, None))
        found.append(Family(dtype, torch.float32, dtype, 4, "channel-last", "seq_idx", False, "silu", 3, None))
    return tuple(found)


FAMILIES = families()
PARTS = 12  # of the drawn layouts, so that several processes share the compiling


def label(family):
    return f"{str(family.dtype)[6:]}-W{family.width}-{family.layout}-{family.mode}"


@dataclass(frozen=True)
class Shape:
    """One layout within a family."""

    batch: int = 1
    dim: int = 64
    length: int = 33
    pitch: int = 0
    gap: int = 0
    offset: int = 0
    dy: str = "dense"
    sequences: int = 3
    compact_states: bool = False
    seed: int = 0
    large: bool = False  # run on the kernels of calls too large for a test


SHAPES = st.builds(
    Shape,
    batch=st.sampled_from((1, 1, 2, 3)),
    dim=st.sampled_from((1, 2, 3, 8, 17, 40, 64, 65, 130)),
    length=st.sampled_from((0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 100, 131)),
    pitch=st.sampled_from((0, 0, 1, 3, 8, 64)),
    gap=st.sampled_from((0, 0, 1, 4)),
    offset=st.sampled_from((0, 0, 0, 1, 2, 8)),
    dy=st.sampled_from(DY_KINDS),
    sequences=st.integers(1, 6),
    compact_states=st.booleans(),
    seed=st.integers(0, 2**20),
)


def upstream_gradient(values, kind, layout):
    """dy of those values, [B, D, T], in one of the layouts that autograd hands over."""
    batch, dim, length = values.shape
    other = "channel-first" if layout == "channel-last" else "channel-last"
    if kind == "expanded":
        return values.new_full((1, 1, 1), 0.75).expand(values.shape)
    if kind == "split":  # a third of [B, T, 3D]
        wide = values.new_full((batch, length, 3 * dim), float("nan"))
        return wide[:, :, dim : 2 * dim].transpose(1, 2).copy_(values)
    if kind == "strided":
        wide = values.new_full((batch, dim, 2 * length), float("nan"))
        return wide[:, :, ::2].copy_(values)
    return reference.sequences(values, values.dtype, layout=other if kind == "transposed" else layout)


def moved(view, device):
    """The same view of the same buffer on the device."""
    if view is None:
        return None
    count = view.untyped_storage().nbytes() // view.element_size()
    whole = torch.as_strided(view, (count,), (1,), 0).to(device)
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


class Case:
    """The tensors of one drawn call, on the CPU as the oracle takes them; `run` moves them to the device."""

    def __init__(self, family, shape):
        self.family = family
        self.large = shape.large
        draw = torch.Generator().manual_seed(shape.seed)

        def normal(*size):
            return torch.randn(size, generator=draw, dtype=torch.float64)

        dtype, layout, dim, length = family.dtype, family.layout, shape.dim, shape.length
        packed = family.mode in ("int32", "int64")
        batch = 1 if packed and layout == "channel-first" else shape.batch
        gap = 0 if packed else shape.gap  # packed rows lie in order: one stride for all B * T tokens
        lay = dict(layout=layout, gap=gap)
        x = reference.sequences(normal(batch, dim, length), dtype, pitch=shape.pitch, offset=shape.offset, **lay)
        self.tensors = dict(
            x=x,
            weight=normal(dim, family.width).to(family.weight_dtype),
            bias=None if family.bias_dtype is None else normal(dim).to(family.bias_dtype),
            residual=reference.sequences(normal(*x.shape), dtype, pitch=shape.pitch + 1, **lay)
            if family.residual
            else None,
        )
        self.packing = {}
        count = batch
        if packed:
            count = shape.sequences
            inner = torch.randint(0, batch * length + 1, (count - 1,), generator=draw).sort().values.tolist()
            bounds = [0, *inner, batch * length]
            self.packing["cu_seqlens"] = torch.tensor(bounds, dtype=getattr(torch, family.mode))
        if family.mode == "seq_idx":
            changes = torch.rand(batch, length, generator=draw) < 0.2
            numbers = torch.randint(-1, 4, (batch, length + 1), generator=draw)
            runs = numbers.gather(1, changes.long().cumsum(1)) if length else numbers[:, :0]
            self.packing["seq_idx"] = runs.to(torch.int32).contiguous()
        states = dict(layout="channel-first" if shape.compact_states else "channel-last")
        self.tensors["initial_states"] = (
            reference.sequences(normal(count, dim, family.history), dtype, **states) if family.history else None
        )
        kind = shape.dy
        self.dy = upstream_gradient(normal(batch, dim, length).to(dtype), kind, layout)
        self.dfinal = normal(count, dim, family.state_len).to(dtype) if family.state_len is not None else None
        self.terms = batch * length

    def oracle(self, compute=torch.float64):
        """(y, final_states, gradients by name), with every tensor a leaf."""
        leaves = {k: None if v is None else v.detach().to(compute).requires_grad_() for k, v in self.tensors.items()}
        y, final = reference.causal_conv1d(
            **leaves,
            activation=self.family.activation,
            state_len=self.family.state_len,
            compute=compute,
            **self.packing,
        )
        return y, final, self.gradients(leaves, y, final, self.dy.to(compute))

    def gradients(self, leaves, y, final, dy):
        wanted = {name: leaf for name, leaf in leaves.items() if leaf is not None}
        outputs, seeds = [y], [dy]
        if self.dfinal is not None:
            outputs.append(final)
            seeds.append(self.dfinal.to(final))
        if not any(output.requires_grad for output in outputs):
            return {name: torch.zeros_like(leaf) for name, leaf in wanted.items()}
        found = torch.autograd.grad(outputs, list(wanted.values()), seeds, allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(wanted.items(), found, strict=True)
        }

    def sizes(self):
        """(slack of y, absolute sums behind each gradient)."""
        t, activation = self.tensors, self.family.activation
        pre, _ = reference.preactivation(
            t["x"], t["weight"], t["bias"], initial_states=t["initial_states"], **self.packing
        )
        size = reference.magnitude(
            reference.causal_conv1d, t["x"], t["initial_states"], t["weight"], t["bias"], **self.packing
        )
        slack = reference.fp32_error(pre, size, self.family.width, activation, t["residual"])
        leaves = {k: None if v is None else v.detach().double().abs().requires_grad_() for k, v in t.items()}
        y, final = reference.causal_conv1d(**leaves, state_len=self.family.state_len, **self.packing)
        dz = self.dy.double().abs() * (1 if activation is None else 1 + size)
        signed = self.dfinal
        self.dfinal = None if signed is None else signed.abs()
        gradients = self.gradients(leaves, y, final, dz)
        self.dfinal = signed
        return slack, gradients

    def options(self, device):
        options = dict(activation=self.family.activation)
        options.update({name: tensor.to(device) for name, tensor in self.packing.items()})
        if self.family.state_len is not None:
            options.update(return_final_states=True, state_len=self.family.state_len)
        return options

    def leaves(self, device):
        return {k: None if v is None else moved(v, device).detach().requires_grad_() for k, v in self.tensors.items()}

    def run(self, device):
        leaves = self.leaves(device)
        with pytest.MonkeyPatch.context() as patch:
            if self.large and device == "cuda":
                patch.setattr("accel.kernels.conv_fwd.SMALL", 0)
            result = ops.causal_conv1d(**leaves, **self.options(device))
            y, final = result if self.family.state_len is not None else (result, None)
            return y, final, self.gradients(leaves, y, final, moved(self.dy, device))

    def check(self, device):
        y, final, gradients = self.run(device)
        expected, expected_final, exact = self.oracle()
        slack, sizes = self.sizes()
        plain = self.oracle(torch.float32)[2]
        x = self.tensors["x"]
        assert y.dtype == x.dtype and y.shape == x.shape and y.device.type == device
        dense_in_its_format = y if self.family.layout == "channel-first" else y.transpose(1, 2)
        assert dense_in_its_format.is_contiguous() or 1 in x.shape[1:]
        reference.assert_close_ulp(y, expected, slack)
        if final is not None:
            reference.assert_same_bits(final, expected_final.detach().to(x.dtype), "final_states")
        assert gradients.keys() == exact.keys()
        for name, gradient in gradients.items():
            assert gradient.dtype == self.tensors[name].dtype, name
            terms = self.terms if name in ("weight", "bias") else 1
            reference.assert_gradient(gradient, exact[name], plain[name], sizes[name], terms, f"gradient of {name}")


@given(family=st.sampled_from(FAMILIES), shape=SHAPES)
def test_against_the_oracle(device, family, shape):
    Case(family, shape).check(device)


@pytest.mark.parametrize("family", FAMILIES, ids=label)
def test_every_family_aligned_and_odd(device, family):
    Case(family, Shape(batch=2, seed=1)).check(device)
    Case(family, Shape(batch=2, dim=35, length=50, pitch=2, offset=1, dy="split", seed=2)).check(device)
    Case(family, Shape(batch=2, length=50, seed=3, large=True)).check(device)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_random_layouts(part):
    """ACCEL_LAYOUTS (default 60) more drawn layouts, longer and wider than the grid's; a part has its own families."""
    draw = random.Random(int(os.environ.get("ACCEL_SEED", "0")) + part)
    for number in range(part, int(os.environ.get("ACCEL_LAYOUTS", "60")), PARTS):
        shape = Shape(
            batch=draw.choice((1, 1, 2, 5)),
            dim=draw.choice((1, 4, 24, 63, 64, 128, 200, 257)),
            length=draw.choice((0, 1, 2, 3, 6, 31, 64, 127, 200, 300)),
            pitch=draw.choice((0, 0, 1, 4, 8, 200)),
            gap=draw.choice((0, 0, 1, 8)),
            offset=draw.choice((0, 0, 1, 2, 4, 8)),
            dy=draw.choice(DY_KINDS),
            sequences=draw.choice((1, 2, 7, 20)),
            compact_states=draw.random() < 0.5,
            seed=number,
            large=number // PARTS % 2 == 1,
        )
        Case(draw.choice(FAMILIES[part::PARTS]), shape).check("cuda")


@pytest.mark.parametrize("length", range(6))
@pytest.mark.parametrize("history, state_len", ((None, 3), (3, 3), (4, 4), (3, 4), (4, 3), (4, 7)))
def test_short_sequences_and_their_states(device, length, history, state_len):
    family = Family(torch.float32, torch.float32, None, 4, "channel-last", "dense", False, "silu", history, state_len)
    Case(family, Shape(batch=2, dim=8, length=length, seed=5)).check(device)


@pytest.mark.parametrize("mode", ("dense", "int32", "seq_idx"))
@pytest.mark.parametrize("batch, dim, length", ((0, 8, 5), (2, 0, 5), (1, 8, 0), (0, 0, 0)))
def test_nothing_to_do(device, batch, dim, length, mode):
    x = torch.empty(batch, length, dim, device=device).transpose(1, 2).requires_grad_()
    weight = torch.ones(dim, 4, device=device).requires_grad_()
    options = {}
    if mode == "int32":
        options["cu_seqlens"] = torch.tensor([0, batch * length], dtype=torch.int32, device=device)
    if mode == "seq_idx":
        options["seq_idx"] = torch.zeros(batch, length, dtype=torch.int32, device=device)
    y = ops.causal_conv1d(x, weight, activation="silu", **options)
    assert y.shape == x.shape
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == x.shape and dw.shape == weight.shape and not dw.any()


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_no_sequence_at_all(device, dtype):
    x, cu = torch.empty(1, 8, 0, device=device), torch.zeros(1, dtype=dtype, device=device)
    y, final = ops.causal_conv1d(x, torch.ones(8, 4, device=device), cu_seqlens=cu, return_final_states=True)
    assert y.shape == (1, 8, 0) and final.shape == (0, 8, 3)


def test_packed_is_each_sequence_alone(device):
    """Twelve ragged sequences, empty ones among them, with states: what twelve calls give."""
    lengths = [5, 0, 1, 2, 3, 64, 0, 17, 4, 33, 8, 1]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    dim, total = 24, sum(lengths)
    x = torch.randn(1, total, dim).bfloat16().to(device).transpose(1, 2)
    weight, bias = torch.randn(dim, 4).bfloat16().to(device), torch.randn(dim).bfloat16().to(device)
    initial = torch.randn(12, dim, 3).bfloat16().to(device)
    options = dict(activation="silu", return_final_states=True)
    y, final = ops.causal_conv1d(x, weight, bias, cu_seqlens=bounds.to(device), initial_states=initial, **options)
    for n in range(12):
        start, end = bounds[n], bounds[n + 1]
        alone, tail = ops.causal_conv1d(x[:, :, start:end], weight, bias, initial_states=initial[n : n + 1], **options)
        reference.assert_same_values(y[:, :, start:end], alone, f"y of sequence {n}")
        reference.assert_same_bits(final[n : n + 1], tail, f"state of sequence {n}")


@pytest.mark.parametrize("dy", sorted(set(DY_KINDS)))
def test_packed_rows_of_one_token(device, dy):
    """An axis of one token has a stride that means nothing; the tokens lie one row apart."""
    family = Family(torch.float16, torch.float16, None, 4, "channel-last", "int32", False, "silu", 3, 3)
    Case(family, Shape(batch=5, length=1, pitch=8, dy=dy, seed=6)).check(device)


@pytest.mark.parametrize("cut", (0, 1, 2, 3, 4, 29, 30))
def test_two_pieces_are_the_whole(device, cut):
    x = torch.randn(2, 30, 16).half().to(device).transpose(1, 2)
    weight = torch.randn(16, 4).half().to(device)
    options = dict(activation="silu", return_final_states=True)
    whole, tail = ops.causal_conv1d(x, weight, **options)
    first, state = ops.causal_conv1d(x[:, :, :cut], weight, **options)
    second, state = ops.causal_conv1d(x[:, :, cut:], weight, initial_states=state, **options)
    reference.assert_same_values(torch.cat([first, second], dim=2), whole, "y")
    reference.assert_same_bits(state, tail)


@pytest.mark.parametrize("state_len", (3, 4, 6))
def test_prefill_hands_over_to_decode(device, state_len):
    """The state that comes out goes into the update as it is."""
    x = torch.randn(3, 21, 32).bfloat16().to(device)
    weight = torch.randn(32, 4).bfloat16().to(device)
    whole, tail = ops.causal_conv1d(
        x.transpose(1, 2), weight, activation="silu", return_final_states=True, state_len=state_len
    )
    y, state = ops.causal_conv1d(
        x[:, :12].transpose(1, 2), weight, activation="silu", return_final_states=True, state_len=state_len
    )
    assert state.shape == (3, 32, state_len) and state.transpose(1, 2).is_contiguous()
    pieces = [y] + [
        ops.causal_conv1d_update(x[:, t], state, weight, activation="silu")[:, :, None] for t in range(12, 21)
    ]
    got, expected = torch.cat(pieces, dim=2).cpu().double(), whole.cpu().double()
    assert ((got - expected).abs() <= reference.ulp(expected, torch.bfloat16)).all()
    reference.assert_same_bits(state, tail)


@pytest.mark.parametrize("frozen", ("x", "weight", "bias", "residual", "initial_states"))
def test_only_the_gradients_that_are_wanted(device, frozen):
    family = Family(torch.float32, torch.float32, torch.float32, 4, "channel-last", "dense", True, "silu", 3, 3)
    case = Case(family, Shape(batch=2, seed=9))
    all_of_them = case.run(device)[2]
    leaves = case.leaves(device)
    leaves[frozen].requires_grad_(False)
    y, final = ops.causal_conv1d(**leaves, **case.options(device))
    torch.autograd.backward([y, final], [moved(case.dy, device), case.dfinal.to(device)])
    for name, leaf in leaves.items():
        if name == frozen:
            assert leaf.grad is None
        else:
            reference.assert_same_bits(leaf.grad, all_of_them[name], name)


def test_final_states_alone_carry_a_gradient(device):
    """No gradient reaches y: what the loss takes from the state alone still arrives."""
    x = torch.randn(2, 8, 2).to(device).requires_grad_()
    initial = torch.randn(2, 8, 3).to(device).requires_grad_()
    _, final = ops.causal_conv1d(x, torch.ones(8, 4, device=device), initial_states=initial, return_final_states=True)
    seed = torch.randn(2, 8, 3).to(device)
    dx, dinitial = torch.autograd.grad(final, (x, initial), seed)
    reference.assert_same_bits(dx, seed[:, :, 1:], "dx")
    assert torch.equal(dinitial[:, :, 2], seed[:, :, 0]) and not dinitial[:, :, :2].any()


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("layout", ("channel-last", "channel-first"))
@pytest.mark.parametrize("mode, large", (("dense", False), ("dense", True), ("int32", False)))
def test_bit_for_bit_over_twenty_runs(device, bias, layout, mode, large):
    dtype = torch.bfloat16
    family = Family(dtype, dtype, dtype if bias else None, 4, layout, mode, False, "silu", None, None)
    case = Case(family, Shape(batch=2, dim=64, length=200 if device == "cpu" else 5000, seed=4, large=large))
    first = case.run(device)
    for _ in range(19):
        again = case.run(device)
        reference.assert_same_bits(again[0], first[0], "y")
        for name, gradient in again[2].items():
            reference.assert_same_bits(gradient, first[2][name], name)


@pytest.mark.parametrize("loss", (torch.sum, lambda y: y.square().sum()), ids=("sum", "square"))
def test_second_derivative_is_refused(device, loss):
    """Never a gradient that silently lacks a term, as in a gradient penalty added to a loss."""
    x = torch.randn(1, 8, 9).to(device).requires_grad_()
    y = ops.causal_conv1d(x, torch.ones(8, 4, device=device), activation="silu")
    with pytest.raises((RuntimeError, NotImplementedError), match="twice|second|double"):
        (dx,) = torch.autograd.grad(loss(y), x, create_graph=True)
        (dx.square().sum() + y.sum()).backward()


@pytest.mark.parametrize("packing", ("dense", "cu_seqlens"))
def test_rows_of_a_matrix(device, packing):
    """x inside a matrix [D, B * T]: y and dx lie like x, so that packed tokens of all rows are at one stride."""
    b, d, t = 3, 24, 10
    x = torch.randn(d, b, t).to(device).transpose(0, 1).requires_grad_()
    weight, dy = torch.randn(d, 4).to(device), torch.randn(b, d, t).to(device)
    bounds = torch.tensor([0, 7, 12, b * t]) if packing == "cu_seqlens" else None
    y = ops.causal_conv1d(x, weight, activation="silu", cu_seqlens=None if bounds is None else bounds.to(device))
    (dx,) = torch.autograd.grad(y, x, dy)
    leaf = x.detach().cpu().double().requires_grad_()
    exact, _ = reference.causal_conv1d(leaf, weight.cpu(), activation="silu", cu_seqlens=bounds)
    (gradient,) = torch.autograd.grad(exact, leaf, dy.cpu().double())
    torch.testing.assert_close(y.detach().cpu().double(), exact.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.cpu().double(), gradient, rtol=1e-5, atol=1e-5)
    assert y.stride() == dx.stride() == x.stride()


@pytest.mark.parametrize("layout", ("channel-last", "compact"))
@pytest.mark.parametrize("columns", (3, 4, 6))
@pytest.mark.parametrize("grad", (False, True))
def test_final_states_out(device, layout, columns, grad):
    x, weight = torch.randn(2, 16, 9).to(device), torch.randn(16, 4).to(device)
    out = torch.empty(2, 16, columns, device=device)
    if layout == "channel-last":
        out = torch.empty(2, columns, 16, device=device).transpose(1, 2)
    address, strides = out.data_ptr(), out.stride()
    x.requires_grad_(grad)
    y, final = ops.causal_conv1d(x, weight, return_final_states=True, final_states_out=out)
    assert final is out and (out.data_ptr(), out.stride()) == (address, strides)
    if grad:
        (dx,) = torch.autograd.grad([y, final], x, [torch.zeros_like(y), torch.ones_like(final)])
        assert (dx[:, :, 9 - columns :] == 1).all() and not dx[:, :, : 9 - columns].any()
    reference.assert_same_bits(out, x[:, :, 9 - columns :])
    assert y.shape == x.shape


@pytest.mark.parametrize("shared", ("x", "weight", "bias", "residual", "initial_states", "cu_seqlens"))
@pytest.mark.parametrize("wrap", ("same storage", "dlpack"))
def test_final_states_out_shares_no_memory(device, shared, wrap):
    dim = 8
    arguments = dict(
        x=torch.randn(1, dim, 12).to(device),
        weight=torch.randn(dim, 4).to(device),
        bias=torch.randn(dim).to(device),
        residual=torch.randn(1, dim, 12).to(device),
        initial_states=torch.randn(1, dim, 3).to(device),
        cu_seqlens=torch.tensor([0, 12], dtype=torch.int32, device=device),
    )
    buffer = torch.zeros(dim * 16, device=device)
    other = torch.from_dlpack(buffer) if wrap == "dlpack" else buffer
    tensor = arguments[shared]
    place = other.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
    arguments[shared] = place.copy_(tensor)
    last = tensor.numel() - 1
    out = buffer[last : last + dim * 3].view(1, dim, 3)  # one element in common
    before = buffer.clone()
    with pytest.raises(ValueError, match=r"\bfinal_states_out\b"):
        ops.causal_conv1d(**arguments, return_final_states=True, final_states_out=out)
    reference.assert_same_bits(buffer, before, "the shared memory")
    out = buffer[last + 1 : last + 1 + dim * 3].view(1, dim, 3)  # neighbours in one storage are no aliases
    _, final = ops.causal_conv1d(**arguments, return_final_states=True, final_states_out=out)
    assert final is out


def good(device):
    tensors = dict(
        x=torch.randn(2, 12, 16).transpose(1, 2).bfloat16(),
        weight=torch.randn(16, 4).bfloat16(),
        bias=torch.randn(16).bfloat16(),
        residual=torch.randn(2, 12, 16).transpose(1, 2).bfloat16(),
        initial_states=torch.randn(2, 16, 3).bfloat16(),
    )
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def cu(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


BAD = {
    "x rank": ("x", lambda a, d: dict(x=a["x"][0]), ValueError),
    "x dtype": ("x", lambda a, d: dict(x=a["x"].double()), TypeError),
    "x no tensor": ("x", lambda a, d: dict(x=[1.0]), TypeError),
    "weight rank": ("weight", lambda a, d: dict(weight=a["weight"][:, None]), ValueError),
    "weight channels": ("weight", lambda a, d: dict(weight=a["weight"][:8]), ValueError),
    "weight dtype": ("weight", lambda a, d: dict(weight=a["weight"].half()), TypeError),
    "width 1": ("weight", lambda a, d: dict(weight=a["weight"][:, :1]), NotImplementedError),
    "width 138": ("weight", lambda a, d: dict(weight=a["weight"].repeat(1, 35)[:, :138]), NotImplementedError),
    "bias shape": ("bias", lambda a, d: dict(bias=a["bias"][:8]), ValueError),
    "bias dtype": ("bias", lambda a, d: dict(bias=a["bias"].half()), TypeError),
    "residual shape": ("residual", lambda a, d: dict(residual=a["residual"][:1]), ValueError),
    "residual dtype": ("residual", lambda a, d: dict(residual=a["residual"].float()), TypeError),
    "activation": ("activation", lambda a, d: dict(activation="gelu"), ValueError),
    "states rows": ("initial_states", lambda a, d: dict(initial_states=a["initial_states"][:1]), ValueError),
    "states short": ("initial_states", lambda a, d: dict(initial_states=a["initial_states"][:, :, 1:]), ValueError),
    "states dtype": ("initial_states", lambda a, d: dict(initial_states=a["initial_states"].half()), TypeError),
    "cu dtype": ("cu_seqlens", lambda a, d: dict(cu_seqlens=cu([0, 9, 24], d, torch.int16)), TypeError),
    "cu rank": ("cu_seqlens", lambda a, d: dict(cu_seqlens=cu([[0, 24]], d)), ValueError),
    "cu empty": ("cu_seqlens", lambda a, d: dict(cu_seqlens=cu([], d)), ValueError),
    "cu against states": ("initial_states", lambda a, d: dict(cu_seqlens=cu([0, 24], d)), ValueError),
    "both packings": (
        "seq_idx",
        lambda a, d: dict(cu_seqlens=cu([0, 12, 24], d), seq_idx=torch.zeros(2, 12, dtype=torch.int32, device=d)),
        ValueError,
    ),
    "seq_idx dtype": ("seq_idx", lambda a, d: dict(seq_idx=torch.zeros(2, 12, dtype=torch.int64, device=d)), TypeError),
    "seq_idx shape": ("seq_idx", lambda a, d: dict(seq_idx=torch.zeros(2, 9, dtype=torch.int32, device=d)), ValueError),
    "seq_idx and final states": (
        "return_final_states",
        lambda a, d: dict(seq_idx=torch.zeros(2, 12, dtype=torch.int32, device=d), return_final_states=True),
        ValueError,
    ),
    "state_len": ("state_len", lambda a, d: dict(return_final_states=True, state_len=2), ValueError),
    "out without asking": (
        "final_states_out",
        lambda a, d: dict(final_states_out=torch.empty(2, 16, 3, dtype=torch.bfloat16, device=d)),
        ValueError,
    ),
    "out columns": (
        "final_states_out",
        lambda a, d: dict(
            return_final_states=True,
            state_len=4,
            final_states_out=torch.empty(2, 16, 3, dtype=torch.bfloat16, device=d),
        ),
        ValueError,
    ),
    "out dtype": (
        "final_states_out",
        lambda a, d: dict(return_final_states=True, final_states_out=torch.empty(2, 16, 3, device=d)),
        TypeError,
    ),
    "out expanded": (
        "final_states_out",
        lambda a, d: dict(
            return_final_states=True,
            final_states_out=torch.empty(1, 16, 3, dtype=torch.bfloat16, device=d).expand(2, 16, 3),
        ),
        ValueError,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(device, name):
    argument, spoil, error = BAD[name]
    arguments = good(device)
    arguments.update(spoil(arguments, device))
    with pytest.raises(error, match=rf"\b{argument}\b") as caught:
        ops.causal_conv1d(**arguments)
    assert type(caught.value) is error


MALFORMED = {
    "negative": [0, -3, 10, 24],
    "very negative": [0, -(2**31), 10, 24],
    "decreasing": [0, 12, 5, 24],
    "past the end": [0, 12, 31, 24],
    "far past the end": [0, 12, 2**31 - 1, 24],
    "first not 0": [3, 12, 20, 24],
    "last too small": [0, 12, 20, 21],
    "last too large": [0, 12, 20, 29],
}


def owners(bounds, total):
    """Per token: the sound sequences (start, end) that claim it; nothing else may give it a number."""
    claims = [[] for _ in range(total)]
    for start, end in itertools.pairwise(bounds):
        if 0 <= start <= end <= total:
            for token in range(start, end):
                claims[token].append((start, end))
    return claims


@pytest.mark.parametrize("layout", ("channel-last", "channel-first"))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_packing(device, name, dtype, layout):
    """NaN where the packing is unsound (a number only where it is right), an error later, then all is well."""
    bounds, dim, total = MALFORMED[name], 40, 24
    batch = 2 if layout == "channel-last" else 1
    x = reference.sequences(torch.randn(batch, dim, total // batch), torch.float32, layout=layout)
    x, weight = moved(x, device), torch.randn(dim, 4).to(device)
    initial = torch.randn(3, dim, 3).to(device)
    y, final = ops.causal_conv1d(
        x, weight, cu_seqlens=cu(bounds, device, dtype), initial_states=initial, return_final_states=True
    )
    if device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(accel.PackedMetadataError, match="cu_seqlens"):
        accel.check()
    accel.check()
    flat = y.cpu().transpose(0, 1).reshape(dim, total)
    tokens = x.cpu().transpose(0, 1).reshape(dim, total)
    assert flat.isnan().any()
    for token, claims in enumerate(owners(bounds, total)):
        if flat[:, token].isnan().all():
            continue
        assert len(claims) == 1, f"token {token} has {len(claims)} owners and a plausible value"
        start, end = claims[0]
        row = bounds.index(start)
        right, _ = reference.sequence(
            tokens[:, start:end].double(), initial[row].cpu().double(), weight.cpu().double(), None, 3
        )
        reference.assert_close_ulp(flat[:, token], right[:, token - start], 2.0**-17)
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        assert 0 <= start <= end <= total or final[n].isnan().all(), f"state of sequence {n}"
    sound = [0, 12, 20, 24]
    y, final = ops.causal_conv1d(
        x, weight, cu_seqlens=cu(sound, device, dtype), initial_states=initial, return_final_states=True
    )
    expected, states = reference.causal_conv1d(
        x.cpu(), weight.cpu(), cu_seqlens=cu(sound, "cpu"), initial_states=initial.cpu()
    )
    reference.assert_close_ulp(y, expected, 2.0**-17)
    reference.assert_same_bits(final, states.float())


def test_malformed_packing_wider_than_int32(device):
    x = torch.randn(1, 8, 24).to(device)
    y = ops.causal_conv1d(x, torch.ones(8, 4, device=device), cu_seqlens=cu([0, 2**33, 24], device, torch.int64))
    if device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(accel.PackedMetadataError):
        accel.check()
    assert y.isnan().any()


def test_malformed_packing_is_raised_by_the_next_call(device):
    x, weight = torch.randn(1, 8, 24).to(device), torch.ones(8, 4, device=device)
    ops.causal_conv1d(x, weight, cu_seqlens=cu([0, 30], device))
    if device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(accel.PackedMetadataError):
        ops.causal_conv1d(x, weight)
    ops.causal_conv1d(x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_len", (1, 3, 4, 9))
@pytest.mark.parametrize("pitch", (0, 5))
def test_varlen_states(device, dtype, state_len, pitch):
    x = reference.rows(torch.randn(30, 24), dtype, pitch=pitch, offset=pitch)
    bounds = torch.tensor([0, 2, 2, 12, 13, 30], dtype=torch.int32)
    states = ops.causal_conv1d_varlen_states(moved(x, device), bounds.to(device), state_len)
    reference.assert_same_bits(states, reference.causal_conv1d_varlen_states(x, bounds, state_len))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("channel-last", "channel-first"))
def test_no_copy_on_the_way(layout, no_copies):
    dtype = torch.bfloat16
    family = Family(dtype, dtype, dtype, 4, layout, "dense", True, "silu", 4, 4)
    case = Case(family, Shape(batch=2, dim=35, length=50, pitch=2, gap=1, offset=1, seed=2))
    leaves = {name: tensor.detach() for name, tensor in case.leaves("cuda").items()}
    expected = ops.causal_conv1d(**leaves, **case.options("cuda"))
    with no_copies():
        got = ops.causal_conv1d(**leaves, **case.options("cuda"))
    for one, other in zip(got, expected, strict=True):
        reference.assert_same_bits(one, other)


@pytest.mark.gpu
def test_side_stream():
    x, weight = torch.zeros(2, 512, 256, device="cuda").requires_grad_(), torch.ones(256, 4, device="cuda")
    weight.requires_grad_()
    torch.autograd.grad(ops.causal_conv1d(x.transpose(1, 2), weight).sum(), (x, weight))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.detach().fill_(1.0)
        y = ops.causal_conv1d(x.transpose(1, 2), weight)
        dx, dw = torch.autograd.grad(y.sum(), (x, weight))
        total, last, taps = y.sum(), dx[:, 508:].sum(2), dw[0]
    stream.synchronize()
    assert total.item() == 2 * 256 * (4 * 512 - 6)
    assert last[0].tolist() == [1024, 768, 512, 256]
    assert taps.tolist() == [2 * 509, 2 * 510, 2 * 511, 2 * 512]


@pytest.mark.gpu
def test_two_streams_at_once():
    """Workspaces of concurrent streams are their own: weight gradients stay bit for bit the same."""
    x = torch.randn(2, 4096, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(512, 4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    expected = torch.autograd.grad(ops.causal_conv1d(x.transpose(1, 2), weight, activation="silu").sum(), weight)[0]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for turn in range(10):
        with torch.cuda.stream(streams[turn % 2]):
            y = ops.causal_conv1d(x.transpose(1, 2), weight, activation="silu")
            results.append(torch.autograd.grad(y.sum(), weight)[0])
    torch.cuda.synchronize()
    for result in results:
        reference.assert_same_bits(result, expected, "dw")


def check_windows(x, weight, y, dy, gradients, starts, slack):
    """y and dx of a linear dense call in windows of 64 tokens, from the tokens around them alone."""
    width, length = weight.shape[1], x.shape[2]
    for start in starts:
        low, high = max(start - (width - 1), 0), min(start + 64, length)
        right = reference.dense(x[:, :, low:high], weight)[:, :, start - low :]
        reference.assert_close_ulp(y[:, :, start:high], right, slack, f"y at {start}")
        far = min(high + width - 1, length)
        right = reference.dense(dy[:, :, start:far].flip(2), weight).flip(2)[:, :, : high - start]
        reference.assert_close_ulp(gradients[:, :, start:high], right, slack, f"dx at {start}")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("channel-last", "channel-first"))
def test_beyond_2_31_elements(layout):
    dim, length = 4096, 2**19 + 77
    if layout == "channel-last":
        x = torch.randn(1, length, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        dy = torch.randn(1, length, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    else:
        x = torch.randn(1, dim, length, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(1, dim, length, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(dim, 4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    x.requires_grad_()
    y = ops.causal_conv1d(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    x, weight = x.detach(), weight.detach()
    check_windows(x, weight, y.detach(), dy, dx, (0, 2**17, 2**18 - 32, 2**19 - 32, length - 64), 2.0**-18)
    exact = torch.zeros(dim, 4, dtype=torch.float64, device="cuda")
    for start in range(0, length, 2**14):
        end = min(start + 2**14, length)
        for tap in range(4):
            shift = 3 - tap
            low = max(start, shift)
            exact[:, tap] += (dy[0, :, low:end].double() * x[0, :, low - shift : end - shift].double()).sum(1)
    reference.assert_close_ulp(dw, exact, 64 * reference.UNIT_FP32 * length**0.5 * 2)


@pytest.mark.gpu
def test_batch_stride_beyond_2_31_elements():
    """Two short rows of a huge buffer: b * stride(0) passes 2^31 (and twice that), D * T does not."""
    stride = 2**31 + 16
    buffer = torch.empty(2 * stride + 64 * 40, device="cuda", dtype=torch.bfloat16)
    x = buffer.as_strided((3, 64, 40), (stride, 1, 64)).copy_(torch.randn(3, 64, 40)).requires_grad_()
    weight = torch.randn(64, 4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    alone = x.detach().clone().requires_grad_()
    y = ops.causal_conv1d(x, weight, activation="silu")
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, weight), dy)
    expected_y = ops.causal_conv1d(alone, weight, activation="silu")
    expected = torch.autograd.grad(expected_y, (alone, weight), dy)
    reference.assert_same_values(y, expected_y, "y")
    reference.assert_same_values(got[0], expected[0], "dx")
    reference.assert_close_ulp(got[1], expected[1].double(), 2.0**-16)


@pytest.mark.gpu
@pytest.mark.parametrize("pitch", (36864, 36867))
def test_row_pitch_times_tokens_beyond_2_31(pitch):
    """A narrow slice of a fused projection: no tensor is large, the offset of its last rows is."""
    length, dim = 2**31 // 36864 + 100, 64
    buffer = torch.empty(length, pitch, device="cuda", dtype=torch.bfloat16)
    x = buffer[:, pitch - dim :].t()[None].copy_(torch.randn(1, dim, length)).requires_grad_()
    weight = torch.randn(dim, 4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    alone = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    results = []
    for tensor in (x, alone):
        y, final = ops.causal_conv1d(tensor, weight, activation="silu", return_final_states=True)
        results.append((y, final, *torch.autograd.grad(y, (tensor, weight), torch.ones_like(y))))
    for name, one, other in zip(("y", "final_states", "dx"), *(result[:3] for result in results), strict=True):
        reference.assert_same_values(one, other, name)
    reference.assert_close_ulp(results[0][3], results[1][3].double(), 64 * reference.UNIT_FP32 * length**0.5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "batch, dim, length, layout",
    (
        (65536 + 70, 16, 5, "channel-last"),
        (65536 + 70, 16, 5, "channel-first"),
        (1, 65536 + 70, 4, "channel-first"),
        (1, 65536 * 9, 5, "channel-last"),
    ),
)
def test_more_than_a_grid_dimension_holds(batch, dim, length, layout):
    values = torch.randn(batch, dim, length, device="cuda")
    x = reference.sequences(values, torch.float32, layout=layout).requires_grad_()
    weight = torch.randn(dim, 2, device="cuda").requires_grad_()
    y = ops.causal_conv1d(x, weight)
    dx, dw = torch.autograd.grad(y.sum(), (x, weight))
    reference.assert_close_ulp(y, reference.dense(x.detach(), weight.detach()), 2.0**-19)
    ones = torch.ones_like(values)
    reference.assert_close_ulp(dx, reference.dense(ones, weight.detach()).flip(2), 2.0**-19)
    last = values.double().sum((0, 2))
    exact = torch.stack([last - values[:, :, -1].double().sum(0), last], dim=1)
    reference.assert_close_ulp(dw, exact, 64 * reference.UNIT_FP32 * (batch * length) ** 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_more_sequences_than_a_grid_dimension_holds(dtype):
    """Packed sequences of two tokens are a dense batch of two tokens."""
    count, dim = 65536 + 70, 16
    x = torch.randn(1, 2 * count, dim, device="cuda")
    weight, initial = torch.randn(dim, 4, device="cuda"), torch.randn(count, dim, 3, device="cuda")
    bounds = torch.arange(0, 2 * count + 1, 2, dtype=dtype, device="cuda")
    options = dict(activation="silu", initial_states=initial, return_final_states=True)
    y, final = ops.causal_conv1d(x.transpose(1, 2), weight, cu_seqlens=bounds, **options)
    rows, states = ops.causal_conv1d(x.view(count, 2, dim).transpose(1, 2), weight, **options)
    reference.assert_same_values(y.transpose(1, 2).reshape(count, 2, dim), rows.transpose(1, 2), "y")
    reference.assert_same_bits(final, states)
    reference.assert_same_bits(final[:, :, 1:], x.view(count, 2, dim).transpose(1, 2))
    accel.check()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("channel-last", "channel-first"))
@pytest.mark.parametrize("packed", (False, True))
def test_a_million_tokens(layout, packed):
    dim, length = 16, 1_000_003
    x = reference.sequences(torch.randn(1, dim, length, device="cuda"), torch.bfloat16, layout=layout).requires_grad_()
    weight = torch.randn(dim, 4, device="cuda", dtype=torch.bfloat16).requires_grad_()
    bounds = [0, 1, 3, 400_000, 400_000, 999_999, length] if packed else [0, length]
    options = dict(cu_seqlens=cu(bounds, "cuda", torch.int64)) if packed else {}
    y, final = ops.causal_conv1d(x, weight, return_final_states=True, **options)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    exact = torch.zeros(dim, 4, dtype=torch.float64, device="cuda")
    values, w = x.detach(), weight.detach()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        one, up = values[:, :, start:end], dy[:, :, start:end]
        reference.assert_close_ulp(y[:, :, start:end], reference.dense(one, w), 2.0**-18, f"y of {n}")
        reference.assert_close_ulp(dx[:, :, start:end], reference.dense(up.flip(2), w).flip(2), 2.0**-18, f"dx of {n}")
        for tap in range(4):
            shift = min(3 - tap, end - start)
            exact[:, tap] += (up[0, :, shift:].double() * one[0, :, : end - start - shift].double()).sum(1)
        tail = torch.cat([one.new_zeros(1, dim, 3), one], dim=2)[0, :, -3:]
        reference.assert_same_bits(final[n], tail)
    reference.assert_close_ulp(dw, exact, 64 * reference.UNIT_FP32 * length**0.5)
