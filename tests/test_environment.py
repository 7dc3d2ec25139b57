"""What is read once: versions, devices and flags; and the status word through which kernels report."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from accel import PackedMetadataError, StateIndexError, check, environment, errors
from accel.errors import StatusWord, pack
from accel.kernels import contract

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_read(monkeypatch):
    """Facts and versions of its own for each test."""
    monkeypatch.setattr(environment, "_facts", {})
    environment.distribution_version.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of any capability, as torch would describe it; its status word lies in ordinary memory."""
    found = SimpleNamespace(name="Some GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(environment, "StatusWord", lambda device: StatusWord(CPU))
    return found


def test_facts_are_read_once():
    facts = environment.facts(CPU)
    assert environment.facts(torch.device("cpu")) is facts
    assert (facts.device, facts.backend, facts.arch) == (CPU, "cpu", None)
    assert not facts.disabled and not facts.trap
    environment.forget()
    assert environment.facts(CPU) is not facts


def test_versions_are_read_once(monkeypatch):
    assert environment.distribution_version("torch").split("+")[0] == torch.__version__.split("+")[0]
    assert environment.distribution_version("there-is-no-such-thing") is None
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda name: "7.0")
    assert environment.distribution_version("there-is-no-such-thing") is None
    environment.forget()
    assert environment.distribution_version("there-is-no-such-thing") == "7.0"


@pytest.mark.parametrize("capability, arch", environment.ARCHITECTURES.items())
def test_known_gpus(gpu, monkeypatch, capability, arch):
    gpu.major, gpu.minor = capability
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    facts = environment._probe(GPU)
    assert (facts.backend, facts.arch, facts.sm_count) == ("cute", arch, 132)


def test_the_kernels_know_the_same_architectures():
    assert tuple(environment.ARCHITECTURES.values()) == contract.ARCHITECTURES


def test_an_unknown_gpu(gpu):
    gpu.major, gpu.minor = 7, 5
    facts = environment._probe(GPU)
    assert facts.backend is None and facts.arch is None
    assert facts.detail.startswith("Some GPU is sm_75; known are sm_80, ")


@pytest.mark.parametrize("module, package", [("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")])
def test_a_missing_compiler(gpu, monkeypatch, module, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else object())
    facts = environment._probe(GPU)
    assert facts.backend is None and facts.detail == f"{package} is not installed"


def test_amd_gpus_have_no_backend(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert environment._probe(GPU).backend is None


def test_other_devices_have_no_backend():
    facts = environment.facts(torch.device("meta"))
    assert facts.backend is None and facts.detail == "no backend for meta devices"


def test_a_gpu_that_is_not_there(monkeypatch):
    """A fake tensor may name it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.facts(GPU).backend is None and environment.facts(GPU).detail == "no backend for cuda devices"
    check()


def test_nothing_is_read_while_a_graph_is_captured(gpu, monkeypatch):
    """Pinned memory must not be allocated then; the call is declined, and the next one outside reads the facts."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for capturing, backend in ((True, None), (False, "cute"), (True, "cute")):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        facts = environment.facts(GPU)
        assert facts.backend == backend
        assert ("the capture of a CUDA graph: make one before it" in facts.detail) == (backend is None)
    environment.forget()


@pytest.mark.parametrize("text, on", [("1", True), ("true", True), ("", False), ("0", False), ("False", False)])
@pytest.mark.parametrize("name, field", [("ACCEL_DISABLE", "disabled"), ("ACCEL_TRAP", "trap")])
def test_flags(monkeypatch, name, field, text, on):
    monkeypatch.setenv(name, text)
    facts = environment.facts(CPU)
    assert getattr(facts, field) is on
    assert [facts.disabled, facts.trap].count(True) == int(on)


PENDING = [
    (0, pack(errors.SLOT_OUT_OF_RANGE, 3, 99), StateIndexError, r"conv_state_indices\[3\] = 99 is not a slot"),
    (0, pack(errors.SLOT_OUT_OF_RANGE, 3, -5), StateIndexError, r"conv_state_indices\[3\] = -5 is not a slot"),
    (0, pack(errors.SLOT_USED_TWICE, 0, 2**31 - 1), StateIndexError, r"\[0\] = 2147483647 names a slot that another"),
    (0, pack(errors.SLOT_OUT_OF_RANGE, 2**40, -(2**31)), StateIndexError, r"\[268435455\] = -2147483648 is"),
    (1, pack(errors.CU_SEQLENS_FIRST, 0, 7), PackedMetadataError, r"cu_seqlens\[0\] = 7: expected .* to start with 0"),
    (1, pack(errors.CU_SEQLENS_DECREASING, 5, 1), PackedMetadataError, r"cu_seqlens\[5\] = 1 is smaller"),
    (1, pack(errors.CU_SEQLENS_LAST, 9, -1), PackedMetadataError, r"cu_seqlens\[9\] = -1: expected it to end"),
]


@pytest.mark.parametrize("index, word, error, message", PENDING)
def test_a_pending_error_is_raised_once(index, word, error, message):
    assert 0 < word < 1 << 63
    environment.facts(CPU).status.view[index] = word
    with pytest.raises(error, match=message + r".*\(an earlier call on cpu\)"):
        check()
    check()


def test_two_pending_errors_are_raised_one_by_one():
    view = environment.facts(CPU).status.view
    view[0], view[1] = pack(errors.SLOT_USED_TWICE, 1, 2), pack(errors.CU_SEQLENS_FIRST, 0, 1)
    with pytest.raises(StateIndexError):
        check()
    with pytest.raises(PackedMetadataError):
        check()
    check()


def test_errors_are_what_callers_catch():
    assert issubclass(StateIndexError, IndexError) and issubclass(PackedMetadataError, ValueError)
    assert issubclass(StateIndexError, errors.AccelError) and issubclass(PackedMetadataError, errors.AccelError)


def test_a_status_word_is_where_its_address_says():
    word = StatusWord(CPU)
    assert word.address == word._words.data_ptr() and list(word.view) == [0, 0]
    word._words[1] = 5
    assert list(word.view) == [0, 5]
