"""Full sequences, forward and backward, against the copy and the add: `python -m benchmarks.conv`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import triton
import typer

from accel.bench import fla_switch, providers
from accel.bench.cases import (
    DTYPE,
    RAGGED,
    ConvBuffers,
    Sequence,
    W,
    conv_buffers,
    conv_reference,
)
from accel.bench.gates import backward_gate, forward_gate
from accel.bench.providers import ConvCalls, Provider
from benchmarks import harness, results
from benchmarks.harness import Call, Entry

PLAIN = [
    Sequence(4, 4096, 4096),
    Sequence(1, 8192, 4096),
    Sequence(8, 2048, 8192),
    Sequence(1, 32768, 4096, RAGGED),
    Sequence(1, 512, 2048, small=True),
]
VARIANTS = [
    Sequence(4, 4096, 4096, bias=True),
    Sequence(4, 4096, 4096, states=True),
    Sequence(4, 4096, 4096, strided=True),
    Sequence(1, 32768, 4096, RAGGED, strided=True),
]
WITH_BIAS = [
    Sequence(1, 8192, 4096, bias=True),
    Sequence(8, 2048, 8192, bias=True),
    Sequence(1, 32768, 4096, RAGGED, bias=True),
    Sequence(1, 512, 2048, bias=True, small=True),
]
DRY = [
    Sequence(2, 9, 32),
    Sequence(1, 12, 16, (5, 1, 0, 6), bias=True),
    Sequence(2, 7, 16, bias=True, states=True),
    Sequence(1, 8, 16, strided=True),
]
LIMIT = {"forward": "copy", "backward": "add"}
METRICS = ("device_us", "graph_us", "host_us")


def gate(provider: Provider, b: ConvBuffers, want: dict[str, torch.Tensor]) -> None:
    backward_gate(provider, b, want, forward_gate(provider, b, want))


def admitted(chosen: list[Provider], b: ConvBuffers, rows: list[dict]) -> list[Provider]:
    want = conv_reference(b)
    passed = []
    for provider in chosen:
        entry = Entry(provider.name, [], provider.scope)
        if harness.surviving([entry], lambda _, p=provider: gate(p, b, want)):
            passed.append(provider)
        else:
            rows.append({"op": "conv", "case": b.case.name, "provider": provider.name, "gate": entry.note})
    return passed


def forward_call(calls: ConvCalls) -> Call:
    def call() -> torch.Tensor:
        with torch.no_grad():
            return calls.forward()[0]

    return call


def limits(sets: list[ConvBuffers]) -> dict[str, list[Call]]:
    """What moves the same bytes: a copy of a dense x, and a dense x + dy -> dx."""
    found: dict[str, list[Call]] = {"forward": [], "backward": []}
    for b in sets:
        x, dy = b.x.detach().contiguous(), b.dy
        y, dx = torch.empty_like(x), torch.empty_like(x)
        found["forward"].append(lambda x=x, y=y: y.copy_(x))
        found["backward"].append(lambda x=x, dy=dy, dx=dx: torch.add(x, dy, out=dx))
    return found


def entries(op: str, passed: list[Provider], sets: list[ConvBuffers], dense: list[ConvBuffers]) -> list[Entry]:
    """`dense`: buffers of the plain case of the same shape, for the ratio of a variant to it."""

    def prepare(provider: Provider, buffers: list[ConvBuffers]) -> list[Call]:
        bound = [provider.conv(b) for b in buffers]
        return [forward_call(calls) if op == "forward" else calls.backward() for calls in bound]

    made = [Entry(LIMIT[op], limits(sets)[op])]
    made += [Entry(p.name, [], p.scope, lambda p=p: prepare(p, sets)) for p in passed]
    made += [Entry(f"{p.name} dense", [], p.scope, lambda p=p: prepare(p, dense)) for p in passed if p.ours and dense]
    return made


def training_forward(passed: list[Provider], sets: list[ConvBuffers]) -> list[Entry]:
    def prepare(provider: Provider) -> list[Call]:
        calls = provider.conv(sets[0])

        def call() -> torch.Tensor:
            with torch.enable_grad():
                return calls.forward()[0]

        return [call]

    return [Entry(p.name, [], p.scope, lambda p=p: prepare(p)) for p in passed]


def as_rows(op: str, case: Sequence, made: list[Entry]) -> list[dict]:
    return [{"op": op, "case": case.name, "provider": e.name, "gate": e.note or "ok", **e.times} for e in made]


def measure(case: Sequence, chosen: list[Provider], device: torch.device, host: bool, rows: list[dict]) -> None:
    sets = [conv_buffers(case, device)]
    passed = admitted(chosen, sets[0], rows)
    dense = [] if case.plain or case.small else [conv_buffers(Sequence(case.B, case.T, case.D), device)]
    if case.small:
        sets += [conv_buffers(case, device) for _ in range(harness.SETS - 1)]
    for op in ("forward", "backward"):
        made = entries(op, passed, sets, dense)
        if case.small:
            harness.graph_times(made)
            if host:
                eager = entries(op, passed, sets[:1], dense)
                harness.host_times(eager)
                made += eager
        else:
            harness.cold_times(made)
        rows += as_rows(op, case, made)
    if case.small and host:
        made = training_forward(passed, sets)
        harness.host_times(made)
        rows += as_rows("training forward", case, made)


def show(rows: list[dict]) -> None:
    for metric in METRICS:
        for op in ("forward", "training forward", "backward"):
            part = [row for row in rows if row["op"] == op and metric in row]
            names = list(dict.fromkeys(row["provider"] for row in part))
            if not part:
                continue
            print(f"\n{op}, {metric} (ratio to {LIMIT.get(op, 'the first')})")
            print(f"{'':<26}" + "".join(f"{name[:17]:>18}" for name in names))
            for case in dict.fromkeys(row["case"] for row in part):
                value = {row["provider"]: row[metric] for row in part if row["case"] == case}
                base = value.get(LIMIT.get(op), next(iter(value.values())))
                cells = [f"{value[n]:10.1f} ({value[n] / base:5.2f})" if n in value else f"{'-':>18}" for n in names]
                print(f"{case:<26}" + "".join(f"{cell:>18}" for cell in cells))


def variant_ratios(rows: list[dict]) -> list[dict]:
    """Ours in a variant over ours on the dense contiguous plain case, timed in turn with it."""
    found = []
    for row in rows:
        name = row["provider"]
        if name.endswith(" dense") and "device_us" in row:
            same = (r for r in rows if (r["op"], r["case"], r["provider"]) == (row["op"], row["case"], name[:-6]))
            variant = next((r["device_us"] for r in same if "device_us" in r), None)
            if variant is not None:
                ratio = variant / row["device_us"]
                found.append({"op": row["op"], "case": row["case"], "ours": name[:-6], "over_dense": ratio})
                print(f"{row['op']} {row['case']} {name[:-6]}: {ratio:.3f} x its dense form")
    return found


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/conv.json"),
    only: Annotated[str, typer.Option(help="providers, comma-separated parts of names")] = "",
    shapes: Annotated[str, typer.Option(help="cases, comma-free parts of their names separated by ;")] = "",
    quick: Annotated[bool, typer.Option(help="no bias cases but one, peers on plain cases only")] = False,
    dry_run: Annotated[bool, typer.Option(help="tiny cases on the CPU, gates only")] = False,
    host: Annotated[bool, typer.Option(help="measure host time too")] = True,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    torch.manual_seed(torch.seed())
    rows: list[dict] = []
    chosen = providers.selected(only, "conv")
    cases = DRY if dry_run else [*PLAIN, *VARIANTS, *([] if quick else WITH_BIAS)]
    wanted = [part.strip() for part in shapes.split(";") if part.strip()]
    cases = [case for case in cases if not wanted or any(part in case.name for part in wanted)]
    if dry_run:
        for case in cases:
            print(case.name, [p.name for p in admitted(chosen, conv_buffers(case, device), rows)])
        results.write(out, "conv", rows)
        return
    print(f"{torch.cuda.get_device_name()}, triton {triton.__version__}, {DTYPE}, W={W}, silu", flush=True)
    for case in cases:
        few = [p for p in chosen if p.ours] if quick and case in VARIANTS else chosen
        print(f"case {case.name}", flush=True)
        harness.surviving([Entry(case.name, [])], lambda _, c=case, f=few: measure(c, f, device, host, rows))
        torch.cuda.empty_cache()
        results.write(out, "conv", rows)
    show(rows)
    print()
    over_dense = variant_ratios(rows)
    for row in rows:
        if row["gate"] != "ok":
            print(f"no figure: {row['op']} {row['case']} {row['provider']}: {row['gate']}")
    restored = fla_switch.fla_switch().restore_gate() if fla_switch.accel_fla_missing() is None else "accel is not here"
    print(restored)
    results.write(out, "conv", rows, over_dense=over_dense, restored=restored)


if __name__ == "__main__":
    typer.run(main)
