"""The mamba target on real releases: mamba_parity.py in a process for each, with causal-conv1d and without.

mamba_packages_parity.py is beside causal-conv1d, against what is computed without accel.
"""

import os

import pytest
from upstreams import ROOT, causal_conv1d, mamba_ssm, run_python, transformers

PARITY = ROOT / "tests" / "mamba_parity.py"
PACKAGES = ROOT / "tests" / "mamba_packages_parity.py"
EXTENSIONS = "import torch, causal_conv1d_cuda, selective_scan_cuda, causal_conv1d, mamba_ssm"
CODE = """
import importlib.metadata, sys
import hidden
hidden.hide(*{absent!r})
import pytest
assert importlib.metadata.version("mamba-ssm") == {version!r}
sys.exit(pytest.main({options!r}))
"""
NEWEST = "2.3.2.post1"
# mamba_ssm, causal-conv1d or None, and what is run of the file: the releases differ in names, hardly in arithmetic
RUNS = [
    (NEWEST, None, "test"),
    (NEWEST, "1.7.0", "not Mamba2 and not packed"),
    ("2.3.0", None, "fused or every_name or packed_prefill"),
    # cpp_functions came with 1.5.1: four names are None in the modules that import it, and set in the others; of a
    # projection with odd rows this mamba_ssm makes a channel-first x, which the extension refuses with seq_idx
    ("2.2.5", "1.4.0", "fused or 49 and not Simple or every_name or Mamba2-2"),
]


def folders(version, conv, needed="4.57.6"):
    return [mamba_ssm(version), transformers(needed), *([causal_conv1d(conv)] if conv else [])]


def hidden(conv):
    """What of causal-conv1d is not to be found, whatever the machine has; its extension is stood in for."""
    return ["causal_conv1d_cuda"] if conv else ["causal_conv1d_cuda", "causal_conv1d"]


def run_parity(file, version, path, absent, *selection, **env):
    """Run a parity file with this release; its output is the message of a failure."""
    options = ["-q", *selection, "-p", "no:cacheprovider", "--tb=short", str(file)]
    env |= {"TRANSFORMERS_OFFLINE": "1", "ACCEL_EVIDENCE": os.devnull}  # this test counts
    code = CODE.format(version=version, options=options, absent=absent)
    done = run_python(code, [*path, ROOT / "tests"], env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout)


@pytest.mark.parametrize("version, conv, selection", RUNS)
def test_on_the_cpu(version, conv, selection):
    """mamba_ssm's own Python and interpreted kernels on the CPU backend; a GPU, where there is one, is hidden."""
    path = folders(version, conv)
    run_parity(PARITY, version, path, hidden(conv), "-k", selection, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("conv", [None, "1.7.0"])
def test_on_the_gpu(conv):
    """The newest release's compiled kernels on the native ones; both ways then multiply fp32 in fp32.

    Of transformers mamba_ssm takes names that every release has.
    """
    run_parity(PARITY, NEWEST, folders(NEWEST, conv, "5.24.0"), hidden(conv), TRITON_F32_DEFAULT="ieee")


def test_packages_on_the_cpu():
    """The extensions written out in torch; the rest of the file takes minutes in the interpreter."""
    selection = "-m", "not gpu", "-k", "Mamba-float32 or decode and Mamba2-float32 or they_were"
    path = folders(NEWEST, "1.7.0")
    run_parity(PACKAGES, NEWEST, path, hidden("1.7.0"), *selection, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_packages_on_the_gpu():
    """The packages of this machine, with the extensions that were built for its torch."""
    done = run_python(EXTENSIONS, env={"TRANSFORMERS_OFFLINE": "1"})
    if done.returncode != 0:
        pytest.skip(f"no built extensions here: {done.stderr.strip().splitlines()[-1]}")
    run_parity(PACKAGES, NEWEST, [], [], TRITON_F32_DEFAULT="ieee")
