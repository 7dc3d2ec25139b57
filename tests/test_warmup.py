"""`accel.warmup`: a model that is run, and specifications that are not."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

import accel
from accel import ops
from accel.kernels import jit, packing

SPEC = packing.PackingSpec(torch.int32, False, "sm_86")


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """No kernel in memory or on the disk."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_functions", {})


def test_a_model_is_called_once_with_its_arguments():
    calls = []
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda *found: calls.append((found[1], torch.is_grad_enabled())))
    x = torch.zeros(1, 2)
    assert accel.warmup(model, x) == []
    with torch.no_grad():
        accel.warmup(model, input=x)
    assert calls == [((x,), True), ((), False)]


def test_an_error_of_the_run_is_raised():
    with pytest.raises(ZeroDivisionError):
        accel.warmup(lambda: 1 / 0)


def test_bad_device_data_of_the_run_is_raised():
    x, weight, state = torch.zeros(1, 4), torch.zeros(4, 4), torch.zeros(1, 4, 4)
    with pytest.raises(accel.StateIndexError):
        accel.warmup(
            lambda: ops.causal_conv1d_update(x, state, weight, conv_state_indices=torch.tensor([7], dtype=torch.int32))
        )


def test_specifications_are_compiled_once_and_then_loaded():
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    before = jit.compilations()
    specs = accel.warmup(iter([SPEC]))
    assert specs == [SPEC] and jit.compilations() == before + 1
    assert accel.warmup(specs) == [SPEC] and jit.compilations() == before + 1
    jit._functions.clear()  # as in another process
    assert accel.warmup(pickle.loads(pickle.dumps(specs))) == [SPEC] and jit.compilations() == before + 1


@pytest.mark.parametrize("wrong", [[1], [(torch.int32, False)], [SPEC, None], "model"])
def test_what_is_no_specification_is_refused_before_any_is_compiled(wrong):
    with pytest.raises(TypeError, match="model_or_specs: expected a callable"):
        accel.warmup(wrong)
    assert jit.specifications() == []


def test_specifications_take_no_arguments():
    with pytest.raises(TypeError, match="arguments for 1 specifications"):
        accel.warmup([SPEC], 1)


RUN = """
import importlib, json, pickle, sys, torch, accel
from accel import ops
path, *known = sys.argv[1:]
jit = importlib.import_module("accel.kernels.jit")
if known:
    with open(path, "rb") as file:
        accel.warmup(pickle.load(file))
before = jit.compilations(), len(jit.specifications())

def model(rows):
    x, state = torch.randn(rows, 64, device="cuda"), torch.randn(rows, 64, 4, device="cuda")
    weight = torch.randn(64, 4, device="cuda", requires_grad=True)
    ops.causal_conv1d(torch.randn(1, 64, 99, device="cuda"), weight, activation="silu").sum().backward()
    return ops.causal_conv1d_update(x, state, weight.detach(), activation="silu")

specs = accel.warmup(model, 4)
with open(path, "wb") as file:
    pickle.dump(specs, file)
print(json.dumps([*before, jit.compilations(), len(jit.specifications())]))
"""


@pytest.mark.gpu
def test_what_one_process_needed_another_has_before_it_runs(tmp_path):
    found = []
    for known in ((), ("known",)):
        command = [sys.executable, "-c", RUN, str(tmp_path / "specs"), *known]
        # a cache of its own: the second process compiles too, but before the model runs
        env = os.environ | {"ACCEL_CACHE_DIR": str(tmp_path / f"cache{len(known)}")}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    first, second = found
    count = first[2]
    assert first == [0, 0, count, count] and count > 3
    assert second == [count] * 4
