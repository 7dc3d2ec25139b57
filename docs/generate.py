"""What the pages take from data while they are built: a hook of mkdocs. Nothing that it makes is committed.

A line `[//]: # (generated: NAME)` in a page stands for the section NAME below. The pictures that a section shows are
files that exist in the built site alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is a folder of the repository, and not installed
import typer.main  # noqa: E402
import yaml  # noqa: E402
from figures import Results  # noqa: E402

from accel import Reason, cli, matrix  # noqa: E402
from accel.tables import Holder, VersionRange  # noqa: E402

MARKER = re.compile(r"^\[//\]: # \(generated: (.+)\)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures of the performance page."""
    for name, picture in results().pictures.items():
        files.append(File.generated(config, name, content=picture))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the sections where a page asks for them."""
    return MARKER.sub(lambda found: section(found[1]), markdown)


def section(name: str) -> str:
    """The Markdown of one section."""
    if name not in SECTIONS:
        raise PluginError(f"generated: {name!r} is none of {', '.join(SECTIONS)}")
    return SECTIONS[name]()


def results() -> Results:
    return Results(ROOT / "benchmarks" / "results")


def reasons() -> str:
    rows = [(f"`{reason}`", reason.meaning, reason.fix) for reason in Reason]
    return table(("reason", "the call has", "what makes it native"), rows)


def commands() -> str:
    return table(("command", "what it does"), found_commands("python -m accel", typer.main.get_command(cli.app)))


def found_commands(path: str, group: Any) -> Iterable[tuple[str, str]]:
    """(command, what it does) of a group and of the groups in it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from found_commands(f"{path} {name}", command)
        elif not command.hidden:
            yield f"`{path} {name}`", " ".join((command.help or "").split("\n\n")[0].split())


def support() -> str:
    return cli.support_table(matrix.load())


def targets() -> str:
    """Each target with its ranges, callables and filled places: every row of compat_matrix.yaml."""
    loaded, parts = matrix.load(), []
    for name, target in loaded.targets.items():
        also = [alias for alias, meant in loaded.aliases.items() if meant == name]
        parts += [f"### {name}", f"{target.summary}. Distribution `{target.distribution}`."]
        if also:
            parts.append("Also called " + ", ".join(f"`{alias}`" for alias in also) + ".")
        if target.standin:
            shown = ", ".join(f"`{export}`" for export in target.standin.exports)
            parts.append(
                f"Where the package is absent accel stands in for it as {target.standin.version}, with {shown}."
            )
        for row in target.ranges:
            parts += range_of(row)
    for name in loaded.modules:
        parts += [
            f"### {name}",
            "No release is patched: it serves [modules of a given model](dense.md#modules-of-a-model).",
        ]
    return "\n\n".join(parts)


def range_of(row: VersionRange) -> list[str]:
    needs = f" Switches on {words(row.needs)} with it." if row.needs else ""
    parts = [f"**Releases `{releases(row.versions)}`**, proven with {words(row.proven)}.{needs}"]
    if row.callables:
        found = [(f"`{point.attribute}`", f"`{point.module}`", f"`{point.parameters}`") for point in row.callables]
        parts.append(table(("swapped callable", "owner", "parameters"), found))
    if row.holders:
        found = [(f"`{place_of(holder)}`", f"`{holder.module}`", held_by(holder)) for holder in row.holders]
        parts.append(table(("filled where it holds nothing", "in", "with"), found))
    if row.closures:
        found = [(f"`{closure.attribute}`", f"`{closure.module}`", f"`{closure.own}`") for closure in row.closures]
        parts.append(table(("function that keeps what it found", "in", "is given back"), found))
    if row.caches:
        parts.append(f"Caches cleared when a package comes or goes: {words(row.caches)}.")
    return parts


def place_of(holder: Holder) -> str:
    return f"{holder.attribute}[{holder.entry!r}]" if holder.entry else holder.attribute


def held_by(holder: Holder) -> str:
    names = words(holder.names)
    forms = {"callable": names, "tuple": f"a tuple of {names}", "package": f"the package {names}"}
    return forms.get(holder.form, f"True where all of {names} are there")


def faults() -> str:
    rows = [
        (
            f"`{row.target}`",
            words(row.callables),
            f"`{releases(row.versions)}`",
            row.fault,
            row.native,
            linked(row.reference),
        )
        for row in matrix.load().faults
    ]
    return table(("target", "callables", "releases", "what is wrong", "a native call", "see"), rows)


def linked(reference: str) -> str:
    if not reference.startswith("https://"):
        return reference
    parts = reference.split("/")
    return f"[{parts[-3]}#{parts[-1]}]({reference})"


def reports() -> str:
    """What users of the upstreams have reported, and what answers it here."""
    cases = yaml.safe_load((ROOT / "tests" / "field_cases.yaml").read_text())
    return table(
        ("report", "what failed", "here"), [(report_of(case["id"]), case["case"], answer(case)) for case in cases]
    )


def report_of(name: str) -> str:
    found = re.match(r"(.+)#(\d+)", name)
    return f"[{name}](https://github.com/{found[1]}/issues/{found[2]})"


def answer(case: dict[str, str]) -> str:
    if "test" in case:
        return "tested: " + words(dict.fromkeys(test.partition("::")[2] for test in case["test"].split()))
    return case.get("not_here") or f"not yet: {case['later']}"


def releases(range_: SpecifierSet) -> str:
    """The oldest first; as text, a SpecifierSet has an order of its own."""
    return ",".join(str(part) for part in sorted(range_, key=lambda part: Version(part.version)))


def halo() -> str:
    """What the halo of a context-parallel convolution costs, from the formulas that stand above it on the page."""
    tokens, channels, width, size, memory = 32768, 8192, 4, 2, 4.8e12
    forward = 2 * tokens * channels * size / memory
    rows = []
    for ranks, link, bandwidth in ((8, "NVLink", 450e9), (64, "network", 50e9), (1024, "network", 50e9)):
        received = (ranks - 1) * (width - 1) * channels * size
        took = received / bandwidth
        cells = (f"{received / 1e6:.2f} MB", f"{took * 1e6:.1f} us", f"{forward * 1e6:.0f} us", f"{took / forward:.1%}")
        rows.append((f"{ranks}, {link}", *cells))
    even = 1 + 2 * tokens / (width - 1) * bandwidth / memory
    sent, parameters = (width - 1) * channels * size, (width + 1) * channels * size
    return f"""GatedDeltaNet with q, k and v in one convolution, D = {channels}, W = {width}, bf16, T = {tokens} a rank,
contiguous. Derived from the formulas and nominal bandwidths (HBM 4.8 TB/s, NVLink 450 GB/s each way, network 50 GB/s a
GPU), without the latency of a gather; not measured:

{table(("R", "received each way", "at the link", "forward, at least", "share of the forward"), rows)}

Every rank sends {sent / 1e3:.0f} kB. At 8 GPUs the gather costs its latency. Over the network it takes as long as the
convolution at R - 1 = 2 T / (W-1) * 50 / 4800, which is {even:.0f} ranks here; more tokens a rank move that point up in
proportion. At 10,000 GPUs the context-parallel group therefore stays small and the rest is data parallel, which adds no
byte for the convolution: its parameters are D (W + 1) numbers a layer, {parameters / 1e3:.0f} kB here with a bias."""


def words(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


SECTIONS = {
    "commands": commands,
    "reasons": reasons,
    "support": support,
    "targets": targets,
    "faults": faults,
    "reports": reports,
    "results": lambda: results().markdown,
    "halo": halo,
}
