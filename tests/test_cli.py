"""The command line through real processes, and the README's generated table."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from upstreams import ROOT

from accel import Reason, cli, doctor, environment, matrix


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
    for word in (*doctor.DISTRIBUTIONS, "torch on the CPU", *matrix.load().targets, *matrix.load().planned):
        assert word in done.stdout, f"{word} is missing in\n{done.stdout}"
    assert re.search(r"^compiled kernels in /\S+/kernels: \d+ kernels, ", done.stdout, re.MULTILINE), done.stdout
    for name in matrix.load().planned:
        assert re.search(rf"(?m)^\W*{name}\b.*not available in this version", done.stdout)


def test_doctor_says_that_accel_is_disabled():
    done = accel("doctor", ACCEL_DISABLE="1")
    assert done.returncode == 0 and done.stdout.count("ACCEL_DISABLE is set") == 2  # once to read, once to paste


# what a program may rely on: types, a list of them where several are possible, one value for all names as "*"
SCHEMA = {
    "python": str,
    "platform": str,
    "processor": str,
    "driver": [str, None],
    "cuda": [str, None],
    "versions": {"*": [str, None]},
    "devices": [{"device": str, "backend": [str, None], "arch": [str, None], "detail": str}],
    "targets": {"*": {"enabled": bool, "reason": str}},
    "architectures": {"*": {"compiled": bool, "run": bool}},
    "cache": {"folder": str, "kernels": int, "bytes": int, "problem": str},
    "disabled": bool,
    "checks": [
        {"operation": str, "device": str, "holds": bool, "error": [float, None], "detail": str, "seconds": float}
    ],
}


def assert_schema(value, schema, at="doctor"):
    if isinstance(schema, dict):
        names = dict.fromkeys(value, schema["*"]) if "*" in schema else schema
        assert value.keys() == names.keys(), at
        for name, inner in names.items():
            assert_schema(value[name], inner, f"{at}.{name}")
    elif isinstance(schema, list) and isinstance(schema[0], dict):
        assert value, f"{at}: empty"
        for index, item in enumerate(value):
            assert_schema(item, schema[0], f"{at}[{index}]")
    else:
        kinds = schema if isinstance(schema, list) else [schema]
        assert value is None and None in kinds or type(value) in kinds, f"{at}: {value!r}"


def test_doctor_for_a_program():
    done = accel("doctor", "--json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert_schema(found, SCHEMA)
    assert [result["operation"] for result in found["checks"]] == list(doctor.CHECKS)
    assert list(found["architectures"]) == list(matrix.load().architectures.compiled)
    assert all(result["holds"] for result in found["checks"])
    assert sum(result["seconds"] for result in found["checks"]) < 2


@pytest.mark.gpu
def test_doctor_checks_the_gpu():
    done = accel("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert_schema(found, SCHEMA)
    checked = {result["operation"] for result in found["checks"] if result["device"] == "cuda:0"}
    assert found["driver"] and checked == doctor.CHECKS.keys()


def test_what_doctor_ends_with_can_be_pasted():
    done = accel("doctor", CUDA_VISIBLE_DEVICES="")
    block = done.stdout.partition("for an issue:")[2].strip().splitlines()
    assert block[0] == "```text" and block[-1] == "```"
    assert f"torch {torch.__version__}" in block and any("causal_conv1d_update on cpu: ok" in line for line in block)


@pytest.mark.parametrize("name", doctor.CHECKS)
def test_the_self_check_sees_a_wrong_operation(name, monkeypatch):
    facts = environment.facts(torch.device("cpu"))
    assert doctor.self_check(name, facts)["holds"]
    right = getattr(doctor.ops, name)
    monkeypatch.setattr(doctor.ops, name, lambda *args, **kwargs: right(*args, **kwargs) + 1e-3)
    assert not doctor.self_check(name, facts)["holds"]

    def broken(*args, **kwargs):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(doctor.ops, name, broken)
    answer = doctor.self_check(name, facts)
    assert not answer["holds"] and answer["detail"] == "RuntimeError: no kernel"


def test_the_self_check_sees_a_state_that_is_not_written(monkeypatch):
    right = doctor.ops.causal_conv1d_update
    monkeypatch.setattr(
        doctor.ops, "causal_conv1d_update", lambda x, state, *args, **kw: right(x, state.clone(), *args, **kw)
    )
    answer = doctor.self_check("causal_conv1d_update", environment.facts(torch.device("cpu")))
    assert not answer["holds"] and answer["error"] is None and answer["detail"] == "NaN, or a state with other bits"


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
