"""Rows as a document for programs, and as a table to read."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from accel import doctor, environment
from accel.bench.cases import DTYPE
from accel.bench.clock import PROTOCOL
from accel.bench.rows import Row

DISTRIBUTIONS = (*doctor.DISTRIBUTIONS, "nvidia-cudnn-frontend")


def document(rows: Sequence[Row], absent: Mapping[str, str], device: torch.device, copied: float) -> dict[str, Any]:
    """Everything of a run, ready for JSON; `copied` is the bandwidth of a copy."""
    facts = environment.facts(device)
    versions = {name: environment.distribution_version(name) for name in DISTRIBUTIONS}
    return {
        "device": f"CPU ({platform.machine()})" if device.type == "cpu" else facts.detail,
        "backend": facts.backend,
        "dtype": str(DTYPE).removeprefix("torch."),
        "clock": PROTOCOL[device.type],
        "copy_gb_s": copied / 1e9,
        "versions": {name: version for name, version in versions.items() if version},
        "absent": dict(absent),
        "rows": [_plain(row, rows, copied) for row in rows],
    }


def _plain(row: Row, rows: Sequence[Row], copied: float) -> dict[str, Any]:
    """A row with what follows from it. `speedup`: how many times longer than ours, of the same case, it took."""
    found = {"op": row.op, **row.shape._asdict(), "provider": row.provider, "ours": row.ours}
    if row.seconds is None:
        return {**found, "reason": row.reason}
    found |= {"us": row.seconds * 1e6, "gb_s": row.bandwidth / 1e9, "of_copy": row.bandwidth / copied}
    if row.flops:
        found["tflop_s"] = row.flops / row.seconds / 1e12
    same = [other for other in rows if other.ours and (other.op, other.shape) == (row.op, row.shape)]
    mine = [other.seconds for other in same if other.seconds is not None]
    if mine and not row.ours:
        found["speedup"] = row.seconds / min(mine)
    return found


def name_of(row: Mapping[str, Any]) -> str:
    """The shape of a row of a document, as it would be given."""
    names = ("B", "D", "W") if row["op"] == "update" else ("B", "T", "D", "W")
    return ", ".join(f"{name} {row[name]}" for name in (*names, *(["dilation"] if row["op"] == "dense" else [])))


def show(found: Mapping[str, Any], console: Console) -> None:
    """The table, who is not here, and why a row has no number."""
    title = f"{found['device']}, {found['dtype']}; a copy moves {found['copy_gb_s']:.3g} GB/s"
    table = Table("operation", "shape", "provider", title=title, title_justify="left")
    for name in ("us", "GB/s", "of the copy", "times ours"):
        table.add_column(name, justify="right")
    previous = None
    for row in found["rows"]:
        case = (row["op"], name_of(row))
        cells = ["no number", "", "", ""]
        if "us" in row:
            speedup = f"{row['speedup']:.2f}" if "speedup" in row else ""
            cells = [f"{row['us']:.1f}", f"{row['gb_s']:.3g}", f"{row['of_copy']:.1%}", speedup]
        style = "bold" if row["ours"] else None
        table.add_row(*(case if case != previous else ("", "")), row["provider"], *cells, style=style)
        previous = case
    console.print(table)
    for row in found["rows"]:
        if "reason" in row:
            line = f"{row['op']} {name_of(row)}, {row['provider']}: {row['reason']}"
            console.print(line, markup=False, soft_wrap=True)
    for name, reason in found["absent"].items():
        console.print(f"{name} is not measured: {reason}", markup=False, soft_wrap=True)
    console.print(f"clock: {found['clock']}", markup=False, soft_wrap=True)
