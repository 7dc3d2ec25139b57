"""Real mamba_ssm beside real causal-conv1d, accelerated, against the same layers unaccelerated: outputs, gradients,
decode, states, routes, and a decode step as a CUDA graph.

Run by test_mamba.py in a process of its own, on a GPU with the extensions that were built for it; not by name.
On the CPU conv_extension.py and mamba_extensions.py stand in for them.
"""

import importlib
from collections import Counter

import conv_extension  # noqa: F401
import pytest
import torch
from counted import counted
from mamba_extensions import NATIVE, smallest_blocks

# isort: split
from mamba_ssm.modules.mamba2 import Mamba2
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.utils.generation import InferenceParams

from accel import accelerated, record_routes

smallest_blocks("mamba_ssm.ops.triton.")

B, T, STEPS = 2, 21, 3
WIDTH = 32
KINDS = {
    "Mamba": (Mamba, dict(d_state=8)),
    "Mamba not fused": (Mamba, dict(d_state=8, use_fast_path=False)),
    "Mamba2": (Mamba2, dict(d_state=16, headdim=8, chunk_size=16)),
    "Mamba2 not fused": (Mamba2, dict(d_state=16, headdim=8, chunk_size=16, use_mem_eff_path=False)),
}
FUSED = ("causal_conv1d_fwd_function", "causal_conv1d_fwd_function", "causal_conv1d_bwd_function")
FN, UPDATE = "causal_conv1d_fn", "causal_conv1d_update"
ON_THE_GPU = torch.cuda.is_available()
# what stands in for Mamba's scan on the CPU takes fp32
LOW = [name for name in KINDS if ON_THE_GPU or name.startswith("Mamba2")]
CASES = [(name, torch.float32) for name in KINDS] + [(name, torch.bfloat16) for name in LOW]
cases = pytest.mark.parametrize("name, dtype", CASES, ids=lambda value: str(value).removeprefix("torch."))


def build(name, dtype):
    kind, options = KINDS[name]
    torch.manual_seed(0)
    layer = kind(d_model=WIDTH, layer_idx=0, **options)
    torch.nn.init.normal_(layer.conv1d.weight, std=0.5)  # large enough for a wrong tap to show
    if dtype == torch.float32:
        return layer
    low = kind(d_model=WIDTH, layer_idx=0, dtype=dtype, **options)  # A and D stay in fp32
    low.load_state_dict(layer.state_dict())
    return low


def tokens(dtype, length=T):
    torch.manual_seed(1)
    return torch.randn(B, length, WIDTH).to(dtype)


def trained(layer, dtype):
    """The output, the input's gradient and the parameters' ones."""
    x = tokens(dtype).requires_grad_()
    y = layer(x)
    parameters = dict(layer.named_parameters())
    dy = torch.randn(y.shape).to(dtype)  # the same numbers for every dtype
    gradients = torch.autograd.grad(y, [x, *parameters.values()], dy)
    return {"y": y.detach(), "x": gradients[0], **dict(zip(parameters, gradients[1:], strict=True))}


@torch.no_grad()
def decoded(layer, dtype):
    """A prompt, then token by token: every output, and the states afterwards."""
    x, cache = tokens(dtype, T + STEPS), InferenceParams(max_seqlen=T + STEPS, max_batch_size=B)
    ys = [layer(x[:, :T], inference_params=cache)]
    for at in range(T, T + STEPS):
        cache.seqlen_offset = at
        ys.append(layer(x[:, at : at + 1], inference_params=cache))
    conv, ssm = cache.key_value_memory_dict[0]
    return {"y": torch.cat(ys, 1), "conv": conv, "ssm": ssm}


def served(function, *expected):
    """function() with the target on; the calls inside have to be these, all native."""
    with accelerated("mamba", verbose=False), counted() as calls:
        result = function()
    assert calls == Counter((name, NATIVE) for name in expected)
    return result


def untouched(function):
    with counted() as calls:
        result = function()
    assert not calls
    return result


def apart(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def compare(found, theirs, exact):
    """fp32: the original's values, but for the order of sums. bf16: as near to the fp32 run as the original is."""
    assert list(found) == list(theirs)
    for name, value in found.items():
        assert value.dtype == theirs[name].dtype and value.isfinite().all()
        limit = 5e-5 if exact is None else 1.5 * apart(theirs[name], exact[name]) + 1e-3
        distance = apart(value, theirs[name] if exact is None else exact[name])
        assert distance <= limit, f"{name}: {distance:.1e}, limit {limit:.1e}"


def exact(name, dtype, run):
    return None if dtype == torch.float32 else untouched(lambda: run(build(name, torch.float32), torch.float32))


@cases
def test_forward_and_backward(name, dtype):
    layer = build(name, dtype)
    theirs = untouched(lambda: trained(layer, dtype))
    calls = (FN,) if "not fused" in name else FUSED
    found = served(lambda: trained(layer, dtype), *calls)
    reference = exact(name, dtype, trained)
    compare(found, theirs, reference)
    compare(untouched(lambda: trained(layer, dtype)), theirs, reference)


@cases
def test_decode(name, dtype):
    """The state of a convolution holds what went into it: the same bits."""
    layer = build(name, dtype)
    theirs = untouched(lambda: decoded(layer, dtype))
    found = served(lambda: decoded(layer, dtype), FN, *[UPDATE] * STEPS)
    compare(found, theirs, exact(name, dtype, decoded))
    assert torch.equal(found["conv"], theirs["conv"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_a_decode_step_as_a_graph(name):
    """Captured while the target is on, replayed after it was restored too: the kernels are in the graph."""
    layer, dtype = build(name, torch.float32), torch.float32
    theirs = untouched(lambda: decoded(layer, dtype))
    x, cache = tokens(dtype, T + STEPS), InferenceParams(max_seqlen=T + STEPS, max_batch_size=B)
    token = torch.empty(B, 1, WIDTH)
    with torch.no_grad(), accelerated("mamba", verbose=False), record_routes() as routes:
        prompt = layer(x[:, :T], inference_params=cache)
        cache.seqlen_offset = T
        states = cache.key_value_memory_dict[0]
        saved = [state.clone() for state in states]
        token.copy_(x[:, T : T + 1])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(token, inference_params=cache)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(token, inference_params=cache)
    assert [(route.callable, str(route)) for route in routes] == [(FN, NATIVE), (UPDATE, NATIVE), (UPDATE, NATIVE)]
    for state, before in zip(states, saved, strict=True):
        state.copy_(before)
    ys = [prompt]
    for at in range(T, T + STEPS):
        token.copy_(x[:, at : at + 1])
        graph.replay()
        ys.append(y.clone())
    found = {"y": torch.cat(ys, 1), "conv": states[0], "ssm": states[1]}
    compare(found, theirs, None)
    assert torch.equal(found["conv"], theirs["conv"])


def test_the_packages_are_what_they_were():
    """The very extension of the machine, where there is one, and every captured name again afterwards."""
    extension = importlib.import_module("causal_conv1d_cuda")
    assert bool(getattr(extension, "__file__", None)) is ON_THE_GPU
    modules = [importlib.import_module(f"mamba_ssm.{name}") for name in ("modules.mamba_simple", "modules.mamba2")]
    before = [vars(module)[name] for module in modules for name in (FN, UPDATE)]
    with accelerated("mamba", verbose=False):
        assert all(vars(module)[name].__accel__.live for module in modules for name in (FN, UPDATE))
    after = [vars(module)[name] for module in modules for name in (FN, UPDATE)]
    assert all(found is held for found, held in zip(after, before, strict=True))
