"""FLA's own Mamba layers, accelerated, with each of their convolution backends: against plain torch convolutions.

Run by test_fla_layers.py in a process of its own for each release, with causal-conv1d or without it; not collected by
name. The layers keep their convolutions as attributes of the instance, of another contract for each backend. On the CPU
a layer's forward takes another way, so the tests call what it calls on a GPU. What mamba_ssm needs of a GPU build is
stood in for by mamba_extensions.py: a convolution that is not native fails here.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from counted import counted
from mamba_extensions import NATIVE, smallest_blocks

# isort: split
import fla
from fla.layers import log_linear_mamba2, mamba, mamba2

from accel import accelerated, matrix

smallest_blocks("mamba_ssm.ops.triton.")
smallest_blocks("fla.")

PRESENT = importlib.util.find_spec("causal_conv1d") is not None
RELEASE = tuple(map(int, fla.__version__.split(".")))
LAYERS = {
    "mamba": (mamba.Mamba, dict(hidden_size=12, intermediate_size=24, state_size=8)),
    "mamba2": (mamba2.Mamba2, dict(hidden_size=16, head_dim=16, state_size=16, expand=1, chunk_size=16)),
    "log_linear_mamba2": (
        log_linear_mamba2.LogLinearMamba2,
        dict(num_heads=1, hidden_size=16, head_dim=16, state_size=64, expand=1, chunk_size=64),
    ),
}
T = 9
TARGETS = {"cuda": "causal_conv1d", "triton": "short_conv"}
NAMES = {
    "cuda": ("causal_conv1d_fn", "causal_conv1d_update"),
    "triton": ("causal_conv1d", "causal_conv1d_update"),
}


def conv(x, weight, bias=None, activation=None, **_):
    """[B, D, T]"""
    y = F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=x.shape[1])
    return y if activation is None else F.silu(y)


def update(x, state, weight, bias=None, activation=None):
    """[B, D], or [B, 1, D] as FLA has it."""
    state.copy_(torch.cat([state[..., 1:], x.reshape(*state.shape[:2], 1)], -1))
    y = (state * weight).sum(-1) + (0 if bias is None else bias)
    return (y if activation is None else F.silu(y)).view_as(x)


def triton_conv(x, weight, bias=None, activation=None, output_final_state=False, **_):
    y = conv(x.transpose(1, 2), weight, bias, activation).transpose(1, 2)
    width = weight.shape[1]
    return y, F.pad(x.transpose(1, 2), (width - x.shape[1], 0)).contiguous() if output_final_state else None


def triton_update(x, cache, weight=None, bias=None, activation=None):
    return update(x, cache, weight, bias, activation), cache


TORCH = {"cuda": (conv, update), "triton": (triton_conv, triton_update)}


def attention(q, k, v, g, level_scales, initial_state=None, output_final_state=False, **_):
    """In the place of log-linear attention's kernel, which the interpreter does not take: plain linear attention."""
    scores = torch.einsum("blgn,bmgn->bglm", q, k).tril()
    return torch.einsum("bglm,bmgp->blgp", scores, v) * level_scales.mean(-1, keepdim=True), None


log_linear_mamba2.chunk_log_linear_attn = attention


def build(name, backend):
    kind, options = LAYERS[name]
    torch.manual_seed(0)
    return kind(backend=backend, layer_idx=0, **options)


@contextlib.contextmanager
def on(backend, model=None):
    with accelerated(TARGETS[backend], model=model, verbose=False), counted() as calls:
        yield calls


def trained(layer):
    torch.manual_seed(1)
    x = torch.randn(2, T, layer.hidden_size, requires_grad=True)
    y, *_ = layer.cuda_kernels_forward(x)
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad(y, [x, *parameters.values()], torch.randn_like(y), allow_unused=True)
    return {"y": y.detach(), "x": gradients[0], **dict(zip(parameters, gradients[1:], strict=True))}


def steps_of(layer):
    # before 0.6.0 the decode of LogLinearMamba2 forgets an argument of its own function
    return [T - 2, T - 1] if RELEASE >= (0, 6) or not isinstance(layer, log_linear_mamba2.LogLinearMamba2) else []


def decoded(layer):
    """Prefill with a cache, then two tokens; the states as they are then."""
    layer.eval()
    torch.manual_seed(1)
    x = torch.randn(2, T, layer.hidden_size)
    with torch.no_grad():
        y, conv_state, state = layer.cuda_kernels_forward(x[:, : T - 2], use_cache=True)
        ys = [y]
        for t in steps_of(layer):
            last = {"conv_state": conv_state, "recurrent_state": state}
            y, conv_state, state = layer.cuda_kernels_forward(x[:, t : t + 1], last_state=last, use_cache=True)
            ys.append(y)
    return {"y": torch.cat(ys, 1), "conv": conv_state}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, at=name: f"{at}: {text}")


def backends(name):
    # before 0.6.0 the Triton backend of two layers hands [B, D, T] to a function of [B, T, D]
    return ["cuda", "triton"] if name == "mamba" or RELEASE >= (0, 6) else ["cuda"]


CASES = [(name, backend) for name in LAYERS for backend in backends(name)]


@pytest.mark.parametrize("name, backend", CASES)
def test_prefill_and_decode(name, backend):
    with on(backend) as calls:
        layer = build(name, backend)
        assert layer.backend == backend and layer.causal_conv1d_fn.__accel__.live
        ours = decoded(layer)
    fn, step = NAMES[backend]
    assert calls == Counter({(fn, NATIVE): 1, (step, NATIVE): len(steps_of(layer))})
    layer.causal_conv1d_fn, layer.causal_conv1d_update = TORCH[backend]
    assert_same(ours, decoded(layer))


@pytest.mark.parametrize("name, backend", CASES)
def test_training(name, backend):
    """mamba_ssm's fused functions, which take causal-conv1d's whatever the backend is; FLA's with its checkpoint."""
    with on(backend) as calls, accelerated("mamba", verbose=False):
        layer = build(name, backend)
        ours = trained(layer.train())
    fused = ["causal_conv1d_fwd_function", "causal_conv1d_fwd_function", "causal_conv1d_bwd_function"]
    expected = [NAMES[backend][0]] * 2 if name == "log_linear_mamba2" else fused
    assert calls == Counter((each, NATIVE) for each in expected)
    layer.causal_conv1d_fn, layer.causal_conv1d_update = TORCH[backend]
    assert_same(ours, trained(layer.eval()))


# without causal-conv1d a layer that is built before anything is switched on takes the other backend by itself
@pytest.mark.parametrize("name, backend", [case for case in CASES if PRESENT or case[1] == "triton"])
def test_instances_that_were_there_before(name, backend):
    layer = build(name, backend)
    found = layer.causal_conv1d_fn, layer.causal_conv1d_update
    assert layer.backend == backend and not hasattr(found[0], "__accel__")
    with on(backend, model=torch.nn.Sequential(layer)) as calls:
        assert layer.causal_conv1d_fn.__wrapped__ is found[0] and layer.causal_conv1d_update.__wrapped__ is found[1]
        decoded(layer)
    fn, step = NAMES[backend]
    assert calls == Counter({(fn, NATIVE): 1, (step, NATIVE): len(steps_of(layer))})
    assert layer.causal_conv1d_fn is found[0] and layer.causal_conv1d_update is found[1]


def holders():
    """The places that the matrix names, as far as this release has them."""
    rules = {rule for row in matrix.load().targets["causal_conv1d"].ranges for rule in row.holders}
    spaces = [(rule, vars(sys.modules[rule.module])) for rule in rules if rule.module in sys.modules]
    return [(space, rule.attribute) for rule, space in spaces if rule.attribute in space]


def test_every_name_and_back():
    places = holders()
    before = {
        (name, key): value
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] in ("fla", "mamba_ssm", "causal_conv1d")
        for key, value in vars(module).items()
    }
    assert len(places) >= 6 and (PRESENT or all(space[name] is None for space, name in places))
    with accelerated(["short_conv", "causal_conv1d", "mamba"], verbose=False):
        assert all(space[name].__accel__.live for space, name in places)
        assert {space[name].__accel__.target for space, name in places} == {"causal_conv1d"}
    after = {
        (name, key): value
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] in ("fla", "mamba_ssm", "causal_conv1d")
        for key, value in vars(module).items()
    }
    assert before.keys() == after.keys()
    assert [place for place in before if before[place] is not after[place]] == []


def test_a_module_imported_meanwhile(monkeypatch):
    known = vars(mamba)["causal_conv1d_fn"]
    monkeypatch.delitem(sys.modules, "fla.layers.mamba")
    with accelerated("causal_conv1d", verbose=False):
        again = importlib.import_module("fla.layers.mamba")
        assert again is not mamba and again.causal_conv1d_fn is sys.modules["causal_conv1d"].causal_conv1d_fn
        layer = again.Mamba(backend="cuda", layer_idx=0, **LAYERS["mamba"][1])
        assert layer.backend == "cuda" and layer.causal_conv1d_update.__accel__.live
    assert again.causal_conv1d_fn is known
