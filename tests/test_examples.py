"""The examples as a reader runs them: each in a process of its own, on real packages, on the CPU and on a GPU."""

import re

import pytest
from upstreams import ROOT, flash_linear_attention, run_python, transformers

EXAMPLES = ROOT / "examples"
UNTUNED = ROOT / "tests" / "untuned.py"
# for tensors as small as these, threads take three times as long
ENV = {"TRANSFORMERS_OFFLINE": "1", "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
TRAINED = re.compile(r"^step +\d+  loss (\d+\.\d+)$", re.MULTILINE)
ROUTE = re.compile(r"^ *(\d+) x (\w+): (\S+)$", re.MULTILINE)


def of_transformers():
    return [transformers("5.24.0")]


def of_fla():
    return [flash_linear_attention("0.6.0"), *of_transformers()]


def run(name, path, *arguments, status=0, **env):
    done = run_python(EXAMPLES / name, path, ENV | env, timeout=500, arguments=arguments)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def routes(output):
    """{callable: (route, calls)}; a callable with two routes fails."""
    found = ROUTE.findall(output)
    assert found and len(found) == len({name for _, name, _ in found}), output
    return {name: (route, int(calls)) for calls, name, route in found}


def losses(output):
    return [float(loss) for loss in TRAINED.findall(output)]


def test_train_then_generate(tmp_path):
    """Each step calls one fused convolution a layer; the cache of the trained model makes the rest one token each."""
    trained = run("train_gated_deltanet.py", of_fla(), "--steps", "12", "--save", str(tmp_path))
    assert routes(trained) == {"causal_conv1d": ("native:cpu", 13 * 2)}
    assert losses(trained)[-1] < 0.85 * losses(trained)[0]
    generated = run("generate.py", of_fla(), "--load", str(tmp_path), "--tokens", "4")
    assert "the first 4 of 4 tokens are the original's" in generated
    assert routes(generated) == {
        "causal_conv1d": ("native:cpu", 3 * 2),
        "causal_conv1d_update": ("native:cpu", 3 * 2 * 3),
    }


RECURRENCE = """
import runpy, sys
import torch
sys.argv = ["train_gated_deltanet.py", "--steps", "1"]
try:
    runpy.run_path({example!r})
except SystemExit as end:
    assert end.code == 0
from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
sizes = dict(hidden_size=16, num_heads=2, head_dim=16, expand_v=1, num_hidden_layers=1, intermediate_size=16)
model = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(vocab_size=128, **sizes))
tokens = torch.randint(128, (1, 20))
ours = model.train()(tokens).logits
with torch.no_grad():
    torch.testing.assert_close(ours, model.eval()(tokens).logits, rtol=1e-5, atol=1e-6)
"""


def test_the_recurrence_on_the_cpu_is_that_of_the_kernel():
    """In evaluation the layer takes FLA's recurrent kernel, which the interpreter runs."""
    done = run_python(RECURRENCE.format(example=str(EXAMPLES / "train_gated_deltanet.py")), of_fla(), ENV)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mamba2():
    found = run("mamba2.py", of_transformers())
    assert losses(found)[-1] < 0.1 and "transformers: abcdefghijklmnopq\n" in found
    assert {name: route for name, (route, _) in routes(found).items()} == {
        "causal_conv1d_fn": "native:cpu",
        "causal_conv1d_update": "native:cpu",
    }


def test_hybrid():
    """Three of four layers have a convolution; the prompt goes through twice, and gives the first token."""
    found = routes(run("hybrid.py", of_transformers(), "--tokens", "4"))
    assert found == {"causal_conv1d_fn": ("native:cpu", 3 * 2), "causal_conv1d_update": ("native:cpu", 3 * 3)}


def test_nothing_native_is_an_error():
    """The other hybrid, switched off."""
    found = routes(run("hybrid.py", of_transformers(), "--model", "lfm2", "--tokens", "4", status=1, ACCEL_DISABLE="1"))
    assert {route for route, _ in found.values()} == {"fallback:disabled"}


def test_graph_decode():
    found = run("cuda_graph_decode.py", of_fla(), "--tokens", "5")
    assert "CPU: no CUDA graph here" in found and "the eager ones: True" in found
    # three convolutions in each of two layers, for two prompts, and five steps after each
    assert routes(found) == {
        "causal_conv1d": ("native:cpu", 2 * 3 * 2),
        "causal_conv1d_update": ("native:cpu", 2 * 3 * 5 * 2),
    }


TUNED = """
import sys
import torch
import triton
import triton.language as tl

@triton.autotune([triton.Config({"BLOCK": size}) for size in (256, 64, 128)], key=["n"])
@triton.jit
def kernel(out, n, BLOCK: tl.constexpr):
    tl.store(out, BLOCK)

out = torch.zeros(1, dtype=torch.int32)
kernel[(1,)](out, 1)
print(__name__, sys.argv, sys.path[0], out.item())
sys.exit(7)
"""


def test_an_untuned_script_is_run_as_it_is(tmp_path):
    """What the tests on a GPU do with the examples."""
    script = tmp_path / "script.py"
    script.write_text(TUNED)
    done = run_python(UNTUNED, (), {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, arguments=[str(script), "-x"])
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"__main__ {[str(script), '-x']} {tmp_path} 64\n"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, package, arguments",
    [
        ("train_gated_deltanet.py", "fla.models", ["--steps", "20"]),
        ("generate.py", "fla.models", []),
        ("mamba2.py", "mamba_ssm", []),
        ("mamba2.py", "transformers", ["--package", "transformers"]),
        ("hybrid.py", "transformers", []),
        ("hybrid.py", "transformers", ["--model", "lfm2"]),
        ("cuda_graph_decode.py", "fla.models", []),
    ],
)
def test_on_the_gpu(name, package, arguments):
    """With the packages of this machine, and nothing tuned."""
    done = run_python(f"import torch, {package}", env=ENV)
    if done.returncode != 0:
        pytest.skip(f"{package} cannot be imported here: {done.stderr.strip().splitlines()[-1]}")
    found = run(UNTUNED, [], str(EXAMPLES / name), "--device", "cuda", *arguments)
    assert {route for route, _ in routes(found).values()} == {"native:cute"}
    if name in ("train_gated_deltanet.py", "mamba2.py"):
        assert losses(found)[-1] < 0.9 * losses(found)[0]
    if name == "cuda_graph_decode.py":
        assert "the step is a graph" in found and "the eager ones: True" in found


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_each_is_short_and_listed(path):
    assert len(path.read_text().splitlines()) < 90
    assert (EXAMPLES / "README.md").read_text().count(f"[{path.name}]({path.name})") == 1
