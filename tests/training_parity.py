"""Real FLA under what training puts around it: autocast, checkpointing, DDP, FSDP2, torch.func. Native beside original.

Run by test_training.py in a process of its own; not collected by name. FLA's kernels are interpreted on the CPU.
"""

import copy
import functools
import os

import pytest
import torch
import torch.distributed as dist
from counted import counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from triton.runtime import driver

from accel import accelerated, explain, ops, record_routes, triton_cpu

if os.environ.get("TRITON_INTERPRET") == "1":
    triton_cpu.install()
else:
    driver.active.get_benchmarker = lambda: triton_cpu.first_wins

import fla.modules.convolution as upstream
from fla.modules import ShortConvolution

B, T, D, W = 2, 9, 24, 4
SERVED = "causal_conv1d"


class Block(nn.Module):
    """A projection, the convolution, and something after it."""

    def __init__(self, device, dtype=torch.float32):
        super().__init__()
        self.projection = nn.Linear(D, 2 * D, device=device, dtype=dtype)
        self.conv = ShortConvolution(D, W, bias=True, device=device, dtype=dtype)

    def forward(self, x):
        # a slice of a wider projection; what comes after saves y
        return self.conv(self.projection(x)[..., D:])[0].sin()


def native(device):
    return "native:cpu" if device == "cpu" else "native:cute"


def train(model, x, function=None):
    """The output, and the gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = (model if function is None else function)(x)
    y.square().sum().backward()
    return y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())


def served(device, function, calls=1):
    """function() accelerated; the convolution has to be native, `calls` times."""
    with accelerated("short_conv", verbose=False), counted() as served_calls:
        found = function()
    assert served_calls == {(SERVED, native(device)): calls}
    return found


def close(found, expected, tolerance=1e-5):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.fixture
def x(device):
    return torch.randn(B, T, D).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, x, dtype):
    """x comes in the low precision, weight and bias stay in fp32, and so do their gradients."""
    block = Block(device)

    def step():
        with torch.autocast(device, dtype):
            return train(block, x)

    found, expected = served(device, step), step()
    assert found[0].dtype == dtype and block.conv.weight.grad.dtype == torch.float32
    close(found, expected, 3e-2)


def test_decode_under_autocast(device, x):
    """A cache in the low precision, as serving code allocates it."""
    block, caches = Block(device), [torch.ones(B, D, W, device=device, dtype=torch.bfloat16) for _ in range(2)]

    def step(cache):
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            return block.conv(block.projection(x[:, :1])[..., D:], cache=cache, output_final_state=True)

    with accelerated("short_conv", verbose=False), record_routes() as routes:
        y, returned = step(caches[0])
    assert [str(route) for route in routes] == [native(device)] and returned is caches[0]
    close((y, caches[0]), (step(caches[1])[0], caches[1]), 2e-2)


CHECKPOINTS = {"reentrant": dict(use_reentrant=True), "non-reentrant": dict(use_reentrant=False)}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoint(device, x, kind):
    block = Block(device)
    expected = train(block, x)
    found = served(device, lambda: train(block, x, lambda x: checkpoint(block, x, **CHECKPOINTS[kind])), calls=2)
    close(found, expected)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpoint(device, x, policy):
    """The policy is asked about our operator, and what it says is done."""
    block, asked, ran = Block(device), [], []

    def decide(context, operator, *args, **kwargs):
        if operator is torch.ops.accel.causal_conv1d.default:
            asked.append(context.is_recompute)
            return policy
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    expected = train(block, x)
    run = ops.registered.conv.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops.registered.conv, "forward", lambda *arguments: (ran.append(1), run(*arguments))[1])
        found = served(
            device,
            lambda: train(block, x, lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)),
            calls=2,
        )
    close(found, expected)
    assert False in asked and len(ran) == (1 if policy is CheckpointPolicy.MUST_SAVE else 2)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoint_under_compile(device, x, kind):
    block = Block(device)
    expected = train(block, x)
    torch._dynamo.reset()

    def run(x):
        return checkpoint(block, x, **CHECKPOINTS[kind])

    with accelerated("short_conv", verbose=False), record_routes() as routes:
        compiled = torch.compile(run, backend="aot_eager", fullgraph=kind == "non-reentrant")
        found = train(block, x, compiled)
    assert {f"{route.callable}={route}" for route in routes} == {f"{SERVED}={native(device)}"}
    close(found, expected)


@pytest.fixture
def mesh(device, tmp_path):
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_data_parallel(device, x, mesh, wrapper, compiled):
    """Under FSDP2 the parameters are DTensors outside of forward and plain inside: native."""
    block = Block(device)
    expected = train(block, x)
    model = copy.deepcopy(block)
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=mesh)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else None
    found = served(device, lambda: train(model, x, run))
    close((tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in found), expected)


def test_mixed_precision_fsdp(device, x, mesh):
    block = Block(device)
    low = copy.deepcopy(block).to(torch.bfloat16)
    expected = train(low, x.to(torch.bfloat16))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    fully_shard(block, mesh=mesh, mp_policy=policy)
    found = served(device, lambda: train(block, x))
    assert found[0].dtype == torch.bfloat16
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.float(), rtol=3e-2, atol=3e-2)


def test_distributed_tensors_are_declined(device, x, mesh):
    weight = distribute_tensor(torch.randn(D, W).to(device), mesh, [Replicate()])
    with accelerated("short_conv", verbose=False):
        decision = explain(upstream.causal_conv1d, x, weight, activation="silu")
    assert str(decision.route) == "fallback:tensor-subclass"
    assert [str(decline) for decline in decision.failed] == ["weight: expected a plain tensor, got DTensor"]
    with pytest.raises(TypeError, match="weight: expected a plain tensor, got DTensor"):
        ops.causal_conv1d(x.transpose(1, 2), weight)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_declined(device, x, transform, compiled):
    """FLA's own autograd function takes no transform either, so the error is the original's."""
    block, reasons = Block(device), []
    torch._dynamo.reset()

    def call(x):
        return block(x)

    def run(x):
        return TRANSFORMS[transform](call, x)

    with accelerated("short_conv", verbose=False), record_routes() as routes:
        with pytest.raises(Exception) as caught:  # noqa: B017, PT011  whatever the original says
            (torch.compile(run, backend="eager") if compiled else run)(x)
        reasons = {str(route) for route in routes if route.callable == SERVED}
    assert reasons == {"fallback:functorch"}, caught.value


def test_functional_call_is_native(device, x):
    block = Block(device)
    parameters = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    expected = block(x)
    found = served(device, lambda: torch.func.functional_call(block, parameters, (x,)))
    close((found,), (expected,))


def test_a_step_with_an_optimizer(device, x):
    """Saved tensors are checked for changes: an optimizer step between forward and backward is noticed."""
    block = Block(device)
    with accelerated("short_conv", verbose=False):
        y = block(x)
        with torch.no_grad():
            block.conv.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
