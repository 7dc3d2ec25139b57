"""What a run leaves behind: its rows, with the machine, the versions and the commit that they belong to, as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness

DISTRIBUTIONS = (
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
    "nvidia-cudnn-frontend",
    "mamba-ssm",
    "transformers",
)


def output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU ({platform.machine()})",
        "processors": torch.cuda.get_device_properties(0).multi_processor_count if cuda else os.cpu_count(),
        "driver": output_of("nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: found for name in DISTRIBUTIONS if (found := version(name))},
    }


def write(out: Path, script: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Writes OUT, replaced at once, so that a run that is cut off leaves its last whole table."""
    document = {
        "script": script,
        "commit": os.environ.get("ACCEL_COMMIT") or output_of("git", "rev-parse", "HEAD"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "protocol": harness.PROTOCOL,
        **more,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(out)
