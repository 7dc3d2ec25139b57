"""The README's tables, as Markdown, from the JSON files of a run: `python -m benchmarks.table [FOLDER]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

ORDER = (
    "accel (FLA)",
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
    "step_ms": "ms a step",
    "tokens_per_s": "tokens/s",
    "peak_bytes": "peak memory, bytes",
}


def table(rows: list[dict[str, Any]], op: str, metric: str) -> str | None:
    part = [row for row in rows if row["op"] == op and metric in row]
    names = [name for name in ORDER if any(row["provider"] == name for row in part)]
    if not part:
        return None
    digits = 0 if metric in ("peak_bytes", "tokens_per_s") else 2
    lines = [f"| {op}: {METRICS[metric]} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for case in dict.fromkeys(row["case"] for row in part):
        value = {row["provider"]: row[metric] for row in part if row["case"] == case}
        cells = [f"{value[name]:.{digits}f}" if name in value else "" for name in names]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
