"""Real FLA releases against accel: fla_parity.py in a process of its own for each version, as pytest run by pytest."""

import os

import pytest
from upstreams import ROOT, fla, run_python

PARITY = ROOT / "tests" / "fla_parity.py"

# An FLA adds every other `fla` folder on the path to its own, a flash-linear-attention of another version among them.
CODE = """
import pkgutil, sys
pkgutil.extend_path = lambda path, name: path
import fla, pytest
assert fla.__version__ == {version!r}
sys.exit(pytest.main({options!r}))
"""


def run_parity(version, marker, *selection, **env):
    """Run the parity file with this FLA; returns the output, which is the message of a failure."""
    options = ["-q", "-m", marker, *selection, "-p", "no:cacheprovider", "--tb=short", str(PARITY)]
    env |= {"ACCEL_EVIDENCE": os.devnull, "FLA_CACHE_RESULTS": "0"}  # this test counts; no untimed choice outlives it
    done = run_python(CODE.format(version=version, options=options), path=[fla(version)], env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("version", ["0.6.0", "0.5.2", "0.4.1"])
def test_on_the_cpu(version):
    """FLA's kernels in Triton's interpreter beside the CPU backend; a GPU, where there is one, is hidden."""
    print(run_parity(version, "not gpu", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""))


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["update", "not update"])  # two processes, because most of the time is compiling
@pytest.mark.parametrize("version", ["0.6.0", "0.5.2", "0.4.1"])
def test_on_the_gpu(version, part):
    """FLA's compiled kernels beside the native ones."""
    assert os.environ.get("TRITON_INTERPRET") is None, "TRITON_INTERPRET would interpret FLA's kernels"
    print(run_parity(version, "gpu", "-k", part))
