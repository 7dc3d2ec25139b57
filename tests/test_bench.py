"""`python -m accel bench` through real processes: its rows, its gate, its shapes, its picture."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner
from upstreams import ROOT, flash_linear_attention, run_python, transformers

from accel.bench import clock, rows, shapes
from accel.bench.providers import PROVIDERS
from accel.cli import app

CPU = torch.device("cpu")
NUMBERS = {"us", "gb_s", "of_copy"}
TINY = ["--shape", "2,9,16,4"]

# what makes a result of ours wrong: a hair in each value, and a state that stays as it was
WRONG = """
from accel import ops
conv, update = ops.causal_conv1d, ops.causal_conv1d_update
ops.causal_conv1d = lambda *args, **kwargs: conv(*args, **kwargs) * 1.02
ops.causal_conv1d_update = lambda x, state, *args, **kwargs: update(x, state.clone(), *args, **kwargs)
from accel.cli import app
app(["bench", "--shape", "2,9,16,4", "--json"])
"""


def bench(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "accel", "bench", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_rows_for_a_program_and_their_picture(tmp_path):
    picture = tmp_path / "out.svg"
    done = bench(*TINY, "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["backend"] == "cpu" and found["copy_gb_s"] > 0 and found["versions"]["torch"] == torch.__version__
    assert {name for name in found["absent"]} >= {"FLA", "FLA Gluon", "cuDNN FE", "causal-conv1d"}
    assert [(row["op"], row["provider"]) for row in found["rows"]] == [
        (op, provider) for op in shapes.DEPTHWISE for provider in ("accel (ops)", "torch")
    ]
    for row in found["rows"]:
        assert {"B": 2, "T": 9, "D": 16, "W": 4}.items() <= row.items() and row.keys() >= NUMBERS, row
        assert row["gb_s"] / found["copy_gb_s"] == pytest.approx(row["of_copy"])
    for mine, peer in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        assert "speedup" not in mine and peer["speedup"] == pytest.approx(peer["us"] / mine["us"])
    drawn = picture.read_text()
    assert "<svg" in drawn and "GB/s" in drawn and "B 2, T 9, D 16, W 4" in drawn


def test_a_table_to_read():
    done = bench("--op", "dense", "--shape", "1,20,8,3,2", "--op", "dense")
    assert done.returncode == 0, done.stderr
    assert "B 1, T 20, D 8, W 3, dilation 2" in done.stdout and "a copy moves" in done.stdout
    assert "accel (ops)" in done.stdout and "pad + conv" in done.stdout and clock.PROTOCOL["cpu"] in done.stdout


def test_a_wrong_result_has_no_number():
    done = run_python(WRONG, [ROOT], {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["rows"]
    mine = {row["op"]: row for row in found if row["ours"]}
    assert mine.keys() == set(shapes.DEPTHWISE)
    for row in mine.values():
        assert not NUMBERS & row.keys()
    assert "state differs bit for bit" in mine["update"]["reason"]
    assert all("from float64, limit" in mine[op]["reason"] for op in ("forward", "backward"))
    for row in found:
        assert row["ours"] or row.keys() >= NUMBERS and "speedup" not in row


@pytest.mark.parametrize("op, wrong", [("forward", "y is"), ("backward", "dx is")])
def test_a_wrong_gradient_costs_the_backward_its_number_alone(op, wrong, monkeypatch):
    class Skewed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * 1.02

    right = rows.PROVIDERS["accel (ops)"].conv

    def skewed(buffers):
        calls = right(buffers)
        forward = calls.forward
        calls.forward = lambda: (Skewed.apply(forward()[0]), None)
        return calls

    broken = {**PROVIDERS, "accel (ops)": rows.Provider("accel (ops)", lambda: None, conv=skewed, ours=True)}
    monkeypatch.setattr(rows, "PROVIDERS", broken)
    found = {row.provider: row for row in rows.measure({op: [shapes.Shape(1, 9, 16, 3)]}, CPU)}
    assert found["torch"].seconds > 0
    assert (found["accel (ops)"].seconds is None) == (op == "backward")
    assert (wrong in found["accel (ops)"].reason) == (op == "backward")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "1,2,3"], "expected B,T,D,W or B,T,D,W,DILATION, got '1,2,3'"),
        (["--shape", "1,2,0,4"], "expected numbers above 0"),
        (["--shape", "1,2,3,4,2"], "a dilation is for --op dense alone"),
        (["--model", "no/such"], "'no/such' is no file"),
        (["--op", "dense", "--model", "MAMBA"], "--op dense needs --shape"),
    ],
)
def test_what_cannot_be_measured(arguments, message, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mamba", "expand": 2, "hidden_size": 8, "conv_kernel": 4}))
    words = [str(tmp_path) if word == "MAMBA" else word for word in arguments]
    done = CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and message in done.output, done.output


def test_without_matplotlib_a_picture_is_refused_at_once(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    done = CliRunner().invoke(app, ["bench", *TINY, "--plot", "out.svg"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "pip install 'fla-accel[plot]'" in done.output and "copy" not in done.output


def test_a_config_on_the_disk(tmp_path):
    """Widths and channels of a file, without Transformers; what it lacks is named."""
    config = {"model_type": "gated_deltanet", "num_heads": 2, "head_dim": 8, "expand_v": 2.0, "conv_size": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    for place in (path, tmp_path):
        wanted = shapes.of_model(str(place), "cpu")
        assert [(shape.B, shape.D) for shape in wanted["forward"]] == [(1, 16), (1, 32)]
        assert {shape.W for shape in wanted["update"]} == {4} and len(wanted["update"]) == 4
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "head_dim"}))
    with pytest.raises(ValueError, match="gated_deltanet has no 'head_dim'"):
        shapes.of_model(str(path), "cpu")
    path.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="with short convolutions .*'llama'; give --shape"):
        shapes.of_model(str(path), "cpu")


# layers of the kind that has a convolution, where the defaults have none
LAYERS = {
    "lfm2": {"full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
}
MODELS = """
import pkgutil
pkgutil.extend_path = lambda path, name: path  # this FLA and no part of another
from accel import triton_cpu
triton_cpu.install()
import json, torch, warnings
warnings.simplefilter("ignore")
import fla.models  # which tells Transformers of its own
from transformers import AutoConfig, AutoModel
from accel.bench.shapes import FAMILIES, convolutions, read_config
found, layers = {}, json.loads(LAYERS)
for kind in FAMILIES:
    assert read_config(kind)["model_type"] == kind
    config = AutoConfig.for_model(kind, **layers.get(kind, {}))
    text = getattr(config, "text_config", config)
    if kind in vars(fla.models):
        text.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModel.from_config(text)
    has = {(m.in_channels, m.kernel_size[0]) for m in model.modules() if isinstance(m, torch.nn.Conv1d)}
    found[kind] = [sorted(convolutions(config.to_dict())), sorted(has)]
print(json.dumps(found))
"""


def test_the_convolutions_of_real_models():
    """What is read from a config is what the model of that config has: all of Transformers' families and FLA's."""
    folders = [flash_linear_attention("0.6.0"), transformers("5.24.0"), ROOT]
    env = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    done = run_python(MODELS.replace("LAYERS", repr(json.dumps(LAYERS))), folders, env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == list(shapes.FAMILIES)
    for kind, (said, has) in found.items():
        assert has and said == has, kind


@pytest.mark.gpu
def test_on_the_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "accel", "bench", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["backend"] == "cute" and {row["op"] for row in found["rows"]} == set(shapes.OPS)
    assert all(row["us"] > 0 for row in found["rows"] if row["ours"])
