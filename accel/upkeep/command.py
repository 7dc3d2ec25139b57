"""`python -m accel matrix check`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.progress import Progress

from accel import matrix
from accel.tables import Matrix, Target
from accel.upkeep import edit, read, releases

app = typer.Typer(help="What upstreams look like, as compat_matrix.yaml says it.", no_args_is_help=True)


class Wanted(NamedTuple):
    """A release to look at; the newest one there is where `version` is None."""

    target: str
    version: Version | None


@app.callback()
def group() -> None:
    """What upstreams look like, as compat_matrix.yaml says it."""


@app.command()
def check(
    latest: Annotated[bool, typer.Option(help="the newest release of each upstream, instead of those listed")] = False,
    upstream: Annotated[
        str | None, typer.Option(help="one of them: a target, an alias or a distribution; NAME==VERSION is one release")
    ] = None,
    file: Annotated[Path, typer.Option(help="another matrix than that of this installation")] = matrix.PATH,
) -> None:
    """Install each listed release into a folder of its own, and compare it with its row: callables, owners, signatures.

    Drift is printed as a diff of compat_matrix.yaml, on stdout. Exit code 0: none; 1: some; 2: none was seen, but not
    everything could be looked at. Downloads from the package index; releases are kept in the user's cache folder.
    """
    console = Console(stderr=True, highlight=False)
    text = file.read_text(encoding="utf-8")
    try:
        table = matrix.parse(text)
        wanted = list(_wanted(table, latest, upstream))
    except (matrix.MatrixError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    reads: list[edit.Read] = []
    unchecked = drifted = 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("releases", total=len(wanted))
        for name, version in wanted:
            progress.update(task, description=f"{name} {version or 'newest'}")
            target = table.targets[name]
            try:
                found = _read(name, target, version or releases.newest(target.distribution))
            except (releases.ReleaseError, read.UnclearError) as error:
                unchecked += 1
                _say(console, f"{target.distribution} {version or 'newest'} could not be checked: {error}")
            else:
                reads.append(found)
                drifted += _tell(console, target, found)
            progress.advance(task)
    edited, notes = edit.propose(text, reads)
    for note in notes:
        _say(console, note)
    print(edit.diff(text, edited, matrix.PATH.name), end="")
    raise typer.Exit(1 if drifted else 2 if unchecked else 0)


def _wanted(table: Matrix, latest: bool, upstream: str | None) -> Iterator[Wanted]:
    """The releases to look at; ValueError for a name or a version that is none."""
    name, _, version = (upstream or "").partition("==")
    chosen = [key for key, target in table.targets.items() if name in ("", target.distribution)]
    if not chosen:
        chosen = [table.canonical(name)]
        if chosen[0] not in table.targets:
            raise ValueError(f"upstream: {chosen[0]} has no releases")
    for key in chosen:
        if version:
            try:
                yield Wanted(key, Version(version))
            except InvalidVersion:
                raise ValueError(f"upstream: {version!r} is no version") from None
        elif latest:
            yield Wanted(key, None)
        else:
            yield from (Wanted(key, proven) for proven in table.targets[key].proven)


def _read(name: str, target: Target, version: Version) -> edit.Read:
    row = edit.row_of(target, version)
    newest = target.ranges[-1]
    package = (newest.callables or newest.holders)[0].module.partition(".")[0]
    folders = releases.folders(target.distribution, str(version), releases.kept())
    if not (folders[0] / package).is_dir():
        raise releases.ReleaseError(f"it has no package {package}")
    return edit.Read(name, version, row, read.release(target.ranges[row], package, folders))


def _tell(console: Console, target: Target, found: edit.Read) -> bool:
    """Say what was found of a release; whether the matrix says something else."""
    differences = edit.differences(target.ranges[found.row], found.reading)
    listed = found.version in target.proven
    for note in found.reading.notes:
        _say(console, f"{target.distribution} {found.version}: {note}")
    for difference in (*differences, *found.reading.apart):
        _say(console, f"{target.distribution} {found.version}: {difference}")
    if not differences and not found.reading.apart:
        state = "as the matrix says" if listed else "not listed, and like the row that it would belong to"
        _say(console, f"{target.distribution} {found.version}: {state}")
    return bool(differences or found.reading.apart) or not listed


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
