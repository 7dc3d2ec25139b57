"""Carries Triton's cache from one bare machine to the next: what FLA tuned and compiled once need not be done again.

`python -m benchmarks.triton_cache pack DIR` and `... unpack DIR`. The cache holds absolute paths, so TRITON_CACHE_DIR
has to be the same folder on both machines. Only what a second process loads is packed: binaries, metadata, launchers.
"""

from __future__ import annotations

import io
import lzma
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import typer
from triton.runtime.autotuner import Autotuner

KEPT = (".cubin", ".json", ".so")
PART_BYTES = 15 << 20
app = typer.Typer(add_completion=False)


def cache_dir() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def fill(parts: int, *program: str) -> None:
    """Run a program `parts` times side by side with `--share I/PARTS`: each compiles its share of what Triton tunes.

    One process compiles configuration after configuration, which takes minutes for FLA's kernels.
    """
    command = [sys.executable, *program, "--share"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([*command, f"{part}/{parts}"], **quiet) for part in range(parts)]
    failed = sum(process.wait() != 0 for process in running)
    print(f"filled the Triton cache in {parts} processes, {failed} of them failed", flush=True)


def take_share(share: str) -> None:
    """Let this process try only share "I/PARTS" of every kernel's configurations."""
    part, parts = (int(number) for number in share.split("/"))
    prune = Autotuner.prune_configs

    def fewer(tuner: Autotuner, kwargs: dict) -> list:
        configs = prune(tuner, kwargs)
        return configs[part::parts] or [configs[part % len(configs)]]

    Autotuner.prune_configs = fewer


@app.command()
def pack(out: Path, most_parts: int = 4) -> None:
    """Writes OUT/triton-cache.0, .1, ...; nothing where it would take more than MOST_PARTS parts."""
    buffer = io.BytesIO()
    with lzma.open(buffer, "wb", preset=1) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(cache_dir().rglob("*")):
            if path.is_file() and path.suffix in KEPT:
                tar.add(path, path.relative_to(cache_dir()))
    data = buffer.getvalue()
    parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    if len(parts) > most_parts:
        print(f"the Triton cache takes {len(data) >> 20} MiB packed: not kept")
        return
    out.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(parts):
        (out / f"triton-cache.{i}").write_bytes(part)
    print(f"kept the Triton cache: {len(data) >> 20} MiB in {len(parts)} parts")


@app.command()
def unpack(source: Path) -> None:
    """Adds what SOURCE/triton-cache.* hold to the cache; nothing where there are none."""
    parts = sorted(source.glob("triton-cache.*"), key=lambda path: int(path.suffix[1:]))
    if not parts:
        print(f"no Triton cache in {source}")
        return
    data = b"".join(part.read_bytes() for part in parts)
    with lzma.open(io.BytesIO(data)) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
        tar.extractall(cache_dir(), filter="data")
    print(f"unpacked {len(data) >> 20} MiB into {cache_dir()}")


if __name__ == "__main__":
    app()
