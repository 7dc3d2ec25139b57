"""Decode: one token a row, x a third of a row-strided projection: `python -m benchmarks.decode`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import triton
import typer

from accel.bench import fla_switch, providers
from accel.bench.cases import (
    Decode,
    UpdateBuffers,
    update_buffers,
)
from accel.bench.gates import update_gate
from accel.bench.providers import Provider
from benchmarks import harness, results
from benchmarks.floor import bare_update_call
from benchmarks.harness import Entry

# N falls, so that FLA's autotuner, whose key is (D, W), tunes each D on its largest case
FULL = [Decode(N, D) for D in (8192, 4096, 2048) for N in (256, 128, 32, 8, 1)]
QUICK = [Decode(256, 8192), Decode(128, 4096), Decode(32, 4096), Decode(1, 2048)]
DRY = [Decode(3, 64), Decode(1, 32, bias=True)]
HOST = [Decode(32, 4096), Decode(1, 2048)]


def admitted(chosen: list[Provider], case: Decode, device: torch.device, rows: list[dict]) -> list[Provider]:
    passed = []
    for provider in chosen:
        entry = Entry(provider.name, [], provider.scope)
        if harness.surviving([entry], lambda _, p=provider: update_gate(p, case, device)):
            passed.append(provider)
        else:
            rows.append({"op": "update", "case": case.name, "provider": provider.name, "gate": entry.note})
    return passed


def entries_of(passed: list[Provider], sets: list[UpdateBuffers]) -> list[Entry]:
    made = [Entry(p.name, [], p.scope, lambda p=p: [p.update(b.fresh()) for b in sets]) for p in passed]
    for entry in made:
        with entry.scope():
            entry.calls = entry.prepare()
        entry.prepare = None
    return made


def device_rows(case: Decode, passed: list[Provider], device: torch.device, bandwidth: float) -> list[dict]:
    sets = [update_buffers(case, device) for _ in range(harness.SETS)]
    entries = [Entry("null kernel", [harness.null_call] * harness.SETS), *entries_of(passed, sets)]
    harness.graph_times(entries)
    limit = case.bytes / bandwidth * 1e6
    entries.append(Entry("bytes / bandwidth", [], times={"graph_us": limit}))
    return as_rows(case, entries)


def host_rows(case: Decode, passed: list[Provider], device: torch.device) -> list[dict]:
    sets = [update_buffers(case, device)]
    entries = entries_of(passed, sets)
    floor = Entry("floor", [], prepare=lambda: [bare_update_call(sets[0].fresh())])
    harness.host_times([floor, *entries])
    return as_rows(case, [floor, *entries])


def as_rows(case: Decode, entries: list[Entry]) -> list[dict]:
    return [
        {
            "op": "update",
            "case": case.name,
            "N": case.N,
            "D": case.D,
            "provider": e.name,
            "gate": e.note or "ok",
            **e.times,
        }
        for e in entries
    ]


def show(rows: list[dict], metric: str) -> None:
    rows = [row for row in rows if metric in row]
    names = list(dict.fromkeys(row["provider"] for row in rows))
    print(f"\n{metric:<16}" + "".join(f"{name[:15]:>16}" for name in names))
    for case in dict.fromkeys(row["case"] for row in rows):
        value = {row["provider"]: row[metric] for row in rows if row["case"] == case}
        print(f"{case:<16}" + "".join(f"{value[n]:16.2f}" if n in value else f"{'-':>16}" for n in names))


def ratios(rows: list[dict], metric: str) -> list[dict]:
    """Ours over each other provider: the geometric mean over the cases that both have, and the worst case."""
    value = {(row["provider"], row["case"]): row[metric] for row in rows if metric in row}
    found = []
    for ours in [name for name, p in providers.PROVIDERS.items() if p.ours]:
        for other in dict.fromkeys(name for name, _ in value):
            both = [c for name, c in value if name == ours and (other, c) in value] if other != ours else []
            if both:
                each = {case: value[ours, case] / value[other, case] for case in both}
                worst = max(each, key=each.get)
                mean = harness.geometric_mean(list(each.values()))
                found.append({"metric": metric, "ours": ours, "other": other, "geomean": mean, "worst": each[worst]})
                print(f"{metric} {ours} / {other}: geomean {mean:.3f}, worst {each[worst]:.3f} at {worst}")
    return found


def best_peer(rows: list[dict]) -> list[dict]:
    """Ours over the best peer at each point."""
    found = []
    for case in dict.fromkeys(row["case"] for row in rows if "graph_us" in row):
        value = {row["provider"]: row["graph_us"] for row in rows if row["case"] == case and "graph_us" in row}
        peers = {
            name: t for name, t in value.items() if name in providers.PROVIDERS and not providers.PROVIDERS[name].ours
        }
        mine = [t for name, t in value.items() if name in providers.PROVIDERS and providers.PROVIDERS[name].ours]
        if peers and mine:
            best = min(peers, key=peers.get)
            found.append({"case": case, "best": best, "ratio": min(mine) / peers[best]})
            print(
                f"{case:<16} {min(mine):7.2f} us, best peer {best} {peers[best]:7.2f}, ratio {found[-1]['ratio']:.3f}"
            )
    return found


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/decode.json"),
    only: Annotated[str, typer.Option(help="providers, comma-separated parts of names")] = "",
    quick: Annotated[bool, typer.Option(help="four shapes")] = False,
    dry_run: Annotated[bool, typer.Option(help="tiny cases on the CPU, gates only")] = False,
    host: Annotated[bool, typer.Option(help="measure host time too")] = True,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    torch.manual_seed(torch.seed())
    rows: list[dict] = []
    with torch.no_grad():
        chosen = providers.selected(only, "update")
        cases = DRY if dry_run else QUICK if quick else FULL
        if dry_run:
            for case in cases:
                print(case.name, [p.name for p in admitted(chosen, case, device, rows)])
            results.write(out, "decode", rows)
            print(fla_switch.fla_switch().restore_gate() if fla_switch.accel_fla_missing() is None else "no FLA here")
            return
        bandwidth = harness.copy_bandwidth()
        print(
            f"{torch.cuda.get_device_name()}, triton {triton.__version__}, copy {bandwidth / 1e12:.2f} TB/s", flush=True
        )
        for case in cases:
            harness.surviving(
                [Entry(case.name, [])], lambda _, c=case: measure(c, chosen, device, bandwidth, host, rows)
            )
            results.write(out, "decode", rows, bandwidth=bandwidth)
    show(rows, "graph_us")
    show(rows, "host_us")
    print()
    best = best_peer(rows)
    found = ratios(rows, "graph_us") + ratios(rows, "host_us")
    restored = fla_switch.fla_switch().restore_gate() if fla_switch.accel_fla_missing() is None else "accel is not here"
    print(restored)
    for row in rows:
        if row["gate"] != "ok":
            print(f"no figure: {row['provider']} {row['case']}: {row['gate']}")
    results.write(out, "decode", rows, bandwidth=bandwidth, best_peer=best, ratios=found, restored=restored)


def measure(
    case: Decode, chosen: list[Provider], device: torch.device, bandwidth: float, host: bool, rows: list[dict]
) -> None:
    passed = admitted(chosen, case, device, rows)
    rows += device_rows(case, passed, device, bandwidth)
    if host and case in HOST:
        rows += host_rows(case, passed, device)


if __name__ == "__main__":
    typer.run(main)
