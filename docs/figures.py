"""The performance page from the JSON files of benchmark runs: tables by benchmarks/table.py, and SVG pictures.

Every figure is read from a file, whose device, date and commit stand over it. Nothing here knows which files there are:
one of an unknown kind gets its rows as a table.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.table import METRICS, heading, in_order, refusals, table

matplotlib.use("svg")
STYLE = {"svg.hashsalt": "accel", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
BOUNDS = ("null kernel", "bytes / bandwidth", "copy", "add")  # the largest of them stands for the limit
HOST_BOUNDS = ("floor",)
COLORS = ("#3f51b5", "#e65100", "#2e7d32", "#ad1457", "#6d4c41", "#00838f", "#f9a825", "#5e35b1")
MARKERS = "osD^vPX*"
HEADING = ("machine", "date", "commit")
MOST_RATIOS = 40  # lines of a summary; a longer one is in the file

Rows = Sequence[Mapping[str, Any]]


class Results:
    """`markdown` for all files of a folder, and the `pictures` that it shows by their names in the site."""

    def __init__(self, folder: Path):
        self.pictures: dict[str, bytes] = {}
        parts = [self._file(path) for path in sorted(folder.glob("*.json"))]
        self.markdown = "\n\n".join(parts) or "There are no result files here."

    def _file(self, path: Path) -> str:
        document = json.loads(path.read_text())
        if not isinstance(document, Mapping) or not {"rows", *HEADING} <= document.keys():
            return (
                f"## {path.stem}\n\n`{path.name}` says nothing of where it was measured, so its figures are not shown."
            )
        rows = document["rows"]
        timed = [row for row in rows if row.get("gate", "ok") == "ok"]
        parts = [f"## {path.stem}", f"`{path.name}`: {heading(document)}", *settings(document), *protocol(document)]
        told = all({"op", "case", "provider"} <= row.keys() for row in rows)
        known = [part for op in unique(timed, "op") for part in self._operation(path.stem, timed, op)] if told else []
        parts += known or [plain(timed)]
        parts += ratios(timed) if known else []
        parts += [part for key, value in document.items() if (part := summary(key, value))]
        parts += refusals(rows) if told else []
        return "\n\n".join(parts)

    def _operation(self, stem: str, rows: Rows, op: str) -> list[str]:
        part = [row for row in rows if row["op"] == op]
        found = [metric for metric in METRICS if any(metric in row for row in part)]
        if len(found) > 1 and len(unique(part, "provider")) == 1:
            head = {op: "case", **{METRICS[metric]: metric for metric in found}}
            return [plain([{name: row.get(key) for name, key in head.items()} for row in part])]
        return [text for metric in found if (text := self._metric(stem, rows, op, metric))]

    def _metric(self, stem: str, rows: Rows, op: str, metric: str) -> str | None:
        text = table(rows, op, metric)
        if text and (picture := against(rows, op, metric)):
            name = f"performance/{re.sub('[^a-z0-9]+', '-', f'{stem} {op} {metric}'.lower())}.svg"
            self.pictures[name] = picture
            text += f"\n\n![{op}: {METRICS[metric]}, in units of ours]({name})"
        return text


def ratios(rows: Rows) -> list[str]:
    """How much faster whole models are, by turns that are neighbours in time; a run compares its own pairs."""
    lines = []
    for row in rows:
        over = row.get("over") or ({"FLA": row["over_fla"]} if "over_fla" in row else {})
        if row["provider"].startswith("accel"):
            found = ", ".join(f"{ratio:.3f} x {name}" for name, ratio in over.items() if name != row["provider"])
            lines += [f"- {row['op']}, {row['case']}: {row['provider']} is {found}"] if found else []
    return ["How many times as fast, neighbours in time compared:\n\n" + "\n".join(lines)] if lines else []


def against(rows: Rows, op: str, metric: str) -> bytes | None:
    """A point for each provider and case: its time over ours, the limit hollow. None where nothing can be compared."""
    if not metric.endswith(("us", "ms")):
        return None
    part = [row for row in rows if row["op"] == op and metric in row]
    providers = in_order(row["provider"] for row in part)
    ours = next((name for name in providers if name.startswith("accel")), None)
    times = {(row["case"], row["provider"]): row[metric] for row in part}
    cases = [case for case in unique(part, "case") if (case, ours) in times]
    others = [name for name in providers if name != ours and name not in (*BOUNDS, *HOST_BOUNDS)]
    if not cases or not others:
        return None
    bounds = [name for name in providers if name in (HOST_BOUNDS if metric == "host_us" else BOUNDS)]
    held = {case: [times[case, name] for name in bounds if (case, name) in times] for case in cases}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.3 + 0.27 * len(cases)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(1, color="#888888", linewidth=1)
        for index, name in enumerate(others):
            points = {
                at: times[case, name] / times[case, ours] for at, case in enumerate(cases) if (case, name) in times
            }
            style = {"marker": MARKERS[index % len(MARKERS)], "color": COLORS[index % len(COLORS)]}
            axes.scatter(points.values(), points.keys(), s=26, label=name, zorder=3, **style)
        lowest = {at: max(held[case]) / times[case, ours] for at, case in enumerate(cases) if held[case]}
        if lowest:
            style = {"facecolors": "none", "edgecolors": "#555555", "label": f"limit: {' or '.join(bounds)}"}
            axes.scatter(lowest.values(), lowest.keys(), s=30, **style)
        axes.set_yticks(range(len(cases)), cases)
        axes.invert_yaxis()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(f"{METRICS[metric]}: over that of {ours} (right of 1: takes longer)")
        axes.grid(axis="x", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


def settings(document: Mapping[str, Any]) -> list[str]:
    """What the run was told, in one line."""
    given = {**document.get("model", {}), **{key: document[key] for key in ("mode", "rounds") if key in document}}
    shown = [f"{key} {value}" for key, value in given.items() if isinstance(value, int | float | str)]
    return ["Settings: " + ", ".join(shown) + "."] if shown else []


def protocol(document: Mapping[str, Any]) -> list[str]:
    """How what occurs was measured."""
    found = {
        key: text for key, text in document.get("protocol", {}).items() if any(key in row for row in document["rows"])
    }
    return (
        ["Measured: " + "; ".join(f"{METRICS.get(key, key)}: {text}" for key, text in found.items()) + "."]
        if found
        else []
    )


def summary(key: str, value: Any) -> str | None:
    """What a run concluded from its rows, folded away: a list of mappings is a table."""
    listed = isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value)
    if key == "rows" or not listed or len(value) > MOST_RATIOS:
        return None
    lines = ["    " + line for line in plain(value).splitlines()]
    return "\n".join([f'??? note "{key.replace("_", " ")}"', "", *lines])


def plain(rows: Rows) -> str:
    """Rows as they are: a column for each key that holds a number or a word."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "gate"]
    keys = [key for key in keys if all(isinstance(row.get(key), int | float | str | None) for row in rows)]
    if not keys:
        return "No rows."
    lines = [" | ".join(keys), " | ".join("---" for _ in keys)]
    lines += [" | ".join(cell(row.get(key)) for key in keys) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def unique(rows: Rows, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))
