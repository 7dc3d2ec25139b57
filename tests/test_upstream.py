"""Real FLA releases against accel: fla_parity.py in a process of its own for each version, as pytest run by pytest."""

import os

import pytest
from upstreams import ROOT, run_fla_parity

PARITY = ROOT / "tests" / "fla_parity.py"


@pytest.mark.parametrize("version", ["0.6.0", "0.5.2", "0.4.1"])
def test_on_the_cpu(version):
    """FLA's kernels in Triton's interpreter beside the CPU backend; a GPU, where there is one, is hidden."""
    print(run_fla_parity(PARITY, version, "not gpu", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""))


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["update", "not update"])  # two processes, because most of the time is compiling
@pytest.mark.parametrize("version", ["0.6.0", "0.5.2", "0.4.1"])
def test_on_the_gpu(version, part):
    """FLA's compiled kernels beside the native ones."""
    assert os.environ.get("TRITON_INTERPRET") is None, "TRITON_INTERPRET would interpret FLA's kernels"
    print(run_fla_parity(PARITY, version, "gpu", "-k", part))
