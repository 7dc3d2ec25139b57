"""`python -m accel bench`."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from accel.bench import clock, rows, shapes, show

Op = enum.Enum("Op", {name: name for name in shapes.OPS}, type=str)


def bench(
    op: Annotated[list[Op] | None, typer.Option(help="which operation; may be given again")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="B,T,D,W", help="may be given again; with --op dense also B,T,D,W,DILATION"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="the convolutions of this config: a file, a model type, a repository on this disk"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="all of it for a program")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw it there, as svg or png for example")] = None,
) -> None:
    """Time accel and what is installed beside it on this device; a result that is not right has no number.

    Without --shape and --model all four operations on a few shapes, with them the depthwise ones; bf16, silu where
    depthwise. A decode step (update) has B rows of one token. Exit code 1 where accel itself has no number.
    """
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    if device.type not in clock.PROTOCOL:
        raise typer.BadParameter(f"this machine has a {device.type} device, which no backend serves")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot draws with matplotlib, which is not installed: pip install 'fla-accel[plot]'")
    try:
        wanted = _wanted(list(dict.fromkeys(choice.value for choice in op or ())), shape or [], model, device.type)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    found = _run(wanted, device)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show.show(found, Console(highlight=False))
    if plot is not None:
        importlib.import_module("accel.bench.plot").draw(found, plot)
    raise typer.Exit(1 if any(row["ours"] and "reason" in row for row in found["rows"]) else 0)


def _wanted(ops: list[str], given: list[str], model: str | None, device: str) -> dict[str, list[shapes.Shape]]:
    """Shapes by operation; ValueError where there are none."""
    if not given and model is None:
        return {op: shapes.DEFAULTS[op][device] for op in ops or shapes.OPS}
    ops = ops or list(shapes.DEPTHWISE)
    parsed = [shapes.parse(text) for text in given]
    if any(shape.dilation != 1 for shape in parsed) and ops != ["dense"]:
        raise ValueError("shape: a dilation is for --op dense alone")
    of_model = shapes.of_model(model, device) if model is not None else {}
    wanted = {op: [*parsed, *of_model.get(op, [])] for op in ops}
    if not any(wanted.values()):
        raise ValueError("model: no dense convolution is known of it; --op dense needs --shape")
    return wanted


def _run(wanted: dict[str, list[shapes.Shape]], device: torch.device) -> dict:
    absent: dict[str, str] = {}
    total = 1
    for op, each in wanted.items():
        names, missing = rows.peers(op, device)
        total += len(names) * len(each)
        absent |= missing
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("copy", total=total)
        copied, done = clock.copy_bandwidth(device), []
        progress.advance(task)
        for row in rows.measure(wanted, device):
            done.append(row)
            progress.update(task, advance=1, description=f"{row.op} {row.provider}")
    return show.document(done, absent, device, copied)
