"""FLA's GatedDeltaNet trained under FSDP2 on several GPUs of one host, with and without acceleration.

`python -m benchmarks.fsdp [--ranks 2] [--layers 6] [--cache-in DIR] [--dry-run]`. Acceleration comes before the model
is built, or after it is wrapped. The gate: the loss of every step is the unaccelerated one within rounding, and every
convolution is native. Tokens a second are those of all ranks together. The dry run leaves the recurrence out and runs
with numpy 2.2; 2.4 is too new for Triton's interpreter.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from accel.bench.cases import require
from benchmarks import harness, launch, results, triton_cache
from benchmarks.gated_deltanet import LAYER, build
from benchmarks.harness import Entry

APART = 2e-2  # losses of one step, relative
VARIANTS = ("FLA", "accel before", "accel after")


class Curve(NamedTuple):
    """Of one training run: the loss of each step on this rank, seconds a step, peak bytes, and what was recorded."""

    losses: list[float]
    seconds: float
    peak: int
    routes: dict


def train(variant: str, layers: int, tokens: int, steps: int, device: torch.device) -> Curve:
    """A few steps from the same weights on the same data; the first third is not timed."""
    accel = importlib.import_module("accel")
    accel.reset_routes()
    if variant == "accel before":
        accel.accelerate_fla(verbose=False)
    try:
        model = build(layers, device, tiny=device.type == "cpu").train()
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if variant == "accel after":
            accel.accelerate_fla(model=model, verbose=False)
        return curve_of(model, tokens, steps, device)
    finally:
        accel.restore()


def values_alone(v: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    """Stands for the recurrence in a dry run: its kernels do not run in Triton's interpreter."""
    return v, None


def curve_of(model: nn.Module, tokens: int, steps: int, device: torch.device) -> Curve:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
    random = torch.Generator().manual_seed(dist.get_rank())
    losses, warm = [], steps // 3
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for index in range(steps):
        if index == warm:
            synchronize(device)
            begin = time.perf_counter()
        ids = torch.randint(3, 100, (1, tokens), generator=random).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    synchronize(device)
    seconds = (time.perf_counter() - begin) / (steps - warm)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Curve([loss.item() for loss in losses], seconds, peak, importlib.import_module("accel").route_counts())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def gate(found: Curve, expected: Curve) -> None:
    """The losses are FLA's and every convolution is native."""
    for index, (ours, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        apart = abs(ours - theirs) / max(abs(theirs), 1e-6)
        require(apart <= APART, f"the loss of step {index} is {ours:.4f}, FLA's {theirs:.4f}, limit {APART}")
    declined = [f"{route.callable} {route}" for route in found.routes if route.path != "native"]
    require(not declined and bool(found.routes), f"not native: {declined or 'nothing was recorded'}")


def work(device: torch.device, layers: int, tokens: int, steps: int, rounds: int, cache: Path | None, out: Path):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if cache and rank == 0:
        triton_cache.unpack(cache)
    dist.barrier()
    if device.type == "cpu":
        importlib.import_module(LAYER).chunk_gated_delta_rule = values_alone
    expected = train("FLA", layers, tokens, steps, device)  # not timed: FLA compiles and tunes
    rows, seconds = [], {name: [] for name in VARIANTS}
    found = {}
    for turn in harness.alternate([Entry(name, []) for name in VARIANTS], rounds):
        found[turn.name] = train(turn.name, layers, tokens, steps, device)
        if turn.name != "FLA":
            gate(found[turn.name], expected)
        seconds[turn.name].append(found[turn.name].seconds)
    for name, curve in found.items():
        step = launch.slowest(min(seconds[name]), device)
        row = {"op": "FSDP2 training step", "case": f"{layers} layers, T={tokens} a rank", "provider": name}
        row |= {"ranks": ranks, "step_ms": step * 1e3, "tokens_per_s": ranks * tokens / step, "peak_bytes": curve.peak}
        row |= {"losses": curve.losses, "native_calls": sum(curve.routes.values()), "gate": "ok"}
        rows.append(row)
        if rank == 0:
            print(
                f"  {name:<13} {step * 1e3:9.3f} ms, {row['tokens_per_s']:10.1f} tokens/s, {curve.losses}", flush=True
            )
    if rank == 0:
        results.write(out, "fsdp", rows, model={"layers": layers, "tokens": tokens, "steps": steps, "rounds": rounds})


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/fsdp.json"),
    ranks: int = 2,
    layers: int = 6,
    tokens: Annotated[int, typer.Option(help="of a rank")] = 4096,
    steps: int = 12,
    rounds: int = 2,
    cache_in: Annotated[Path | None, typer.Option(help="unpack a Triton cache from here first")] = None,
    dry_run: Annotated[bool, typer.Option(help="tiny, gloo, in Triton's interpreter")] = False,
) -> None:
    if dry_run:
        layers, tokens, steps, rounds = 1, 16, 3, 1
    launch.start(work, ranks, dry_run, layers, tokens, steps, rounds, cache_in, out)


if __name__ == "__main__":
    typer.run(main)
