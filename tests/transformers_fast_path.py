"""Transformers before 5.15 on the path of a GPU: mamba_ssm is there, causal-conv1d is not, and accel closes the gap.

Run by test_transformers.py in a process of its own for each release; not collected by name. The gates of Transformers
ask for CUDA, so they are told that it is there; the mixers look at their weights and would take their torch path here,
so that path is exchanged for the other one. The scans are mamba_ssm's own, see mamba_extensions.py.
"""

import mamba_extensions  # noqa: F401
import pytest
import torch

torch.cuda.is_available = lambda: True

from transformers_parity import FAMILIES, build, compare, modeling, outcome  # noqa: E402

from accel import accelerated, record_routes  # noqa: E402

FN, UPDATE = ("causal_conv1d", "causal_conv1d_fn"), ("causal_conv1d", "causal_conv1d_update")
FUSED = [("causal_conv1d", "causal_conv1d_fwd_function"), ("causal_conv1d", "causal_conv1d_bwd_function")]
FLAG = "is_fast_path_available"
MIXERS = [name for name in FAMILIES if not name.startswith(("qwen3", "lfm2", "olmo"))]


@pytest.mark.parametrize("family", ["mamba", "jamba", "zamba"])
def test_models_on_the_fast_path(family, monkeypatch):
    """Logits, decoding and gradients are those of the torch path; Mamba's training step is mamba_ssm's fused one."""
    model = build(family)
    expected = outcome(model)
    for mixer in {type(module) for module in model.modules() if hasattr(module, "cuda_kernels_forward")}:
        monkeypatch.setattr(mixer, "slow_forward", mixer.cuda_kernels_forward)
    with accelerated("transformers", verbose=False), record_routes() as routes:
        actual = outcome(model)
    assert {str(route) for route in routes} == {"native:cpu"}
    assert {route[:2] for route in routes} == {FN, UPDATE, *(FUSED if family == "mamba" else [])}
    compare(actual, expected)


@pytest.mark.parametrize("family", [name for name in MIXERS if not name.endswith("mamba") or name == "jamba"])
def test_the_flag_of_the_fast_path(family):
    """On where causal-conv1d was the only thing missing, also for mixers that are built meanwhile; off again after."""
    module = modeling(build(family))
    names = ("causal_conv1d_fn", "causal_conv1d_update")
    before = [vars(module)[name] for name in (*names, FLAG)]
    assert before == [None, None, False]
    with accelerated("transformers", verbose=False):
        assert vars(module)[FLAG] is True
        build(family)
        assert vars(module)[FLAG] is True
        assert [vars(module)[name].__name__ for name in names] == [*names]
    assert [vars(module)[name] for name in (*names, FLAG)] == before


def test_falcon_mamba_stays_on_its_torch_path():
    """The fast path's training step would need the extension itself, or a kernel from the Hub."""
    module = modeling(build("falcon_mamba"))
    with accelerated("transformers", verbose=False):
        build("falcon_mamba")
        held = vars(module)
        functions = held.get("_causal_conv1d_cache") or [held["causal_conv1d_fn"], held["causal_conv1d_update"]]
        assert not all([*functions, held.get("mamba_inner_fn", held.get("falcon_mamba_inner_fn"))])
