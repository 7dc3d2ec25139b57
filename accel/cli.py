"""The command line: `python -m accel run | demo | doctor | bench | cache | matrix`, and the README's table.

Top floor. Imports no upstream: the demo and `run` are processes or scripts of their own, doctor.py asks accelerate().
"""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import runpy
import shlex
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from accel import AccelError, doctor, launch, matrix
from accel.bench.command import bench
from accel.kernels import cache
from accel.upkeep import command as upkeep

app = typer.Typer(
    help="Native short causal convolutions for FLA, Mamba and Transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="Compiled kernels on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.add_typer(upkeep.app, name="matrix")
app.command()(bench)


class ReportForm(str, enum.Enum):
    """How `run` prints its report."""

    TABLE = "table"
    JSON = "json"


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT|MODULE [ARGS]...", help="as python takes it")],
    module: Annotated[bool, typer.Option("-m", help="MODULE is run, as by python -m")] = False,
    targets: Annotated[
        str,
        typer.Option(help="all: each when its package is imported; or names with commas, each of them a must"),
    ] = "all",
    report: Annotated[ReportForm, typer.Option(help="the form of the report at exit")] = ReportForm.TABLE,
    out: Annotated[Path | None, typer.Option(help="write the report there, not to stderr")] = None,
) -> None:
    """Run a script as it is, accelerated, and say at its exit which route its calls took, or why not native."""
    names = targets if targets == "all" else targets.split(",")
    words = ["-m", *command] if module else command
    try:
        env = launch.environment_of(names, report.value, out, shlex.join(words), os.environ)
        launch.execute(words, env)
    except (AccelError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


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


@app.command("doctor")
def show_doctor(
    as_json: Annotated[bool, typer.Option("--json", help="all of it for a program")] = False,
) -> None:
    """Say what is here, which targets can be switched on, or why not, and check each operation; 1 where one fails."""
    found = doctor.examine()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print_examination(found, Console(highlight=False))
    raise typer.Exit(0 if all(result["holds"] for result in found["checks"]) else 1)


def _print_examination(found: dict[str, Any], console: Console) -> None:
    versions = Table("distribution", "version", title=f"Python {found['python']}", title_justify="left")
    for name, version in found["versions"].items():
        versions.add_row(name, version or "not installed")
    devices = Table(
        "device", "backend", "arch", "detail", title=f"NVIDIA driver {found['driver'] or 'none'}", title_justify="left"
    )
    for device in found["devices"]:
        devices.add_row(device["device"], device["backend"] or "none", device["arch"], device["detail"])
    targets = Table("target", "enabled", "why not", title="targets", title_justify="left")
    for name, target in found["targets"].items():
        targets.add_row(name, "yes" if target["enabled"] else "no", target["reason"])
    architectures = Table("architecture", "compiled", "run on", title="kernels", title_justify="left")
    for name, state in found["architectures"].items():
        architectures.add_row(name, *("yes" if state[key] else "no" for key in ("compiled", "run")))
    checks = Table("operation", "device", "holds", "error", "seconds", title="self-check", title_justify="left")
    for result in found["checks"]:
        error = result["detail"] if result["error"] is None else f"{result['error']:.1e}"
        holds = "yes" if result["holds"] else "NO"
        checks.add_row(result["operation"], result["device"], holds, error, f"{result['seconds']:.2f}")
    for part in (versions, devices, targets, architectures, checks):
        console.print(part)
    console.print(f"compiled kernels in {_cache_state()}", soft_wrap=True)
    if found["disabled"]:
        console.print("ACCEL_DISABLE is set: every call goes to its original", style="yellow")
    console.print("\nfor an issue:\n")
    console.print(doctor.paste(found), soft_wrap=True, markup=False)


@cache_app.command("info")
def cache_info() -> None:
    """Say where compiled kernels are kept, how many there are, and why the folder is not used, if so."""
    print(_cache_state())


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove all compiled kernels from the disk; running processes keep theirs."""
    removed = cache.clear()
    print(f"{cache.folder()}: {removed} kernels removed")


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


def _cache_state() -> str:
    found = cache.info()
    state = f"{found.folder}: {found.entries} kernels, {found.size / 1024:.0f} KiB"
    return f"{state}\nnot used: {found.problem}" if found.problem else state
