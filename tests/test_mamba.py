"""The mamba target on real releases: mamba_parity.py in a process for each, with causal-conv1d and without."""

import os

import pytest
from upstreams import ROOT, causal_conv1d, mamba_ssm, run_python, transformers

PARITY = ROOT / "tests" / "mamba_parity.py"
CODE = """
import importlib.metadata, sys
import pytest
assert importlib.metadata.version("mamba-ssm") == {version!r}
sys.exit(pytest.main({options!r}))
"""
# mamba_ssm, causal-conv1d or None, and what is run of the file: the releases differ in names, hardly in arithmetic
RUNS = [
    ("2.3.2.post1", None, "test"),
    ("2.3.2.post1", "1.7.0", "not Mamba2 and not packed"),
    ("2.3.0", None, "fused or every_name or packed_prefill"),
    # cpp_functions came with 1.5.1: four names are None in the modules that import it, and set in the others; of a
    # projection with odd rows this mamba_ssm makes a channel-first x, which the extension refuses with seq_idx
    ("2.2.5", "1.4.0", "fused or 49 and not Simple or every_name or Mamba2-2"),
]


def run_parity(version, conv, selection, **env):
    """Run the parity file with these releases; its output is the message of a failure."""
    options = ["-q", "-k", selection, "-p", "no:cacheprovider", "--tb=short", str(PARITY)]
    folders = [mamba_ssm(version), transformers("4.57.6"), *([causal_conv1d(conv)] if conv else [])]
    env |= {"TRANSFORMERS_OFFLINE": "1", "ACCEL_EVIDENCE": os.devnull}  # this test counts
    done = run_python(CODE.format(version=version, options=options), folders, env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("version, conv, selection", RUNS)
def test_on_the_cpu(version, conv, selection):
    """mamba_ssm's own Python and interpreted kernels on the CPU backend; a GPU, where there is one, is hidden."""
    run_parity(version, conv, selection, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("conv", [None, "1.7.0"])
def test_on_the_gpu(conv):
    """The newest release's compiled kernels on the native ones; both ways then multiply fp32 in fp32."""
    run_parity("2.3.2.post1", conv, "test", TRITON_F32_DEFAULT="ieee")
