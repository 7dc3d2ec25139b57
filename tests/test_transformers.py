"""The transformers target on real releases: transformers_parity.py in processes of their own for each of them."""

import os

import pytest
from upstreams import ROOT, causal_conv1d, mamba_ssm, run_python, transformers

from accel import matrix

PARITY = ROOT / "tests" / "transformers_parity.py"
FAST_PATH = ROOT / "tests" / "transformers_fast_path.py"
VERSIONS = [str(version) for version in matrix.load().targets["transformers"].proven]
# every kind of mixer; the families of a kind differ in what is around it
FEWER = "not late and (qwen3 or lfm2 or mamba2 or falcon_mamba or jamba or not (test_family or mixers))"
CODE = """
import sys
import hidden
hidden.hide(*{absent!r})
import pytest
sys.exit(pytest.main({options!r}))
"""


def run_parity(version, present, *selection, marker="not gpu"):
    """Run the parity file with this release, with causal-conv1d beside it or without, and never with mamba_ssm."""
    path, absent = [transformers(version)], ["mamba_ssm"]
    if present:
        path.append(causal_conv1d("1.7.0"))
    else:
        absent.append("causal_conv1d")
    run(path, absent, PARITY, *selection, marker=marker)


def run(path, absent, file, *selection, marker="not gpu", **env):
    options = ["-q", "-m", marker, *selection, "-p", "no:cacheprovider", "--tb=short", str(file)]
    env |= {"ACCEL_EVIDENCE": os.devnull, "TRANSFORMERS_OFFLINE": "1"}  # this test counts
    env["OMP_NUM_THREADS"] = "1"  # for tensors as small as these, threads take three times as long
    if marker == "not gpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # hidden, where there is one
    code = CODE.format(options=options, absent=absent)
    done = run_python(code, path=[*path, ROOT / "tests"], env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout)


HIDDEN = """
import importlib.metadata, importlib.util, sys
import found_before, hidden
hidden.hide("causal_conv1d", "found_before")
for name in ("causal_conv1d", "causal_conv1d.sub", "found_before"):
    sys.modules.pop(name, None)
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
assert importlib.util.find_spec("causal_conv1d") is None and importlib.util.find_spec("other") is not None
assert {found.name for found in importlib.metadata.distributions()} >= {"torch", "other"}
assert "causal-conv1d" not in {found.name for found in importlib.metadata.distributions()}
assert importlib.metadata.version("other") == "1"
importlib.metadata.version("causal-conv1d")
"""


def test_a_hidden_package_is_not_found(tmp_path):
    """On a machine that has it: no module, no version, no distribution."""
    for name in ("causal-conv1d", "found-before", "other"):
        module, info = tmp_path / name.replace("-", "_"), tmp_path / f"{name.replace('-', '_')}-1.dist-info"
        module.mkdir(), info.mkdir()
        (module / "__init__.py").touch(), (module / "sub.py").touch()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    done = run_python(HIDDEN, [tmp_path, ROOT / "tests"])
    assert "PackageNotFoundError: No package metadata was found for causal-conv1d" in done.stderr, done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_models(version):
    """Without causal-conv1d, as most people have it: all families of the newest release against their torch path."""
    run_parity(version, False, "-k", "not late" if version == VERSIONS[-1] else FEWER)


@pytest.mark.parametrize("version", VERSIONS)
def test_models_beside_causal_conv1d(version):
    """With the package, whose extension must not be reached."""
    run_parity(version, True, "-k", FEWER)


@pytest.mark.parametrize("version", VERSIONS)
def test_modules_imported_later(version):
    """With causal_conv1d on as well, so that its stand-in is there while they are imported."""
    run_parity(version, False, "-k", "late and both")


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_modules_imported_later_beside_causal_conv1d(version):
    run_parity(version, True, "-k", "late and alone")


@pytest.mark.parametrize("version", VERSIONS[:2])
def test_fast_path_beside_mamba_ssm(version):
    """Before 5.15: what the mixers of the Mamba kind run on a GPU."""
    path = [transformers(version), mamba_ssm("2.3.2.post1")]
    run(path, ["causal_conv1d"], FAST_PATH, TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_on_the_gpu():
    """The newest release's families on the native kernels."""
    run_parity(VERSIONS[-1], False, marker="gpu")
