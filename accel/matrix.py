"""compat_matrix.yaml: read once, validated strictly, as frozen tables.

Imports PyYAML and packaging, nothing of `accel` but `errors`. The one surprise: it reads YAML nodes instead of loaded
values, because nodes know their line and keep duplicate keys, and an error should name both.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from accel.errors import AccelError

PATH = Path(__file__).with_name("compat_matrix.yaml")


class MatrixError(AccelError):
    """compat_matrix.yaml says something that it must not say; the message names the key and the line."""


class Parameters(str):
    """A parameter list without annotations, as `inspect.signature` would print it: "x, weight=None, **kwargs"."""

    def __new__(cls, text: str) -> Parameters:
        function = ast.parse(f"def _({text}): ...").body[0]
        return super().__new__(cls, ast.unparse(function.args))

    @classmethod
    def of(cls, function: Callable) -> Parameters:
        signature = inspect.signature(function)
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
        return super().__new__(cls, text[1:-1])  # a default may have no source form, so this text is not parsed


@dataclass(frozen=True)
class PatchPoint:
    """One upstream callable. `module` is its owner, whose globals the upstream's own code reads: a name to import."""

    attribute: str
    module: str
    adapter: str
    parameters: Parameters


@dataclass(frozen=True)
class VersionRange:
    """Releases that look alike. `proven` are those that the tests install and compare."""

    versions: SpecifierSet
    proven: tuple[Version, ...]
    callables: tuple[PatchPoint, ...]


@dataclass(frozen=True)
class Target:
    """A group of callables of one upstream distribution, switched together. Ranges go from the oldest to the newest."""

    summary: str
    distribution: str
    ranges: tuple[VersionRange, ...]

    def range_of(self, version: Version) -> VersionRange | None:
        return next((row for row in self.ranges if row.versions.contains(version, prereleases=True)), None)

    @property
    def proven(self) -> tuple[Version, ...]:
        return tuple(version for row in self.ranges for version in row.proven)


@dataclass(frozen=True)
class Architectures:
    """What the kernels are compiled for, and where they were really run."""

    compiled: tuple[str, ...]
    run: tuple[str, ...]


@dataclass(frozen=True)
class Support:
    """What one backend takes in one operation; `parameter_dtypes` are those of weight and bias."""

    dtypes: tuple[str, ...]
    parameter_dtypes: tuple[str, ...]
    widths: tuple[int, ...]
    layouts: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """What an upstream gets wrong, in which versions, and what a native call does instead."""

    target: str
    callables: tuple[str, ...]
    versions: SpecifierSet
    fault: str
    native: str
    reference: str


@dataclass(frozen=True)
class Matrix:
    """The whole file. `planned` names are known and not served yet; `operations` is by operation, then backend.

    `modules` are the targets that serve modules of a given model instead of an upstream's callables.
    """

    targets: Mapping[str, Target]
    modules: tuple[str, ...]
    planned: tuple[str, ...]
    aliases: Mapping[str, str]
    architectures: Architectures
    operations: Mapping[str, Mapping[str, Support]]
    faults: tuple[Fault, ...]

    def canonical(self, name: str) -> str:
        """The target that a name or an alias means."""
        target = self.aliases.get(name, name)
        known = (*self.targets, *self.modules, *self.planned)
        if target not in known:
            aliases = ", ".join(f"{alias} = {meant}" for alias, meant in self.aliases.items())
            names = ", ".join(known)
            raise ValueError(f"targets: expected some of {names} (aliases: {aliases}) or 'all', got {name!r}")
        return target


@functools.cache
def load() -> Matrix:
    """The matrix of this installation."""
    return parse(PATH.read_text(encoding="utf-8"))


def parse(text: str) -> Matrix:
    """Text to tables; MatrixError names the key that is wrong."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise MatrixError(f"not YAML: {error}") from None
    if root is None:
        raise MatrixError("expected a mapping, got an empty file")
    matrix = _read(root, Matrix, "")
    _cross_check(matrix)
    return matrix


def _read(node: yaml.Node, kind: Any, path: str) -> Any:
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        entries = _entries(node, path)
        for name, (key, _) in entries.items():
            if name not in hints:
                raise _wrong(key, _join(path, name), f"unknown key; known here: {', '.join(hints)}")
        for field in fields(kind):
            if field.name not in entries and field.default is MISSING:
                raise _wrong(node, _join(path, field.name), "missing key")
        return kind(**{name: _read(value, hints[name], _join(path, name)) for name, (_, value) in entries.items()})
    if get_origin(kind) is tuple:
        if not isinstance(node, yaml.SequenceNode):
            raise _wrong(node, path, f"expected a list, got {_kind(node)}")
        item = get_args(kind)[0]
        return tuple(_read(value, item, f"{path}[{index}]") for index, value in enumerate(node.value))
    if get_origin(kind) is Mapping:
        item = get_args(kind)[1]
        entries = _entries(node, path).items()
        return MappingProxyType({name: _read(value, item, _join(path, name)) for name, (_, value) in entries})
    wanted = "int" if kind is int else "str"
    if not isinstance(node, yaml.ScalarNode) or node.tag != f"tag:yaml.org,2002:{wanted}":
        raise _wrong(node, path, f"expected {wanted}, got {_kind(node)}")
    try:
        return kind(node.value)
    except (ValueError, SyntaxError):  # InvalidSpecifier and InvalidVersion are ValueErrors
        raise _wrong(node, path, f"not a valid {kind.__name__}: {node.value!r}") from None


def _entries(node: yaml.Node, path: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(node, path, f"expected a mapping, got {_kind(node)}")
    entries = {}
    for key, value in node.value:
        name = _read(key, str, path)
        if name in entries:
            raise _wrong(key, _join(path, name), "key given twice")
        entries[name] = (key, value)
    return entries


def _cross_check(matrix: Matrix) -> None:
    """What one key says about another: names that exist, proven versions inside their own range and no other."""
    for alias, target in matrix.aliases.items():
        if target not in matrix.targets:
            raise MatrixError(f"aliases.{alias}: {target!r} is no target")
    for index, name in enumerate(matrix.planned):
        if name in matrix.targets:
            raise MatrixError(f"planned[{index}]: {name!r} is a target already")
    for name, target in matrix.targets.items():
        if not target.ranges:
            raise MatrixError(f"targets.{name}.ranges: empty")
        for index, row in enumerate(target.ranges):
            for version in row.proven:
                homes = [other for other in target.ranges if other.versions.contains(version, prereleases=True)]
                if homes != [row]:
                    where = f"targets.{name}.ranges[{index}].proven"
                    raise MatrixError(f"{where}: {version} must lie in this range and in no other")
        if not target.proven or list(target.proven) != sorted(target.proven):
            raise MatrixError(f"targets.{name}.ranges: expected proven versions from the oldest to the newest")
    for index, fault in enumerate(matrix.faults):
        if fault.target not in matrix.targets:
            raise MatrixError(f"faults[{index}].target: {fault.target!r} is no target")
        named = {point.attribute for row in matrix.targets[fault.target].ranges for point in row.callables}
        for attribute in fault.callables:
            if attribute not in named:
                raise MatrixError(f"faults[{index}].callables: {attribute!r} is no callable of {fault.target}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kind(node: yaml.Node) -> str:
    return node.tag.rsplit(":", 1)[-1]


def _wrong(node: yaml.Node, path: str, what: str) -> MatrixError:
    return MatrixError(f"{path or 'the file'} (line {node.start_mark.line + 1}): {what}")
