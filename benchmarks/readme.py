"""The README's section of measured figures, from the JSON files of runs: `python -m benchmarks.readme` writes it.

A file that is not there has no table. Over each table stands where it comes from; no figure is typed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from benchmarks.table import in_order, refusals, table

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "[//]: # (measured begin: written by python -m benchmarks.readme)", "[//]: # (measured end)"
Document = Mapping[str, Any]

INTRO = """\
Every figure stands behind gates: values and gradients against float64, state bits, cache identity, route, restore.
Providers take turns in one process, on random data in bf16; a filter has four taps and SiLU. A table is of the commit
over it, and the code may have changed since. The files are in `benchmarks/results`; `make docs` makes
[docs/performance.md](docs/performance.md) of all of their rows, with pictures."""

STEPS = ["N=256 D=8192", "N=128 D=4096", "N=32 D=4096", "N=8 D=2048", "N=1 D=2048"]
DECODE = """\
### A decode step

N rows and D channels, x a third of a row-strided projection. "accel (FLA)" goes through FLA's own callable, "accel
(ops)" calls the operation; "null kernel" is an empty one, "floor" a bare launch and `empty_like`."""

SHAPES = ["1,8192,4096", "4,4096,4096", "8,2048,8192", "1,32768,4096 packed"]
SHAPES += ["4,4096,4096 strided", "4,4096,4096 states"]
CONV = """\
### Full sequences

Shapes are B,T,D; "packed" is ragged sequences in one row, "strided" a third of a fused projection, "states" has initial
and final ones; "copy" and "add" move the same bytes."""

MODELS = {
    "e2e_decode": "FLA's GatedDeltaNet, eager; `stub` has nothing in the place of its convolutions, the bound for any",
    "e2e_decode_graph": "FLA's GatedDeltaNet, a step as a CUDA graph",
    "e2e_decode_compiled": "FLA's GatedDeltaNet, a step through torch.compile",
    "e2e_train": "FLA's GatedDeltaNet, training",
    "e2e_mamba": "mamba_ssm's Mamba2 language model",
    "e2e_qwen3_next": "Transformers' Qwen3-Next",
    "e2e_qwen3_next_step": "Transformers' Qwen3-Next with a cache of fixed size",
    "e2e_nemotron_h": "Transformers' Nemotron-H",
}
# what is compared, as far as a run has it
PAIRS = [("accel", "FLA"), ("stub", "FLA"), ("accel", "causal-conv1d"), ("accel alone", "torch")]
WHOLE = """\
### Whole models

Random weights; milliseconds a step, and how many times as fast, neighbours in time compared. "torch" is the model where
causal-conv1d is not installed, "accel alone" what accel makes of that."""

RANKS = """\
### Several GPUs

FLA's context parallelism, convolution forward and backward, and its GatedDeltaNet under FSDP2 with acceleration
switched on before the model is built or after it is wrapped; times of the slowest rank."""

DENSE = """\
### Dense convolutions

`CausalConv1d` in bf16 beside the forms that torch has; a case is B, channels in, channels out, taps, dilation, T."""

HOST = """\
### Host time

An eager call without waiting for the GPU; "floor" is bare launches and allocations."""

COLD = """\
### First calls

A new process, with nothing compiled on the disk or everything."""


def section(folder: Path) -> str:
    """Everything between the markers."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    parts = [part for make in (decode, conv, models, ranks, dense, host, cold, versions) for part in make(found)]
    return "\n\n".join([INTRO, *parts])


def filled(text: str, folder: Path) -> str:
    """The README with the section as it has to be."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{section(folder)}\n\n{END}{rest.split(END)[1]}"


def decode(found: Mapping[str, Document]) -> list[str]:
    if "decode" not in found:
        return []
    document = found["decode"]
    rows = chosen(document, STEPS)
    device = [row for row in rows if row["provider"] != "accel (ops)"]
    parts = [DECODE, source("decode", document), *tables(device, ["update"], "graph_us")]
    return [*parts, *tables(rows, ["update"], "host_us"), *over_all(document)]


def over_all(document: Document) -> list[str]:
    """The geometric mean over all points, against each peer and against the best one of each point."""
    ratios = [
        f"{row['geomean']:.2f} of {row['other']}'s"
        for row in document.get("ratios", [])
        if (row["metric"], row["ours"]) == ("graph_us", "accel (FLA)")
        and row["other"] in ("FLA", "cuDNN FE", "causal-conv1d")
    ]
    best = [row["ratio"] for row in document.get("best_peer", [])]
    if not ratios or not best:
        return []
    return [
        f"Over all {len(best)} points accel (FLA) takes, as a geometric mean, {', '.join(ratios)} device time; the\n"
        f"quicker of its two entries takes from {min(best):.2f} to {max(best):.2f} of the best peer's at a point."
    ]


def conv(found: Mapping[str, Document]) -> list[str]:
    parts = [CONV] if "conv" in found or "conv_small" in found else []
    for name, metric, cases in (("conv", "device_us", SHAPES), ("conv_small", "graph_us", None)):
        if name in found:
            rows = [row for row in chosen(found[name], cases) if row["provider"] != "accel (ops)"]
            rows = [row for row in rows if not row["provider"].endswith(" dense")]
            parts += [source(name, found[name]), *tables(rows, ["forward", "backward"], metric)]
    return parts


def models(found: Mapping[str, Document]) -> list[str]:
    parts = []
    for name, what in MODELS.items():
        if name in found:
            sizes = {key: size for key, size in found[name].get("model", {}).items() if isinstance(size, int | float)}
            told = ", ".join(f"{key} {size:g}" for key, size in sizes.items())
            parts += [f"{what}{told and f' ({told})'}. {source(name, found[name])}", *model(found[name])]
    return [WHOLE, *parts] if parts else []


def model(document: Document) -> list[str]:
    rows = [row for row in chosen(document) if "step_ms" in row]
    if not all("all_ms" in row for row in rows):
        return ["No table: an earlier form of the benchmark timed each turn's first step, and ranks nothing."]
    columns = in_order(row["provider"] for row in rows)
    pairs = [pair for pair in PAIRS if set(pair) <= set(columns)]
    head = ["ms", *columns, *(f"{ours} over {other}" for ours, other in pairs)]
    lines = [head, ["---"] * len(head)]
    for op, case in dict.fromkeys((row["op"], row["case"]) for row in rows):
        part = {row["provider"]: row for row in rows if (row["op"], row["case"]) == (op, case)}
        times = [f"{part[column]['step_ms']:.3f}" if column in part else "" for column in columns]
        lines.append([f"{op}, {case}", *times, *(faster(part, *pair) for pair in pairs)])
    notes = dict.fromkeys((row["provider"], row["case"], row["note"]) for row in rows if "note" in row)
    parts = ["\n".join(f"| {' | '.join(line)} |" for line in lines)]
    parts += ["\n".join(f"- {provider} at {case}: {note}" for provider, case, note in notes)] if notes else []
    return [*parts, *refusals(document["rows"])]


def faster(part: Mapping[str, Mapping[str, Any]], ours: str, other: str) -> str:
    """How many times as fast, as the run compared its own pairs."""
    row = part.get(ours, {})
    ratio = row.get("over", {"FLA": row.get("over_fla")}).get(other)
    return "" if ratio is None else f"{ratio:.2f}"


def ranks(found: Mapping[str, Document]) -> list[str]:
    parts = []
    for name in ("cp", "cp_zigzag"):
        if name in found:
            rows = chosen(found[name])
            parts += [source(name, found[name]), *tables(rows, dict.fromkeys(row["op"] for row in rows), "ms")]
    if "fsdp" in found:
        rows = chosen(found["fsdp"])
        ops = dict.fromkeys(row["op"] for row in rows)
        parts += [source("fsdp", found["fsdp"]), *tables(rows, ops, "step_ms"), *tables(rows, ops, "tokens_per_s")]
        parts.append(losses(rows))
    return [RANKS, *parts] if parts else []


def losses(rows: list[dict[str, Any]]) -> str:
    """How far the losses of a step are apart, over all steps and runs of one file."""
    curves = [row["losses"] for row in rows]
    apart = max(max(step) - min(step) for step in zip(*curves, strict=True))
    first, last = curves[0][0], curves[0][-1]
    return f"Losses of {len(curves[0])} steps, from {first:.3f} to {last:.3f}, are {apart:.4f} apart at most."


def dense(found: Mapping[str, Document]) -> list[str]:
    if "dense" not in found:
        return []
    rows = [row for row in chosen(found["dense"]) if row["case"].endswith("bf16")]
    return [DENSE, source("dense", found["dense"]), *tables(rows, ["forward", "backward"], "device_us")]


def host(found: Mapping[str, Document]) -> list[str]:
    if "host" not in found:
        return []
    parts = tables(chosen(found["host"]), ["decode", "forward", "forward+backward"], "host_us")
    return [HOST, source("host", found["host"]), *parts]


def cold(found: Mapping[str, Document]) -> list[str]:
    if "cold" not in found:
        return []
    lines = ["| | first call, ms | a later one, ms | kernels |", "|---|---|---|---|"]
    lines += [
        f"| {row['case']} | {row['first_ms']:.1f} | {row['warm_ms']:.3f} | {row['kernels']} |"
        for row in chosen(found["cold"])
    ]
    return [COLD, source("cold", found["cold"]), "\n".join(lines)]


def versions(found: Mapping[str, Document]) -> list[str]:
    """What the files were measured with, those of the same driver and packages together."""
    groups: dict[str, list[str]] = {}
    for name, document in found.items():
        machine = document["machine"]
        packages = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
        groups.setdefault(f"driver {machine['driver']}, {packages}", []).append(f"`{name}`")
    return ["\n".join(f"- {', '.join(names)}: {what}" for what, names in groups.items())] if groups else []


def chosen(document: Document, cases: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows that hold, of these cases and in their order, or of all."""
    rows = [row for row in document["rows"] if row.get("gate") == "ok"]
    return rows if cases is None else [row for case in cases for row in rows if row["case"] == case]


def tables(rows: list[dict[str, Any]], ops: Iterable[str], metric: str) -> list[str]:
    return [text for op in ops if (text := table(rows, op, metric))]


def source(name: str, document: Document) -> str:
    device, commit = document["machine"]["device"], document["commit"] or "unknown"
    return f"`{name}.json`: {device}, {document['date'][:10]}, commit {commit[:12]}."


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(), ROOT / "benchmarks" / "results"))


if __name__ == "__main__":
    typer.run(main)
