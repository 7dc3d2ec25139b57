"""`ops.causal_conv1d_dense`, `nn.CausalConv1d` and the target conv1d against a float64 oracle written tap by tap."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from reference import UNIT_FP32
from torch import nn
from torch.library import opcheck

import accel
from accel import dense_checks, dense_torch, environment, ops
from accel.call import DenseCall
from accel.dense_checks import FASTER, RULES
from accel.kernels.dense_weight import split
from accel.nn import CausalConv1d
from accel.reasons import Reason

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ULP = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24, FP64: 2.0**-53}  # half an ulp of 1
ACTIVATIONS = {None: lambda u: u, "silu": F.silu, "swish": F.silu, "relu": F.relu, "gelu": F.gelu}

# batch, Cin, Cout, K, dilation, T
SMALL = [
    (2, 3, 5, 3, 2, 11),
    (1, 1, 1, 1, 1, 1),
    (3, 8, 16, 5, 4, 9),  # T under the reach
    (2, 7, 3, 2, 7, 64),
    (1, 16, 8, 1, 3, 33),
    (0, 4, 4, 3, 1, 5),
    (2, 4, 4, 3, 1, 0),
]
# odd channels and lengths, tiles that are full and that are not, unaligned rows, reaches on both sides of a vector
LARGE = [
    (2, 64, 64, 3, 2, 256),
    (1, 128, 128, 5, 8, 1024),
    (3, 33, 65, 3, 1, 129),
    (2, 130, 70, 4, 3, 200),
    (1, 256, 200, 3, 4, 520),
    (2, 40, 136, 2, 129, 264),
    (1, 72, 72, 7, 13, 77),
    (2, 96, 257, 1, 1, 136),
    (5, 8, 8, 3, 512, 2048),
    (1, 24, 16, 9, 1, 8),
    # enough tokens for the wide tile of a weight gradient, moved inside a vector and not
    (2, 130, 264, 7, 3, 1288),
    (4, 264, 136, 5, 8, 2048),
]


@pytest.fixture(autouse=True)
def every_row(monkeypatch):
    """The kernels are right for any rows, also for those that a rule gives to torch."""
    monkeypatch.setattr(dense_checks, "FASTER", ())


def reference(x, weight, bias=None, dilation=1, groups=1, activation=None):
    """y in float64, and the sum of the magnitudes that it was added up from."""
    taps, tokens = weight.shape[2], x.shape[2]
    wide, narrow = x.double(), weight.double()
    per_group = weight.shape[0] // groups
    y = wide.new_zeros(x.shape[0], weight.shape[0], tokens)
    size = torch.zeros_like(y)
    for group, tap in itertools.product(range(groups), range(taps)):
        back = (taps - 1 - tap) * dilation
        part = narrow[group * per_group : (group + 1) * per_group, :, tap]
        source = wide[:, group * weight.shape[1] : (group + 1) * weight.shape[1], : max(0, tokens - back)]
        rows = slice(group * per_group, (group + 1) * per_group)
        y[:, rows, back:] += torch.einsum("oc,bct->bot", part, source)
        size[:, rows, back:] += torch.einsum("oc,bct->bot", part.abs(), source.abs())
    if bias is not None:
        y = y + bias.double()[:, None]
        size = size + bias.double().abs()[:, None]
    return ACTIVATIONS[activation](y), size


def made(device, dtype, shape, bias=True, leaf=False):
    b, cin, cout, taps, _, t = shape
    tensors = [
        torch.randn(b, cin, t),
        torch.randn(cout, cin, taps) / max(1, cin * taps) ** 0.5,
        torch.randn(cout) if bias else None,
    ]
    return [None if each is None else each.to(device, dtype).requires_grad_(leaf) for each in tensors]


def close(got, want, size, dtype, slack=1.0):
    """Within the rounding of the output, and of an fp32 sum of as many terms as lead to it, in any order."""
    unit = max(ULP[dtype], 2.0**-53)
    accumulation = UNIT_FP32 if dtype is not FP64 else 2.0**-53
    bound = slack * (1.001 * unit * want.abs() + 64 * accumulation * size) + 1e-38
    if dtype is FP16:
        bound = bound + 2.0**-25
    excess = (got.double() - want).abs() - bound
    assert not (excess > 0).any() and not got.isnan().any(), f"{excess.max().item():.2e} beyond the bound"


def gradients(tensors, dilation, dy):
    """For each of x, weight and bias the gradient in float64, and the sum of the magnitudes that lead to it."""
    found = []
    for size in (False, True):
        leaves = [tensor.detach().double() for tensor in tensors]
        leaves = [(leaf.abs() if size else leaf).requires_grad_() for leaf in leaves]
        given = dy.double().abs() if size else dy.double()
        found.append(torch.autograd.grad(reference(*leaves, dilation)[0], leaves, given))
    return list(zip(*found, strict=True))


def serve_like(layout, x):
    """The same values in other memory."""
    if layout == "channel-last":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = torch.full((*x.shape[:2], x.shape[2] + 5), float("nan"), dtype=x.dtype, device=x.device)
        return wide[:, :, 3 : 3 + x.shape[2]].copy_(x)
    return x


def backend(device):
    return "native:cpu" if device == "cpu" else "native:cute"


def on(device):
    return SMALL if device == "cpu" else SMALL + LARGE


@pytest.mark.parametrize("layout", ["dense", "channel-last", "sliced"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_forward(device, dtype, layout):
    for shape in on(device):
        for bias, activation in ((False, None), (True, "silu"), (True, "relu"), (True, "gelu")):
            x, weight, b = made(device, dtype, shape, bias)
            y = ops.causal_conv1d_dense(serve_like(layout, x), weight, b, dilation=shape[4], activation=activation)
            want, size = reference(x, weight, b, shape[4], activation=activation)
            assert y.shape == want.shape and y.dtype == dtype
            if device == "cpu" or dtype in (BF16, FP16):
                assert str(accel.last_route("conv1d")) == backend(device)
                assert y.is_contiguous()
            else:
                assert str(accel.last_route("conv1d")) == "fallback:dtype"
            tf32 = device == "cuda" and dtype is FP32 and torch.backends.cudnn.allow_tf32
            close(y, want, size, dtype, slack=2.0**13 if tf32 else 1.3)


@pytest.mark.parametrize("dy_layout", ["dense", "channel-last", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_gradients(device, dtype, dy_layout):
    for shape in on(device):
        if dtype is FP32 and device == "cuda":
            continue  # torch's own
        x, weight, bias = made(device, dtype, shape, leaf=True)
        y = ops.causal_conv1d_dense(x, weight, bias, dilation=shape[4])
        dy = torch.randn(y.shape).to(device, dtype)
        dy = dy[:1, :1, :1].expand(y.shape) if dy_layout == "expanded" and dy.numel() else serve_like(dy_layout, dy)
        found = torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)
        again = torch.autograd.grad(y, (x, weight, bias), dy)
        for one, other, wanted in zip(found, again, gradients((x, weight, bias), shape[4], dy), strict=True):
            assert one.dtype == dtype and one.shape == wanted[0].shape
            assert torch.equal(one, other), "not the same bits twice"
            close(one, *wanted, dtype, slack=1.3)


def test_some_gradients_alone(device):
    shape = SMALL[0]
    for needs in itertools.product((False, True), repeat=3):
        tensors = [t.requires_grad_(need) for t, need in zip(made(device, BF16, shape), needs, strict=True)]
        y = ops.causal_conv1d_dense(*tensors, dilation=shape[4])
        assert y.requires_grad == any(needs)
        if any(needs):
            y.sum().backward()
        assert [t.grad is not None for t in tensors] == list(needs)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_gradcheck(groups, activation):
    x = torch.randn(1, 2, 4, dtype=FP64, requires_grad=True)
    weight = torch.randn(2, 2 // groups, 2, dtype=FP64, requires_grad=True)
    bias = torch.randn(2, dtype=FP64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda *tensors: ops.causal_conv1d_dense(*tensors, dilation=2, groups=groups, activation=activation),
        (x, weight, bias),
    )


def test_an_activation_behind_a_gradient_is_torchs(device):
    x, weight, bias = made(device, BF16, SMALL[0], leaf=True)
    y = ops.causal_conv1d_dense(x, weight, bias, dilation=2, activation="silu")
    assert torch.equal(y, F.silu(ops.causal_conv1d_dense(x, weight, bias, dilation=2)))


def test_groups(device):
    x, weight = torch.randn(2, 6, 9).to(device), torch.randn(4, 3, 3).to(device)
    y = ops.causal_conv1d_dense(x, weight, dilation=2, groups=2)
    assert str(accel.last_route("conv1d")) == ("native:cpu" if device == "cpu" else "fallback:dtype")
    slack = {"atol": 1e-2, "rtol": 0} if device == "cuda" else {}  # TF32, and another algorithm perhaps
    torch.testing.assert_close(y, F.conv1d(F.pad(x, (4, 0)), weight, dilation=2, groups=2), **slack)
    ops.causal_conv1d_dense(x.bfloat16(), weight.bfloat16(), dilation=2, groups=2)
    expected = "native:cpu" if device == "cpu" else "fallback:unsupported-argument"
    assert str(accel.last_route("conv1d")) == expected


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.reason}-{rule.argument}")
def test_a_rule_gives_a_call_to_torch(rule):
    """On a device that claims to be a GPU, so that the rules are asked."""
    x, weight = torch.randn(1, 2, 4), torch.randn(2, 2, 2)
    calls = {
        "x-dtype": {"x": x, "weight": weight},
        "groups-unsupported-argument": {"x": x.bfloat16(), "weight": weight[:, :1].bfloat16()},
        "x-shape": {"x": x.bfloat16(), "weight": weight.bfloat16()},
    }
    name = f"{rule.argument}-{rule.reason}"
    groups = 2 if rule.argument == "groups" else 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(environment._facts, torch.device("cpu"), gpu_facts())
        if name == "x-shape":
            patch.setattr("accel.dense_checks.reach", lambda call: 2**31)
        y = ops.causal_conv1d_dense(**calls[name], groups=groups)
    assert str(accel.last_route("conv1d")) == f"fallback:{rule.reason}"
    want, _ = reference(**calls[name], groups=groups)
    torch.testing.assert_close(y.double(), want, atol=0.05, rtol=0.05)


def narrow(*shape):
    return torch.randn(shape).bfloat16()


ROWS = {
    "whole": (narrow(2, 3, 16), True),
    "sliced at a vector": (narrow(2, 3, 32)[:, :, 8:24], True),
    "one channel of odd rows": (narrow(1, 5, 17)[:, :1, :16], True),
    "odd T": (narrow(2, 3, 15), False),
    "odd rows": (narrow(2, 3, 17)[:, :, :16], False),
    "odd offset": (narrow(2, 3, 32)[:, :, 3:19], False),
    "channel-last": (narrow(2, 16, 3).transpose(1, 2), False),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_no_whole_vectors_are_torchs(name):
    x, whole = ROWS[name]
    call = DenseCall(x, narrow(2, x.shape[1], 3), None, 2, 1, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_checks, "FASTER", FASTER)
        patch.setitem(environment._facts, torch.device("cpu"), gpu_facts())
        declines = list(dense_checks.dense_checks(call, environment.facts(x.device)))
        y = None if whole else ops.causal_conv1d_dense(*call[:3], dilation=2)
    assert [decline.reason for decline in declines] == ([] if whole else [Reason.LAYOUT])
    if not whole:
        want, _ = reference(*call[:3], 2)
        torch.testing.assert_close(y.double(), want, atol=0.05, rtol=0.05)
        assert str(accel.last_route("conv1d")) == "fallback:layout"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, route", [(256, "native:cute"), (255, "fallback:layout")])
def test_a_gpu_asks_the_rule_of_rows(tokens, route, monkeypatch):
    monkeypatch.setattr(dense_checks, "FASTER", FASTER)
    x, weight, bias = made("cuda", BF16, (2, 64, 64, 3, 4, tokens), leaf=True)
    y = ops.causal_conv1d_dense(x, weight, bias, dilation=4)
    assert str(accel.last_route("conv1d")) == route
    want, size = reference(x.detach(), weight.detach(), bias.detach(), 4)
    if route.startswith("native"):
        close(y, want, size, BF16, slack=1.3)
    else:  # torch rounds before the bias and after it
        torch.testing.assert_close(y.double(), want, atol=0.05, rtol=0.05)
    y.float().sum().backward()
    assert x.grad.shape == x.shape and weight.grad.isfinite().all()


def gpu_facts(arch="sm_90a", sm_count=132):
    cpu = environment.facts(torch.device("cpu"))
    return environment.DeviceFacts(cpu.device, "cute", arch, "claimed", sm_count, False, False, cpu.status)


def test_what_no_backend_serves_is_torchs(monkeypatch):
    x, weight = torch.randn(1, 2, 5), torch.randn(3, 2, 2)
    want = ops.causal_conv1d_dense(x, weight)
    with torch.no_grad():
        mapped = torch.func.vmap(lambda row: ops.causal_conv1d_dense(row, weight))(x.expand(3, 1, 2, 5))
    assert str(accel.last_route("conv1d")) == "fallback:functorch"
    torch.testing.assert_close(mapped, want.expand(3, *want.shape))
    monkeypatch.setenv("ACCEL_DISABLE", "1")
    environment.forget()
    try:
        assert torch.equal(ops.causal_conv1d_dense(x, weight), want)
        assert str(accel.last_route("conv1d")) == "fallback:disabled"
    finally:
        monkeypatch.delenv("ACCEL_DISABLE")
        environment.forget()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": torch.randn(3, 5)}, ValueError, r"x: expected \[B, Cin, T\], got \[3, 5\]"),
        ({"x": torch.randn(1, 0, 5)}, ValueError, r"x: expected \[B, Cin, T\], got \[1, 0, 5\]"),
        ({"x": torch.ones(1, 3, 5, dtype=torch.int64)}, TypeError, "x: expected a floating dtype"),
        ({"x": "x"}, TypeError, "x: expected a Tensor, got str"),
        ({"weight": None}, TypeError, "weight: expected a Tensor, got NoneType"),
        ({"weight": torch.randn(4, 2, 3)}, ValueError, r"weight: expected \[Cout, 3 / groups, K\], groups = 1, got"),
        ({"weight": torch.randn(4, 3, 3).double()}, TypeError, "weight: expected x's dtype torch.float32"),
        ({"bias": torch.randn(3)}, ValueError, r"bias: expected \[4\], got \[3\]"),
        ({"dilation": 0}, ValueError, "dilation: expected at least 1, got 0"),
        ({"groups": 0}, ValueError, "groups: expected at least 1, got 0"),
        ({"groups": 3}, ValueError, "weight: expected"),
        ({"activation": "tanh"}, ValueError, "activation: expected None, 'silu'.*got 'tanh'"),
    ],
)
def test_a_bad_argument_is_named(change, error, message):
    arguments = {"x": torch.randn(1, 3, 5), "weight": torch.randn(4, 3, 3), "bias": torch.randn(4), **change}
    with pytest.raises(error, match=message):
        ops.causal_conv1d_dense(**arguments)


def test_a_second_derivative_is_refused():
    x, weight, _ = made("cpu", FP32, SMALL[0], leaf=True)
    (dx,) = torch.autograd.grad(ops.causal_conv1d_dense(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("shape", [*SMALL[:5], SMALL[6]], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_what_torch_computes_can_be_differentiated_twice(shape, groups):
    """Its two forms, one each way, are one function; double precision, as a rule would call it."""
    b, cin, cout, taps, dilation, tokens = shape
    x, weight, bias = made("cpu", FP64, (b, 2 * cin, 2 * cout, taps, dilation, min(tokens, 9)), leaf=True)
    if groups == 2:
        weight = weight.detach()[:, :cin].requires_grad_()

    def run(*tensors):
        return dense_torch.convolve(DenseCall(*tensors, dilation, groups, None))

    want, _ = reference(x.detach(), weight.detach(), bias.detach(), dilation, groups)
    torch.testing.assert_close(run(x, weight, bias).detach(), want)
    if tokens and cin < 9:
        torch.autograd.gradcheck(run, (x, weight, bias))
        torch.autograd.gradgradcheck(run, (x, weight, bias))
    for needs in itertools.product((False, True), repeat=3):
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, weight, bias), needs, strict=True)]
        y = run(*leaves)
        assert y.requires_grad == any(needs)
        if any(needs):
            y.sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == list(needs)


def test_autocast(device):
    x, weight, bias = made(device, FP32, SMALL[0], leaf=True)
    with torch.autocast(device, BF16):
        y = ops.causal_conv1d_dense(x, weight, bias, dilation=2)
    assert y.dtype is BF16 and str(accel.last_route("conv1d")) == backend(device)
    y.float().sum().backward()
    assert x.grad.dtype is FP32 and weight.grad.dtype is FP32


@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_the_operators_are_registered_right(kind, device):
    """Schema, fake implementation, autograd, and both under tracing."""
    x, weight, bias = made(device, BF16, SMALL[0], leaf=kind == "everything")
    bias = bias if kind == "everything" else None
    opcheck(torch.ops.accel.causal_conv1d_dense.default, (x, weight, bias, 2, 1, None))
    opcheck(torch.ops.accel.causal_conv1d_dense.default, (x.detach(), weight.detach(), None, 2, 1, "silu"))
    plain = (x.detach(), torch.randn(2, 5, 11).to(x), weight.detach(), 2, 1)
    opcheck(torch.ops.accel.causal_conv1d_dense_backward.default, (*plain, True, kind == "everything", True))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"activation": "gelu"}], ids=str)
def test_compiled(options, dynamic, device):
    layer = CausalConv1d(4, 6, 3, dilation=2, device=device, dtype=BF16, **options)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (9, 16):
        x = torch.randn(2, 4, tokens).to(device, BF16).requires_grad_()
        y, eager = compiled(x), layer(x)
        (dx,), (wanted,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(eager.sum(), x)
        if device == "cuda" and layer.groups > 1:  # torch's own, which promises no bits
            torch.testing.assert_close((y, dx), (eager, wanted))
        else:
            assert torch.equal(y, eager) and torch.equal(dx, wanted)


def test_exported_and_checkpointed(device):
    layer = CausalConv1d(4, 6, 3, dilation=2, device=device, dtype=BF16)
    x = torch.randn(2, 4, 9).to(device, BF16).requires_grad_()
    program = torch.export.export(layer, (x.detach(),))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.accel.causal_conv1d_dense.default]
    assert torch.equal(program.module()(x.detach()), layer(x))
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    again, once = (torch.autograd.grad(out.float().sum(), x)[0] for out in (y, layer(x)))
    assert torch.equal(again, once)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_rules_are_asked_while_a_graph_is_traced(dynamic):
    layer = CausalConv1d(4, 6, 3, dilation=2)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(environment._facts, torch.device("cpu"), gpu_facts())
        for tokens in (9, 16):
            x = torch.randn(2, 4, tokens)
            torch.testing.assert_close(compiled(x), layer(x))
            assert str(accel.last_route("conv1d")) == "fallback:dtype"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8192, 8191])
def test_no_memory_but_the_output_and_the_weights(tokens):
    x, weight, bias = made("cuda", BF16, (4, 128, 128, 5, 8, tokens))
    ops.causal_conv1d_dense(x, weight, bias, dilation=8)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = ops.causal_conv1d_dense(x, weight, bias, dilation=8)
    # the allocator leaves up to a MiB of a large block unused; a pad would take 8
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + weight.nbytes + (2 << 20)


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    x, weight, bias = made("cuda", BF16, (2, 64, 96, 3, 2, 520), leaf=True)
    dy = torch.randn(2, 96, 520).to(x)

    def step():
        y = ops.causal_conv1d_dense(x, weight, bias, dilation=2)
        return y, *torch.autograd.grad(y, (x, weight, bias), dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1 << 20, (1 << 20) + 1])
def test_more_elements_than_32_bits_count(tokens):
    x = torch.randn(33, 64, tokens, device="cuda", dtype=BF16)
    weight = torch.randn(64, 64, 3, device="cuda", dtype=BF16)
    y = ops.causal_conv1d_dense(x, weight, dilation=5)
    assert torch.equal(y[-1:], ops.causal_conv1d_dense(x[-1:], weight, dilation=5))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_layer_is_a_conv1d_behind_a_pad(bias, groups):
    torch.manual_seed(5)
    conv = nn.Conv1d(4, 6, 3, dilation=2, groups=groups, bias=bias)
    after = torch.rand(1)
    torch.manual_seed(5)
    layer = CausalConv1d(4, 6, 3, dilation=2, groups=groups, bias=bias)
    assert torch.equal(torch.rand(1), after), "other random draws"
    assert list(layer.state_dict()) == list(conv.state_dict())
    for name, tensor in conv.state_dict().items():
        assert torch.equal(layer.state_dict()[name], tensor)
    assert layer.extra_repr() == conv.extra_repr()
    CausalConv1d(4, 6, 3, dilation=2, groups=groups, bias=bias).load_state_dict(conv.state_dict())
    x = torch.randn(2, 4, 9)
    torch.testing.assert_close(layer(x), conv(F.pad(x, (4, 0))))
    torch.testing.assert_close(layer(x[0]), conv(F.pad(x[0], (4, 0))))
    assert repr(CausalConv1d(1, 1, 2, activation="silu")).endswith("activation=silu)")
    with pytest.raises(ValueError, match="activation"):
        CausalConv1d(1, 1, 2, activation="tanh")


@pytest.mark.parametrize("padding", [0, 4, "valid"])
def test_from_conv1d_shares_the_parameters(padding):
    conv = nn.Conv1d(4, 6, 3, dilation=2, padding=padding).eval()
    before = torch.get_rng_state()
    layer = CausalConv1d.from_conv1d(conv, activation="relu")
    assert torch.equal(torch.get_rng_state(), before)
    assert layer.weight is conv.weight and layer.bias is conv.bias and not layer.training
    x = torch.randn(2, 4, 9)
    causal = conv(x)[:, :, :9] if padding == 4 else conv(F.pad(x, (4, 0)))
    torch.testing.assert_close(layer(x), F.relu(causal))


@pytest.mark.parametrize(
    "options, name",
    [({"stride": 2}, "stride"), ({"padding": 1}, "padding"), ({"padding_mode": "circular"}, "padding_mode")],
)
def test_from_conv1d_refuses_what_is_not_causal(options, name):
    with pytest.raises(ValueError, match=f"conv.{name}: expected"):
        CausalConv1d.from_conv1d(nn.Conv1d(4, 6, 3, **options))


@pytest.mark.parametrize("taps, dilation", [(1, 1), (1, 5), (2, 3), (4, 2)])
@pytest.mark.parametrize("start", [0, 1, 5, 17])
@pytest.mark.parametrize("options", [{}, {"groups": 2, "activation": "silu"}], ids=str)
def test_a_stream_gives_what_the_whole_gives(taps, dilation, start, options, device):
    layer = CausalConv1d(4, 6, taps, dilation=dilation, device=device, **options)
    x = torch.randn(3, 4, 30).to(device)
    state = layer.stream(x[:, :, :start])
    places = [tensor.data_ptr() for tensor in state]
    steps = torch.stack([layer.step(x[:, :, t], state) for t in range(start, 30)], dim=2)
    # one token at a time is another order of summation, and TF32 where torch says so
    torch.testing.assert_close(steps, layer(x)[:, :, start:].detach(), atol=1e-2 if device == "cuda" else 1e-5, rtol=0)
    assert [tensor.data_ptr() for tensor in state] == places
    assert state.ring.shape == (3, 4, (taps - 1) * dilation)
    with pytest.raises(ValueError, match="x_t, state: expected"):
        layer.step(x[:, :3, 0], state)


class Chomped(nn.Conv1d):
    """The usual way to write it."""

    causal = True

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.padding = ((self.kernel_size[0] - 1) * self.dilation[0],)

    def forward(self, x):
        return super().forward(x)[:, :, : x.shape[2]]


class Padded(nn.Conv1d):
    def __init__(self, *args, is_causal=True, mode="constant", **options):
        super().__init__(*args, **options)
        self.is_causal, self.mode, self.seen = is_causal, mode, 0

    def forward(self, signal):
        self.seen += 1
        return super().forward(F.pad(signal, ((self.kernel_size[0] - 1) * self.dilation[0], 0), self.mode))


class Scaled(Chomped):
    def forward(self, x):
        return 2 * super().forward(x)


class Silent(nn.Conv1d):
    forward = Chomped.forward


@pytest.fixture
def restored():
    yield
    accel.restore()
    for kind in (Chomped, Padded, Scaled):
        assert not hasattr(kind.forward, "__accel__")


def model_of(*modules):
    return nn.ModuleDict({f"m{number}": module for number, module in enumerate(modules)})


def test_a_module_that_states_it_is_served(restored, caplog):
    model = model_of(Chomped(4, 4, 3, dilation=2), Padded(4, 4, 3), Padded(4, 4, 3, is_causal=False))
    original = Padded.forward
    x = torch.randn(2, 4, 9)
    want = [module(x) for module in model.values()]
    assert accel.accelerate("conv1d", model=model) == ("conv1d",) and accel.is_accelerated("conv1d")
    assert Padded.forward.__wrapped__ is original and model["m1"].seen == 1  # the trial ran on a copy
    for module, expected, path in zip(model.values(), want, ("native", "native", "fallback"), strict=True):
        with accel.record_routes() as routes:
            torch.testing.assert_close(module(x), expected)
        assert [(route.target, route.path) for route in routes] == [("conv1d", path)]
    assert model["m1"].seen == 1 and model["m2"].seen == 2
    assert accel.explain(Chomped.forward, model["m0"], x).route.path == "native"
    accel.restore("conv1d")
    assert Padded.forward is original and not accel.is_accelerated()
    assert set(vars(model["m0"])) == set(vars(Chomped(4, 4, 3)))


def test_copies_and_pickles_of_a_served_model(restored):
    model = model_of(Chomped(4, 4, 3))
    with accel.accelerated("conv1d", model=model):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                twin["m0"].weight.zero_()
            with accel.record_routes() as routes:
                y = twin["m0"](torch.randn(1, 4, 5))
            assert torch.equal(y, twin["m0"].bias[None, :, None].expand(y.shape))
            assert [str(route) for route in routes] == ["native:cpu"]
    assert torch.equal(twin["m0"](torch.zeros(1, 4, 5)), y)


def test_nothing_is_guessed(restored, caplog):
    served = Chomped(4, 4, 3)
    lies = (Scaled(4, 4, 3), Padded(4, 4, 3, mode="reflect"), Padded(4, 4, 3, device="meta"))
    plain = nn.Conv1d(4, 4, 3)
    plain.causal = True  # and has no forward that could be
    others = (Silent(4, 4, 3, padding=2), nn.Conv1d(4, 4, 3), CausalConv1d(4, 4, 3))
    model = model_of(served, *lies, plain, *others)
    accel.accelerate("conv1d", model=model)
    warned = [record.message.split()[0] for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ["m1", "m2", "m3", "m4"]
    x = torch.randn(1, 4, 9)
    with accel.record_routes() as routes:
        assert torch.equal(model["m1"](x), 2 * F.conv1d(F.pad(x, (2, 0)), model["m1"].weight, model["m1"].bias))
    assert [route.path for route in routes] == ["fallback"]  # the class that it inherits from is served for m0 alone


def test_the_target_is_a_contract(restored):
    with pytest.raises(ImportError, match="conv1d: it serves the modules of a model, and needs model="):
        accel.accelerate("conv1d")
    with pytest.raises(ImportError, match="conv1d: the model has no nn.Conv1d that states to be causal and is"):
        accel.accelerate("conv1d", model=model_of(nn.Conv1d(1, 1, 1)))
    assert not accel.is_accelerated() and accel.accelerate("all", model=model_of(Chomped(1, 1, 2)), verbose=False) != (
        "conv1d",
    )
    assert not accel.is_accelerated("conv1d")


def test_a_later_patch_stays(restored, caplog):
    accel.accelerate("conv1d", model=model_of(Chomped(4, 4, 3)))
    ours = Chomped.forward
    Chomped.forward = later = lambda self, x: ours(self, x)
    try:
        accel.restore()
        assert Chomped.forward is later
        assert [r.message for r in caplog.records if "Chomped.forward was replaced" in r.message]
        assert Chomped(4, 4, 3)(torch.randn(1, 4, 5)).shape == (1, 4, 5)  # the wrapper inside has become the original
    finally:
        Chomped.forward = ours.__wrapped__


def test_a_new_model_while_it_is_on(restored):
    accel.accelerate("conv1d", model=model_of(Chomped(4, 4, 3)))
    model = model_of(Chomped(4, 4, 3))
    for path in ("fallback", "native"):
        with accel.record_routes() as routes:
            model["m0"](torch.randn(1, 4, 5))
        assert [route.path for route in routes] == [path]
        accel.accelerate("conv1d", model=model)


def test_a_served_module_compiled_and_under_autocast(restored):
    model, x = model_of(Padded(4, 4, 3)), torch.randn(1, 4, 9)
    want = model["m0"](x)
    accel.accelerate("conv1d", model=model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model["m0"], backend="aot_eager", fullgraph=True)(x), want)
    assert str(accel.last_route()) == "native:cpu"
    with torch.autocast("cpu", BF16):
        assert model["m0"](x).dtype is BF16
    assert str(accel.last_route()) == "native:cpu"


def test_what_has_no_backend_is_torchs():
    y = ops.causal_conv1d_dense(torch.randn(1, 2, 8, device="meta"), torch.randn(3, 2, 2, device="meta"))
    assert y.shape == (1, 3, 8) and str(accel.last_route("conv1d")) == "fallback:device"


def test_other_calls_of_a_served_module_go_to_the_original(restored):
    module = Padded(4, 4, 3)
    accel.accelerate("conv1d", model=module)
    assert module(signal=torch.randn(1, 4, 5)).shape == (1, 4, 5)
    assert str(accel.last_route()) == "native:cpu"
    assert module(torch.randn(4, 5)).shape == (4, 5)  # without a batch
    assert str(accel.last_route()) == "fallback:shape"
    with pytest.raises(TypeError, match="positional"):
        module(torch.randn(1, 4, 5), 3)
    assert str(accel.last_route()) == "fallback:unsupported-argument"


@pytest.mark.parametrize("blocks", [16, 132, 216, 264])
@pytest.mark.parametrize("tokens", [1, 511, 8192, 1 << 22])
def test_the_blocks_of_a_weight_gradient_run_at_once(tokens, blocks):
    """Or there is one for each tile, where there are more tiles than that."""
    for tiles in range(1, 600):
        parts = split(tokens, tiles, blocks)
        assert parts == 1 or parts * tiles <= blocks and parts * 512 <= tokens
        assert parts == 1 or (parts + 1) * tiles > blocks or (parts + 1) * 512 > tokens
