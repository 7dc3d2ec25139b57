"""Ranks of a process group, as processes that stay: a function runs in all of them at once, and another one after it.

On the CPU they are forked with gloo, so what this process has imported costs them nothing; it must not have computed
anything yet. With a GPU each they are spawned with nccl.
"""

import datetime
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# seconds; a rank that says nothing for so long waits for another one. On GPUs the first call imports and compiles
TIMEOUT = {"cpu": 120.0, "cuda": 300.0}


class Ranks:
    """`world` processes, rank r on device r where they are GPUs."""

    def __init__(self, world: int, device: str):
        self._timeout = TIMEOUT[device]
        context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
        self._room = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, device, f"{self._room.name}/rendezvous", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """What function(*args) returns on each rank; AssertionError with its traceback where it raises or hangs."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        until = time.monotonic() + self._timeout
        answers, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.1, until - time.monotonic())):
                failures.append(f"rank {rank} has said nothing for {self._timeout} s")
                continue
            error, answer = pickle.loads(pipe.recv_bytes())
            answers.append(answer)
            if error:
                failures.append(f"rank {rank}: {error}")
        if failures:
            self.close()  # the others may wait for the one that failed
            raise AssertionError("\n".join(failures))
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._room.cleanup()


def _serve(rank: int, world: int, device: str, rendezvous: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT[device]),
    )
    while True:
        function, args = pickle.loads(pipe.recv_bytes())
        try:
            answer = None, function(*args)
        except BaseException:
            answer = traceback.format_exc(), None
        pipe.send_bytes(pickle.dumps(answer))
