"""`python -m accel run`: the script is as it would be without it, and the report says what all its processes did."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from upstreams import ROOT, causal_conv1d

from accel import cli, launch, report

SCRIPT = """
import os, sys
import torch
from causal_conv1d import causal_conv1d_fn
torch.set_num_threads(1)
def conv(width):
    return causal_conv1d_fn(torch.randn(2, 8, 16), torch.randn(8, width))
"""
MAIN = """
conv(4)
try:
    conv(9)
except NotImplementedError:
    pass
print(sys.argv, sys.path[0], __name__)
"""
PROCESSES = """
import multiprocessing
if __name__ == "__main__":
    conv(4)
    context = multiprocessing.get_context(sys.argv[1])
    started = [context.Process(target=conv, args=(3,)) for _ in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0, 0]
"""


def command(*words, targets="causal_conv1d"):
    return [sys.executable, "-m", "accel", "run", "--targets", targets, *map(str, words)]


def run(*words, cwd, env=None, **options):
    env = {**os.environ, "TMPDIR": str(cwd), **(env or {})}
    return subprocess.run(
        command(*words, **options),
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def script(folder, text, name="script.py"):
    path = folder / name
    path.write_text(text)
    return path


def calls(found):
    return {f"{route['path']}:{route['backend'] or route['reason']}": route["calls"] for route in found["routes"]}


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith("accel-run-")]


def test_a_script(tmp_path):
    (tmp_path / "inner").mkdir()
    path = script(tmp_path / "inner", SCRIPT + MAIN)
    done = run("inner/script.py", "--report", "-x", "--", "y", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    argv = ["inner/script.py", "--report", "-x", "--", "y"]
    assert done.stdout == f"{argv} {path.parent} __main__\n"
    line = SCRIPT.splitlines().index("    return causal_conv1d_fn(torch.randn(2, 8, 16), torch.randn(8, width))") + 1
    for expected in (
        "accel: inner/script.py --report -x -- y\n",
        "causal_conv1d  causal_conv1d_fn  native:cpu          1\n",
        "causal_conv1d  causal_conv1d_fn  fallback:width      1\n",
        "check: weight: expected a width from 2 to 8, got 9\n",
        "fix: nothing but another width\n",
        f"first at: {path}:{line} in conv\n",
    ):
        assert expected in done.stderr, done.stderr
    assert leftovers(tmp_path) == []


def test_a_module_and_a_report_in_a_file(tmp_path):
    script(tmp_path, SCRIPT + MAIN, "module.py")
    out = tmp_path / "report.json"
    done = run("--report", "json", "--out", out, "-m", "module", "--out", "z", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[str(tmp_path / 'module.py'), '--out', 'z']} {tmp_path} __main__\n"
    found = json.loads(out.read_text())
    assert found["title"] == "-m module --out z" and found["processes"] == 1 and found["ranks_missing"] == []
    assert found["targets"] == {"causal_conv1d": ""} and calls(found) == {"native:cpu": 1, "fallback:width": 1}
    (first,) = found["firsts"]
    assert first["reason"] == "width" and first["where"].startswith(f"{tmp_path}/module.py:")


ENDS = {
    "sys.exit(7)": 7,
    "raise ValueError('mine')": 1,
    # what a shell starts in the background inherits that interrupts are ignored; another thread may get it first
    "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), 2); "
    "time.sleep(30)": -signal.SIGINT,
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_is_the_scripts_own(end, tmp_path):
    done = run(script(tmp_path, SCRIPT + f"conv(4)\n{end}\n"), cwd=tmp_path)
    assert done.returncode == ENDS[end]
    assert "native:cpu      1\n" in done.stderr
    assert ("mine" in done.stderr) == ("mine" in end)
    assert leftovers(tmp_path) == []


def test_a_signal_is_the_scripts_own_too(tmp_path):
    done = run(
        script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"), cwd=tmp_path, targets="all"
    )
    assert done.returncode == -signal.SIGTERM and done.stderr == ""


def test_an_interpreter_without_its_environment_is_refused(tmp_path):
    words = [sys.executable, "-E", *command("script.py", targets="all")[1:]]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "-E, -I or -S" in done.stderr
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_are_counted(method, tmp_path):
    done = run("--report", "json", script(tmp_path, SCRIPT + PROCESSES), method, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr)
    assert found["processes"] == 3 and calls(found) == {"native:cpu": 3}


def test_two_ranks_are_one_report(tmp_path):
    path = script(tmp_path, SCRIPT + "for _ in range(1 + int(os.environ['RANK'])):\n    conv(4)\n")
    out = tmp_path / "report.json"
    words = command("--report", "json", "--out", out, path)[1:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["ranks_missing"] == [] and found["processes"] == 2
    assert [route["by_rank"] for route in found["routes"]] == [{"0": 1, "1": 2}]
    assert leftovers(tmp_path) == []


def test_a_terminal(tmp_path):
    """The script's terminal is its own, and the report comes after its last word."""
    path = script(tmp_path, "import sys\nprint('tty', sys.stdin.isatty(), sys.stdout.isatty(), input())\n")
    master, slave = pty.openpty()
    process = subprocess.Popen(command(path, targets="all"), cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.write(master, b"typed\n")
    said = b""
    try:
        while chunk := os.read(master, 4096):
            said += chunk
    except OSError:  # how Linux says that nobody has the other end any more
        pass
    os.close(master)
    assert process.wait(60) == 0
    assert b"tty True True typed" in said, said
    assert said.index(b"tty True") < said.index(b"no call was seen: nothing was imported that it serves"), said


def test_nothing_is_imported_for_the_script(tmp_path):
    text = "import sys\nprint([name for name in ('torch', 'accel', 'rich', 'fla') if name in sys.modules], sys.path)\n"
    done = run(script(tmp_path, text), cwd=tmp_path, targets="all")
    assert done.stdout.startswith("[] ") and str(launch.SITE) not in done.stdout, done.stdout


def test_an_earlier_sitecustomize_runs_too(tmp_path):
    script(tmp_path, "print('theirs')\n", "sitecustomize.py")
    (tmp_path / "inner").mkdir()
    done = run(script(tmp_path / "inner", ""), cwd=tmp_path, targets="all", env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "theirs\ntheirs\n", done.stderr  # of the command, and of the interpreter that it becomes


def test_a_target_that_cannot_be_on_ends_the_script(tmp_path):
    done = run(script(tmp_path, "import torch\nprint('went on')\n"), cwd=tmp_path, targets="mamba,causal_conv1d")
    assert done.returncode == 1 and done.stdout == ""
    assert "accel run: accel changed nothing, because it cannot serve mamba: mamba-ssm is not installed" in done.stderr


def test_all_says_why_a_target_is_off(tmp_path):
    package = tmp_path / "causal_conv1d"
    package.mkdir()
    (package / "__init__.py").write_text("")
    done = run(script(tmp_path, "import torch, causal_conv1d\n"), cwd=tmp_path, targets="all")
    assert done.returncode == 0
    assert "causal_conv1d is not accelerated: causal_conv1d can be imported, but no distribution" in done.stderr


def test_all_switches_on_what_the_script_imports(tmp_path):
    """A real release, found on the path, whose extension must not be reached."""
    script(tmp_path, "", "causal_conv1d_cuda.py")
    path = script(tmp_path, SCRIPT + "conv(4)\n")
    env = {"PYTHONPATH": str(causal_conv1d("1.7.0"))}
    done = run("--report", "json", path, cwd=tmp_path, targets="all", env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stderr)
    assert found["targets"] == {"causal_conv1d": ""} and calls(found) == {"native:cpu": 1}


def test_an_unknown_target_is_a_usage_error(tmp_path):
    done = run("script.py", cwd=tmp_path, targets="bogus")
    assert done.returncode == 2 and "'bogus'" in done.stderr


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    env = {"RANK": "0", "WORLD_SIZE": "2", "ACCEL_RUN_DIR": str(tmp_path), "TORCHELASTIC_RUN_ID": "1"}
    found = json.loads(launch.environment_of("all", "table", None, "x", env)["ACCEL_RUN"])
    assert found["ranks"] == 2 and found["head"] and os.stat(found["folder"]).st_mode & 0o777 == 0o700
    again = json.loads(launch.environment_of("all", "table", None, "x", env | {"RANK": "1"})["ACCEL_RUN"])
    assert again["folder"] == found["folder"] and not again["head"]
    other = json.loads(
        launch.environment_of("all", "table", None, "x", env | {"TORCHELASTIC_RUN_ID": "2"})["ACCEL_RUN"]
    )
    assert other["folder"] != found["folder"]
    os.rmdir(found["folder"])
    os.symlink(tmp_path, found["folder"])
    with pytest.raises(launch.AccelError, match="expected a folder of this user"):
        launch.environment_of("all", "table", None, "x", env)


def test_a_rank_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "PATIENCE", 0.0)
    monkeypatch.setenv("RANK", "0")
    settings = {"folder": str(tmp_path), "pid": os.getpid(), "head": True, "ranks": 2, "title": "x", "out": None}
    report.leave({**settings, "report": "table"}, None)
    assert "rank 1 has left no report\n" in capsys.readouterr().err and not tmp_path.exists()


def test_what_run_needs_is_shipped():
    assert '"site/sitecustomize.py"' in (ROOT / "pyproject.toml").read_text()
    assert (launch.SITE / "sitecustomize.py").is_file() and set(cli.ReportForm) == {"table", "json"}
