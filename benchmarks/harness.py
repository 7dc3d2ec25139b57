"""Timing on one GPU. Providers take turns (A B B A) in one process, because only ratios inside one process count.

Three clocks: a CUDA graph of many calls for small operations, the profiler's kernel durations with a cold L2 for large
ones, and the host's clock around calls that are only enqueued. Imports torch and Triton, knows nothing of convolutions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from accel.bench.gates import reason_of

REPLAYS = 51
SETS = 20
HOST_CALLS = 300
HOST_ROUNDS = 7
FLUSH_BYTES = 256 << 20
QUEUE_CYCLES = 400_000  # about 0.2 ms: the replay is enqueued while the device waits, so its launch is not timed
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

PROTOCOL = {
    "graph_us": f"one CUDA graph of {SETS} calls on {SETS} buffer sets, replayed {REPLAYS} times: median / {SETS}",
    "device_us": f"time in which a kernel of the call ran (profiler), {FLUSH_BYTES >> 20} MiB written before: median",
    "host_us": f"{HOST_CALLS} eager calls enqueued without a synchronize, median of {HOST_ROUNDS}",
    "order": "providers alternate A B B A in one process",
}

Call = Callable[[], Any]


@triton.jit
def bench_null_kernel():
    pass


@triton.jit
def bench_flush_kernel(out, value, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros((BLOCK,), tl.float32) + value, mask=at < n)


@dataclass
class Entry:
    """One provider's calls for one case: one call per buffer set, and what must hold around them."""

    name: str
    calls: list[Call]
    scope: Callable[[], AbstractContextManager] = nullcontext
    prepare: Callable[[], list[Call]] | None = None  # builds the calls on the stream that times them
    times: dict[str, float] = field(default_factory=dict)
    note: str = ""


def alternate(entries: Sequence[Entry], rounds: int) -> Iterator[Entry]:
    for i in range(rounds):
        yield from entries if i % 2 == 0 else reversed(entries)


def null_call() -> None:
    bench_null_kernel[(1,)]()


def surviving(entries: Sequence[Entry], step: Callable[[Entry], None]) -> list[Entry]:
    """Runs a step for each entry; one that fails keeps its reason and drops out."""
    alive = []
    for entry in entries:
        try:
            with entry.scope():
                step(entry)
            alive.append(entry)
        except Exception as error:  # noqa: BLE001 - a peer's failure must not end the run
            entry.note = reason_of(error)
            print(f"  ! {entry.name}: {entry.note}", flush=True)
    return alive


def graph_times(entries: Sequence[Entry], replays: int = REPLAYS) -> None:
    """Sets times['graph_us'], microseconds a call."""
    stream = torch.cuda.Stream()
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, list, int]] = {}

    def capture(entry: Entry) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls = entry.prepare() if entry.prepare else entry.calls
            for _ in range(2):
                for call in calls:
                    call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call() for call in calls]  # outputs stay alive, so that each call has its own
        graphs[entry.name] = (graph, [kept, calls], len(calls))

    alive = surviving(entries, capture)
    samples: dict[str, list[float]] = {entry.name: [] for entry in alive}
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        for entry in [*alive, *alternate(alive, replays)]:
            torch.cuda._sleep(QUEUE_CYCLES)
            start.record()
            graphs[entry.name][0].replay()
            stop.record()
            stop.synchronize()
            samples[entry.name].append(start.elapsed_time(stop) * 1e3 / graphs[entry.name][2])
    for entry in alive:
        entry.times["graph_us"] = statistics.median(samples[entry.name][1:])
    torch.cuda.synchronize()


def cold_times(entries: Sequence[Entry], samples: int = 31) -> None:
    """Sets times['device_us'] and 'kernels', how many a call; where kernels overlap, no time counts twice."""
    flush_l2 = flusher()

    def warm(entry: Entry) -> None:
        if entry.prepare:
            entry.calls = entry.prepare()
        for _ in range(3):
            entry.calls[0]()
        torch.cuda.synchronize()

    flush_l2()
    alive = surviving(entries, warm)
    order = list(alternate(alive, samples))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for i, entry in enumerate(order):
            with entry.scope():
                flush_l2()
                entry.calls[i % len(entry.calls)]()
        flush_l2()  # closes the last call's group
        torch.cuda.synchronize()
    groups = kernel_groups(profiler.profiler.kineto_results.events())
    if len(groups) != len(order) or not all(groups):
        print(f"  the profiler saw {len(groups)} of {len(order)} calls: timing by events instead", flush=True)
        return event_times(alive, flush_l2, samples)
    found: dict[str, list[list[tuple[int, int]]]] = {entry.name: [] for entry in alive}
    for entry, group in zip(order, groups, strict=True):
        found[entry.name].append(group)
    for entry in alive:
        calls = found[entry.name]
        entry.times["device_us"] = statistics.median(union_ns(call) / 1e3 for call in calls)
        entry.times["kernels"] = statistics.median(len(call) for call in calls)


def flusher() -> Callable[[], None]:
    """A call that writes more than L2 holds, by a kernel whose name no provider has."""
    flush = torch.empty(FLUSH_BYTES // 4, device="cuda")
    grid = (triton.cdiv(flush.numel(), 4096),)
    return lambda: bench_flush_kernel[grid](flush, 0.5, flush.numel(), BLOCK=4096)


def event_times(entries: Sequence[Entry], flush_l2: Callable[[], None], samples: int) -> None:
    """The same by events: gaps between a call's kernels count too; queued behind a wait, so the host does not."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for entry in alternate(entries, samples):
        with entry.scope():
            torch.cuda._sleep(10 * QUEUE_CYCLES)
            flush_l2()
            start.record()
            entry.calls[0]()
            stop.record()
            stop.synchronize()
        found[entry.name].append(start.elapsed_time(stop) * 1e3)
    for entry in entries:
        entry.times["device_us"] = statistics.median(found[entry.name])
        entry.times["by_events"] = 1.0


def busy_ms(step: Callable[[], None]) -> float:
    """Milliseconds in which the device worked for one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    spans = [(start, end) for start, end, _ in device_work(profiler.profiler.kineto_results.events())]
    return union_ns(spans) / 1e6


def device_work(traced: Iterable[Any]) -> list[tuple[int, int, str]]:
    """(start, end, name) in ns of everything the device ran, in order."""
    found = []
    for event in traced:
        if event.device_type() == torch.profiler.DeviceType.CUDA and kind_of(event) in DEVICE_WORK:
            start = event.start_ns()
            found.append((start, start + event.duration_ns(), event.name()))
    return sorted(found)


def kernel_groups(traced: Iterable[Any]) -> list[list[tuple[int, int]]]:
    """(start, end) in ns of everything the device ran between one flush and the next."""
    groups: list[list[tuple[int, int]]] = []
    for start, end, name in device_work(traced):
        if "bench_flush_kernel" in name:
            groups.append([])
        elif groups:
            groups[-1].append((start, end))
    return groups[:-1]


def kind_of(event: Any) -> str:
    if hasattr(event, "activity_type"):
        return event.activity_type()
    return "annotation" if event.name().startswith(("accel::", "ProfilerStep")) else "kernel"


def union_ns(spans: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def host_times(entries: Sequence[Entry], calls: int = HOST_CALLS, rounds: int = HOST_ROUNDS) -> None:
    """Sets times['host_us'], microseconds to enqueue one call."""

    def warm(entry: Entry) -> None:
        if entry.prepare:
            entry.calls = entry.prepare()
        for _ in range(20):
            entry.calls[0]()
        torch.cuda.synchronize()

    alive = surviving(entries, warm)
    samples: dict[str, list[float]] = {entry.name: [] for entry in alive}
    for entry in alternate(alive, rounds):
        call = entry.calls[0]
        with entry.scope():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            spent = time.perf_counter() - begin
            torch.cuda.synchronize()
        samples[entry.name].append(spent / calls * 1e6)
    for entry in alive:
        entry.times["host_us"] = statistics.median(samples[entry.name])


def copy_bandwidth(nbytes: int = 1 << 30) -> float:
    """Bytes a second that a large device copy moves, reads and writes counted."""
    x = torch.randint(-100, 100, (nbytes,), device="cuda", dtype=torch.int8)
    y = torch.empty_like(x)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    spent = []
    for _ in range(12):
        start.record()
        y.copy_(x)
        stop.record()
        stop.synchronize()
        spent.append(start.elapsed_time(stop) / 1e3)
    return 2 * nbytes / statistics.median(spent[2:])


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values else float("nan")
