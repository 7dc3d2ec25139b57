"""Real Transformers models with random weights, accelerated, against their own torch path: logits, greedy decoding with
a cache, gradients, packed documents, routes, bindings.

Run by test_transformers.py in a process of its own for each release, with causal-conv1d beside it or without; not
collected by name. Where causal-conv1d is there its extension is a stub that raises, so every call has to be native.
"""

import contextlib
import importlib
import importlib.util
import inspect
import logging
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from accel import accelerate, accelerated, record_routes, restore

PRESENT = importlib.util.find_spec("causal_conv1d") is not None
if PRESENT:

    def unbuilt(*args):
        raise RuntimeError("the extension is not there")

    extension = types.ModuleType("causal_conv1d_cuda")
    extension.causal_conv1d_fwd = extension.causal_conv1d_bwd = extension.causal_conv1d_update = unbuilt
    sys.modules[extension.__name__] = extension
sys.modules["fla"] = None  # it would be taken for the other kernels, and needs a GPU
torch.backends.cudnn.allow_tf32 = False  # on a GPU the torch path is to be as exact as it is here

import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.integrations import hub_kernels  # noqa: E402

VERSION = Version(transformers.__version__)
HUB = Version("5.15") <= VERSION  # the modeling modules define the functions themselves
COMMON = dict(vocab_size=64, hidden_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=128)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=8)
DELTA = dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
SHORT = dict(num_hidden_layers=2, layer_types=["conv", "full_attention"], conv_L_cache=3, block_multiple_of=8)
JAMBA = dict(num_hidden_layers=3, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4)
FAMILIES = {
    "mamba": dict(num_hidden_layers=2, state_size=8),
    "falcon_mamba": dict(num_hidden_layers=2, state_size=8),
    "mamba2": dict(num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8),
    "jamba": HEADS | JAMBA | dict(num_experts=2, use_mamba_kernels=False),
    "bamba": HEADS | MAMBA | dict(num_hidden_layers=2, attn_layer_indices=[1]),
    "granitemoehybrid": HEADS
    | MAMBA
    | dict(num_hidden_layers=2, layer_types=["mamba", "attention"], shared_intermediate_size=16)
    | dict(num_local_experts=2, num_experts_per_tok=1),
    "falcon_h1": HEADS | MAMBA | dict(num_hidden_layers=2, mamba_d_ssm=64),
    "zamba": HEADS | JAMBA | dict(n_mamba_heads=2, use_mamba_kernels=False),
    "zamba2": HEADS
    | dict(num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"], hybrid_layer_ids=[1])
    | dict(mamba_d_state=8, mamba_ngroups=2, n_mamba_heads=8, mamba_headdim=8, num_mem_blocks=1, chunk_size=8),
    "nemotron_h": HEADS
    | dict(num_hidden_layers=2, layers_block_type=["mamba", "attention"], head_dim=8, ssm_state_size=8)
    | dict(mamba_num_heads=8, mamba_head_dim=8, n_groups=2, chunk_size=8),
    "lfm2": HEADS | SHORT,
    "lfm2_moe": HEADS | SHORT | dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "lfm3": HEADS | SHORT,
    "qwen3_next": HEADS | DELTA | EXPERTS,
    "qwen3_5_text": HEADS | DELTA,
    "qwen3_5_moe_text": HEADS | DELTA | EXPERTS,
    "olmo_hybrid": HEADS | DELTA,
    "kimi_linear": HEADS
    | DELTA
    | dict(num_key_value_heads=4, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, head_dim=None)
    | dict(linear_num_heads=4, linear_head_dim=8, mlp_layer_types=["dense", "dense"]),
}
FAMILIES = {name: config for name, config in FAMILIES.items() if name in transformers.CONFIG_MAPPING}
# before 5.15 the other families have their torch path in their mixers, and no call that could be swapped
SERVED = [name for name in FAMILIES if HUB or name.startswith("qwen3")]
SHORT_CONV = [name for name in FAMILIES if name.startswith("lfm")]
NEW_TOKENS = 4
DECORATOR = '@use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")'


def build(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON, **FAMILIES[family]))
    for name, parameter in model.named_parameters():
        if "conv" in name:
            torch.nn.init.normal_(parameter, std=0.5)  # large enough for a wrong tap to show in the logits
    return model


def modeling(model):
    return sys.modules[type(model).__module__]


def tokens(batch=2, length=11):
    torch.manual_seed(1)
    return torch.randint(3, COMMON["vocab_size"], (batch, length))


def logits(model, **inputs):
    model.eval()
    with torch.no_grad():
        return model(**{"input_ids": tokens().to(model.device), **inputs}).logits


def outcome(model):
    """What a model is for: logits, greedy decoding with a cache after a padded prompt, gradients."""
    found, ids = {"logits": logits(model)}, tokens().to(model.device)
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    generated = model.generate(
        ids,
        attention_mask=padded,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found["tokens"] = generated.sequences
    scores = torch.stack(generated.scores)
    found["scores"] = scores.where(scores.isfinite(), 0)  # the end of the text is forbidden, by minus infinity
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
    model.zero_grad(set_to_none=True)
    return found


def near(actual, expected):
    return (actual - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-7


def compare(actual, expected):
    assert list(actual) == list(expected)
    assert torch.equal(actual["tokens"], expected["tokens"])
    assert [name for name in actual if not near(actual[name], expected[name])] == []


@contextlib.contextmanager
def torch_path(module):
    """The module on its torch functions, also where causal-conv1d is there."""
    found = {name: vars(module)[name] for name in ("causal_conv1d_fn", "causal_conv1d_update") if PRESENT and HUB}
    vars(module).update({name: function.__wrapped__ for name, function in found.items()})
    try:
        yield
    finally:
        vars(module).update(found)


def outcome_of_torch(model, run=outcome, **inputs):
    with torch_path(modeling(model)):
        return run(model, **inputs)


FN = ("transformers" if HUB else "causal_conv1d", "causal_conv1d_fn")
UPDATE = ("transformers", "causal_conv1d_update" if HUB else "torch_causal_conv1d_update")


def check_routes(routes, model):
    """All native; every convolution in the forward, the prompt and the training step, and in each decode step."""
    layers = sum(isinstance(module, torch.nn.Conv1d) for module in model.modules())
    native = "native:cpu" if model.device.type == "cpu" else "native:cute"
    expected = {(*FN, native): 3 * layers, (*UPDATE, native): (NEW_TOKENS - 1) * layers}
    assert Counter((*route[:2], str(route)) for route in routes) == expected


@pytest.mark.parametrize("family", SERVED)
def test_family(family, device):
    model = build(family).to(device)
    with torch_path(modeling(model)):
        expected = outcome(model)
        shifted = build(family).to(device)
        for name, parameter in shifted.named_parameters():
            if "conv" in name and parameter.dim() == 3:
                parameter.data = parameter.data.roll(1, -1)
        assert not near(logits(shifted), expected["logits"])
    with accelerated("transformers", model=model, verbose=False), record_routes() as routes:
        actual = outcome(model)
    check_routes(routes, model)
    compare(actual, expected)
    with torch_path(modeling(model)), record_routes() as routes:
        assert torch.equal(logits(model), expected["logits"])
    assert routes == []


@pytest.mark.parametrize("family", [name for name in ("mamba2", "lfm2", "qwen3_5_text") if name in SERVED])
def test_bfloat16(family):
    """As models are used: every call native, and as near to the float32 model as the torch path is."""
    exact = outcome_of_torch(build(family))["logits"]
    model = build(family).bfloat16()
    plain = outcome_of_torch(model)["logits"]
    with accelerated("transformers", model=model, verbose=False), record_routes() as routes:
        actual = outcome(model)["logits"]
    check_routes(routes, model)
    assert (actual - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SERVED + SHORT_CONV])
def test_torch_mixers_are_left_alone(family):
    """Before 5.15: the slow path of a Mamba mixer has no call to serve, and is not disturbed."""
    model = build(family)
    expected = outcome(model)
    with accelerated("transformers", model=model, verbose=False), record_routes() as routes:
        actual = outcome(build(family))
        again = outcome(model)
    assert routes == []
    for name, value in expected.items():
        assert torch.equal(actual[name], value) and torch.equal(again[name], value)


@pytest.mark.skipif(HUB, reason="since 5.15 there is one path")
@pytest.mark.parametrize("family", SHORT_CONV)
def test_fast_path_of_short_convolutions(family, monkeypatch):
    """Before 5.15: what LFM2 runs on a GPU."""
    model = build(family)
    expected = outcome(model)
    mixer = next(type(m) for m in model.modules() if type(m).__name__.endswith("ShortConv"))
    monkeypatch.setattr(mixer, "slow_forward", mixer.cuda_kernels_forward)
    with accelerated("transformers", verbose=False), record_routes() as routes:
        assert modeling(model).is_fast_path_available
        actual = outcome(model)
    assert not modeling(model).is_fast_path_available
    assert {str(route) for route in routes} == {"native:cpu"}
    assert {route.callable for route in routes} == {"causal_conv1d_fn", "causal_conv1d_update"}
    compare(actual, expected)


@pytest.mark.skipif(not HUB, reason="since 5.15 packed documents reach the convolution")
@pytest.mark.parametrize("family", SHORT_CONV)
def test_packed_documents(family):
    """Two documents in one row are what each gives alone; the torch path refuses them, or mixes them before 5.24."""
    model = build(family)
    ids, lengths = tokens(1, 12), (5, 7)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    seq_idx = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None].int()
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    alone = [outcome_of_torch(model, logits, input_ids=part) for part in ids.split(lengths, 1)]
    expected = torch.cat(alone, 1)
    packed = dict(input_ids=ids, position_ids=positions, use_cache=False)
    assert not near(outcome_of_torch(model, logits, **packed), expected)
    for how in (dict(seq_idx=seq_idx), dict(cu_seqlens=starts), dict(seq_idx=seq_idx, cu_seqlens=starts)):
        if not PRESENT:
            with pytest.raises(ValueError, match="keep packed sequences apart"):
                logits(model, **packed, **how)
        with accelerated("transformers", verbose=False), record_routes() as routes:
            actual = logits(model, **packed, **how)
        assert {str(route) for route in routes} == {"native:cpu"}
        assert near(actual, expected)


@pytest.mark.skipif(not HUB, reason="before 5.15 the layers of LFM2 take their torch path here")
def test_padding_of_a_continued_forward():
    """What the padded tokens of a second forward are makes no difference to the others."""
    model = build("lfm2")
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 5:7] = 0
    found = []
    with accelerated("transformers", verbose=False), record_routes() as routes, torch.no_grad():
        for padding in (7, 9):
            ids[0, 5:7] = padding
            cache = model(input_ids=ids[:, :5], attention_mask=mask[:, :5]).past_key_values
            found.append(model(input_ids=ids[:, 5:], attention_mask=mask, past_key_values=cache).logits)
    assert [str(route) for route in routes] == 4 * ["native:cpu"]
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][0, 2:], found[1][0, 2:])
    assert not torch.equal(found[0][0, :2], found[1][0, :2])


@pytest.mark.skipif(not PRESENT or VERSION.major > 4, reason="Mamba of 4.57 keeps causal-conv1d's functions like that")
def test_functions_in_a_tuple(monkeypatch):
    """What a model that was built before left in the cache of its module."""
    module = modeling(build("mamba"))
    package = importlib.import_module("causal_conv1d")
    found = package.causal_conv1d_update, package.causal_conv1d_fn
    monkeypatch.setattr(module, "_causal_conv1d_cache", found)
    with accelerated("transformers", verbose=False):
        assert module._causal_conv1d_cache == (package.causal_conv1d_update, package.causal_conv1d_fn) != found
    assert module._causal_conv1d_cache is found


def test_kernels_of_the_hub_are_left_alone(monkeypatch):
    """The package `kernels` puts modules or functions of its own there, with other signatures."""
    kernel, hub = torch.nn.Identity(), types.ModuleType("kernel_of_the_hub")
    hub.causal_conv1d_fn = hub.causal_conv1d_update = kernel
    family = "lfm2" if HUB else "mamba2"
    module = modeling(build(family))
    if hasattr(hub_kernels, "_KERNEL_MODULE_MAPPING"):  # for mixers that are built from now on
        monkeypatch.setitem(hub_kernels._KERNEL_MODULE_MAPPING, "causal-conv1d", hub)
    monkeypatch.setattr(module, "causal_conv1d_fn", kernel)
    with accelerated("transformers", verbose=False):
        build(family)
        assert module.causal_conv1d_fn is kernel
    assert module.causal_conv1d_fn is kernel


def test_fallback_is_the_torch_path():
    """A dtype that no backend takes is answered as before: by torch, or by the package where it is there."""
    dense = next(family for family in ("lfm2", "qwen3_5_text", "qwen3_next") if family in SERVED)
    model = build(dense).double()
    expected = outcome_of_torch(model, logits)
    with accelerated("transformers", model=model, verbose=False), record_routes() as routes:
        if HUB and not PRESENT:
            assert torch.equal(logits(model), expected)
        else:
            # the extension is not there, or causal-conv1d itself
            with pytest.raises((RuntimeError, TypeError), match="not there|not installed"):
                logits(model)
    assert {str(route) for route in routes} == {"fallback:dtype"}


@pytest.mark.skipif(not HUB or PRESENT, reason="the warning belongs to the torch fallback since 5.15")
def test_no_warning_of_the_slow_path(caplog):
    transformers.utils.logging.enable_propagation()
    model = build("lfm2")
    for on in (False, True):
        logging.Logger.warning_once.cache_clear()
        caplog.clear()
        with accelerated("transformers", verbose=False) if on else contextlib.nullcontext():
            logits(model)
        assert ("falling back to its reference PyTorch" in caplog.text) is not on


def bindings():
    """Every module of Transformers and of causal-conv1d, its attributes, and what its mappings of kernels hold."""
    found = {}
    for name, module in sys.modules.copy().items():
        if module is not None and name.partition(".")[0] in ("transformers", "causal_conv1d"):
            found[name] = dict(object.__getattribute__(module, "__dict__"))
    kernels = found["transformers.integrations.hub_kernels"].get("_KERNEL_MODULE_MAPPING", {})
    return {**found, "kernels": dict(kernels)}


def test_restore_leaves_every_binding():
    """Also with mixers built in between, which assign the names of their modules anew before 5.15."""
    models = [build(family) for family in FAMILIES]
    found = bindings()
    with accelerated("transformers", verbose=False):
        changed = bindings()
        for model in models:
            name = type(model).__module__
            assert changed[name] != found[name] or "causal_conv1d_fn" not in found[name]
        for family in FAMILIES:
            build(family)
    after = bindings()
    assert after.keys() - found.keys() == set()
    for name, held in found.items():
        assert after[name].keys() == held.keys(), name
        assert [key for key, value in held.items() if after[name][key] is not value] == [], name


@pytest.mark.skipif(not HUB, reason="before 5.15 no module defines the pair")
def test_every_modeling_module():
    """All modules with a pair of their own, also those whose models are too large to build here."""
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    names = sorted(file.stem.removeprefix("modeling_") for file in files if DECORATOR in file.read_text())
    assert len(names) >= 17  # 25 in 5.24
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 7, 24).transpose(1, 2), torch.randn(24, 4), torch.randn(24)
    state = torch.randn(2, 24, 4)
    with accelerated("transformers", verbose=False), record_routes() as routes:
        for name in names:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            fn, update = module.causal_conv1d_fn, module.causal_conv1d_update
            plain_fn, plain_update = fn.__wrapped__.__wrapped__, update.__wrapped__.__wrapped__
            assert near(fn(x, weight, bias, activation="silu"), plain_fn(x, weight, bias, activation="silu")), name
            ours, theirs = state.clone(), state.clone()
            y = update(x[:, :, :1], ours, weight, bias, "silu")
            assert near(y, plain_update(x[:, :, :1], theirs, weight, bias, "silu")), name
            assert torch.equal(ours, theirs), name
    expected = {(*FN, "native:cpu"): len(names), (*UPDATE, "native:cpu"): len(names)}
    assert Counter((*route[:2], str(route)) for route in routes) == expected


@pytest.mark.parametrize("targets", [["transformers"], ["causal_conv1d", "transformers"]], ids=["alone", "both"])
def test_late_import(targets, monkeypatch):
    """Modules that are imported while a target is on, and what they and their models are after the restore."""
    family, other = "qwen3_next", "lfm2"
    name = "transformers.models.{0}.modeling_{0}"
    assert name.format(family) not in sys.modules
    accelerate(targets, verbose=False)
    with monkeypatch.context() as gate:
        if not PRESENT:
            gate.setattr(torch.cuda, "is_available", lambda: True)  # before 5.15 nothing is taken without CUDA
        importlib.import_module(name.format(family))
    model = build(family)
    accelerate(targets, model=model, verbose=False)
    with record_routes() as routes:
        actual = outcome(model)
    check_routes(routes, model)
    restore()
    assert PRESENT or "causal_conv1d" not in sys.modules
    with torch_path(modeling(model)), record_routes() as routes:
        compare(outcome(model), actual)
        compare(outcome(build(family)), actual)
    assert routes == []
    importlib.import_module(name.format(other))
    for where, held in bindings().items():
        assert [key for key, value in held.items() if is_ours(value)] == [], where


def is_ours(value):
    """Whether a binding, or the closure of a function, holds something of accel's."""
    cells = value.__closure__ or () if inspect.isfunction(value) else ()
    return any("__accel__" in getattr(held, "__dict__", {}) for held in (value, *(c.cell_contents for c in cells)))
