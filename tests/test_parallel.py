"""Real FLA on several ranks, context parallelism and training: each parity file in a process of its own."""

import pytest
from upstreams import ROOT, run_fla_parity

CONTEXT = ROOT / "tests" / "parallel_parity.py"


@pytest.mark.parametrize("version", ["0.6.0", "0.5.2", "0.5.1", "0.5.0", "0.4.2"])
def test_context_parallel_on_the_cpu(version):
    """2 and 4 ranks with gloo, FLA's kernels in Triton's interpreter; a GPU, where there is one, is hidden."""
    print(run_fla_parity(CONTEXT, version, "not gpu", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""))
