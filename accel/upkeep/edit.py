"""Readings of releases as edits of compat_matrix.yaml's text, comments and anchors kept.

A row that several releases share is edited where all of them that were read agree; else a note says what differs. A new
release joins the row that it looks like, or gets a row of its own behind it.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import yaml
from packaging.version import Version

from accel import matrix
from accel.tables import PatchPoint, Target, VersionRange
from accel.upkeep.read import Found, Reading

WIDTH = 120
Span = tuple[int, int]  # first and last line, the last one excluded; or characters


class Read(NamedTuple):
    """What was read of one release: `row` is the range that it was compared with."""

    target: str
    version: Version
    row: int
    reading: Reading

    @property
    def name(self) -> str:
        return f"{self.target} {self.version}"


def row_of(target: Target, version: Version) -> int:
    """The range that a release belongs to, or else the nearest."""
    row = target.range_of(version)
    if row is not None:
        return target.ranges.index(row)
    behind = [index for index, other in enumerate(target.ranges) if other.proven[-1] < version]
    return behind[-1] if behind else 0


def differences(row: VersionRange, reading: Reading) -> list[str]:
    """What a release has otherwise than the row says, in words."""
    found = []
    for point, seen in zip(row.callables, reading.callables, strict=True):
        if seen is None:
            found.append(f"{point.attribute} is gone from {point.module}")
        else:
            if seen.module != point.module:
                found.append(f"{point.attribute} belongs to {seen.module}, not {point.module}")
            if seen.parameters != point.parameters:
                found.append(f"{point.attribute} takes ({seen.parameters}), not ({point.parameters})")
    for index in reading.lacking:
        found.append(f"{row.holders[index].module} has no {row.holders[index].attribute}")
    return found


def propose(text: str, reads: Sequence[Read]) -> tuple[str, list[str]]:
    """The text as the releases have it, and what could not be written into it."""
    table, notes = matrix.parse(text), []
    document = _Document(text)
    for read in reads:
        target = table.targets[read.target]
        if read.version in target.proven:
            document.correct(read, target.ranges[read.row])
        elif read.version < target.proven[0]:
            found = "; ".join(differences(target.ranges[0], read.reading)) or "it looks like the oldest"
            notes.append(f"{read.name} is older than every row: {found}")
        elif differences(target.ranges[read.row], read.reading):
            document.split(read, target, notes)
        else:
            document.join(read, target)
    edited = document.edited(notes)
    try:
        matrix.parse(edited)
    except matrix.MatrixError as error:
        notes.append(f"the matrix would not be one after this: {error}")
    return edited, notes


def diff(old: str, new: str, name: str) -> str:
    """As `git apply` and `patch -p1` take it."""
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{name}", f"b/{name}")
    return "".join(lines)


class _Document:
    """A matrix's text, with the places of its nodes, and what is wanted there by which release."""

    def __init__(self, text: str):
        self.text, self.lines = text, text.splitlines(True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.targets = _keys(_keys(yaml.compose(text, Loader=yaml.SafeLoader))["targets"])
        self.wants: dict[Span, dict[str, list[str]]] = {}  # by characters: new text, and the releases that want it

    def want(self, span: Span, new: str, name: str) -> None:
        self.wants.setdefault(span, {}).setdefault(new, []).append(name)

    def row(self, read: Read) -> dict[str, yaml.Node]:
        return _keys(_keys(self.targets[read.target])["ranges"].value[read.row])

    def correct(self, read: Read, row: VersionRange) -> None:
        """Each callable and holder as the release has it; what is right is wanted too, against other releases."""
        keys = self.row(read)
        for index, (point, seen) in enumerate(zip(row.callables, read.reading.callables, strict=True)):
            node = keys["callables"].value[index]
            whole = self.item(node)
            self.want(whole, "" if seen is None else self.text[slice(*whole)], read.name)
            if seen is not None:
                parts = _keys(node)
                self.want(_characters(parts["module"]), seen.module, read.name)
                span = _characters(parts["parameters"])
                same = seen.parameters == point.parameters
                self.want(span, self.text[slice(*span)] if same else _parameters(seen, 12), read.name)
        for index in range(len(row.holders)):
            whole = self.item(keys["holders"].value[index])
            self.want(whole, "" if index in read.reading.lacking else self.text[slice(*whole)], read.name)

    def join(self, read: Read, target: Target) -> None:
        """One more proven release of a row that it looks like, and within its versions."""
        keys, row = self.row(read), target.ranges[read.row]
        proven = sorted({*row.proven, read.version})
        self.want(_characters(keys["proven"]), f"[{', '.join(map(str, proven))}]", read.name)
        if not row.versions.contains(read.version, prereleases=True):
            specifiers = [str(one) for one in row.versions if not one.operator.startswith("<")]
            widened = ",".join([*specifiers, f"<{_next(read.version)}"])
            self.want(_characters(keys["versions"]), f'"{widened}"', read.name)

    def split(self, read: Read, target: Target, notes: list[str]) -> None:
        """A row of its own for a release that differs, behind the one that it was compared with."""
        keys, row = self.row(read), target.ranges[read.row]
        end = next((str(one)[1:] for one in row.versions if one.operator == "<"), None)
        if row.versions.contains(read.version, prereleases=True):
            if read.version < row.proven[-1] or end is None:
                found = "; ".join(differences(row, read.reading))
                notes.append(f"{read.name} differs from releases before and after it in its row: {found}")
                return
            start = next(str(one) for one in row.versions if not one.operator.startswith("<"))
            self.want(_characters(keys["versions"]), f'"{start},<{read.version}"', read.name)
        else:
            end = str(_next(read.version))
        node = _keys(self.targets[read.target])["ranges"].value[read.row]
        first, last = self.span(node)
        indent = " " * self.lines[first].index("-")
        block = [f'{indent}- versions: ">={read.version},<{end}"\n', f"{indent}  proven: [{read.version}]\n"]
        for name in keys:
            if name == "callables":
                block.append(f"{indent}  callables:\n")
                for point, seen in zip(row.callables, read.reading.callables, strict=True):
                    block += _written(point, seen, read.version, len(indent) + 4)
            elif name not in ("versions", "proven"):
                block.append(self.section(node, name, last))
        at = self.starts[last]
        self.want((at, at), "".join(block), read.name)

    def section(self, row: yaml.Node, name: str, last: int) -> str:
        """The lines of one key of a row, to be written once more: anchors are not set again."""
        keys = [key for key, _ in row.value]
        index = next(index for index, key in enumerate(keys) if key.value == name)
        stop = keys[index + 1].start_mark.line if index + 1 < len(keys) else last
        lines = "".join(self.lines[keys[index].start_mark.line : stop])
        return re.sub(r" &\w+", "", re.sub(r"- &\w+\n\s+", "- ", lines))

    def span(self, node: yaml.Node) -> Span:
        """The lines of a block, without the comments and empty lines behind it."""
        first, last = node.start_mark.line, node.end_mark.line
        if node.end_mark.column and node.end_mark.line == node.start_mark.line:
            last += 1
        while last > first + 1 and self.lines[last - 1].strip()[:1] in ("", "#"):
            last -= 1
        return first, last

    def item(self, node: yaml.Node) -> Span:
        """The characters of a list's item, its lines whole."""
        first, last = self.span(node)
        return self.starts[first], self.starts[last]

    def edited(self, notes: list[str]) -> str:
        """The text with every change that nobody is against."""
        text, taken = self.text, len(self.text) + 1
        for span, wanted in sorted(self.wants.items(), reverse=True):
            old = self.text[slice(*span)]
            if len(wanted) > 1:
                each = "; ".join(f"{', '.join(names)}: {_short(new)}" for new, names in wanted.items())
                line = self.text.count("\n", 0, span[0]) + 1
                notes.append(f"line {line} is shared by releases that differ, a row for each of them is needed: {each}")
                continue
            (new,) = wanted
            if new != old and span[1] <= taken:
                text = text[: span[0]] + new + text[span[1] :]
                taken = span[0]
        return text


def _keys(node: yaml.Node) -> dict[str, yaml.Node]:
    return {key.value: value for key, value in node.value}


def _characters(node: yaml.Node) -> Span:
    return node.start_mark.index, node.end_mark.index


def _next(version: Version) -> Version:
    return Version(f"{version.major}.{version.minor}.{version.micro + 1}")


def _short(text: str) -> str:
    return " ".join(text.split()) or "gone"


def _parameters(seen: Found, indent: int) -> str:
    """A parameter list as it stands behind its key, wrapped, and quoted where YAML would read something else."""
    text = seen.parameters
    try:
        plain = yaml.safe_load(f"parameters: {text}") == {"parameters": text}
    except yaml.YAMLError:
        plain = False
    if not plain:
        text = "'" + text.replace("'", "''") + "'"
    key = " " * indent + "parameters: "
    rest = " " * (indent + 2)
    wrapped = textwrap.wrap(text, WIDTH, initial_indent=key, subsequent_indent=rest, break_long_words=False)
    return "\n".join(wrapped)[len(key) :]


def _written(point: PatchPoint, seen: Found | None, version: Version, indent: int) -> list[str]:
    """A callable of a new row. One that takes other parameters needs an adapter of that name."""
    if seen is None:
        return []
    same = seen.parameters == point.parameters
    adapter = point.adapter if same else f"{point.adapter.partition('@')[0]}@{version}"
    pad = " " * (indent + 2)
    return [
        f"{' ' * indent}- attribute: {point.attribute}\n",
        f"{pad}module: {seen.module}\n",
        f"{pad}adapter: {adapter}\n",
        f"{pad}parameters: {_parameters(seen, indent + 2)}\n",
    ]
