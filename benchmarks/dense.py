"""Dense, dilated causal convolution, forward and backward, against torch's forms: `python -m benchmarks.dense`.

`--shapes "8,256,256,3,1,8192;..."` measures others than the table's: B, Cin, Cout, K, dilation, T.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from accel.bench.dense import KINDS, OURS, Buffers, Dense, backward_call, buffers, forward_call, gate, reference
from benchmarks import harness, results
from benchmarks.harness import Call, Entry

SHAPES = [  # B, Cin, Cout, K, dilation, T
    (16, 64, 64, 3, 2, 4096),
    (8, 256, 256, 3, 4, 8192),
    (4, 512, 512, 5, 8, 8192),
    (64, 64, 128, 3, 4, 65536),
]
DRY = [(2, 8, 12, 3, 2, 40), (1, 5, 3, 2, 1, 7)]
TORCH_FORMS = ("conv + chomp", "pad + conv", "compiled chomp", "compiled pad")


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def peak_bytes(call: Call) -> int:
    """What a call allocates at most, beside what was there before it."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def admitted(names: list[str], b: Buffers, rows: list[dict]) -> list[str]:
    want = reference(b)
    passed = []
    for name in names:
        entry = Entry(name, [])
        if harness.surviving([entry], lambda _, n=name: gate(n, b, want)):
            passed.append(name)
        else:
            rows.append({"op": "dense", "case": b.case.name, "provider": name, "gate": entry.note})
    return passed


def measure(case: Dense, names: list[str], device: torch.device, rows: list[dict], dry: bool) -> None:
    b = buffers(case, device)
    passed = admitted(names, b, rows)
    if dry:
        print(case.name, passed)
        return
    torch.cuda.empty_cache()
    for op, make in (("forward", forward_call), ("backward", backward_call)):
        made = [Entry(name, [], prepare=lambda n=name, m=make: [m(n, b)]) for name in passed]
        harness.cold_times(made)
        factor = 1 if op == "forward" else 2
        for entry in made:
            row = {"op": op, "case": case.name, "provider": entry.name, "gate": entry.note or "ok", **entry.times}
            if "device_us" in entry.times:
                row["tflops"] = factor * case.flops / entry.times["device_us"] / 1e6
                row["peak_bytes"] = peak_bytes(make(entry.name, b))
            rows.append(row)


def ratios(rows: list[dict]) -> list[dict]:
    """Ours over the best of torch's forms, by case, and the geometric mean for each dtype and direction."""
    found = []
    for op in ("forward", "backward"):
        timed = [row for row in rows if row["op"] == op and "device_us" in row]
        for case in dict.fromkeys(row["case"] for row in timed):
            times = {row["provider"]: row["device_us"] for row in timed if row["case"] == case}
            if OURS in times and len(times) > 1:
                best = min((name for name in times if name != OURS), key=times.__getitem__)
                found.append({"op": op, "case": case, "best": best, "over_best": times[OURS] / times[best]})
    for op in ("forward", "backward"):
        for kind in KINDS:
            values = [row["over_best"] for row in found if row["op"] == op and row["case"].endswith(kind)]
            if values:
                print(f"{op} {kind}: {harness.geometric_mean(values):.3f} x the best form of torch, over {len(values)}")
    return found


def show(rows: list[dict]) -> None:
    for op in ("forward", "backward"):
        part = [row for row in rows if row["op"] == op and "device_us" in row]
        names = list(dict.fromkeys(row["provider"] for row in part))
        print(f"\n{op}: device us (TFLOP/s, peak MiB)")
        print(f"{'':<32}" + "".join(f"{name:>26}" for name in names))
        for case in dict.fromkeys(row["case"] for row in part):
            cells = {row["provider"]: row for row in part if row["case"] == case}
            text = {
                name: f"{row['device_us']:.1f} ({row['tflops']:.0f}, {row['peak_bytes'] / 2**20:.1f})"
                for name, row in cells.items()
            }
            print(f"{case:<32}" + "".join(f"{text.get(name, '-'):>26}" for name in names))


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/dense.json"),
    kinds: Annotated[str, typer.Option(help="comma-separated, of bf16, fp16, fp32, tf32")] = "bf16,fp32,tf32",
    shapes: Annotated[str, typer.Option(help="others, separated by ;")] = "",
    compiled: Annotated[bool, typer.Option(help="torch.compile of both forms too")] = True,
    dry_run: Annotated[bool, typer.Option(help="tiny cases on the CPU, gates only")] = False,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    names = [OURS, *(name for name in TORCH_FORMS if not name.startswith("compiled") or compiled and not dry_run)]
    rows: list[dict] = []
    others = [tuple(map(int, shape.split(","))) for shape in shapes.split(";") if shape]
    for kind in kinds.split(","):
        for shape in others or (DRY if dry_run else SHAPES):
            case = Dense(*shape, kind)
            with tf32(kind == "tf32"):
                step = Entry(case.name, [])
                harness.surviving([step], lambda _, c=case: measure(c, names, device, rows, dry_run))
            if not dry_run:
                torch.cuda.empty_cache()
            results.write(out, "dense", rows)
    if not dry_run:
        show(rows)
    results.write(out, "dense", rows, over_best=ratios(rows))
    for row in rows:
        if row["gate"] != "ok":
            print(f"no figure: {row['op']} {row['case']} {row['provider']}: {row['gate']}")


if __name__ == "__main__":
    typer.run(main)
