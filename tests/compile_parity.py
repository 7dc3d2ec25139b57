"""Real FLA and causal-conv1d, accelerated, under torch.compile and torch.export: compiled beside eager, bit for bit.

Run by test_compile.py in a process of its own; not collected by name. causal-conv1d's extension is a stub: what is not
native there fails. FLA's kernels are interpreted on the CPU, where a declined call needs them.
"""

import io
import os
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from triton.runtime import driver

from accel import accelerated, record_routes, restore, triton_cpu

if os.environ.get("TRITON_INTERPRET") == "1":
    triton_cpu.install()
else:
    driver.active.get_benchmarker = lambda: triton_cpu.first_wins
extension = types.ModuleType("causal_conv1d_cuda")
extension.causal_conv1d_fwd = extension.causal_conv1d_bwd = extension.causal_conv1d_update = None
sys.modules[extension.__name__] = extension

from causal_conv1d import causal_conv1d_fn, causal_conv1d_update, cpp_functions  # noqa: E402, F401
from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states  # noqa: E402, F401
from fla.modules import ShortConvolution  # noqa: E402

B, T, D, W = 2, 9, 24, 4
SLICE = slice(3, D + 3)
dynamics = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
here = sys.modules[__name__]  # the package's callables are looked up at each call, and so are swapped


@pytest.fixture(autouse=True)
def switched():
    torch._dynamo.reset()
    with accelerated(("short_conv", "causal_conv1d"), verbose=False), warnings.catch_warnings():
        # dynamo's own: record_function is ignored, einops changes a table while it is traced
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        ShortConvolution(D, W)(torch.zeros(1, T, D))  # einops learns what a tensor is: later, it would be traced again
        yield


def native(device):
    return "native:cpu" if device == "cpu" else "native:cute"


def normal(device, *shape, dtype=torch.float32):
    return torch.randn(shape).to(device, dtype)


def layer(device, width=W, **options):
    return ShortConvolution(D, width, bias=True, **options).to(device)


def projection(device, tokens=T, batch=B):
    """[B, T, D] as a slice of a wider projection."""
    return normal(device, batch, tokens, 2 * D + 5)[..., SLICE]


def leaves(*tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


def compiled(function, dynamic=False, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend, **options)


def close(found, expected):
    """Equal but for the last bits: torch on the CPU rounds exp differently in vectors and in what is left of a row."""
    found, expected = torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def same(found, expected):
    close(found, expected)
    for ours, theirs in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        assert ours.stride() == theirs.stride()


@dynamics
def test_prefill(device, dynamic):
    conv = layer(device)

    def prefill(x):
        return conv(x, output_final_state=True)

    with torch.no_grad():
        for call, x in enumerate((projection(device), projection(device, tokens=T + 4))):
            if call == 0:
                run = compiled(prefill, dynamic)
            with record_routes() as routes:
                found = run(x)
            # noted when it was traced: the second length is the same graph where shapes are dynamic
            traced = call == 0 or not dynamic
            assert [str(route) for route in routes] == [native(device)] * traced
            same(found, prefill(x))
            with record_routes() as routes:
                run(x)
            assert routes == []


@dynamics
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_training(device, dynamic, packed):
    conv = layer(device)
    bounds = torch.tensor([0, 4, T, 2 * T], dtype=torch.int32, device=device) if packed else None
    n = 3 if packed else B
    x, residual = (projection(device, batch=1, tokens=B * T) if packed else projection(device) for _ in range(2))
    initial, dy = normal(device, n, D, W), torch.randn_like(x)

    def forward(x, residual, initial, bounds):
        return conv(x * 2, residual=residual, cache=initial, output_final_state=True, cu_seqlens=bounds)

    def step(function):
        tensors = [*leaves(x, residual, initial), *conv.parameters()]
        y, final = function(*tensors[:3], bounds)
        return y, final, *torch.autograd.grad((y, final), tensors, (dy, final.detach()))

    with record_routes() as routes:
        found = step(compiled(forward, dynamic))
    assert [str(route) for route in routes] == [native(device)]
    close(found, step(forward))


@dynamics
def test_decode(device, dynamic):
    """Several steps in one graph, the cache mutated in place and returned itself."""
    conv = layer(device)

    def decode(x, cache):
        ys = []
        for token in range(3):
            y, cache = conv(x[:, token : token + 1], cache=cache, output_final_state=True)
            ys.append(y)
        return torch.cat(ys, dim=1), cache

    with torch.no_grad():
        run = compiled(decode, dynamic)
        for batch in (B, B + 1):
            x, cache = projection(device, batch=batch), normal(device, batch, D, W)
            eager = cache.clone()
            y, returned = run(x, cache)
            assert returned is cache
            same((y, cache), decode(x, eager))


def test_a_strided_cache_is_updated_in_place(device):
    conv, x = layer(device), projection(device, tokens=1)
    cache = normal(device, B, W, D).transpose(1, 2)
    eager = cache.clone()
    with torch.no_grad():
        compiled(lambda x, cache: conv(x, cache=cache))(x, cache)
        conv(x, cache=eager)
    assert torch.equal(cache, eager) and cache.stride() == (W * D, 1, D)


@pytest.fixture
def replays(monkeypatch):
    """One entry for each replay of a CUDA graph."""
    found, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (found.append(graph), replay(graph))[1])
    return found


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(device, mode, replays):
    """A CUDA graph is recorded in the second round and replayed afterwards, into the same memory: hence the clones."""
    conv, x = layer(device), projection(device)
    graphs = device == "cuda" and mode == "reduce-overhead"

    def forward(x):
        return conv(x)[0]

    def trained(function):
        (leaf,) = leaves(x)
        y = function(leaf)
        gradients = torch.autograd.grad(y.square().sum(), [leaf, *conv.parameters()])
        return [tensor.detach().clone() for tensor in (y, *gradients)]

    run = torch.compile(forward, fullgraph=True, mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        close(trained(run), trained(forward))
    # the forward and the backward, each more than once
    assert len(replays) >= 4 if graphs else not replays
    replays.clear()

    cache, eager = (torch.ones(B, D, W, device=device) for _ in range(2))
    torch._dynamo.mark_static_address(cache)  # or no graph is made that writes into it
    step = torch.compile(lambda x, cache: conv(x, cache=cache)[0] + 1, fullgraph=True, mode=mode)
    with torch.no_grad():
        for token in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            now = x[:, token : token + 1]
            close(step(now, cache).clone(), conv(now, cache=eager)[0] + 1)
            assert torch.equal(cache, eager)
    assert len(replays) >= 2 if graphs else not replays


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.conv = layer(device)

    def forward(self, x):
        y, state = self.conv(x * 2, output_final_state=True)
        return y + 1, state


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export(device, strict):
    model, x = Model(device), projection(device).contiguous()
    dimensions = {"x": {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("tokens", min=W, max=4096)}}
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=dimensions, strict=strict)
        assert [str(node.target) for node in program.graph.nodes].count("accel.causal_conv1d.default") == 1
        saved = io.BytesIO()
        torch.export.save(program.run_decompositions(), saved)
        saved.seek(0)
        loaded = torch.export.load(saved).module()
        for batch, tokens in ((B, T), (5, 33)):
            x = projection(device, batch=batch, tokens=tokens).contiguous()
            same(loaded(x), model(x))


def test_a_declined_call_is_the_original(device):
    """A filter wider than ours: the graph breaks where the upstream's own does."""
    conv, x = layer(device, width=9), projection(device).contiguous()
    with record_routes() as routes:
        found = torch.compile(lambda x: conv(x)[0] + 1, backend="eager")(x)
    assert {str(route) for route in routes} == {"fallback:width"}
    close(found, conv(x)[0] + 1)


def test_restored_callables_are_compiled_again(device):
    conv, x = layer(device), projection(device).contiguous()
    run = torch.compile(lambda x: conv(x)[0], backend="eager")
    accelerated_y = run(x)
    restore()
    with record_routes() as routes:
        y = run(x)
    assert routes == []
    torch.testing.assert_close(y, accelerated_y, rtol=1e-5, atol=1e-5)


CASES = {
    "plain": dict(),
    "documents": dict(seq_idx=True),
    "states": dict(initial_states=True, return_final_states=True),
    "states given": dict(initial_states=True, return_final_states=True, final_states_out=True),
}


@dynamics
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channel_last", [False, True])
def test_causal_conv1d_fn(device, channel_last, case, dynamic):
    x = projection(device).transpose(1, 2) if channel_last else normal(device, B, D, T)
    weight, bias, initial = normal(device, D, W), normal(device, D), normal(device, B, W - 1, D).transpose(1, 2)
    documents = torch.tensor([[0] * 4 + [1] * 5, [2] * 8 + [-1]], dtype=torch.int32, device=device)
    dy = torch.randn_like(x)

    def forward(x, weight, bias, initial, documents, out):
        options = dict(CASES[case], activation="silu")
        if "seq_idx" in options:
            options["seq_idx"] = documents
        if "initial_states" in options:
            options["initial_states"] = initial
        if "final_states_out" in options:
            options["final_states_out"] = out
        return here.causal_conv1d_fn(x, weight, bias, **options)

    def step(function):
        tensors = leaves(x, weight, bias, initial)
        out = normal(device, B, W - 1, D).transpose(1, 2)
        outputs = function(*tensors, documents, out)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if "final_states_out" in CASES[case]:
            assert torch.equal(out, outputs[1])
        gradients = [dy, *(torch.ones_like(states) for states in outputs[1:])]
        wanted = tensors if len(outputs) > 1 else tensors[:3]
        return *outputs, *torch.autograd.grad(outputs, wanted, gradients)

    with record_routes() as routes:
        found = step(compiled(forward, dynamic))
    assert [str(route) for route in routes] == [native(device)]
    close(found, step(forward))


@dynamics
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_causal_conv1d_update(device, tokens, dynamic):
    """[N, D], [N, D, 1] and [N, D, 2] with slots, one of them padding."""
    shape = (3, D) if tokens == 0 else (3, D, tokens)
    x, state, weight = normal(device, *shape), normal(device, 5, D, W), normal(device, D, W)
    slots = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    eager = state.clone()

    def update(x, state, slots):
        return here.causal_conv1d_update(x, state, weight, None, "silu", conv_state_indices=slots)

    with torch.no_grad():
        same((compiled(update, dynamic)(x, state, slots), state), (update(x, eager, slots), eager))


def test_functional_backward(device):
    """As mamba_ssm's autograd nodes call it: dx is half of a gradient that the caller has made."""
    x, weight, bias, dy = normal(device, B, D, T), normal(device, D, W), normal(device, D), normal(device, B, D, T)

    def backward(x, weight, bias, dy):
        dxz = x.new_zeros(B, 2 * D, T)
        y = cpp_functions.causal_conv1d_fwd_function(x, weight, bias, None, None, None, True)
        dx, dweight, dbias, _ = cpp_functions.causal_conv1d_bwd_function(
            x, weight, bias, dy, None, None, None, dxz[:, D:], False, True
        )
        return y, dxz, dx, dweight, dbias

    found, expected = compiled(backward)(x, weight, bias, dy), backward(x, weight, bias, dy)
    close(found, expected)


@dynamics
def test_varlen_states(device, dynamic):
    x, bounds = normal(device, 11, D), torch.tensor([0, 2, 2, 11], device=device)

    def last(x, bounds):
        return here.causal_conv1d_varlen_states(x, bounds, W)

    same(compiled(last, dynamic)(x, bounds), last(x, bounds))
