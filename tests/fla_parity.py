"""Real FLA beside accel, in one process: originals, accelerated calls and the float64 reference on the same inputs.

Run by test_upstream.py in a process of its own for each FLA version; not collected by name. On the CPU, FLA's kernels
run in Triton's interpreter, which has to be chosen before Triton is imported. On either device FLA takes its first
configuration of a kernel: to search for the fastest would compile them all.
"""

import os
import sys
from unittest import mock

import pytest
import reference
import torch
from triton.runtime import driver

from accel import accelerated, matrix, record_routes, triton_cpu
from accel.bench.fla_switch import FlaSwitch

if os.environ.get("TRITON_INTERPRET") == "1":
    triton_cpu.install()
else:
    driver.active.get_benchmarker = lambda: triton_cpu.first_wins

import fla
import fla.modules.convolution as upstream
from fla.modules import ShortConvolution

D = 24
UPDATES = {"plain": (False, None, False), "bias": (True, "silu", False), "all": (True, "swish", True)}
SHAPES = {"ND": lambda n: (n, D), "N1D": lambda n: (n, 1, D), "1ND": lambda n: (1, n, D)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# (packed boundaries or None, B, T); W = 4 makes T = 2 shorter than a filter, 70 is longer than FLA's chunk
LENGTHS = {"short": (None, 2, 2), "dense": (None, 2, 9), "chunks": (None, 1, 70), "packed": ([0, 3, 4, 11], 1, 11)}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
ROW = next(row for row in matrix.load().targets["short_conv"].ranges if fla.__version__ in map(str, row.proven))
STEP = any(point.attribute == "ShortConvolution.step" for point in ROW.callables)


def backend(device):
    return "native:cpu" if device == "cpu" else "native:cute"


def normal(device, dtype, *shape):
    return torch.randn(shape).to(device, dtype)


def strided(x):
    """The same numbers as a slice of a wider projection."""
    wide = torch.full((*x.shape[:-1], 2 * D + 5), float("nan"), dtype=x.dtype, device=x.device)
    return wide[..., 3 : D + 3].copy_(x)


def both(function):
    """function() with the originals, function() accelerated, and the routes of the latter."""
    original = function()
    kept = upstream.causal_conv1d_update, upstream.causal_conv1d
    with accelerated("short_conv", verbose=False), record_routes() as routes:
        assert upstream.causal_conv1d_update is not kept[0]
        ours = function()
    assert (upstream.causal_conv1d_update, upstream.causal_conv1d) == kept
    return original, ours, [f"{route.callable}={route}" for route in routes]


def assert_values(ours, exact, size, original):
    """Ours within a rounding of float64; the original in the same neighbourhood, so that both served the same call."""
    reference.assert_close_ulp(ours, exact, 32 * reference.UNIT_FP32 * (size + 1))
    tolerance = 1e-5 if ours.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(original, ours, rtol=tolerance, atol=tolerance)


@dtypes
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("extras", UPDATES)
def test_update(device, dtype, width, form, extras):
    with_bias, activation, with_residual = UPDATES[extras]
    n, shape = 3, SHAPES[form](3)
    x = strided(normal(device, dtype, *shape))
    cache, weight = normal(device, dtype, n, D, width), normal(device, dtype, D, width)
    bias = normal(device, dtype, D) if with_bias else None
    residual = normal(device, dtype, *shape) if with_residual else None
    caches = []

    def call():
        caches.append(cache.clone())
        pointer = caches[-1].data_ptr()
        y, returned = upstream.causal_conv1d_update(x, caches[-1], residual, weight, bias, activation)
        assert returned.data_ptr() == pointer
        return y, returned

    (y, _), (ours, returned), routes = both(call)
    assert routes == [f"causal_conv1d_update={backend(device)}"]
    assert returned is caches[1]
    assert torch.equal(caches[0], caches[1])
    assert ours.shape == y.shape and ours.dtype == y.dtype and ours.is_contiguous()
    rows = dict(residual=None if residual is None else residual.reshape(n, D), activation=activation)
    exact, _ = reference.causal_conv1d_update(x.reshape(n, D), cache, weight, bias, **rows)
    size = reference.magnitude(reference.causal_conv1d_update, x.reshape(n, D), cache, weight, bias)
    assert_values(ours.reshape(n, D), exact, size, y.reshape(n, D))


def test_update_reaches_a_strided_cache(device):
    cache = normal(device, torch.float32, 2, 4, D).transpose(1, 2)  # channel-last; the original updates a copy
    before, x, weight = cache.clone(), normal(device, torch.float32, 2, D), normal(device, torch.float32, D, 4)
    with accelerated("short_conv", verbose=False):
        _, returned = upstream.causal_conv1d_update(x, cache, None, weight)
    assert returned is cache
    assert torch.equal(cache, torch.cat((before, x[:, :, None]), 2)[:, :, 1:])


def test_an_update_that_is_declined_is_the_original(device):
    x, cache = normal(device, torch.float32, 2, D), normal(device, torch.float32, 2, D, 4)
    weight = normal(device, torch.float32, D, 4).requires_grad_()

    def call():
        state = cache.clone()
        return upstream.causal_conv1d_update(x, state, None, weight)[0], state

    (y, state), (ours, our_state), routes = both(call)
    assert routes == ["causal_conv1d_update=fallback:autograd"]
    assert torch.equal(y, ours) and torch.equal(state, our_state)


@dtypes
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution_prefill_and_decode(device, dtype, width, bias):
    layer = ShortConvolution(D, width, bias=bias, activation="silu").to(device, dtype)
    prompt, steps = normal(device, dtype, 2, 7, D), normal(device, dtype, 4, 2, 1, D)

    @torch.no_grad()
    def generate():
        y, cache = layer(prompt, output_final_state=True)
        outputs = [y]
        for x in steps:
            y, returned = layer(strided(x), cache=cache, output_final_state=True)
            assert returned is cache
            outputs.append(y)
        return torch.cat(outputs, dim=1), cache

    (y, cache), (ours, our_cache), routes = both(generate)
    assert routes[-4:] == [f"causal_conv1d_update={backend(device)}"] * 4
    assert torch.equal(cache, our_cache)
    tokens = torch.cat((prompt, *steps), dim=1).transpose(1, 2)
    weight = layer.weight.detach().squeeze(1)
    exact, state = reference.causal_conv1d(tokens, weight, layer.bias, activation="silu", state_len=width)
    assert torch.equal(our_cache.double(), state)
    size = reference.magnitude(reference.causal_conv1d, tokens, None, weight, layer.bias)
    decoded = slice(prompt.shape[1], None)
    assert_values(ours[:, decoded], *(t.transpose(1, 2)[:, decoded].detach() for t in (exact, size)), y[:, decoded])


class Decoder:
    """A layer that has made two native steps, and how often its own code prepared a weight since."""

    def __init__(self, device, form="N1D", bias=True):
        self.layer = ShortConvolution(D, 4, bias=bias, activation="silu").to(device, torch.bfloat16)
        self.owner = sys.modules[ShortConvolution.step.__module__]
        self.shape = SHAPES[form](3)
        bounds = torch.arange(4, device=device, dtype=torch.int32)
        self.options = {"output_final_state": True} | ({"cu_seqlens": bounds} if form == "1ND" else {})
        self.cache = normal(device, torch.bfloat16, 3, D, 4)
        self.device, self.prepared, self.rearrange = device, 0, self.owner.rearrange
        for _ in range(2):
            self.step()
        self.prepared = 0

    def counting(self, *args, **kwargs):
        self.prepared += 1
        return self.rearrange(*args, **kwargs)

    @torch.no_grad()
    def step(self, **options):
        """A step as the layer makes it, compared with the reference; its routes."""
        x = normal(self.device, torch.bfloat16, *self.shape)
        before, layer = self.cache.clone(), self.layer
        given = self.options | options
        with mock.patch.object(self.owner, "rearrange", self.counting), record_routes() as routes:
            y, returned = layer(x, cache=self.cache, **given)
        assert returned is (self.cache if given["output_final_state"] else None) and y.shape == x.shape
        residual = None if (found := given.get("residual")) is None else found.reshape(3, D)
        rows = dict(residual=residual, activation=layer.activation)
        weight = layer.weight.squeeze(1)
        exact, expected = reference.causal_conv1d_update(x.reshape(3, D), before, weight, layer.bias, **rows)
        torch.testing.assert_close(y.reshape(3, D).double(), exact, rtol=2e-2, atol=2e-2)
        assert torch.equal(self.cache.double(), expected)
        return [f"{route.callable}={route}" for route in routes]


@pytest.mark.skipif(not STEP, reason="the layer's step is served for FLA 0.6")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["N1D", "1ND"])
def test_a_layers_repeated_step_is_not_prepared_again(device, form, bias):
    own = ShortConvolution.step
    with accelerated("short_conv", verbose=False):
        decoder = Decoder(device, form, bias)
        native = [f"causal_conv1d_update={backend(device)}"]
        assert decoder.step() == decoder.step(output_final_state=False) == native and decoder.prepared == 0
        for parameter in decoder.layer.parameters():
            parameter.data = normal(device, torch.bfloat16, *parameter.shape)
        decoder.layer.weight = torch.nn.Parameter(normal(device, torch.bfloat16, D, 1, 4))
        assert decoder.step() == native and decoder.prepared == 0  # the parameters as they are now
    assert ShortConvolution.step is own and decoder.step() == [] and decoder.prepared == 1


@pytest.mark.skipif(not STEP, reason="the layer's step is served for FLA 0.6")
def test_what_a_layers_step_may_not_pass_by(device):
    """A residual, a weight that is no parameter, and what somebody put in the callable's place since."""
    native = [f"causal_conv1d_update={backend(device)}"]
    with accelerated("short_conv", verbose=False):
        decoder = Decoder(device)
        assert decoder.step(residual=normal(device, torch.bfloat16, *decoder.shape)) == native
        assert decoder.prepared == 1
        torch.nn.utils.parametrize.register_parametrization(decoder.layer, "weight", torch.nn.Tanh())
        assert decoder.step() == native and decoder.prepared == 2
        torch.nn.utils.parametrize.remove_parametrizations(decoder.layer, "weight")
        ours, seen = decoder.owner.causal_conv1d_update, []

        def spy(**given):
            seen.append(given)
            return ours(**given)

        assert decoder.step() == native and decoder.prepared == 2
        with mock.patch.object(decoder.owner, "causal_conv1d_update", spy):
            assert decoder.step() == native
        assert len(seen) == 1 and decoder.prepared == 3


@pytest.mark.skipif(not STEP, reason="the layer's step is served for FLA 0.6")
def test_a_layer_of_another_backend_says_so(device):
    with accelerated("short_conv", verbose=False):
        decoder = Decoder(device)
        decoder.layer.backend = "cuda"
        stub = mock.Mock(side_effect=lambda x, **_: x)
        with mock.patch.object(decoder.owner, "causal_conv1d_update_cuda", stub), record_routes() as routes:
            with torch.no_grad():
                decoder.layer(normal(device, torch.bfloat16, *decoder.shape), cache=decoder.cache)
        assert [str(route) for route in routes] == ["fallback:unsupported-argument"] and stub.call_count == 1
        assert "backend: expected 'triton', got 'cuda'" in routes[0].detail
        with pytest.raises(TypeError, match="missing 4 required positional arguments"):
            ShortConvolution.step()


@dtypes
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("extras", ["plain", "states"])
def test_sequences_forward_and_backward(device, dtype, width, lengths, extras):
    bounds, b, t = LENGTHS[lengths]
    states = extras == "states"
    inputs = {"x": normal(device, dtype, b, t, D), "weight": normal(device, dtype, D, width)}
    if states:
        inputs["bias"] = normal(device, dtype, D)
        inputs["residual"] = normal(device, dtype, b, t, D)
        inputs["initial_state"] = normal(device, dtype, len(bounds) - 1 if bounds else b, D, width)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
    activation = "silu" if states else None
    dy = normal(device, dtype, b, t, D)

    def call():
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        y, final = upstream.causal_conv1d(
            **leaves, activation=activation, output_final_state=states, cu_seqlens=cu_seqlens
        )
        y.backward(dy)
        return y.detach(), final, {name: leaf.grad for name, leaf in leaves.items()}

    (y, final, original_grads), (ours, our_final, grads), routes = both(call)
    assert routes[0] == f"causal_conv1d={backend(device)}"
    assert all(route.endswith(backend(device)) for route in routes)
    assert (final is None) == (our_final is None)
    if states:
        assert torch.equal(final, our_final)
    exact = exact_sequences(inputs, dy, activation, cu_seqlens, torch.float64)
    plain = exact_sequences(inputs, dy, activation, cu_seqlens, torch.float32)
    sizes = {name: value.abs() for name, value in inputs.items()}
    size = exact_sequences(sizes, dy.abs(), None, cu_seqlens, torch.float64)
    assert_values(ours, exact["y"], size["y"], y)
    for name, grad in grads.items():
        assert grad.dtype == inputs[name].dtype
        reference.assert_gradient(grad, exact[name], plain[name], size[name], dy.numel() // D, name)
        if not states:  # with states, FLA before 0.6.0 has wrong gradients that are listed in compat_matrix.yaml
            tolerance = 1e-4 if dtype == torch.float32 else 8e-2
            torch.testing.assert_close(original_grads[name], grad, rtol=tolerance, atol=tolerance)


def exact_sequences(inputs, dy, activation, cu_seqlens, compute):
    """y and every gradient by the reference, in FLA's shapes."""
    leaves = {name: value.to(compute).requires_grad_() for name, value in inputs.items()}
    residual = leaves.get("residual")
    y, _ = reference.causal_conv1d(
        leaves["x"].transpose(1, 2),
        leaves["weight"],
        leaves.get("bias"),
        activation=activation,
        residual=None if residual is None else residual.transpose(1, 2),
        cu_seqlens=cu_seqlens,
        initial_states=leaves.get("initial_state"),
        compute=compute,
    )
    y = y.transpose(1, 2)
    grads = torch.autograd.grad(y, list(leaves.values()), dy.to(compute))
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def test_an_expanded_gradient_is_right(device):
    """`.sum().backward()` gives a dy of stride 0, which FLA before 0.5.1 reads wrongly."""
    inputs = {"x": normal(device, torch.float32, 2, 9, D), "weight": normal(device, torch.float32, D, 4)}
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    with accelerated("short_conv", verbose=False):
        upstream.causal_conv1d(**leaves, activation="silu")[0].sum().backward()
    exact = exact_sequences(inputs, torch.ones(2, 9, D, device=device), "silu", None, torch.float64)
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad.double(), exact[name], rtol=1e-5, atol=1e-5)


def test_packed_rows_of_a_batch(device):
    """cu_seqlens over B * T tokens with B > 1: every row's tokens count in the weight's gradient."""
    inputs = {"x": normal(device, torch.float32, 2, 8, D), "weight": normal(device, torch.float32, D, 4)}
    cu_seqlens = torch.tensor([0, 5, 16], dtype=torch.int32, device=device)
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    dy = normal(device, torch.float32, 2, 8, D)
    with accelerated("short_conv", verbose=False):
        upstream.causal_conv1d(**leaves, activation="silu", cu_seqlens=cu_seqlens)[0].backward(dy)
    exact = exact_sequences(inputs, dy, "silu", cu_seqlens, torch.float64)
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad.double(), exact[name], rtol=1e-5, atol=1e-5)


@dtypes
def test_thirds_of_a_fused_projection(device, dtype):
    """x and dy as slices of a wider row, in place: as one convolution of the whole row."""
    inputs = {"x": normal(device, dtype, 2, 9, 3 * D), "weight": normal(device, dtype, 3 * D, 4)}
    dy = normal(device, dtype, 2, 9, 3 * D)

    def call():
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        parts = zip(leaves["x"].split(D, dim=2), leaves["weight"].split(D), strict=True)
        found = [upstream.causal_conv1d(*part, output_final_state=True, activation="silu") for part in parts]
        y = torch.cat([y for y, _ in found], dim=2)
        y.backward(dy)
        return y.detach(), torch.cat([state.detach() for _, state in found], dim=1), leaves

    (y, final, originals), (ours, our_final, leaves), routes = both(call)
    assert routes[:3] == [f"causal_conv1d={backend(device)}"] * 3
    assert torch.equal(final, our_final)
    exact = exact_sequences(inputs, dy, "silu", None, torch.float64)
    plain = exact_sequences(inputs, dy, "silu", None, torch.float32)
    size = exact_sequences({name: value.abs() for name, value in inputs.items()}, dy.abs(), None, None, torch.float64)
    assert_values(ours, exact["y"], size["y"], y)
    tolerance = 1e-4 if dtype == torch.float32 else 8e-2
    for name, leaf in leaves.items():
        reference.assert_gradient(leaf.grad, exact[name], plain[name], size[name], 2 * 9, name)
        torch.testing.assert_close(originals[name].grad, leaf.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bounds", [None, [0, 3, 4, 11]], ids=["dense", "packed"])
def test_the_functions_that_context_parallel_code_calls(device, bounds):
    b, t, n = (2, 9, 2) if bounds is None else (1, 11, 3)
    inputs = {
        "x": normal(device, torch.float32, b, t, D),
        "weight": normal(device, torch.float32, D, 4),
        "bias": normal(device, torch.float32, D),
        "residual": normal(device, torch.float32, b, t, D),
        "initial_state": normal(device, torch.float32, n, D, 4),
    }
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=device)
    options = {"activation": "silu", "cu_seqlens": cu_seqlens}
    state = {"x": inputs["x"], "initial_state": inputs["initial_state"], "cu_seqlens": cu_seqlens}
    dy = normal(device, torch.float32, b, t, D)

    @torch.no_grad()
    def call():
        y, final = upstream.causal_conv1d_fwd(**inputs, output_final_state=True, **options)
        gradients = upstream.causal_conv1d_bwd(dy=dy, dht=None, **inputs, **options)
        return y, final, upstream.causal_conv1d_update_states(state_len=4, **state), gradients

    (y, final, states, _), (ours, our_final, our_states, gradients), routes = both(call)
    names = "causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update_states"
    assert routes == [f"{name}={backend(device)}" for name in names]
    assert torch.equal(final, our_final) and torch.equal(states, our_states) and torch.equal(final, our_states)
    exact = exact_sequences(inputs, dy, "silu", cu_seqlens, torch.float64)
    torch.testing.assert_close(y, ours, rtol=1e-5, atol=1e-5)
    for name, found in zip(("y", *inputs), (ours, *gradients), strict=True):
        torch.testing.assert_close(found.double(), exact[name], rtol=1e-5, atol=1e-5)


def test_the_prefill_state_goes_on_in_decode(device):
    """The very state that prefill returns is what decode updates: native to native, no conversion, same bits."""
    x, weight = normal(device, torch.bfloat16, 2, 6, D), normal(device, torch.bfloat16, D, 4)
    token = normal(device, torch.bfloat16, 2, 1, D)

    @torch.no_grad()
    def hand_over():
        _, state = upstream.causal_conv1d(x, weight, output_final_state=True, activation="silu")
        y, returned = upstream.causal_conv1d_update(token, state, None, weight, None, "silu")
        assert returned is state
        return y, state

    (_, state), (_, our_state), routes = both(hand_over)
    assert routes == [f"causal_conv1d={backend(device)}", f"causal_conv1d_update={backend(device)}"]
    assert torch.equal(state, our_state)


def test_the_switch_of_the_benchmarks_reaches_the_layer_too():
    own = ShortConvolution.step, upstream.causal_conv1d_update
    switch = FlaSwitch()
    try:
        assert (ShortConvolution.step is not own[0]) == STEP and upstream.causal_conv1d_update is not own[1]
        with switch.original():
            assert (ShortConvolution.step, upstream.causal_conv1d_update) == own
        assert (ShortConvolution.step is not own[0]) == STEP
    finally:
        said = switch.restore_gate()
    assert said.startswith("restored") and (ShortConvolution.step, upstream.causal_conv1d_update) == own
