"""Ranks for a benchmark: one process a GPU with nccl, or gloo on the CPU for a dry run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accel.bench import providers


def start(work: Callable[..., None], ranks: int, dry_run: bool, *args: Any) -> None:
    """work(device, *args) on each rank, inside the default process group; ends when all have ended."""
    with tempfile.TemporaryDirectory() as room:
        arguments = (work, ranks, dry_run, f"{room}/rendezvous", args)
        torch.multiprocessing.start_processes(_rank, arguments, nprocs=ranks, start_method="spawn")


def _rank(rank: int, work: Callable[..., None], ranks: int, dry_run: bool, rendezvous: str, args: tuple) -> None:
    device = torch.device("cpu") if dry_run else torch.device("cuda", rank)
    if dry_run:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    providers.interpret()
    group = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo" if dry_run else "nccl", **group)
    if dry_run:
        dist.all_gather_into_tensor = _flat(dist.all_gather_into_tensor)
    work(device, *args)
    dist.destroy_process_group()


def _flat(gather: Callable) -> Callable:
    """gloo takes the output of a gather as one long tensor; FLA hands over a stacked one, as nccl allows."""

    def wrapper(output, part, group=None, async_op=False):
        return gather(output.view(-1, *part.shape[1:]), part, group=group, async_op=async_op)

    return wrapper


def slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks."""
    found = torch.tensor([value], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()
