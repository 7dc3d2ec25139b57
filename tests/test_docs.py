"""The documentation: its Python runs, its generated parts hold every row of their source, it builds without warnings.

A block that needs what a machine may lack says so in its fence, ```python title="needs a GPU", and is skipped there.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from upstreams import ROOT, fla, flash_linear_attention, mamba_ssm, run_python, transformers

from accel import Reason

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {' title="needs a GPU"': torch.cuda.is_available() and torch.version.hip is None}
# each page in a namespace of its own, each line where it stands in the page
RUN = """
import sys, traceback
import mamba_extensions  # what stands in for extensions that are not built, and for a GPU
import accel
failed = []
for name, blocks in {pages!r}:
    namespace = {{"__name__": "__main__"}}
    try:
        for line, code in blocks:
            exec(compile("\\n" * line + code, name, "exec"), namespace)
    except BaseException:
        traceback.print_exc()
        failed.append(name)
    accel.restore()
sys.exit(f"failed: {{failed}}" if failed else 0)
"""


def blocks(page, everywhere=True):
    """(lines above, code) of a page's Python that can run here; with those that need something, or without them."""
    text = page.read_text()
    found = []
    for fence in FENCE.finditer(text):
        language, tag, code = fence.groups()
        if language == "python" and (NEEDS[tag] and everywhere if tag else True):
            found.append((text[: fence.start()].count("\n") + 1, code))
    return found


def run(pages, path, everywhere=False, **env):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    quiet = {"TRANSFORMERS_OFFLINE": "1", "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
    named = [(page.name, blocks(page, everywhere)) for page in pages]
    done = run_python(RUN.format(pages=named), [*path, ROOT / "tests"], {**alone, **quiet, **env}, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_blocks():
    """All pages but one beside real FLA and mamba_ssm, on the CPU; a GPU, where there is one, is hidden."""
    pages = [page for page in PAGES if page.name != "transformers.md"]
    path = [flash_linear_attention("0.6.0"), mamba_ssm("2.3.2.post1"), transformers("5.6.2")]
    run(pages, path, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def test_blocks_of_transformers():
    """In a process where it finds neither FLA nor mamba_ssm, as most people have it."""
    run([DOCS / "transformers.md"], [transformers("5.24.0")], TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "needs a GPU" in page.read_text()], ids=lambda page: page.name
)
def test_blocks_that_need_a_gpu(page):
    run([page], [fla("0.6.0")], everywhere=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fences_say_what_they_hold(page):
    """Python under another name, or under a tag that is not known, would not be run."""
    text = page.read_text()
    found = [(language, tag) for language, tag, _ in FENCE.findall(text)]
    assert text.count("\n```") == 2 * len(found)
    for language, tag in found:
        assert language in ("python", "bash") and (not tag or language == "python" and tag in NEEDS), (language, tag)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site's pages as text, by name; built strictly, without a word of warning."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install 'fla-accel[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not re.search("warn|error", done.stdout + done.stderr, re.IGNORECASE), done.stderr
    return folder


def page(site, name):
    """A page's text: cells end in a tab, and tags and entities are gone."""
    html = (site / name / "index.html").read_text()
    body = html.partition("<article")[2].partition("</article>")[0]
    text = re.sub(r"<[^>]+>", "", body.replace("</td>", "\t"))
    for entity, character in (("&gt;", ">"), ("&lt;", "<"), ("&quot;", '"'), ("&#39;", "'"), ("&amp;", "&")):
        text = text.replace(entity, character)
    return text


def test_every_page_is_built(site):
    for source in DOCS.glob("*.md"):
        name = "." if source.stem == "index" else source.stem
        assert "generated:" not in page(site, name), source.name
    assert not list(site.rglob("*.py"))


def test_every_reason_has_its_row(site):
    text = page(site, "routes").replace("`", "")
    for reason in Reason:
        row = "\t\n".join((str(reason), reason.meaning.replace("`", ""), reason.fix.replace("`", "")))
        assert row in text, reason


def test_every_row_of_the_matrix_is_there(site):
    text = page(site, "matrix")
    found = yaml.safe_load((ROOT / "compat_matrix.yaml").read_text())
    for name, target in found["targets"].items():
        part = text.partition(target["summary"])[2].partition("Distribution ")[2]
        for row in target["ranges"]:
            start = part.index(f"Releases {row['versions']}")
            assert all(str(version) in part[start:] for version in row["proven"])
            for point in row.get("callables", []):
                assert f"{point['attribute']}\t\n{point['module']}\t\n" in part[start:], (name, point)
            for holder in row.get("holders", []):
                entry = f"[{holder['entry']!r}]" if "entry" in holder else ""
                assert f"{holder['attribute']}{entry}\t\n{holder['module']}\t\n" in part[start:], (name, holder)
    for name in (*found["operations"], *found["modules"]):
        assert name in text
    for fault in found["faults"]:
        assert f"{fault['versions']}\t\n{fault['fault']}\t\n{fault['native']}\t\n" in text


def test_every_report_has_its_answer(site):
    text = page(site, "faq")
    for case in yaml.safe_load((ROOT / "tests" / "field_cases.yaml").read_text()):
        assert f"{case['id']}\t\n{case['case']}\t\n" in text


def test_every_result_file_is_there(site):
    """With its device, date and commit; its figures as they are, rounded."""
    text = page(site, "performance")
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        document = json.loads(path.read_text())
        for word in (
            path.name,
            document["machine"]["device"],
            document["date"][:10],
            (document["commit"] or "unknown")[:12],
        ):
            assert word in text, (path.name, word)
    assert list((site / "performance").glob("*.svg")) or not list((ROOT / "benchmarks" / "results").glob("*.json"))


def test_the_readmes_figures_are_those_of_the_files(tmp_path, monkeypatch):
    """What `python -m benchmarks.readme` writes is what stands there; a file that is not there has no table."""
    monkeypatch.syspath_prepend(str(ROOT))
    readme = importlib.import_module("benchmarks.readme")
    text = (ROOT / "README.md").read_text()
    assert readme.filled(text, ROOT / "benchmarks" / "results") == text
    assert readme.section(tmp_path) == readme.INTRO
    step = {"op": "step", "case": "x", "gate": "ok"}
    rows = [
        step | {"provider": "causal-conv1d", "step_ms": 3.0, "all_ms": [3.0], "note": "as it is"},
        step | {"provider": "accel", "step_ms": 2.0, "all_ms": [2.0], "over": {"causal-conv1d": 1.4996}},
        step | {"provider": "torch", "gate": "GateError: x is off [cases.py:1 gate]"},
    ]
    write(tmp_path / "e2e_mamba.json", rows)
    found = readme.section(tmp_path)
    assert "model. `e2e_mamba.json`: NVIDIA H200, 2026-01-01, commit unknown.\n\n" in found
    assert "| step, x | 2.000 | 3.000 | 1.50 |\n\n- causal-conv1d at x: as it is\n\n" in found
    assert "- no figure for torch at x: GateError: x is off\n\n- `e2e_mamba`: driver 1, torch 2" in found
    write(tmp_path / "e2e_mamba.json", [step | {"provider": "accel", "step_ms": 2.0}])
    assert "2.000" not in readme.section(tmp_path) and "ranks nothing" in readme.section(tmp_path)


def test_results_that_are_not_there_or_of_no_known_kind(tmp_path, monkeypatch):
    """No file, rows that nobody knows, a peer that failed, a case that only some have, one provider, pairs of a run."""
    figures = imported(monkeypatch)
    assert "no result files" in figures.Results(tmp_path).markdown
    rows = [
        {"op": "a", "case": "x", "provider": "accel", "gate": "ok", "graph_us": 2.0},
        {"op": "a", "case": "x", "provider": "FLA", "gate": "ok", "graph_us": 3.0},
        {"op": "a", "case": "y", "provider": "accel", "gate": "ok", "graph_us": 2.5},
        {"op": "a", "case": "y", "provider": "FLA", "gate": "GateError: y is off [cases.py:1 gate]"},
    ]
    write(tmp_path / "failed.json", rows)
    write(tmp_path / "unknown.json", [{"op": "b", "case": "z", "provider": "one", "apples": 7, "list": [1]}])
    alone = {"op": "c", "case": "w", "provider": "accel", "first_ms": 5.0, "warm_ms": 0.25, "over": {"FLA": 1.5}}
    write(tmp_path / "alone.json", [alone])
    write(tmp_path / "bare.json", [{"size": 8, "us": 1.25}])
    (tmp_path / "foreign.json").write_text("[1, 2]")
    made = figures.Results(tmp_path)
    assert "| x | 2.00 | 3.00 |" in made.markdown and "| y | 2.50 |  |" in made.markdown
    assert "no figure for FLA at y: GateError: y is off\n" in made.markdown + "\n"
    assert "| b | z | one | 7 |" in made.markdown and "| 8 | 1.25 |" in made.markdown
    assert "`foreign.json` says nothing" in made.markdown
    assert "| w | 5 | 0.25 |" in made.markdown and "- c, w: accel is 1.500 x FLA\n" in made.markdown
    assert list(made.pictures) == ["performance/failed-a-graph-us.svg"]
    assert made.pictures == figures.Results(tmp_path).pictures  # the same bytes each time


def write(path, rows):
    machine = {"device": "NVIDIA H200", "driver": "1", "versions": {"torch": "2"}}
    path.write_text(
        json.dumps({"script": "s", "commit": None, "date": "2026-01-01T00", "machine": machine, "rows": rows})
    )


def imported(monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'fla-accel[docs]'")
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("figures")
