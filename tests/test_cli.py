"""The command line through real processes, and the README's generated table."""

import os
import re
import subprocess
import sys

import pytest
from upstreams import ROOT

from accel import cli, matrix


def accel(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "accel", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", **env},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_demo_on_the_cpu():
    done = accel("demo", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FLA's Triton kernels are interpreted on the CPU" in done.stdout
    assert "accel's backend here: cpu" in done.stdout
    assert "the convolution's state is the same, bit for bit" in done.stdout
    assert re.search(r"causal_conv1d_update\W+native:cpu\W+32\b", done.stdout), done.stdout
    assert "all checks hold" in done.stdout


@pytest.mark.gpu
def test_demo_on_the_gpu():
    done = accel("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "native:cute" in done.stdout and "all checks hold" in done.stdout


def test_doctor():
    done = accel("doctor")
    assert done.returncode == 0, done.stderr
    for word in (*cli.DISTRIBUTIONS, "torch on the CPU", *matrix.load().targets, *matrix.load().planned):
        assert word in done.stdout, f"{word} is missing in\n{done.stdout}"
    for name in matrix.load().planned:
        assert re.search(rf"(?m)^\W*{name}\b.*not available in this version", done.stdout)


def test_doctor_says_that_accel_is_disabled():
    assert "ACCEL_DISABLE is set" in accel("doctor", ACCEL_DISABLE="1").stdout


def test_readme_table_is_up_to_date():
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"\(support begin.*?\)\n\n(.*?)\n\n\[//\]: # \(support end\)", readme, re.DOTALL)
    assert found and found[1] == cli.support_table(matrix.load()), "run `python -m accel support`"
