"""One training step of FLA's GatedDeltaNet with and without acceleration: tokens a second and peak memory.

`python -m benchmarks.e2e_train [--layers 6] [--warm-up PROCESSES] [--cache-in DIR] [--cache-out DIR] [--conv-only]`.
FLA's first step on a bare machine compiles and tunes for minutes: compile side by side first, carry the cache along, or
time the convolutions alone (--conv-only). On Hopper its gated backward wants Triton 3.7.1 or later.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from accel.bench import providers
from accel.bench.cases import require
from benchmarks import harness, results, triton_cache
from benchmarks.gated_deltanet import accelerated, build, native_calls, stubbed_training
from benchmarks.harness import Entry

APART = 2e-2  # loss and gradient norms, relative
VARIANTS: dict[str, Callable[[], AbstractContextManager]] = {"FLA": nullcontext, "accel": accelerated}


Step = Callable[[], None]
Probe = Callable[[], dict[str, float]]  # what one forward and backward gives


def step_of(model: nn.Module, T: int, device: torch.device) -> tuple[Step, Probe]:
    # a step size that changes nothing: every variant trains the same weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-12, weight_decay=0.0, fused=device.type == "cuda")
    ids = torch.randint(3, 100, (1, T), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def probe() -> dict[str, float]:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        convs = [grad for name, grad in named if "conv1d" in name]
        found = {"loss": loss.item(), "grads": norm([grad for _, grad in named]), "conv grads": norm(convs)}
        optimizer.zero_grad(set_to_none=True)
        return found

    return step, probe


def norm(grads: list[torch.Tensor]) -> float:
    return torch.stack([grad.float().norm() for grad in grads]).norm().item()


def conv_step_of(layers: int, T: int, D: int, device: torch.device) -> tuple[Step, Probe]:
    """The convolutions of `layers` layers, forward and backward, through the callable that the layer holds."""
    layer = importlib.import_module("fla.layers.gated_deltanet")
    x = torch.randn(1, T, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(D, 4, device=device).mul(0.5).bfloat16().requires_grad_()
    dy = torch.randn_like(x)

    def once() -> tuple[torch.Tensor, ...]:
        y, _ = layer.causal_conv1d(x=x, weight=weight, bias=None, activation="silu", backend="triton")
        return y, *torch.autograd.grad(y, (x, weight), dy)

    def step() -> None:
        for _ in range(layers):
            once()

    return step, lambda: dict(zip(("y", "dx", "dw"), (norm([t]) for t in once()), strict=True))


def timed(step: Step, device: torch.device) -> tuple[float, int]:
    """(seconds, peak bytes) of one step."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter() - begin, torch.cuda.max_memory_allocated()
    return time.perf_counter() - begin, 0


def gate(probe: Probe) -> int:
    """Loss and gradient norms are FLA's, every short convolution native; returns how many calls were."""
    got: dict[str, float] = {}
    want = probe()
    calls = native_calls(lambda: got.update(probe()))
    for name, value in want.items():
        apart = abs(got[name] - value) / max(abs(value), 1e-6)
        require(apart <= APART, f"{name} is {got[name]:.4f}, FLA's {value:.4f}, limit {APART}")
    return calls


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/e2e_train.json"),
    layers: int = 6,
    tokens: int = 4096,
    rounds: int = 12,
    stub: Annotated[bool, typer.Option(help="also with the convolution returning its input")] = True,
    conv_only: Annotated[bool, typer.Option(help="the layers' convolutions alone")] = False,
    cache_in: Annotated[Path | None, typer.Option(help="unpack a Triton cache from here first")] = None,
    cache_out: Annotated[Path | None, typer.Option(help="pack the Triton cache to here as soon as it is warm")] = None,
    warm_up: Annotated[int, typer.Option(help="processes that compile FLA's kernels side by side first")] = 0,
    share: Annotated[str, typer.Option(help="of such a process: I/N", hidden=True)] = "",
    dry_run: Annotated[bool, typer.Option(help="tiny, in Triton's interpreter")] = False,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    providers.interpret()
    if share:
        triton_cache.take_share(share)
        timed(step_of(build(1, device, tiny=dry_run).train(), tokens, device)[0], device)
        return
    if warm_up:
        triton_cache.fill(warm_up, "-m", "benchmarks.e2e_train", "--tokens", str(tokens))
    if cache_in:
        triton_cache.unpack(cache_in)
    if conv_only:
        step, probe = conv_step_of(layers, tokens, 64 if dry_run else 8192, device)
    else:
        step, probe = step_of(build(layers, device, tiny=dry_run).train(), tokens, device)
    begin = time.perf_counter()
    timed(step, device)
    print(f"FLA's first step: {time.perf_counter() - begin:.1f} s", flush=True)
    if cache_out:
        triton_cache.pack(cache_out)
    checked: list[int] = []
    entry = Entry("accel", [])
    alive = harness.surviving([entry], lambda _: checked.append(gate(probe)))
    rows: list[dict] = []
    variants = {name: scope for name, scope in VARIANTS.items() if name != "accel" or alive}
    if stub and not conv_only:
        variants["stub"] = stubbed_training
    spent: dict[str, list[tuple[float, int]]] = {name: [] for name in variants}
    busy: dict[str, float] = {}
    for name in variants:  # not timed: each variant's own first step
        with variants[name]():
            timed(step, device)
            busy[name] = harness.busy_ms(step) if device.type == "cuda" else 0.0
    for turn in harness.alternate([Entry(name, []) for name in variants], 1 if dry_run else rounds):
        with variants[turn.name]():
            timed(step, device)  # switching leaves the host's caches cold
            steps = [timed(step, device) for _ in range(1 if dry_run else 3)]
            spent[turn.name].append((statistics.median(s for s, _ in steps), max(peak for _, peak in steps)))
    what = "conv part of a training step" if conv_only else "training step"
    for name, samples in spent.items():
        seconds, peak = statistics.median(s for s, _ in samples), max(p for _, p in samples)
        # neighbours in time are compared: a shared machine's speed drifts more than the variants differ
        over = statistics.median(theirs / ours for (theirs, _), (ours, _) in zip(spent["FLA"], samples, strict=True))
        row = {"op": what, "case": f"{layers} layers, T={tokens}", "provider": name, "gate": "ok"}
        row |= {
            "step_ms": seconds * 1e3,
            "device_busy_ms": busy[name],
            "tokens_per_s": tokens / seconds,
            "peak_bytes": peak,
            "over_fla": over,
            "all_ms": [s * 1e3 for s, _ in samples],
        }
        rows.append(row | ({"native_calls": checked[0]} if name == "accel" else {}))
        print(
            f"  {name:<6} {seconds * 1e3:9.3f} ms, {busy[name]:.3f} of them busy, {tokens / seconds:10.1f} tokens/s, "
            f"{over:.3f} x FLA pair by pair, peak {peak / 2**30:.3f} GiB"
        )
    if not alive:
        rows.append({"op": what, "case": f"{layers} layers, T={tokens}", "provider": "accel", "gate": entry.note})
    results.write(out, "e2e_train", rows, model={"layers": layers, "tokens": tokens, "rounds": rounds})


if __name__ == "__main__":
    typer.run(main)
