"""The command line through real processes, and the README's generated table."""

import os
import re
import subprocess
import sys

import pytest
from upstreams import ROOT

from accel import Reason, cli, matrix


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
    assert re.search(r"^compiled kernels in /\S+/kernels: \d+ kernels, ", done.stdout, re.MULTILINE), done.stdout
    for name in matrix.load().planned:
        assert re.search(rf"(?m)^\W*{name}\b.*not available in this version", done.stdout)


def test_doctor_says_that_accel_is_disabled():
    assert "ACCEL_DISABLE is set" in accel("doctor", ACCEL_DISABLE="1").stdout


def test_the_cache_is_shown_and_cleared(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    (folder / f"{'1' * 64}.so").write_bytes(bytes(2048))
    (folder / f"{'a' * 64}.so").write_bytes(bytes(1024))
    (folder / "foreign.so").touch()
    env = {"ACCEL_CACHE_DIR": str(tmp_path)}
    assert accel("cache", "info", **env).stdout == f"{folder}: 2 kernels, 3 KiB\n"
    folder.chmod(0o777)
    assert "not used: " in accel("cache", "info", **env).stdout
    assert accel("cache", "clear", **env).stdout == f"{folder}: 2 kernels removed\n"
    assert [path.name for path in folder.iterdir()] == ["foreign.so"]


def test_a_cache_that_is_not_there_yet(tmp_path):
    for command, said in (("info", "0 kernels, 0 KiB"), ("clear", "0 kernels removed")):
        done = accel("cache", command, ACCEL_CACHE_DIR=str(tmp_path / "none"))
        assert done.returncode == 0 and said in done.stdout, done.stderr
    assert not (tmp_path / "none").exists()


def test_readme_table_is_up_to_date():
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"\(support begin.*?\)\n\n(.*?)\n\n\[//\]: # \(support end\)", readme, re.DOTALL)
    assert found and found[1] == cli.support_table(matrix.load()), "run `python -m accel support`"


def test_readme_names_every_reason():
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {reason.value: reason.meaning for reason in Reason}.items() <= dict(rows).items()
