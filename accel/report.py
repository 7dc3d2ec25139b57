"""The report of `python -m accel run`: what each process leaves in the run's folder, and their sum.

Standard library only, because a process that never imported torch leaves and reads parts too. No collective: the head
of a run reads the folder, and waits a while for the ranks whose part is not there yet. The one surprise: nothing here
may evaluate source text (a new namedtuple, a new dataclass) once the script has ended, or CPython forgets that it ended
by SIGINT, and exits with 1.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 10.0  # seconds that rank 0, when it ends, waits for the parts of the other ranks
NOTHING = {"targets": {}, "routes": [], "firsts": []}


def leave(settings: dict[str, Any], mine: dict[str, Any] | None) -> None:
    """What a process does last: leave its part, and report where it is the head. `mine` is None without accel."""
    folder, rank = Path(settings["folder"]), os.environ.get("RANK")
    is_first = os.getpid() == settings["pid"]  # of its rank, and no child
    if folder.is_dir():  # a child may outlive the head
        part = {"rank": rank and int(rank), "is_first": is_first, **(mine or NOTHING)}
        _write(folder / f"rank-{rank or 0}-{os.getpid()}.json", part)
    if is_first and settings["head"]:
        found = fold(collect(folder, settings["ranks"]), settings["title"], settings["ranks"])
        shutil.rmtree(folder, ignore_errors=True)
        publish(found, settings["report"], settings["out"])


def _write(path: Path, part: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(part))
    partial.replace(path)


def collect(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """The parts in a folder, waiting for the first process of each rank."""
    end = time.monotonic() + PATIENCE
    while True:
        files = sorted(glob.glob(f"{glob.escape(str(folder))}/*.json"))
        parts = [json.loads(Path(file).read_text()) for file in files]
        if sum(part["is_first"] for part in parts) >= ranks or time.monotonic() > end:
            return parts
        time.sleep(0.05)


def fold(parts: Sequence[dict[str, Any]], title: str, ranks: int = 1) -> dict[str, Any]:
    """The sum of the parts: counters added, by rank too, and of each kind the first call."""
    targets: dict[str, str] = {}
    total: Counter[tuple] = Counter()
    by_rank: dict[tuple, Counter[str]] = {}
    firsts: dict[tuple, dict[str, str]] = {}
    for part in parts:
        for name, refusal in part["targets"].items():
            targets[name] = refusal if targets.get(name, refusal) == refusal else targets[name] or refusal
        for route in part["routes"]:
            key = tuple(route[name] for name in ("target", "callable", "path", "backend", "reason"))
            total[key] += route["calls"]
            if part["rank"] is not None:
                by_rank.setdefault(key, Counter())[str(part["rank"])] += route["calls"]
        for first in part["firsts"]:
            firsts.setdefault(tuple(first[name] for name in ("target", "callable", "path", "reason")), first)
    keys = sorted(total, key=lambda key: (key[0], key[1], key[2] != "native", -total[key]))
    routes = [
        dict(zip(("target", "callable", "path", "backend", "reason"), key, strict=True))
        | {"calls": total[key], "by_rank": dict(sorted(by_rank.get(key, {}).items(), key=lambda item: int(item[0])))}
        for key in keys
    ]
    there = {part["rank"] for part in parts if part["is_first"]}
    return {
        "title": title,
        "processes": len(parts),
        "ranks_missing": [rank for rank in range(ranks) if rank not in there] if ranks > 1 else [],
        "targets": targets,
        "routes": routes,
        "firsts": list(firsts.values()),
    }


def publish(found: dict[str, Any], kind: str, out: str | None) -> None:
    """Write the report to a file, or after the script's own words on stderr."""
    if out is not None:
        with open(out, "w", encoding="utf-8") as file:
            _print(found, kind, file)
    elif sys.stderr is not None and not sys.stderr.closed:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
        _print(found, kind, sys.stderr)


def _print(found: dict[str, Any], kind: str, file: Any) -> None:
    lines = [json.dumps(found, indent=1)] if kind == "json" else _lines(found)
    print(*lines, sep="\n", file=file)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    processes = "" if found["processes"] < 2 else f", {found['processes']} processes"
    yield f"accel: {found['title']}{processes}"
    for name, refusal in found["targets"].items():
        if refusal:
            yield f"{name} is not accelerated: {refusal}"
    for rank in found["ranks_missing"]:
        yield f"rank {rank} has left no report"
    if not found["routes"]:
        on = [name for name, refusal in found["targets"].items() if not refusal]
        yield "no call was seen: " + (
            f"accelerated were {', '.join(on)}" if on else "nothing was imported that it serves"
        )
        return
    ranks = list(dict.fromkeys(rank for route in found["routes"] for rank in route["by_rank"]))
    rows = [("target", "callable", "route", "calls", *(f"rank {rank}" for rank in ranks))]
    for route in found["routes"]:
        name = f"{route['path']}:{route['backend'] if route['path'] == 'native' else route['reason']}"
        counts = [str(route["by_rank"].get(rank, 0)) for rank in ranks]
        rows.append((route["target"], route["callable"], name, str(route["calls"]), *counts))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        words = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)]
        numbers = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        yield "  " + "  ".join(words + numbers)
    for first in found["firsts"]:
        yield f"{first['target']}.{first['callable']} took {first['path']}:{first['reason']}"
        yield from (f"  {label}: {first[key]}" for label, key in LABELS if first[key])


LABELS = (("check", "detail"), ("fix", "fix"), ("first at", "where"))
