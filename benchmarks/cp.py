"""FLA's context-parallel convolution, forward and backward, with and without acceleration, on GPUs of one host.

`python -m benchmarks.cp [--ranks 2] [--layout zigzag] [--dry-run]`. Every rank stands behind the gate: its part of y
and dx, and the sum of dw, are those of one process that has the whole sequence. A time is that of the slowest rank.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from accel.bench.cases import W, distance, require
from benchmarks import harness, launch, results
from benchmarks.gated_deltanet import accelerated
from benchmarks.harness import Entry

LIMITS = {"y": 2e-3, "dx": 5e-3, "dw": 5e-3}  # relative L2 in bf16; a halo's share of dx is rounded once more
Step = Callable[[], tuple[Tensor, Tensor, Tensor]]


def order(layout: str, tokens: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """The tokens of a rank, in the order in which it holds them."""
    whole = torch.arange(tokens, device=device)
    if layout == "contiguous":
        return whole.chunk(ranks)[rank]
    parts = whole.chunk(2 * ranks)
    return torch.cat((parts[rank], parts[-1 - rank]))


def step_of(x: Tensor, weight: Tensor, dy: Tensor, **options: object) -> Step:
    module = importlib.import_module("fla.modules.convolution")

    def step() -> tuple[Tensor, Tensor, Tensor]:
        y, _ = module.causal_conv1d(x, weight, activation="silu", **options)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    return step


def gate(step: Step, whole: Step, mine: Tensor) -> None:
    """This rank's part is that of one process, and both convolutions are native, no other call being recorded."""
    accel = importlib.import_module("accel")
    with accelerated():
        want = dict(zip(LIMITS, whole(), strict=True))
        accel.reset_routes()
        got = dict(zip(LIMITS, step(), strict=True))
        counts = {(route.callable, route.path): count for route, count in accel.route_counts().items()}
    native = {("causal_conv1d_fwd", "native"): 1, ("causal_conv1d_bwd", "native"): 1}
    require(counts == native, f"the routes are {counts}")
    shared = got["dw"].float()
    dist.all_reduce(shared)
    got["dw"] = shared
    for name, limit in LIMITS.items():
        part = want[name] if name == "dw" else want[name][:, mine]
        apart = distance(got[name], part)
        require(apart <= limit, f"{name} is {apart:.2e} from one process, limit {limit}")


def timed(step: Step, device: torch.device) -> float:
    """Milliseconds of one step; all ranks begin together."""
    dist.barrier()
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    step()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1])


def work(device: torch.device, layout: str, tokens: int, channels: int, rounds: int, out: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # every rank draws the whole: the GPUs are of one kind, and the seed is the same
    x, dy = (torch.randn(1, tokens * ranks, channels, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = torch.randn(channels, W, device=device).mul(0.5).bfloat16().requires_grad_()
    mine = order(layout, tokens * ranks, ranks, rank, device)
    starts = torch.tensor([0, tokens * ranks], dtype=torch.long, device=device)
    options = {"layout": layout} if layout != "contiguous" else {}
    build = importlib.import_module("fla.ops.cp").build_cp_context
    context = build(starts, dist.group.WORLD, conv1d_kernel_size=W, **options)
    part = x[:, mine].requires_grad_(), weight, dy[:, mine]
    steps = {"context parallel": step_of(*part, cp_context=context), "its part alone": step_of(*part)}
    gate(steps["context parallel"], step_of(x.requires_grad_(), weight, dy), mine)
    scopes = {"FLA": nullcontext, "accel": accelerated}
    spent: dict[tuple[str, str], list[float]] = {}
    for what, step in steps.items():
        for turn in harness.alternate([Entry(name, []) for name in scopes], rounds):
            with scopes[turn.name]():
                step()  # not timed: the switch, and the first call of all
                spent.setdefault((what, turn.name), []).append(timed(step, device))
    rows = []
    halo = ranks * (W - 1) * channels * x.element_size() * (1 if layout == "contiguous" else 2)
    for (what, name), samples in spent.items():
        ms = launch.slowest(statistics.median(samples), device)
        rows.append({"op": f"conv, {what}", "case": f"{layout}, T={tokens} a rank, D={channels}", "provider": name})
        rows[-1] |= {"ranks": ranks, "ms": ms, "gathered_bytes_each_way": halo, "gate": "ok"}
        if rank == 0:
            print(f"  {what:<18} {name:<6} {ms:9.3f} ms", flush=True)
    if rank == 0:
        results.write(out, "cp", rows, rounds=rounds)


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/cp.json"),
    ranks: int = 2,
    layout: Annotated[str, typer.Option(help="contiguous or zigzag")] = "contiguous",
    tokens: Annotated[int, typer.Option(help="of a rank")] = 32768,
    channels: int = 4096,
    rounds: int = 12,
    dry_run: Annotated[bool, typer.Option(help="tiny, gloo, in Triton's interpreter")] = False,
) -> None:
    if dry_run:
        tokens, channels, rounds = 16, 32, 1
    launch.start(work, ranks, dry_run, layout, tokens, channels, rounds, out)


if __name__ == "__main__":
    typer.run(main)
