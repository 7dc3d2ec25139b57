"""Real mamba_ssm, accelerated, against its own torch path: outputs, gradients, decode, states, routes, bindings.

Run by test_mamba.py in a process of its own for each release, with causal-conv1d or without it; not collected by name.
The torch path is what mamba_ssm does where the names that it took from causal-conv1d are None, as they are without the
package. What it needs of a GPU build is stood in for by mamba_extensions.py: a call that is not native fails here.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections import Counter

import pytest
import torch
from counted import counted
from mamba_extensions import NATIVE, smallest_blocks

# isort: split
from mamba_ssm.modules import mamba2, mamba2_simple, mamba_simple, mha
from mamba_ssm.ops import selective_scan_interface
from mamba_ssm.ops.triton import ssd_combined
from mamba_ssm.utils.generation import InferenceParams

from accel import accelerated, is_accelerated, last_route

PRESENT = importlib.util.find_spec("causal_conv1d") is not None
smallest_blocks("mamba_ssm.ops.triton.")  # interpreted, a block costs what it holds

CAPTURING = (mamba2, mamba2_simple, mamba_simple, mha, selective_scan_interface, ssd_combined)
CAPTURED = [(module, name) for module in CAPTURING for name in vars(module) if name.startswith("causal_conv1d_")]
T = 9
# Mamba2's fused projection with rows of a multiple of 8 elements, behind a gated MLP, and with rows of 49
PITCHES = {"P = 72": dict(d_model=19, expand=1, d_ssm=16), "P = 49": dict(d_model=8, expand=1)}
pitches = pytest.mark.parametrize("options", PITCHES.values(), ids=PITCHES.keys())


@contextlib.contextmanager
def torch_path():
    """mamba_ssm as it is without causal-conv1d."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in CAPTURED:
            patch.setattr(module, name, None)
        yield


def served(function, *expected):
    """function() with the target on; the calls inside have to be these, all native."""
    with accelerated("mamba", verbose=False) as on, counted() as calls:
        assert on == ("mamba",) and is_accelerated("mamba")
        result = function()
    assert calls == Counter((name, NATIVE) for name in expected)
    return result


def build(kind, **options):
    torch.manual_seed(0)
    if kind is mamba_simple.Mamba:
        return kind(d_model=12, d_state=8, **options)
    if kind is mha.MHA:
        return kind(embed_dim=24, num_heads=3, num_heads_kv=1, causal=True, d_conv=4, **options)
    return kind(**{"d_model": 8, "expand": 1, "d_state": 16, "headdim": 8, "chunk_size": 16, **options})


def sizes(layer):
    return layer.in_proj.in_features


def trained(layer, call):
    """The outputs, the input's gradient and the parameters' ones."""
    torch.manual_seed(1)
    x = torch.randn(2, T, sizes(layer), requires_grad=True)
    y = call(layer, x)
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad(y, [x, *parameters.values()], torch.randn_like(y), allow_unused=True)
    return {"y": y.detach(), "x": gradients[0], **dict(zip(parameters, gradients[1:], strict=True))}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def plain(layer, x):
    return layer(x)


FN, UPDATE, STATES = "causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"
# the forward, its recomputation in the backward, and the backward itself
FUSED = ("causal_conv1d_fwd_function", "causal_conv1d_fwd_function", "causal_conv1d_bwd_function")


@pytest.mark.parametrize("conv_bias", [False, True])
def test_mamba_fused(conv_bias):
    """mamba_inner_fn: dx is written in place into one half of dxz, and what comes back of it is ignored."""
    layer = build(mamba_simple.Mamba, conv_bias=conv_bias)
    with torch_path():
        theirs = trained(layer, plain)
    assert_same(served(lambda: trained(layer, plain), *FUSED), theirs)


def test_mamba_not_fused():
    layer = build(mamba_simple.Mamba, use_fast_path=False)
    with torch_path():
        theirs = trained(layer, plain)
    assert_same(served(lambda: trained(layer, plain), FN), theirs)


@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param(mamba2.Mamba2, PITCHES["P = 72"], id="Mamba2-P = 72"),
        pytest.param(mamba2.Mamba2, PITCHES["P = 49"], id="Mamba2-P = 49"),
        pytest.param(mamba2_simple.Mamba2Simple, PITCHES["P = 49"], id="Mamba2Simple-P = 49"),  # it has no gated MLP
    ],
)
def test_mamba2(kind, options):
    """mamba_split_conv1d_scan_combined, which is not there without causal-conv1d, against the layer in steps."""
    fused, steps = build(kind, **options), build(kind, use_mem_eff_path=False, **options)
    with torch_path():
        theirs = trained(steps, plain)
    assert_same(served(lambda: trained(fused, plain), *FUSED), theirs)


@pitches
def test_packed_documents(options):
    """seq_idx, whatever layout mamba_ssm makes of the projection: as if the documents came one by one."""
    fused, steps = build(mamba2.Mamba2, **options), build(mamba2.Mamba2, use_mem_eff_path=False, **options)
    numbers = torch.tensor([[0] * 4 + [1] * (T - 4)] * 2, dtype=torch.int32)

    def one_by_one(layer, x):
        return torch.cat([layer(x[:, :4]), layer(x[:, 4:])], 1)

    def packed(layer, x):
        return layer(x, seq_idx=numbers)

    with torch_path():
        theirs = trained(steps, one_by_one)
    assert_same(served(lambda: trained(fused, packed), *FUSED), theirs)
    assert_same(served(lambda: trained(steps, packed), FN), theirs)


def test_mha():
    layer = build(mha.MHA, mlp_dim=256)
    with torch_path():
        theirs = trained(layer, plain)
    assert_same(served(lambda: trained(layer, plain), FN), theirs)


def decoded(layer, tokens=5):
    """Prefill with a cache, then token by token: every output, and the states afterwards."""
    torch.manual_seed(1)
    x = torch.randn(2, tokens + 3, sizes(layer))
    cache = InferenceParams(max_seqlen=16, max_batch_size=2)
    with torch.no_grad():
        ys = [layer(x[:, :tokens], inference_params=cache)]
        for t in range(tokens, tokens + 3):
            cache.seqlen_offset = t
            ys.append(layer(x[:, t : t + 1], inference_params=cache))
    states = cache.key_value_memory_dict[layer.layer_idx]
    # of attention's cache only what was written
    return {"y": torch.cat(ys, 1), "first": states[0][:, : tokens + 3] if states[0].dim() == 5 else states[0],
            "second": states[1]}  # fmt: skip


@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("kind", [mamba_simple.Mamba, mamba2.Mamba2, mha.MHA])
def test_prefill_and_decode(kind, tokens):
    layer = build(kind, layer_idx=0)
    with torch_path():
        theirs = decoded(layer, tokens)
    assert_same(served(lambda: decoded(layer, tokens), FN, UPDATE, UPDATE, UPDATE), theirs)


def test_packed_prefill():
    """cu_seqlens with a cache: the conv states are the last tokens of each sequence."""
    layer = build(mamba2.Mamba2, layer_idx=0)
    torch.manual_seed(1)
    x = torch.randn(1, T, sizes(layer))
    bounds, numbers = torch.tensor([0, 2, T], dtype=torch.int32), torch.tensor([[0] * 2 + [1] * (T - 2)]).int()

    def packed():
        cache = InferenceParams(max_seqlen=16, max_batch_size=2)
        with torch.no_grad():
            y = layer(x, seq_idx=numbers, cu_seqlens=bounds, inference_params=cache)
            cache.seqlen_offset = T
            step = layer(x[0, :2, None], inference_params=cache)
        conv, ssm = cache.key_value_memory_dict[0]
        return {"y": y, "conv": conv, "ssm": ssm, "step": step}

    def one_by_one():
        found = []
        for first, last, token in ((0, 2, 0), (2, T, 1)):
            cache = InferenceParams(max_seqlen=16, max_batch_size=1)
            with torch.no_grad():
                y = layer(x[:, first:last], inference_params=cache)
                cache.seqlen_offset = T
                step = layer(x[:, token : token + 1], inference_params=cache)
            found.append((y, *cache.key_value_memory_dict[0], step))
        ys, convs, ssms, steps = zip(*found, strict=True)
        return {"y": torch.cat(ys, 1), "conv": torch.cat(convs), "ssm": torch.cat(ssms), "step": torch.cat(steps)}

    with torch_path():
        theirs = one_by_one()
    assert_same(served(packed, STATES, FN, UPDATE), theirs)


def test_every_name_and_back():
    """All that mamba_ssm took or could not take is ours while the target is on, and the very same thing afterwards."""
    before = {
        (name, key): value
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] in ("mamba_ssm", "causal_conv1d")
        for key, value in vars(module).items()
    }
    found = [vars(module)[name] for module, name in CAPTURED]
    assert len(found) == 16 and (PRESENT or found == [None] * 16)
    with accelerated("mamba", verbose=False):
        held = [vars(module)[name] for module, name in CAPTURED]
        assert all(function.__accel__.live for function in held)
        assert {name: function for (_, name), function in zip(CAPTURED, held, strict=True)}.keys() >= set(FUSED)
        assert len({id(function) for function in held}) == 6
    after = {
        (name, key): value
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] in ("mamba_ssm", "causal_conv1d")
        for key, value in vars(module).items()
    }
    assert before.keys() == after.keys()
    assert [place for place in before if before[place] is not after[place]] == []
    assert PRESENT or importlib.util.find_spec("causal_conv1d") is None


def test_a_target_that_shares_its_callables():
    """mamba and causal_conv1d claim the same callables: they go when the last of the two goes."""
    found = [vars(module)[name] for module, name in CAPTURED]
    with accelerated("mamba", verbose=False):
        held = [vars(module)[name] for module, name in CAPTURED]
        with accelerated("causal_conv1d", verbose=False):
            assert all(vars(module)[name] is function for (module, name), function in zip(CAPTURED, held, strict=True))
        assert all(vars(module)[name] is function for (module, name), function in zip(CAPTURED, held, strict=True))
        assert importlib.import_module("causal_conv1d").causal_conv1d_fn is mamba_simple.causal_conv1d_fn
    assert all(vars(module)[name] is value for (module, name), value in zip(CAPTURED, found, strict=True))


def test_a_call_that_nobody_serves_says_what_would():
    layer = build(mamba_simple.Mamba, use_fast_path=False).double()
    with (
        accelerated("mamba", verbose=False),
        pytest.raises((AssertionError, RuntimeError) if PRESENT else TypeError) as caught,
    ):
        layer(torch.randn(1, T, 12, dtype=torch.float64))
    assert str(last_route("causal_conv1d")) == "fallback:dtype"
    if not PRESENT:
        assert "causal_conv1d_fn: x: expected torch.bfloat16, torch.float16, torch.float32" in str(caught.value)
        assert "causal-conv1d is not installed" in str(caught.value)
