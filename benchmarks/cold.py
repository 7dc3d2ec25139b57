"""Cold starts: the first native call of a process, empty and warm cache, one and many processes at once.

`python -m benchmarks.cold [--dry-run]`. Imports are timed apart; a first call is everything else: the device's facts,
compiling or loading the kernels, loading them onto the GPU, the call itself and waiting for it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from accel.bench.cases import require
from benchmarks import harness, results
from benchmarks.first_call import OPS
from benchmarks.harness import Entry

GOALS = {"warm": 20.0, "empty": 700.0}  # ms over a warm call, one process
TIMEOUT = 240


def run(op: str, device: str, folder: str, count: int, compiler: bool) -> tuple[list[dict[str, Any]], float]:
    """What `count` fresh processes measured that made their first call at one moment; seconds from start to end."""
    command = [sys.executable, "-m", "benchmarks.first_call", op, device, *(["compiler"] if compiler else [])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = os.environ | {"ACCEL_CACHE_DIR": folder}
    begin = time.perf_counter()
    children = [subprocess.Popen(command, text=True, env=env, **pipes) for _ in range(count)]
    try:
        for child in children:
            word = child.stdout.readline()
            require(word == "ready\n", f"a process did not start: {word}{child.stderr.read() if not word else ''}")
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        found = []
        for child in children:
            out, err = child.communicate(timeout=TIMEOUT)
            require(child.returncode == 0, f"a process failed: {err.strip()[-400:]}")
            found.append(json.loads(out))
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    return found, time.perf_counter() - begin


def measure(op: str, state: str, count: int, device: str, repeats: int) -> dict[str, Any]:
    """One row: medians over repeats; with many processes, of the slowest in each."""
    rounds, walls = [], []
    with tempfile.TemporaryDirectory(prefix="accel-cold-") as root:
        for number in range(repeats):
            # an empty cache is a new folder each time; a warm one is filled by a process that does not count
            folder = os.path.join(root, str(number) if state == "empty" else "filled")
            if state == "warm" and number == 0:
                run(op, device, folder, 1, False)
            found, wall = run(op, device, folder, count, compiler=state == "empty" and device == "cuda")
            entries = len(list(Path(folder).rglob("*.so")))
            compiled = sum(one["compiled"] for one in found)
            require(compiled == (entries if state == "empty" else 0), f"{compiled} compiled, {entries} on the disk")
            require(device == "cpu" or entries > 0, "nothing was stored")
            require(state == "empty" or not any(one["compiler"] for one in found), "a warm cache imported the compiler")
            rounds.append(found)
            walls.append(wall)
    over = [max(one["first_ms"] - one["warm_ms"] for one in found) for found in rounds]
    each = [one for found in rounds for one in found]
    return {
        "first_ms": statistics.median(max(one["first_ms"] for one in found) for found in rounds),
        "warm_ms": statistics.median(one["warm_ms"] for one in each),
        "over_warm_ms": statistics.median(over),
        "imports_ms": statistics.median(one["imports_ms"] for one in each),
        "wall_s": statistics.median(walls),
        "kernels": entries,
        "all_over_warm_ms": over,
    }


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/cold.json"),
    processes: Annotated[str, typer.Option(help="how many at once, comma-separated")] = "1,8",
    repeats: int = 3,
    dry_run: Annotated[bool, typer.Option(help="the CPU backend, which compiles nothing: the way of it alone")] = False,
) -> None:
    device = "cpu" if dry_run else "cuda"
    rows: list[dict] = []
    print(f"{'first call over a warm one':<40}{'ms':>9}{'first':>9}{'warm':>9}{'imports':>9}{'kernels':>9}   goal")
    for op in OPS:
        for count in [int(part) for part in processes.split(",")]:
            for state in ("empty", "warm"):
                case = f"{op}, {state} cache, {count} process{'es' if count > 1 else ''}"
                row = {"op": op, "case": case, "cache": state, "processes": count, "provider": "accel"}
                entry = Entry(case, [])

                def step(_: Entry, row: dict = row, args: tuple = (op, state, count)) -> None:
                    row |= measure(*args, device, 1 if dry_run else repeats)

                if not harness.surviving([entry], step):
                    rows.append(row | {"gate": entry.note})
                    continue
                goal = GOALS[state] if count == 1 and not dry_run else None
                rows.append(row | {"gate": "ok", "goal_ms": goal})
                met = "" if goal is None else f"{goal:.0f} {'met' if row['over_warm_ms'] <= goal else 'MISSED'}"
                cells = (row[name] for name in ("over_warm_ms", "first_ms", "warm_ms", "imports_ms"))
                print(f"{case:<40}" + "".join(f"{ms:9.2f}" for ms in cells) + f"{row['kernels']:9}   {met}", flush=True)
                results.write(out, "cold", rows)
    results.write(out, "cold", rows)


if __name__ == "__main__":
    typer.run(main)
