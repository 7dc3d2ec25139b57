"""Host time of eager calls, against the peers and the floor, and where a decode call spends its own.

`python -m benchmarks.host [--dry-run]`.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from accel.bench import fla_switch, providers
from accel.bench.cases import Decode, Sequence, UpdateBuffers, conv_buffers, require, update_buffers
from accel.bench.providers import ConvCalls, Provider
from benchmarks import conv, decode, harness, results
from benchmarks.decode_step import synchronize
from benchmarks.floor import bare_calls
from benchmarks.harness import Call, Entry

DECODE = [Decode(32, 4096), Decode(1, 2048)]
SMALL = [Sequence(1, 512, 2048, small=True), Sequence(1, 512, 2048, bias=True, small=True)]
DRY_DECODE, DRY_SMALL = [Decode(3, 64)], [Sequence(2, 9, 32)]
STEP_CALLS, STEP_ROUNDS = 2000, 9
GOALS = {  # of baseline: ours over the other, through the patched FLA callable
    ("decode", "floor"): 1.7,
    ("decode", "FLA"): 0.25,
    ("decode", "cuDNN FE"): 0.35,
    ("forward", "FLA"): 0.3,
}


def forward_call(calls: ConvCalls) -> Call:
    return conv.forward_call(calls)


def training_call(calls: ConvCalls) -> Call:
    """A forward that builds its graph, and the backward through it."""

    def call() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            y, _ = calls.forward()
            return torch.autograd.grad(y, calls.inputs, calls.dy)

    return call


OPS: dict[str, Callable[[ConvCalls], Call]] = {"forward": forward_call, "forward+backward": training_call}


def conv_rows(case: Sequence, chosen: list[Provider], device: torch.device, rows: list[dict], timed: bool) -> None:
    buffers = conv_buffers(case, device)
    passed = conv.admitted(chosen, buffers, rows)
    ours = [provider for provider in passed if provider.name == "accel (ops)"]
    for op, bind in OPS.items():
        made = [Entry(p.name, [], p.scope, lambda p=p, bind=bind: [bind(p.conv(buffers))]) for p in passed]
        made += [Entry("floor", [], prepare=lambda p=p, bind=bind: [bare_calls(bind(p.conv(buffers)))]) for p in ours]
        if timed:
            harness.host_times(made)
        rows += conv.as_rows(op, case, made)


def decode_rows(case: Decode, chosen: list[Provider], device: torch.device, rows: list[dict], timed: bool) -> None:
    passed = decode.admitted(chosen, case, device, rows)
    if timed:
        rows += [row | {"op": "decode"} for row in decode.host_rows(case, passed, device)]


NEW = "a call of a new kind"  # not a part of one that repeats


def steps_of(b: UpdateBuffers) -> dict[str, Call]:
    """The steps of a decode call that repeats, through the patched FLA callable."""
    dispatch, environment, plans, routes = (
        importlib.import_module(f"accel.{name}") for name in ("dispatch", "environment", "ops.plans", "routes")
    )
    function = fla_switch.fla("causal_conv1d_update")
    binding = function.__accel__
    kwargs = {"x": b.x.unsqueeze(1), "cache": b.state, "weight": b.weight, "bias": b.bias, "activation": "silu"}
    dispatch.run(binding, (), kwargs)
    step = binding.steps.kept[0]
    x, state, weight, bias = kwargs["x"], b.state, b.weight, b.bias
    tensors = tuple(tensor for tensor in (x, state, weight, bias) if tensor is not None)
    require(plans.fits(step.guards, tensors), "the call was not kept")
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    status, address = step.facts.status, step.facts.status.address
    return {
        "whole call": lambda: function(**kwargs),
        NEW: lambda: dispatch.run(binding, (), kwargs),
        "adapter: again": lambda: binding.adapter.again(lambda *_: None, **kwargs),
        "recognise the step": lambda: plans.fits(step.guards, tensors),
        "facts of the device": lambda: environment.facts(x.device),
        "profiler on?": lambda: routes.profiling(),
        "record the route": lambda: routes.record(step.route),
        "device error pending?": lambda: status.raise_pending(),
        "allocate y": lambda: torch.empty_like(x, memory_format=torch.contiguous_format),
        "launch": lambda: step.launch(x, state, weight, bias, None, y, None, -1, address),
        "nothing (the loop)": lambda: None,
    }


def step_times(steps: dict[str, Call], calls: int, rounds: int) -> dict[str, float]:
    """Microseconds a step, the loop's own taken off; steps take turns."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for turn in harness.alternate([Entry(name, [step]) for name, step in steps.items()], rounds):
        step = turn.calls[0]
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        spent[turn.name].append((time.perf_counter() - begin) / calls * 1e6)
    found = {name: statistics.median(times) for name, times in spent.items()}
    loop = found.pop("nothing (the loop)")
    return {name: us - loop for name, us in found.items()}


def breakdown(case: Decode, device: torch.device, rows: list[dict], calls: int, rounds: int) -> None:
    """One row a step; what no step accounts for is a row of its own."""
    found = step_times(steps_of(update_buffers(case, device)), calls, rounds)
    whole, new = found.pop("whole call"), found.pop(NEW)
    found["between the steps"] = whole - sum(found.values())
    found[NEW] = new
    print(f"\na decode call, {case.name}: {whole:.2f} us")
    for name, us in sorted(found.items(), key=lambda pair: -pair[1]):
        print(f"  {name:<24}{us:8.2f}")
        rows.append({"op": "decode step", "case": case.name, "provider": name, "gate": "ok", "host_us": us})
    rows.append({"op": "decode step", "case": case.name, "provider": "whole call", "gate": "ok", "host_us": whole})


def against(rows: list[dict]) -> list[dict]:
    """Ours over each other provider, call by call, and the goal where there is one."""
    value = {(row["op"], row["case"], row["provider"]): row["host_us"] for row in rows if "host_us" in row}
    found = []
    print(f"\n{'host us a call':<36}{'ours':>9}{'other':>9}{'ratio':>8}   goal")
    for (op, case, other), theirs in value.items():
        mine = value.get((op, case, "accel (FLA)"))
        if mine is None or other.startswith("accel"):
            continue
        goal = GOALS.get((op, other))
        row = {"op": op, "case": case, "other": other, "ours_us": mine, "other_us": theirs, "ratio": mine / theirs}
        found.append(row | {"goal": goal})
        met = "" if goal is None else f"{goal} {'met' if mine / theirs <= goal else 'MISSED'}"
        print(f"{op + ' ' + case + ' / ' + other:<36}{mine:9.2f}{theirs:9.2f}{mine / theirs:8.3f}   {met}")
    return found


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/host.json"),
    only: Annotated[str, typer.Option(help="providers, comma-separated parts of names")] = "",
    dry_run: Annotated[bool, typer.Option(help="tiny cases on the CPU: gates and steps, no peers' times")] = False,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    torch.manual_seed(torch.seed())
    rows: list[dict] = []
    chosen = {op: providers.selected(only, op) for op in ("update", "conv")}
    with torch.no_grad():
        for case in DRY_DECODE if dry_run else DECODE:
            print(f"decode {case.name}", flush=True)
            step = Entry(case.name, [])
            harness.surviving([step], lambda _, c=case: decode_rows(c, chosen["update"], device, rows, not dry_run))
            calls, rounds = (20, 3) if dry_run else (STEP_CALLS, STEP_ROUNDS)
            harness.surviving([step], lambda _, c=case, n=calls, r=rounds: breakdown(c, device, rows, n, r))
            results.write(out, "host", rows)
    for case in DRY_SMALL if dry_run else SMALL:
        print(f"sequence {case.name}", flush=True)
        step = Entry(case.name, [])
        harness.surviving([step], lambda _, c=case: conv_rows(c, chosen["conv"], device, rows, not dry_run))
        results.write(out, "host", rows)
    found = against(rows)
    for row in rows:
        if row["gate"] != "ok":
            print(f"no figure: {row['op']} {row['case']} {row['provider']}: {row['gate']}")
    restored = fla_switch.fla_switch().restore_gate() if fla_switch.accel_fla_missing() is None else "accel is not here"
    print(restored)
    results.write(out, "host", rows, against=found, restored=restored)


if __name__ == "__main__":
    typer.run(main)
