"""Real FLA releases against accel: fla_parity.py in a process of its own for each version, as pytest run by pytest."""

import os

import pytest
from upstreams import ROOT, fla, run_python

PARITY = ROOT / "tests" / "fla_parity.py"


def run_parity(version, marker, **env):
    """Run the parity file with this FLA; returns the output, which is the message of a failure."""
    options = ["-q", "-m", marker, "-p", "no:cacheprovider", "--tb=short", str(PARITY)]
    code = f"import sys, fla, pytest\nassert fla.__version__ == {version!r}\nsys.exit(pytest.main({options!r}))"
    done = run_python(code, path=[fla(version)], env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("version", ["0.6.0", "0.5.2", "0.4.1"])
def test_on_the_cpu(version):
    """FLA's kernels in Triton's interpreter beside the CPU backend; a GPU, where there is one, is hidden."""
    print(run_parity(version, "not gpu", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""))


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["0.6.0", "0.5.2"])
def test_on_the_gpu(version):
    """FLA's compiled kernels beside the native ones."""
    assert os.environ.get("TRITON_INTERPRET") is None, "TRITON_INTERPRET would interpret FLA's kernels"
    print(run_parity(version, "gpu"))
