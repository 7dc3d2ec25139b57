"""What all tests share: the `gpu` marker, seeds, fresh memory that is NaN, the mode that refuses copies, GPU evidence.

`tests/gpu_evidence.json` is written by the session itself whenever at least one test marked `gpu` ran; runs of several
files at one commit add up. ACCEL_EVIDENCE names another file, ACCEL_COMMIT the commit where git cannot.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ROOT = pathlib.Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "tests" / "gpu_evidence.json"
DISTRIBUTIONS = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "fla-core", "causal-conv1d")
EMPTIES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
OUTCOMES = ("passed", "failed", "skipped")

settings.register_profile(
    "accel",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("ACCEL_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("accel")
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # every worker would take all cores, and the oracle's threads wait by spinning
has_gpu = torch.cuda.is_available() and torch.version.hip is None


def pytest_configure(config):
    config.pluginmanager.register(Evidence(config), "accel-evidence")


def pytest_collection_modifyitems(items):
    if not has_gpu:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seeds():
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_pending():
    """A test that leaves a device error behind fails itself, not the next one."""
    yield
    if "accel" in sys.modules:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        getattr(sys.modules["accel"], "check", int)()


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(monkeypatch):
    """Every uninitialised floating tensor made from Python holds NaN, so that an output that is not written shows."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            out = allocate(*args, **kwargs)
            if torch.compiler.is_compiling() or not (out.is_floating_point() and out.element_size() > 1):
                return out
            with _disable_current_modes(), torch.no_grad():
                return out.fill_(float("nan"))

        return wrapper

    # torch notes at its first look which functions take a default device: the allocators themselves, not ours
    _device_constructors()
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


class NoCopies(TorchDispatchMode):
    """Inside, only views, empties, `accel` operators and the ops named in `allow` may run; all else fails at once."""

    def __init__(self, allow=()):
        super().__init__()
        self.allow = EMPTIES | set(allow)
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func.namespace == "accel":
            key = "CUDA" if any(isinstance(a, torch.Tensor) and a.is_cuda for a in args) else "CPU"
            with self:  # the operator's own body is looked at too
                return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs)
        aliases = [out.alias_info for out in func._schema.returns]
        view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        if not view and name not in self.allow:
            shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
            raise AssertionError(f"aten::{name} on {shapes} on the way of a native call")
        self.seen.append(name)
        return func(*args, **kwargs)


@pytest.fixture(scope="session")
def no_copies():
    return NoCopies


class Evidence:
    """Counts the outcomes of the tests marked `gpu` and writes them down with what they ran on."""

    def __init__(self, config):
        self.config = config
        self.files = {}

    def pytest_runtest_logreport(self, report):
        if "gpu" not in report.keywords or (report.when != "call" and report.outcome == "passed"):
            return
        counts = self.files.setdefault(report.nodeid.split("::")[0], dict.fromkeys(OUTCOMES, 0))
        counts[report.outcome] += 1

    def pytest_sessionfinish(self):
        ran = any(counts["passed"] + counts["failed"] for counts in self.files.values())
        if hasattr(self.config, "workerinput") or not (ran and has_gpu):
            return
        path = pathlib.Path(os.environ.get("ACCEL_EVIDENCE") or EVIDENCE)
        now = evidence_header()
        files = {**earlier_files(path, now), **self.files}
        for outcome in OUTCOMES:
            now[outcome] = sum(counts[outcome] for counts in files.values())
        now["files"] = {name: files[name] for name in sorted(files)}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now, indent=2) + "\n")


def earlier_files(path, now):
    """The per-file counts already noted for this very state of the tree."""
    for candidate in (path, EVIDENCE):
        if candidate.is_file():
            noted = json.loads(candidate.read_text())
            if all(noted.get(key) == now[key] for key in ("commit", "dirty", "device")):
                return noted.get("files", {})
    return {}


def evidence_header():
    commit, dirty = git_state()
    driver = command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "driver": driver.splitlines()[0] if driver else None,
        "versions": versions,
    }


def git_state():
    """(commit, dirty). The evidence file and the benchmark results are outputs: they do not make a tree dirty."""
    commit = command("git", "rev-parse", "HEAD")
    status = command("git", "status", "--porcelain", "--", ".", ":!tests/gpu_evidence.json", ":!benchmarks/results")
    dirty = None if status is None or commit is None else bool(status)
    if os.environ.get("ACCEL_COMMIT"):
        given = os.environ["ACCEL_COMMIT"]
        if given != commit:
            dirty = given.endswith("-dirty")
        commit = given.removesuffix("-dirty")
    return commit, dirty


def command(*words):
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
