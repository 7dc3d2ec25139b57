"""First calls inside the capture of a CUDA graph: the thread is relaxed while code is made and loaded, not after."""

import ctypes
import dataclasses

import pytest
import torch
from upstreams import run_python

from accel import environment
from accel.call import UpdateCall
from accel.kernels import capture, conv_update, jit
from accel.ops import update

GLOBAL = 0  # CU_STREAM_CAPTURE_MODE_GLOBAL


class Driver:
    """The driver's part: it holds the mode of a thread and exchanges it for another."""

    def __init__(self):
        self.mode = GLOBAL

    def __call__(self, reference):
        pointer = ctypes.cast(reference, ctypes.POINTER(ctypes.c_int))
        self.mode, pointer[0] = pointer[0], self.mode
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(capture, "_exchange", lambda: found)
    return found


@pytest.fixture
def made(driver, monkeypatch):
    """(specification, driver mode) of each kernel that is made; its function returns the mode in which it runs."""
    seen = []

    def get(spec, compile_):
        seen.append((spec, driver.mode))
        return lambda *args: driver.mode

    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(jit.cache, "get", get)
    return seen


def test_a_first_call_is_relaxed_and_no_other(driver, made):
    first = jit.get("spec")
    assert made == [("spec", capture._RELAXED)] and driver.mode == GLOBAL
    assert jit.get("spec") is first  # not called yet: its code is not loaded
    assert first(1) == capture._RELAXED and driver.mode == GLOBAL
    bare = jit.get("spec")
    assert bare is first.function and bare(1) == GLOBAL
    assert len(made) == 1 and jit.specifications() == ["spec"]


def test_a_failure_leaves_the_mode_as_it_was(driver, made, monkeypatch):
    def fail(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(jit.cache, "get", fail)
    with pytest.raises(RuntimeError, match="no"):
        jit.get("spec")
    assert driver.mode == GLOBAL and jit.specifications() == []
    monkeypatch.setattr(jit.cache, "get", lambda spec, compile_: fail)
    for _ in range(2):  # what failed to load is loaded by the next call
        with pytest.raises(RuntimeError, match="no"):
            jit.get("spec")(1)
        assert driver.mode == GLOBAL and isinstance(jit.get("spec"), capture.FirstCall)


def test_relaxed_inside_relaxed(driver):
    with capture.relaxed():
        with capture.relaxed():
            assert driver.mode == capture._RELAXED
        assert driver.mode == capture._RELAXED
    assert driver.mode == GLOBAL


def test_without_a_driver(monkeypatch):
    monkeypatch.setattr(capture, "_exchange", lambda: None)
    with capture.relaxed():
        pass


# One process an operation, so that its kernels are new to it; the device alone has been used before.
SCRIPT = """
import torch
from accel import check, environment, ops
from accel.kernels import jit

torch.manual_seed(0)
device = torch.device("cuda", 0)
D, T, W = 256, 64, 4
x, weight = torch.randn(2, T, D, device=device).transpose(1, 2), torch.randn(D, W, device=device)
state, bounds = torch.randn(2, D, W, device=device), torch.tensor([0, 5, 2 * T], device=device)
slots = torch.tensor([1, 0], dtype=torch.int32, device=device)

def update():
    return (ops.causal_conv1d_update(x[:, :, 0], state.clone(), weight, activation="silu", conv_state_indices=slots),)

def tokens():
    return (ops.causal_conv1d_update(x[:, :, :3], state.clone(), weight),)

def training():
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, state)]
    y, final = ops.causal_conv1d(*leaves[:2], cu_seqlens=bounds, initial_states=leaves[2], return_final_states=True)
    return y, final, *torch.autograd.grad((y, final), leaves, (torch.ones_like(y), torch.ones_like(final)))

def states():
    return (ops.causal_conv1d_varlen_states(x.transpose(1, 2).flatten(0, 1), bounds, W),)

run = globals()[OPERATION]
environment.facts(device)
torch.empty(1, device=device).clone()
torch.ones(8, device=device, requires_grad=True).sum().backward()  # the autograd engine's own threads and libraries
torch.cuda.synchronize()
assert jit.specifications() == []
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    captured = run()
assert jit.specifications() and jit.compilations() == (len(jit.specifications()) if COLD else 0)
for tensor in captured:
    tensor.fill_(float("nan"))
graph.replay()
expected = run()
check()
for ours, theirs in zip(captured, expected, strict=True):
    assert torch.equal(ours, theirs)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["update", "tokens", "training", "states"])
def test_kernels_are_compiled_and_loaded_in_a_capture(operation, tmp_path):
    """First from an empty cache, then from the disk."""
    for cold in (True, False):
        code = SCRIPT.replace("OPERATION", repr(operation)).replace("COLD", repr(cold))
        done = run_python(code, env={"ACCEL_CACHE_DIR": str(tmp_path)})
        assert done.returncode == 0, done.stdout + done.stderr


UNUSED = """
import torch
from accel import ops

x, weight = torch.randn(2, 256, 64, device="cuda"), torch.randn(256, 4, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    try:
        ops.causal_conv1d(x, weight)
    except NotImplementedError as error:
        print(error)
    y = x * 2
graph.replay()
torch.cuda.synchronize()
assert torch.equal(y, x * 2)
assert ops.causal_conv1d(x, weight).isfinite().all()
"""


@pytest.mark.gpu
def test_a_capture_before_any_call_is_told_so():
    done = run_python(UNUSED)
    assert done.returncode == 0, done.stderr
    assert "the first call ever, in the capture of a CUDA graph: make one before it" in done.stdout


def test_a_kept_step_is_the_bare_function(driver, made, monkeypatch):
    """A decode step whose first call made its kernel costs no more than any other afterwards."""
    monkeypatch.setattr(update, "kernels", {"conv_update": conv_update}.get)
    facts = dataclasses.replace(environment.facts(torch.device("cpu")), backend="cute", arch="sm_90a", plans={})
    x, state, weight = torch.randn(3, 64), torch.randn(3, 64, 4), torch.randn(64, 4)
    call = UpdateCall(x, "ND", state, weight, None, None, None, None, None, -1)
    first, second = update.prepare(call, facts), update.prepare(call, facts)
    assert isinstance(first, capture.FirstCall) and second is first.function
