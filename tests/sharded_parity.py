"""Real FLA trained on two ranks: DDP and FSDP2 around it before and after acceleration, tensor parallelism, DTensors.

Run by test_parallel.py in a process of its own; not collected by name. FLA's kernels are interpreted on the CPU.
"""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from triton.runtime import driver

from accel import accelerate, accelerated, explain, ops, reset_routes, restore, route_counts, triton_cpu
from accel.routes import fold

if os.environ.get("TRITON_INTERPRET") == "1":
    triton_cpu.install()
else:
    driver.active.get_benchmarker = lambda: triton_cpu.first_wins

import fla.modules.convolution as upstream
from fla.modules import ShortConvolution

WORLD, STEPS = 2, 2
B, T, D, W = 2, 9, 24, 4


class Block(nn.Module):
    """A convolution of `channels` between two projections."""

    def __init__(self, channels=D):
        super().__init__()
        self.up = nn.Linear(D, channels)
        self.conv = ShortConvolution(channels, W, bias=True)
        self.down = nn.Linear(channels, D)

    def forward(self, x):
        return self.down(self.conv(self.up(x))[0])


@pytest.fixture(scope="session")
def ranks(device):
    if device == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    found = Ranks(WORLD, device)
    torch.set_num_threads(1)
    yield found
    found.close()


def device_of_rank():
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(device_of_rank())


def wrap(layers, wrapper):
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(layers)
    mesh = init_device_mesh(device_of_rank().type, (WORLD,))
    for block in layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def train(wrapper, when):
    """The losses and the weights of a few steps, each rank on its own data, and the counters."""
    reset_routes()
    mine = when in ("before", "after") or when == "rank 0 alone" and dist.get_rank() == 0
    try:
        if mine and when != "after":
            accelerate("short_conv", verbose=False)
        layers = wrap(model(), wrapper)
        if mine and when == "after":
            accelerate("short_conv", verbose=False)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        random, losses = torch.Generator().manual_seed(dist.get_rank()), []
        for _ in range(STEPS):
            loss = layers(torch.randn(B, T, D, generator=random).to(device_of_rank())).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    finally:
        restore()
    weights = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in layers.parameters())
    return losses, [weight.detach().cpu() for weight in weights], route_counts()


def native(device, count):
    """The one path of all ranks together: native, so many times."""
    return {f"causal_conv1d={'native:cpu' if device == 'cpu' else 'native:cute'}": count}


def named(answers):
    return {f"{route.callable}={route}": count for route, count in fold(counts for *_, counts in answers).items()}


@pytest.fixture(scope="session")
def plain(ranks):
    """What the originals give; how the parameters are kept makes no difference."""
    return ranks.run(train, "ddp", "never")


@pytest.mark.parametrize("when", ["before", "after", "rank 0 alone"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_data_parallel(device, ranks, plain, wrapper, when):
    """The loss curve and the weights of the originals; one rank on another route than the other makes no difference."""
    found = ranks.run(train, wrapper, when)
    for (losses, weights, _), (their_losses, their_weights, counts) in zip(found, plain, strict=True):
        assert counts == {}
        torch.testing.assert_close(losses, their_losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weights, their_weights, rtol=1e-5, atol=1e-5)
    assert named(found) == native(device, (1 if when == "rank 0 alone" else WORLD) * 2 * STEPS)


def tensor_parallel():
    """(y, dx, d weight, d bias) of a block whose channels are split over the ranks, and of the whole block."""
    device, rank = device_of_rank(), dist.get_rank()
    torch.manual_seed(1)
    whole, local = Block().to(device), Block().to(device)
    x = torch.randn(B, T, D).to(device)
    local.load_state_dict(whole.state_dict())
    local.conv = ShortConvolution(D // WORLD, W, bias=True).to(device)
    with torch.no_grad():
        local.conv.weight.copy_(whole.conv.weight.chunk(WORLD)[rank])
        local.conv.bias.copy_(whole.conv.bias.chunk(WORLD)[rank])
    mesh = init_device_mesh(device.type, (WORLD,))
    parallelize_module(local, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    reset_routes()
    found = []
    for block, on in ((local, "short_conv"), (whole, ())):
        leaf = x.clone().requires_grad_()
        with accelerated(on, verbose=False):
            y = block(leaf)
            y.square().sum().backward()
        found.append([y.detach().cpu(), leaf.grad.cpu(), block.conv.weight.grad.cpu(), block.conv.bias.grad.cpu()])
    return *found, route_counts()


def test_tensor_parallel_slices_are_native(device, ranks):
    """The projections are DTensors; what lies between them are plain tensors of a share of the channels."""
    answers = ranks.run(tensor_parallel)
    for rank, (ours, whole, _) in enumerate(answers):
        shares = [whole[0], whole[1], whole[2].chunk(WORLD)[rank], whole[3].chunk(WORLD)[rank]]
        torch.testing.assert_close(ours, shares, rtol=1e-5, atol=1e-4)
    assert named(answers) == native(device, WORLD)


def slice_of_channels():
    """A rank's channels as a slice of the whole x, not a copy, with its share of a weight that is a DTensor."""
    device, rank = device_of_rank(), dist.get_rank()
    torch.manual_seed(2)
    x, weight = torch.randn(B, T, D).to(device), torch.randn(D, W).to(device)
    mesh = init_device_mesh(device.type, (WORLD,))
    sharded, split = distribute_tensor(weight, mesh, [Shard(0)]), distribute_tensor(x, mesh, [Shard(2)])
    with accelerated("short_conv", verbose=False):
        share = x.chunk(WORLD, dim=2)[rank], sharded.to_local()
        decisions = [explain(upstream.causal_conv1d, *inputs) for inputs in (share, (x, sharded), (split, sharded))]
        y, _ = upstream.causal_conv1d(*share, activation="silu")
        whole, _ = upstream.causal_conv1d(x, weight, activation="silu")
    with pytest.raises(TypeError, match="expected a plain tensor, got DTensor"):
        ops.causal_conv1d(split.transpose(1, 2), sharded)
    # exp rounds differently in the CPU's vectors and in what is left of a row
    torch.testing.assert_close(y, whole.chunk(WORLD, dim=2)[rank], rtol=2e-6, atol=2e-6)
    return [(str(decision.route), [str(decline) for decline in decision.failed]) for decision in decisions]


def test_distributed_tensors_are_declined_and_their_shares_are_not(device, ranks):
    for decisions in ranks.run(slice_of_channels):
        assert decisions[0] == ("native:cpu" if device == "cpu" else "native:cute", [])
        x, weight = (f"{name}: expected a plain tensor, got DTensor" for name in ("x", "weight"))
        assert decisions[1] == ("fallback:tensor-subclass", [weight])
        assert decisions[2] == ("fallback:tensor-subclass", [x, weight])


@pytest.mark.gpu
def test_a_model_on_another_device_than_the_current_one():
    """Device 0 is current all along."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    torch.manual_seed(3)
    block, x = Block(), torch.randn(B, T, D)
    found = []
    for index in (0, 1):
        reset_routes()
        block.to(f"cuda:{index}").zero_grad()
        leaf = x.to(f"cuda:{index}").requires_grad_()
        with accelerated("short_conv", verbose=False):
            y = block(leaf)
            y.square().sum().backward()
        assert torch.cuda.current_device() == 0 and y.device.index == index
        assert named([(route_counts(),)]) == native("cuda", 1)
        found.append([tensor.detach().cpu() for tensor in (y, leaf.grad, block.conv.weight.grad)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
