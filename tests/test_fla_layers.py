"""FLA's Mamba layers on real releases: fla_layers_parity.py in a process for each, with causal-conv1d and without."""

import os

import pytest
from upstreams import ROOT, causal_conv1d, flash_linear_attention, mamba_ssm, run_python, transformers

PARITY = ROOT / "tests" / "fla_layers_parity.py"
CODE = """
import importlib.metadata, sys
import hidden
hidden.hide(*{absent!r})
import pytest
assert importlib.metadata.version("flash-linear-attention") == {version!r}
sys.exit(pytest.main({options!r}))
"""


# FLA, the transformers that it imports, causal-conv1d or None, and what is run of the file
RUNS = [
    ("0.6.0", "5.6.2", None, "test"),
    ("0.6.0", "5.6.2", "1.7.0", "cuda and before or every_name or meanwhile"),
    ("0.5.2", "4.57.6", None, "not training"),
]


def run_parity(version, needed, conv, selection, **env):
    """Run the parity file with these releases; its output is the message of a failure."""
    options = ["-q", "-k", selection, "-p", "no:cacheprovider", "--tb=short", str(PARITY)]
    folders = [flash_linear_attention(version), mamba_ssm("2.3.2.post1"), transformers(needed)]
    folders += [causal_conv1d(conv)] if conv else []
    # whatever the machine has; where the package is there its extension is stood in for
    absent = ["causal_conv1d_cuda"] if conv else ["causal_conv1d_cuda", "causal_conv1d"]
    env |= {"TRANSFORMERS_OFFLINE": "1", "FLA_CACHE_RESULTS": "0", "ACCEL_EVIDENCE": os.devnull}  # this test counts
    code = CODE.format(version=version, options=options, absent=absent)
    done = run_python(code, [*folders, ROOT / "tests"], env, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("version, needed, conv, selection", RUNS)
def test_on_the_cpu(version, needed, conv, selection):
    """The layers' own Python above real mamba_ssm on the CPU backend; a GPU, where there is one, is hidden."""
    run_parity(version, needed, conv, selection, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("conv", [None, "1.7.0"])
def test_on_the_gpu(conv):
    """The newest release's layers and compiled kernels on the native ones; both ways then multiply fp32 in fp32."""
    run_parity("0.6.0", "5.24.0", conv, "test", TRITON_F32_DEFAULT="ieee")
