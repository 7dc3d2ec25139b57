"""Real FLA on several ranks, context parallelism and training: each parity file in a process of its own."""

import pytest
from upstreams import ROOT, causal_conv1d, run_fla_parity

CONTEXT, TRAINING = ROOT / "tests" / "context_parity.py", ROOT / "tests" / "sharded_parity.py"


@pytest.mark.parametrize("version", ["0.6.0", "0.5.2", "0.5.1", "0.5.0", "0.4.2"])
def test_context_parallel_on_the_cpu(version):
    """2 and 4 ranks with gloo, FLA's kernels in Triton's interpreter; a GPU, where there is one, is hidden."""
    # these two have the context-parallel code of 0.4.2 and 0.5.2: what the originals do is not asked again
    selection = ("-k", "one_process") if version in ("0.5.0", "0.5.1") else ()
    package = [causal_conv1d("1.7.0")] if version == "0.6.0" else []
    print(
        run_fla_parity(
            CONTEXT, version, "not gpu", *selection, beside=package, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""
        )
    )


def test_training_on_the_cpu():
    """2 ranks with gloo."""
    print(run_fla_parity(TRAINING, "0.6.0", "not gpu", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""))


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["0.6.0", "0.5.2", "0.4.2"])
def test_context_parallel_on_gpus(version):
    """With nccl, on 2 GPUs or 4: what needs more than there are is skipped, and says so."""
    print(run_fla_parity(CONTEXT, version, "gpu", "-rs"))


@pytest.mark.gpu
def test_training_on_gpus():
    print(run_fla_parity(TRAINING, "0.6.0", "gpu", "-rs"))
