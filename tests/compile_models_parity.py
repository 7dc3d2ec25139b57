"""Transformers' and mamba_ssm's convolutions, accelerated, under torch.compile: compiled beside eager.

Run by test_compile.py in a process of its own, without causal-conv1d; not collected by name.
"""

import pytest
import torch
from mamba_extensions import NATIVE
from transformers import Lfm2Config
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

# isort: split
from mamba_ssm.modules import mamba2

from accel import accelerated, record_routes

B, T, D, W = 2, 9, 24, 4
dynamics = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


@pytest.fixture(autouse=True)
def switched():
    torch._dynamo.reset()
    with accelerated(("mamba", "transformers"), verbose=False):
        yield


def compiled(function, dynamic):
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")


def check(function, dynamic, *arguments):
    """The same values compiled, every convolution native; dynamo may start again, and then traces one twice."""
    expected = function(*arguments)
    with record_routes() as routes:
        found = compiled(function, dynamic)(*arguments)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    assert {str(route) for route in routes} == {NATIVE}


@dynamics
def test_a_whole_lfm2(dynamic):
    options = dict(num_attention_heads=2, num_key_value_heads=2, vocab_size=64, layer_types=["conv", "full_attention"])
    config = Lfm2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, **options)
    model = modeling_lfm2.Lfm2ForCausalLM(config)
    tokens = torch.randint(0, 64, (B, T))

    def loss(tokens):
        return model(tokens, labels=tokens, use_cache=False).loss

    check(loss, dynamic, tokens)
    gradients = []
    for run in (loss, compiled(loss, dynamic)):
        model.zero_grad()
        run(tokens).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients, rtol=2e-4, atol=2e-5)


@dynamics
def test_qwen3_next_prefill_and_step(dynamic):
    weight, state = torch.randn(D, W), torch.randn(B, D, W)

    def prefill(x):
        return modeling_qwen3_next.causal_conv1d_fn(x.transpose(1, 2), weight, None, activation="silu")

    def step(x, state):
        state = state.clone()
        y = modeling_qwen3_next.causal_conv1d_update(x, state, weight, None, "silu")
        return y, state

    check(prefill, dynamic, torch.randn(B, T, D))
    with torch.no_grad():
        check(step, dynamic, torch.randn(B, D, 1), state)


@dynamics
def test_the_convolution_of_mamba2(dynamic):
    weight, bias = torch.randn(D, W), torch.randn(D)
    documents = torch.tensor([[0] * 4 + [1] * (T - 4)] * B, dtype=torch.int32, device=weight.device)

    def conv(projection, documents):
        x = projection[..., 3 : D + 3].transpose(1, 2)
        return mamba2.causal_conv1d_fn(x, weight, bias=bias, activation="swish", seq_idx=documents)

    projection = torch.randn(B, T, 2 * D + 5, requires_grad=True)
    check(conv, dynamic, projection, documents)
    both = [
        torch.autograd.grad(run(projection, documents).sum(), projection)[0] for run in (conv, compiled(conv, dynamic))
    ]
    torch.testing.assert_close(*both, rtol=2e-5, atol=2e-5)
