"""compat_matrix.yaml: read once, validated strictly, into the tables of accel/tables.py.

Imports PyYAML, and of `accel` the tables and `errors`. The one surprise: it reads YAML nodes instead of loaded
values, because nodes know their line and keep duplicate keys, and an error should name both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from accel.errors import AccelError
from accel.tables import FORMS, Matrix, Target, VersionRange

PATH = Path(__file__).with_name("compat_matrix.yaml")


class MatrixError(AccelError):
    """compat_matrix.yaml says something that it must not say; the message names the key and the line."""


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
    if get_origin(kind) is UnionType:
        return _read(node, get_args(kind)[0], path)
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
            _check_row(matrix, target, row, f"targets.{name}.ranges[{index}]")
        if not target.proven or list(target.proven) != sorted(target.proven):
            raise MatrixError(f"targets.{name}.ranges: expected proven versions from the oldest to the newest")
    for index, fault in enumerate(matrix.faults):
        if fault.target not in matrix.targets:
            raise MatrixError(f"faults[{index}].target: {fault.target!r} is no target")
        named = {point.attribute for row in matrix.targets[fault.target].ranges for point in row.callables}
        for attribute in fault.callables:
            if attribute not in named:
                raise MatrixError(f"faults[{index}].callables: {attribute!r} is no callable of {fault.target}")


def _check_row(matrix: Matrix, target: Target, row: VersionRange, path: str) -> None:
    needed = list(row.needs)
    for index, name in enumerate(row.needs):
        if name not in matrix.targets:
            raise MatrixError(f"{path}.needs[{index}]: {name!r} is no target")
        needed += [more for other in matrix.targets[name].ranges for more in other.needs if more not in needed]
    served = [point for name in needed for other in matrix.targets[name].ranges for point in other.callables]
    known = {point.attribute for point in (*row.callables, *target.ranges[-1].callables, *served)}
    for index, holder in enumerate(row.holders):
        where = f"{path}.holders[{index}]"
        if holder.form not in FORMS:
            raise MatrixError(f"{where}.form: expected one of {', '.join(FORMS)}, got {holder.form!r}")
        if holder.form in ("callable", "package") and len(holder.names) != 1:
            raise MatrixError(f"{where}.of: expected one name for a {holder.form}, got {len(holder.names)}")
        for name in holder.names if holder.form in ("callable", "tuple") else ():
            if name not in known:
                raise MatrixError(f"{where}: {name!r} is no callable of this target or of what it needs")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kind(node: yaml.Node) -> str:
    return node.tag.rsplit(":", 1)[-1]


def _wrong(node: yaml.Node, path: str, what: str) -> MatrixError:
    return MatrixError(f"{path or 'the file'} (line {node.start_mark.line + 1}): {what}")
