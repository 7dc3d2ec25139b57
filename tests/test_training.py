"""FLA under autocast, checkpointing, DDP, FSDP2 and torch.func: training_parity.py in a process of its own."""

import pytest
from upstreams import ROOT, fla, run_parity

PARITY = ROOT / "tests" / "training_parity.py"


def test_on_the_cpu():
    """One process with gloo, FLA's kernels in Triton's interpreter; a GPU, where there is one, is hidden."""
    print(run_parity(PARITY, "not gpu", [fla("0.6.0")], TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""))


@pytest.mark.gpu
def test_on_the_gpu():
    print(run_parity(PARITY, "gpu", [fla("0.6.0")]))
