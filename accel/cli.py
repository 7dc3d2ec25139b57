"""The command line: `python -m accel run | demo | doctor | cache`, and what generates the README's table.

Top floor. Imports no upstream: the demo is a script of its own, and doctor asks accelerate().
"""

from __future__ import annotations

import enum
import importlib.util
import os
import platform
import runpy
import shlex
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from accel import AccelError, accelerate, environment, launch, matrix, restore
from accel.kernels import cache

app = typer.Typer(
    help="Native short causal convolutions for FLA, Mamba and Transformers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="Compiled kernels on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
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
    console.print(f"compiled kernels in {_cache_state()}", soft_wrap=True)
    if environment.facts(torch.device("cpu")).disabled:
        console.print("ACCEL_DISABLE is set: every call goes to its original", style="yellow")


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
