"""What compat_matrix.yaml says, as frozen tables. accel/matrix.py fills them.

Imports packaging and the standard library. The table classes are the schema: a key that none of them has is an error.
"""

from __future__ import annotations

import ast
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

FORMS = ("callable", "tuple", "package", "all")


def one_of(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name is one of these names, or is matched by one of these patterns: quick, for all that is imported."""
    matches = re.compile("|".join(map(fnmatch.translate, dict.fromkeys(patterns))) or r"(?!)").match
    return lambda name: matches(name) is not None


def look_up(module: ModuleType, attribute: str) -> Any:
    """What a module has under a patch point's attribute; KeyError where it has nothing."""
    found: Any = module
    for name in attribute.split("."):
        found = vars(found)[name]
    return found


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
    """One upstream callable. `module` is its owner, whose globals the upstream's own code reads: a name to import.

    Or it is a pattern, as fnmatch has them: each module of such a name that defines the callable is an owner, once it
    is imported; nothing is imported for it. `attribute` is a function of the module, or "Class.method".
    """

    attribute: str
    module: str
    adapter: str
    parameters: Parameters

    @property
    def is_pattern(self) -> bool:
        return "*" in self.module

    def owns(self, module: str) -> bool:
        return fnmatch.fnmatchcase(module, self.module)


@dataclass(frozen=True)
class Holder:
    """A place that holds nothing where a package is absent or too old: there it is filled, and emptied by restore.

    `module` is a name or a pattern; nothing is imported for it. `of` names callables, by default the attribute's own
    name, and `form` says what they make: `callable` the one callable; `tuple` a tuple of them; `package` the package
    of that name; `all` whether all of these attributes of the module hold something. `entry` is a key, where the
    attribute is a dict.
    """

    module: str
    attribute: str
    form: str = "callable"
    of: tuple[str, ...] = ()
    entry: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return self.of or (self.attribute,)

    def owns(self, module: str) -> bool:
        return fnmatch.fnmatchcase(module, self.module)


@dataclass(frozen=True)
class Closure:
    """A function that keeps what it found at its import: in the cell `cell` the package's callable, or that of `own`.

    `flag` is the cell that says whether it is the package's, `parameters` the one with the names that it takes. What
    was captured from a stand-in is put back to the function's own, because no restore could reach it in use.
    """

    module: str
    attribute: str
    cell: str
    own: str
    flag: str
    parameters: str

    def owns(self, module: str) -> bool:
        return fnmatch.fnmatchcase(module, self.module)


@dataclass(frozen=True)
class StandIn:
    """What stands where the package is absent: the newest range's callables, in modules of the same names.

    `version` is its `__version__`, `exports` the callables that the package itself shows.
    """

    version: Version
    exports: tuple[str, ...]


@dataclass(frozen=True)
class VersionRange:
    """Releases that look alike. `proven` are those that the tests install and compare.

    `needs` are targets whose callables are swapped too, as far as they are installed or stood in for; `caches` are
    functions of the upstream that remember what is installed: their cache is cleared when that changes.
    """

    versions: SpecifierSet
    proven: tuple[Version, ...]
    callables: tuple[PatchPoint, ...] = ()
    needs: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    closures: tuple[Closure, ...] = ()
    caches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A group of callables of one upstream distribution, switched together. Ranges go from the oldest to the newest."""

    summary: str
    distribution: str
    ranges: tuple[VersionRange, ...]
    standin: StandIn | None = None

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
