"""A document's rows as a picture: bandwidth against that of a copy, and how many times longer than ours each peer took.

Imports matplotlib, so that the command imports this file only where a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from accel.bench.show import name_of


def draw(found: Mapping[str, Any], out: Path) -> None:
    """Write the picture; its format is the name's, svg or png for example."""
    timed = [row for row in found["rows"] if "us" in row]
    providers = list(dict.fromkeys(row["provider"] for row in timed))
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for row in timed:
        cases.setdefault(f"{row['op']}\n{name_of(row)}", []).append(row)
    figure = Figure(figsize=(13, 2 + 0.25 * (len(timed) + len(cases))), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    place, middles = 0, []
    for rows in cases.values():
        for index, row in enumerate(rows):
            color = f"C{providers.index(row['provider'])}"
            left.barh(place + index, row["gb_s"], color=color)
            if "speedup" in row:
                right.barh(place + index, row["speedup"], color=color)
        middles.append(place + (len(rows) - 1) / 2)
        place += len(rows) + 1
    left.axvline(found["copy_gb_s"], color="black", linestyle="--")
    right.axvline(1, color="black", linestyle="--")
    left.set_yticks(middles, list(cases))
    left.invert_yaxis()
    left.set_xlabel("GB/s; the line is a copy")
    right.set_xlabel("time of each over accel's; the line is accel")
    patches = [Patch(color=f"C{index}", label=name) for index, name in enumerate(providers)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches) or 1)
    figure.suptitle(f"{found['device']}, {found['dtype']}")
    figure.savefig(out)
