"""What a release has at the places that the matrix names: asked of a process that imports it, else read in its source.

Source is read for patterns too, whose modules nobody imports, and to find the module that a callable has moved to.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import accel
from accel.errors import AccelError
from accel.tables import Holder, Parameters, PatchPoint, VersionRange

Place = tuple[str, str]  # module and attribute


class UnclearError(AccelError):
    """What a release has cannot be told; the message says why."""


class Found(NamedTuple):
    """A callable of a release: where it is defined, and its parameters."""

    module: str
    parameters: str


class Reading(NamedTuple):
    """A row against a release: each callable in order, None where the release has none, and what its own holders hold.

    `held` has the type's name by the holder's index: "" where it is only known that the name is there, None where it
    is not. `apart`: modules of a pattern that have other parameters than the row. `notes`: what else is to be said.
    """

    callables: list[Found | None]
    held: dict[int, str | None]
    apart: list[str]
    notes: list[str]

    @property
    def lacking(self) -> list[int]:
        """The holders that the release has not."""
        return [index for index, kind in self.held.items() if kind is None]


def release(row: VersionRange, package: str, folders: Sequence[Path]) -> Reading:
    """Read what a row names; the first folder has the package. UnclearError where a callable may be one of several."""
    named = [point for point in row.callables if not point.is_pattern]
    held = [(index, holder) for index, holder in enumerate(row.holders) if is_own(holder, package)]
    places = [(place.module, place.attribute) for place in (*named, *(holder for _, holder in held))]
    looked = dict(zip(places, probe(places, folders), strict=True))
    source = Source(folders[0], package)
    apart: list[str] = []
    notes: list[str] = []
    callables = [
        _of_pattern(point, source, apart) if point.is_pattern else _of_name(point, looked, source, folders, notes)
        for point in row.callables
    ]
    answers = {index: (holder, looked[holder.module, holder.attribute]) for index, holder in held}
    kinds = {
        index: answer["type"] if "type" in answer else "" if source.binds(holder.module, holder.attribute) else None
        for index, (holder, answer) in answers.items()
    }
    return Reading(callables, kinds, apart, notes)


def probe(places: Sequence[Place], folders: Sequence[Path]) -> list[dict[str, Any]]:
    """What accel/upkeep/probe.py says of each place, or the error that kept it from saying anything."""
    if not places:
        return []
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")]), str(Path(accel.__file__).parents[1])]
    env = {"PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", "from accel.upkeep import probe; probe.main()"],
        cwd=folders[0],
        env={**os.environ, **env},
        input=json.dumps(places),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [{"error": reason}] * len(places)
    return json.loads(done.stdout.splitlines()[-1])


def is_own(holder: Holder, package: str) -> bool:
    """Whether a holder is a name of the package itself that can be looked up without a model or another package."""
    return holder.form == "callable" and "*" not in holder.module and holder.module.startswith(f"{package}.")


def _of_name(
    point: PatchPoint, looked: dict[Place, dict], source: Source, folders: Sequence[Path], notes: list[str]
) -> Found | None:
    answer = looked[point.module, point.attribute]
    if answer.get("type") == "function" and answer["name"] == point.attribute:
        return Found(answer["module"], answer["parameters"])
    here = source.parameters(point.module, point.attribute)
    modules = [point.module] if here is not None else source.definers(point.attribute)
    if len(modules) > 1:
        raise UnclearError(f"{point.module} has no {point.attribute}, and {' and '.join(modules)} have one")
    if not modules:
        return None
    (answer,) = probe([(modules[0], point.attribute)], folders)
    if answer.get("type") == "function":
        return Found(answer["module"], answer["parameters"])
    why = answer.get("error", f"imported, it is a {answer.get('type')}")
    notes.append(f"{point.attribute} was read in the source of {modules[0]}: {why}")
    return Found(modules[0], source.parameters(modules[0], point.attribute))


def _of_pattern(point: PatchPoint, source: Source, apart: list[str]) -> Found | None:
    """The one parameter list of all modules that match, or the row's own where one of them has it."""
    lists: dict[str, list[str]] = {}
    for module in source.definers(point.attribute):
        if point.owns(module):
            lists.setdefault(source.parameters(module, point.attribute), []).append(module)
    if not lists:
        return None
    others = {text: modules for text, modules in lists.items() if text != point.parameters}
    if len(others) == len(lists) == 1:
        return Found(point.module, next(iter(others)))
    for text, modules in others.items():
        apart.append(f"{point.attribute} takes ({text}) in {', '.join(modules)}, where it would not be served")
    return Found(point.module, point.parameters)


class Source:
    """The source text of a package in a folder."""

    def __init__(self, folder: Path, package: str):
        self.folder, self.package = folder, package

    def parameters(self, module: str, attribute: str) -> str | None:
        """The parameters of a function that a module defines at its top level, or a class there: no annotations."""
        owner, _, name = attribute.rpartition(".")
        for statement in self._statements(module, owner):
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                arguments = statement.args
                for argument in ast.walk(arguments):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                return Parameters(ast.unparse(arguments))
        return None

    def definers(self, attribute: str) -> list[str]:
        """The modules that define a function of this name at their top level, or a method of it."""
        found = []
        for path in sorted((self.folder / self.package).rglob("*.py")):
            if f"def {attribute.rpartition('.')[2]}(" in path.read_text(encoding="utf-8", errors="replace"):
                parts = path.relative_to(self.folder).with_suffix("").parts
                module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                if self.parameters(module, attribute) is not None:
                    found.append(module)
        return found

    def binds(self, module: str, attribute: str) -> bool:
        """Whether a module gives this name a value at its top level."""
        return any(attribute in _names(statement) for statement in self._statements(module))

    def _statements(self, module: str, owner: str = "") -> Iterator[ast.stmt]:
        """What stands at a module's top level, or in the body of the class there of the name `owner`."""
        base = self.folder.joinpath(*module.split("."))
        path = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
        if path is None:
            return
        waiting = list(ast.parse(path.read_text(encoding="utf-8")).body)
        while waiting:
            statement = waiting.pop(0)
            if not owner:
                yield statement
            elif isinstance(statement, ast.ClassDef) and statement.name == owner:
                yield from statement.body
            if isinstance(statement, ast.If | ast.Try | ast.With):  # their bodies are top level too
                bodies = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
                bodies += [handler.body for handler in getattr(statement, "handlers", [])]
                waiting = [inner for body in bodies for inner in body] + waiting


def _names(statement: ast.stmt) -> set[str]:
    """The names that one statement binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
        return {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return set()
