"""The causal_conv1d target on real releases: causal_conv1d_parity.py in a process of its own for each version."""

import os

import pytest
from upstreams import ROOT, causal_conv1d, run_python

from accel import matrix

PARITY = ROOT / "tests" / "causal_conv1d_parity.py"
VERSIONS = [str(version) for version in matrix.load().targets["causal_conv1d"].proven]
CODE = """
import sys
import pytest
sys.exit(pytest.main({options!r}))
"""


def run_parity(version, marker, *selection, **env):
    """Run the parity file with this release; returns the output, which is the message of a failure."""
    options = ["-q", "-m", marker, *selection, "-p", "no:cacheprovider", "--tb=short", str(PARITY)]
    env |= {"ACCEL_EVIDENCE": os.devnull}  # this test counts
    done = run_python(CODE.format(options=options), path=[causal_conv1d(version)], env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_on_the_cpu(version):
    """The package's Python over a stub of its extension, on the CPU backend; a GPU, where there is one, is hidden."""
    fewer = () if version == VERSIONS[-1] else ("-k", "not bf16")  # the releases differ in names, not in arithmetic
    print(run_parity(version, "not gpu", *fewer, CUDA_VISIBLE_DEVICES=""))


# every part compiles its own kernels: side by side they take a quarter of the time
PARTS = ("test_fn or test_fwd_function", "test_bwd_function and not given_dx", "given_dx")
REST = "not (test_fn or test_fwd_function or test_bwd_function)"


@pytest.mark.gpu
@pytest.mark.parametrize("part", (*PARTS, REST))
def test_on_the_gpu(part):
    """The newest release's Python over a stub of its extension, on the native kernels."""
    print(run_parity(VERSIONS[-1], "gpu", "-k", part))
