"""Real FLA on several ranks: its context parallelism against one process in float64, values and gradients.

Run by test_parallel.py in a process of its own for each FLA version; not collected by name. Halos, their gradients and
every collective are FLA's; what is asked here is that the convolution of each rank is native and right between them.
"""

import functools
import importlib.util
import os
import pkgutil
import sys
import types

import pytest
import reference
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.profiler import profile
from triton.runtime import driver

from accel import accelerated, environment, explain, reset_routes, route_counts, triton_cpu
from accel.routes import fold

if os.environ.get("TRITON_INTERPRET") == "1":
    triton_cpu.install()
else:
    # spawned ranks do not come by upstreams.py, which sees to it that no part of another FLA is found
    pkgutil.extend_path = lambda path, name: path
    driver.active.get_benchmarker = lambda: triton_cpu.first_wins

if importlib.util.find_spec("causal_conv1d_cuda") is None:
    # what is not native in the package fails then
    extension = sys.modules["causal_conv1d_cuda"] = types.ModuleType("causal_conv1d_cuda")
    extension.causal_conv1d_fwd = extension.causal_conv1d_bwd = extension.causal_conv1d_update = None

import fla
import fla.modules.convolution as upstream
from fla.ops.cp import build_cp_context

RELEASE = tuple(int(part) for part in fla.__version__.split(".")[:2])
T, D, W = 32, 24, 4
# where sequences begin; ranks begin at multiples of 16 or 8, parts of the zigzag at multiples of 8 or 4
BOUNDS = {
    "one sequence": [0, T],
    "boundaries on the edges": [0, 8, 16, 24, T],
    "one token before the edges": [0, 7, 15, 23, T],
    "one token behind the edges": [0, 9, 17, 25, T],
    "two tokens behind the edges": [0, 6, 10, 18, 26, T],
    "shorter than the filter": [0, 1, 3, 6, 7, 9, 10, 11, 14, 15, 17, 18, 22, 24, 25, 26, 31, T],
}
LAYOUTS = ["contiguous", "zigzag"] if RELEASE >= (0, 6) else ["contiguous"]
PARTS = {"native": {"causal_conv1d_fwd": 1, "causal_conv1d_bwd": 1}}

worlds = pytest.mark.parametrize("world", [2, 4])
layouts = pytest.mark.parametrize("layout", LAYOUTS)
bounds = pytest.mark.parametrize("name", BOUNDS)


@pytest.fixture(scope="session")
def groups(device):
    """The ranks, by how many there are; all are started before this process computes anything."""
    sizes = [2, 4] if device == "cpu" else [size for size in (2, 4) if size <= torch.cuda.device_count()]
    found = {world: Ranks(world, device) for world in sizes}
    torch.set_num_threads(1)
    yield found
    for ranks in found.values():
        ranks.close()


def need(groups, world):
    if world not in groups:
        pytest.skip(f"needs {world} GPUs")
    return groups[world]


def inputs(name, dtype=torch.float32):
    """The whole sequence, which every rank makes for itself; FLA before 0.6.0 drops the residual."""
    random = torch.Generator().manual_seed(len(name))
    shapes = {"x": (1, T, D), "weight": (D, W), "bias": (D,)}
    if RELEASE >= (0, 6):
        shapes["residual"] = (1, T, D)
    found = {key: torch.randn(shape, generator=random).to(dtype) for key, shape in shapes.items()}
    return found, torch.randn(1, T, D, generator=random).to(dtype)


def tokens(layout, world, rank):
    """The tokens of a rank, in the order in which it holds them."""
    if layout == "contiguous":
        return torch.arange(T).chunk(world)[rank]
    parts = torch.arange(T).chunk(2 * world)
    return torch.cat((parts[rank], parts[-1 - rank]))


def gather_flat(gather):
    """gloo takes the output of a gather as one long tensor; FLA hands over a stacked one, as nccl allows."""

    def wrapper(output, part, group=None, async_op=False):
        return gather(output.view(-1, *part.shape[1:]), part, group=group, async_op=async_op)

    return wrapper


def device_of_rank():
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else torch.device("cpu")


def shard(name, layout, dtype=torch.float32, kind="all"):
    """One step of this rank's part: y, dx and the rest, with the names that `inputs` has."""
    device, mine = device_of_rank(), tokens(layout, dist.get_world_size(), dist.get_rank())
    leaves, dy = inputs(name, dtype)
    for key in leaves.keys() & {"x", "residual"}:
        leaves[key] = leaves[key][:, mine]
    leaves = {key: value.to(device).requires_grad_() for key, value in leaves.items()}
    options = {"layout": layout} if layout == "zigzag" else {}
    starts = torch.tensor(BOUNDS[name], dtype=torch.long, device=device)
    context = build_cp_context(starts, dist.group.WORLD, conv1d_kernel_size=W, **options)
    if kind == "all":
        assert str(explain(upstream.causal_conv1d, **leaves, cp_context=context).route).startswith("native")
    backend = "cuda" if kind == "package" else "triton"
    y, final = upstream.causal_conv1d(**leaves, activation="silu", backend=backend, cp_context=context)
    assert final is None
    y.backward(dy[:, mine].to(device))
    return {"y": y.detach().cpu(), **{key: leaf.grad.cpu() for key, leaf in leaves.items()}}


def targets(rank, kind):
    """What is accelerated on a rank: the same on all of them, nothing, or something else on the second one."""
    if kind == "disabled on rank 1" and rank == 1:
        os.environ["ACCEL_DISABLE"] = "1"
        environment.forget()
    if kind == "none" or kind == "rank 0 alone" and rank != 0:
        return ()
    return ("short_conv", "causal_conv1d") if kind == "package" else ("short_conv",)


def shards(layout, names, kind="all", dtype=torch.float32):
    """Each of the cases on this rank: (what `shard` gives, the counters)."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_backend() == "gloo":
            patch.setattr(dist, "all_gather_into_tensor", gather_flat(dist.all_gather_into_tensor))
        try:
            with accelerated(targets(dist.get_rank(), kind), verbose=False):
                for name in names:
                    reset_routes()
                    found.append((shard(name, layout, dtype, kind), route_counts()))
        finally:
            os.environ.pop("ACCEL_DISABLE", None)
            environment.forget()
    return found


def paths(counts):
    """{"native": {callable: calls}}, of the counters of one rank or of several."""
    found = {}
    for route, count in counts.items():
        found.setdefault(route.path, {})[route.callable] = count
    return found


def whole(layout, found):
    """The parts of all ranks put together, and what they share summed."""
    world = len(found)
    order = torch.cat([tokens(layout, world, rank) for rank in range(world)])
    values = {}
    for key in found[0]:
        if key in ("weight", "bias"):
            values[key] = sum(part[key].double() for part in found)
        else:
            values[key] = torch.empty_like(torch.cat([part[key] for part in found], dim=1))
            values[key][:, order] = torch.cat([part[key] for part in found], dim=1)
    return values


@functools.cache
def exact(name, dtype):
    """The same step in one process, in float64."""
    leaves, dy = inputs(name, dtype)
    leaves = {key: value.double().requires_grad_() for key, value in leaves.items()}
    residual = leaves.get("residual")
    y, _ = reference.causal_conv1d(
        leaves["x"].transpose(1, 2),
        leaves["weight"],
        leaves["bias"],
        activation="silu",
        residual=None if residual is None else residual.transpose(1, 2),
        cu_seqlens=torch.tensor(BOUNDS[name], dtype=torch.int32),
    )
    y = y.transpose(1, 2)
    grads = torch.autograd.grad(y, list(leaves.values()), dy.double())
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_whole(layout, name, found, dtype=torch.float32):
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    found, expected = whole(layout, found), exact(name, dtype)
    torch.testing.assert_close(
        {key: value.double() for key, value in found.items()}, expected, rtol=tolerance, atol=tolerance
    )


@pytest.fixture(scope="session")
def accelerated_shards(groups):
    """accelerated_shards(world, layout): every case on every rank, {name: [of each rank]}; run once."""

    @functools.cache
    def run(world, layout):
        answers = need(groups, world).run(shards, layout, list(BOUNDS))
        return dict(zip(BOUNDS, zip(*answers, strict=True), strict=True))

    return run


@worlds
@layouts
@bounds
def test_context_parallel_is_one_process(accelerated_shards, world, layout, name):
    found = accelerated_shards(world, layout)[name]
    assert_whole(layout, name, [values for values, _ in found])
    for _, counts in found:
        assert paths(counts) == PARTS
    assert paths(fold(counts for _, counts in found)) == {"native": dict.fromkeys(PARTS["native"], world)}


@layouts
def test_in_low_precision(groups, layout):
    found = need(groups, 2).run(shards, layout, ["two tokens behind the edges"], "all", torch.bfloat16)
    parts = [values for ((values, _),) in found]
    assert {value.dtype for value in parts[0].values()} == {torch.bfloat16}
    assert_whole(layout, "two tokens behind the edges", parts, torch.bfloat16)


def collectives(layout, name, kind):
    """`shards` of one case, and what it asked of the other ranks."""
    with profile() as profiler:
        (found,) = shards(layout, [name], kind)
    return found, [event.name for event in profiler.events() if event.name.startswith("c10d::")]


@layouts
def test_the_collectives_are_the_upstreams(groups, layout):
    """As many and of the same kinds as without acceleration; and the original served the same call."""
    name = "two tokens behind the edges"
    original, ours = (need(groups, 2).run(collectives, layout, name, kind) for kind in ("none", "all"))
    assert_whole(layout, name, [values for (values, _), _ in original])
    assert [counts for (_, counts), _ in original] == [{}, {}]
    assert [asked for _, asked in original] == [asked for _, asked in ours]
    assert all(len(asked) == 2 and asked[0].startswith("c10d::_allgather") for _, asked in ours)


@layouts
@pytest.mark.parametrize("kind", ["rank 0 alone", "disabled on rank 1"])
def test_ranks_on_different_routes(groups, layout, kind):
    """Which route a rank takes is its own affair: no collective waits for it, and the numbers fit together."""
    names = ["two tokens behind the edges", "one sequence"]
    first, second = need(groups, 2).run(shards, layout, names, kind)
    for name, ours, theirs in zip(names, first, second, strict=True):
        assert_whole(layout, name, [ours[0], theirs[0]])
        assert paths(ours[1]) == PARTS
        served = {str(route) for route in theirs[1]}
        assert served == (set() if kind == "rank 0 alone" else {"fallback:disabled"})


if RELEASE >= (0, 6) and importlib.util.find_spec("causal_conv1d"):

    @bounds
    def test_the_path_of_the_causal_conv1d_package(groups, name):
        """backend="cuda" calls nothing of FLA's; what it calls of the package is native where that target is on."""
        found = [part for (part,) in need(groups, 2).run(shards, "contiguous", [name], "package")]
        assert_whole("contiguous", name, [values for values, _ in found])
        for _, counts in found:
            served = {f"{route.target}.{route.callable}": route for route in counts}
            assert list(counts.values()) == [1, 1] and len(served) == 2
            assert str(served["short_conv.causal_conv1d"]) == "fallback:context-parallel"
            assert served["causal_conv1d.causal_conv1d_fn"].path == "native"


def few_tokens(kind):
    """A sequence over ranks of two tokens each, fewer than a filter looks back: y, and the error of the backward."""
    with pytest.MonkeyPatch.context() as patch, accelerated("short_conv" if kind == "all" else (), verbose=False):
        if dist.get_backend() == "gloo":
            patch.setattr(dist, "all_gather_into_tensor", gather_flat(dist.all_gather_into_tensor))
        device = device_of_rank()
        starts = torch.tensor([0, 4], dtype=torch.long, device=device)
        context = build_cp_context(starts, dist.group.WORLD, conv1d_kernel_size=W)
        x, weight = torch.ones(1, 2, D, device=device, requires_grad=True), torch.ones(D, W, device=device)
        y, _ = upstream.causal_conv1d(x, weight, cp_context=context)
        with pytest.raises(RuntimeError) as caught:
            y.sum().backward()
        return y[0, :, 0].tolist(), str(caught.value)


def test_training_on_fewer_tokens_than_the_filter_is_the_upstreams_error(groups):
    """FLA's gradient correction needs W - 1 tokens on every rank, and says so, with and without acceleration."""
    ours, theirs = (need(groups, 2).run(few_tokens, kind) for kind in ("all", "none"))
    assert ours == theirs and [y for y, _ in ours] == [[1, 2], [3, 4]]
