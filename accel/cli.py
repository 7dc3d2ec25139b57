"""The command line: `python -m accel demo | doctor`, and what generates the README's table.

Top floor. Imports no upstream: the demo is a script of its own, and doctor asks accelerate().
"""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy

import torch
import typer
from rich.console import Console
from rich.table import Table

from accel import accelerate, environment, matrix, restore

app = typer.Typer(
    help="Native short causal convolutions for FLA, Mamba and Transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
DISTRIBUTIONS = (
    "fla-accel",
    "torch",
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "fla-core",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
    "transformers",
)


@app.command()
def demo() -> None:
    """Run real FLA code with the originals and accelerated: results, routes and times of both."""
    missing = [name for name in ("fla", "einops", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the demo runs FLA, and {', '.join(missing)} cannot be found: pip install 'fla-accel[fla]'")
        raise typer.Exit(2)
    if not torch.accelerator.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    runpy.run_module("accel.demo", run_name="__main__")


@app.command()
def doctor() -> None:
    """Say what is installed, what the devices are, and which targets can be switched on, or why not."""
    console = Console(highlight=False)
    versions = Table("distribution", "version", title=f"Python {platform.python_version()}", title_justify="left")
    for name in DISTRIBUTIONS:
        versions.add_row(name, environment.distribution_version(name) or "not installed")
    devices = Table("device", "backend", "arch", "detail", title="devices", title_justify="left")
    for device in _devices():
        facts = environment.facts(device)
        devices.add_row(str(device), facts.backend or "none", facts.arch or "", facts.detail)
    targets = Table("target", "enabled", "why not", title="targets", title_justify="left")
    table = matrix.load()
    for name in (*table.targets, *table.planned):
        reason = _refusal(name)
        targets.add_row(name, "no" if reason else "yes", reason)
    for part in (versions, devices, targets):
        console.print(part)
    if environment.facts(torch.device("cpu")).disabled:
        console.print("ACCEL_DISABLE is set: every call goes to its original", style="yellow")


@app.command(hidden=True)
def support() -> None:
    """Print the table between the README's markers, from compat_matrix.yaml."""
    print(support_table(matrix.load()))


def support_table(table: matrix.Matrix) -> str:
    """The matrix as Markdown: what is served, then what each operation takes."""
    lines = ["| target | distribution | releases | callables |", "| --- | --- | --- | --- |"]
    for name, target in table.targets.items():
        releases = ", ".join(map(str, target.proven))
        named = [place.attribute for row in target.ranges for place in row.callables or row.holders]
        callables = ", ".join(f"`{attribute}`" for attribute in dict.fromkeys(named))
        lines.append(f"| `{name}` | `{target.distribution}` | {releases} | {callables} |")
    lines += ["", "| operation | backend | dtypes | weight, bias | widths | layouts |", "| --- " * 6 + "|"]
    for operation, backends in table.operations.items():
        for backend, support in backends.items():
            cells = (support.dtypes, support.parameter_dtypes, support.widths, support.layouts)
            row = " | ".join(", ".join(map(str, cell)) or "-" for cell in cells)
            lines.append(f"| `{operation}` | {backend} | {row} |")
    compiled, run = table.architectures.compiled, table.architectures.run
    lines += ["", f"Compiled for {', '.join(compiled)}; run on {', '.join(run)}."]
    return "\n".join(lines)


def _devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        found += [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    return found


def _refusal(target: str) -> str:
    """Why a target cannot be switched on, found by trying; empty when it can."""
    try:
        accelerate([target], verbose=False)
    except ImportError as error:
        return str(error).partition(f"{target}: ")[2] or str(error)
    restore([target])
    return ""
