"""Tables of the JSON files of runs, as Markdown: `python -m benchmarks.table [FOLDER]` prints all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

ORDER = (
    "accel (FLA)",
    "accel (FLA) dense",
    "accel (ops)",
    "accel (ops) dense",
    "accel",
    "accel alone",
    "FLA",
    "FLA Gluon",
    "cuDNN FE",
    "causal-conv1d",
    "torch",
    "stub",
    "null kernel",
    "bytes / bandwidth",
    "copy",
    "add",
    "floor",
)
METRICS = {
    "graph_us": "device, us (graph replay)",
    "device_us": "device, us (cold L2)",
    "host_us": "eager host, us a call",
    "ms": "ms of the slowest rank, launching included",
    "first_ms": "first call, ms",
    "warm_ms": "warm call, ms",
    "over_warm_ms": "first call over a warm one, ms",
    "step_ms": "ms a step",
    "tokens_per_s": "tokens/s",
    "tflops": "TFLOP/s",
    "peak_bytes": "peak memory, bytes",
}
MOST_COLUMNS = 8


def in_order(providers: Iterable[str]) -> list[str]:
    """Each once: those of ORDER first, then the others as they come."""
    found = list(dict.fromkeys(providers))
    return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER) + found.index(name))


def table(rows: list[dict[str, Any]], op: str, metric: str) -> str | None:
    """One metric of one operation: a line a case, a column a provider; the other way round where these are many."""
    part = [row for row in rows if row["op"] == op and metric in row]
    if not part:
        return None
    digits = 0 if metric in ("peak_bytes", "tokens_per_s") else 2
    values = {(row["case"], row["provider"]): f"{row[metric]:.{digits}f}" for row in part}
    down, across = list(dict.fromkeys(row["case"] for row in part)), in_order(row["provider"] for row in part)
    if len(across) > max(MOST_COLUMNS, len(down)):
        down, across = across, down
        values = {(provider, case): value for (case, provider), value in values.items()}
    lines = [f"| {op}: {METRICS[metric]} | " + " | ".join(across) + " |", "|---" * (len(across) + 1) + "|"]
    lines += [f"| {one} | " + " | ".join(values.get((one, other), "") for other in across) + " |" for one in down]
    return "\n".join(lines)


def refusals(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What has no figure, and why: a peer that does not take a case, a gate that did not hold."""
    found = dict.fromkeys(
        (row["provider"], row["case"], re.sub(r"\s*\[.*\]$", "", row["gate"]))
        for row in rows
        if row.get("gate", "ok") != "ok"
    )
    return ["\n".join(f"- no figure for {name} at {case}: {why}" for name, case, why in found)] if found else []


def heading(document: dict[str, Any]) -> str:
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    commit = (document["commit"] or "unknown")[:12]
    return f"{machine['device']}, driver {machine['driver']}, {document['date'][:10]}, commit {commit}; {versions}."


def main(folder: Annotated[Path, typer.Argument(help="where the JSON files are")] = Path("benchmarks/results")) -> None:
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        rows = document["rows"]
        print(f"**{document['script']}** ({heading(document)})\n")
        for op in dict.fromkeys(row["op"] for row in rows):
            for metric in METRICS:
                text = table(rows, op, metric)
                if text:
                    print(text + "\n")
        for found in document.get("ratios", []):
            print(f"- {found['metric']}: {found['ours']} / {found['other']}: geometric mean {found['geomean']:.3f}")


if __name__ == "__main__":
    typer.run(main)
