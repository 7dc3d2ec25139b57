"""`python -m accel matrix check`: real releases against matrices that are wrong, and what a new release asks for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version
from typer.testing import CliRunner
from upstreams import CACHE, ROOT

from accel import matrix
from accel.cli import app
from accel.upkeep import edit, read, releases

TEXT = matrix.PATH.read_text(encoding="utf-8")
TARGETS = matrix.load().targets


@pytest.fixture
def kept(tmp_path):
    """A cache of the command that has the tests' releases, by the name that is asked for; nothing is downloaded."""
    folder = tmp_path / "cache" / "releases"
    folder.mkdir(parents=True)

    def put(distribution, version, **others):
        for made in releases.folders(distribution, version, CACHE):
            (folder / others.get("name", made.name)).symlink_to(made)

    put.env = {"ACCEL_CACHE_DIR": str(folder.parent), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "NO_COLOR": "1"}
    return put


def check(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "accel", "matrix", "check", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_no_drift(kept):
    kept("causal-conv1d", "1.7.0")
    done = check("--upstream", "causal-conv1d==1.7.0", **kept.env)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "causal-conv1d 1.7.0: as the matrix says" in done.stderr


# of 1.7.0: a module that only shows the function, other parameters, a callable that is gone, a module that is none
WRONG = {
    """\
            module: causal_conv1d.causal_conv1d_interface
            adapter: causal_conv1d.causal_conv1d_fn
""": """\
            module: causal_conv1d
            adapter: causal_conv1d.causal_conv1d_fn
""",
    """\
            parameters: x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states,
              silu_activation
""": """\
            parameters: x, weight, bias, out=0
""",
    """\
          - attribute: causal_conv1d_update_function
            module: causal_conv1d.cpp_functions
""": """\
          - attribute: causal_conv1d_lost
            module: causal_conv1d.cpp_functions
            adapter: causal_conv1d.causal_conv1d_update_function
            parameters: x
          - attribute: causal_conv1d_update_function
            module: causal_conv1d.lost
""",
}


def line_of(text):
    """The number of the matrix's line at which `text` first begins."""
    return TEXT[: TEXT.index(text)].count("\n") + 1


FIRST = line_of("        callables:\n          - &fn\n")
SECOND = line_of("          - attribute: causal_conv1d_bwd_function\n            module: causal_conv1d.cpp_functions\n")
DIFF = f"""\
--- a/compat_matrix.yaml
+++ b/compat_matrix.yaml
@@ -{FIRST},7 +{FIRST},7 @@
         callables:
           - &fn
             attribute: causal_conv1d_fn
-            module: causal_conv1d
+            module: causal_conv1d.causal_conv1d_interface
             adapter: causal_conv1d.causal_conv1d_fn
             parameters: x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
               final_states_out=None, activation=None
@@ -{SECOND},13 +{SECOND},10 @@
           - attribute: causal_conv1d_bwd_function
             module: causal_conv1d.cpp_functions
             adapter: causal_conv1d.causal_conv1d_bwd_function
-            parameters: x, weight, bias, out=0
-          - attribute: causal_conv1d_lost
+            parameters: x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states,
+              silu_activation
+          - attribute: causal_conv1d_update_function
             module: causal_conv1d.cpp_functions
-            adapter: causal_conv1d.causal_conv1d_update_function
-            parameters: x
-          - attribute: causal_conv1d_update_function
-            module: causal_conv1d.lost
             adapter: causal_conv1d.causal_conv1d_update_function
             parameters: x, conv_state, weight, bias, silu_activation, cache_seqlens, conv_state_indices\n \n"""


def test_drift_is_a_diff_that_can_be_applied(kept, tmp_path):
    kept("causal-conv1d", "1.7.0")
    wrong = TEXT
    for right, drifted in WRONG.items():
        assert wrong.count(right) == 1
        wrong = wrong.replace(right, drifted)
    file = tmp_path / "compat_matrix.yaml"
    file.write_text(wrong)
    done = check("--upstream", "causal_conv1d==1.7.0", "--file", str(file), **kept.env)
    assert done.returncode == 1, done.stderr
    assert done.stdout == DIFF
    for line in (
        "causal_conv1d_fn belongs to causal_conv1d.causal_conv1d_interface, not causal_conv1d",
        "causal_conv1d_lost is gone from causal_conv1d.cpp_functions",
        "causal_conv1d_update_function belongs to causal_conv1d.cpp_functions, not causal_conv1d.lost",
    ):
        assert f"causal-conv1d 1.7.0: {line}\n" in done.stderr
    subprocess.run(["git", "apply", "-"], input=done.stdout, cwd=tmp_path, text=True, check=True)
    assert file.read_text() == TEXT


def test_a_new_release_that_looks_like_the_newest(kept, tmp_path):
    """1.7.0 itself, called 1.7.1 by a folder and by what pip finds."""
    kept("causal-conv1d", "1.7.0", name="causal-conv1d-1.7.1")
    for version in ("1.7.0", "1.7.1", "1.8.0rc1"):
        (tmp_path / f"causal_conv1d-{version}.tar.gz").touch()
    done = check("--latest", "--upstream", "causal_conv1d", **{**kept.env, "PIP_FIND_LINKS": str(tmp_path)})
    assert done.returncode == 1, done.stderr
    assert "causal-conv1d 1.7.1: not listed, and like the row that it would belong to" in done.stderr
    changed = [line for line in done.stdout.splitlines() if line.startswith(("+ ", "- "))]
    assert changed == [
        '-      - versions: ">=1.5.1,<1.7.1"',
        "-        proven: [1.5.2, 1.6.1, 1.7.0]",
        '+      - versions: ">=1.5.1,<1.7.2"',
        "+        proven: [1.5.2, 1.6.1, 1.7.0, 1.7.1]",
    ]


def test_what_cannot_be_checked(kept, tmp_path):
    done = check("--upstream", "fla-core==99.0", **kept.env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "fla-core 99.0 could not be checked: pip install: ERROR: " in done.stderr
    done = check("--latest", "--upstream", "mamba", **kept.env)
    assert done.returncode == 2 and "mamba-ssm newest could not be checked: pip index: ERROR: " in done.stderr


@pytest.mark.parametrize("name, message", [("shrt_conv", "'shrt_conv'"), ("conv1d", "no releases"), ("fla==x", "'x'")])
def test_names_that_are_none(name, message):
    done = CliRunner().invoke(app, ["matrix", "check", "--upstream", name], env={"COLUMNS": "400"})
    assert done.exit_code == 2 and message in done.output


def seen(name, row, **changes):
    """A reading of a row as it is, but for the callables that are given: (module, parameters) or None."""
    points = TARGETS[name].ranges[row].callables
    found = [changes.get(point.attribute, read.Found(point.module, point.parameters)) for point in points]
    return read.Reading(found, {}, [], [])


def propose(*reads):
    return edit.propose(TEXT, [edit.Read(name, Version(version), *rest) for name, version, *rest in reads])


def test_what_is_right_changes_nothing():
    reads = [
        (name, str(version), index, seen(name, index))
        for name, target in TARGETS.items()
        for index, row in enumerate(target.ranges)
        for version in row.proven
    ]
    assert propose(*reads) == (TEXT, [])


def test_a_new_release_that_differs_gets_a_row():
    other = read.Found("causal_conv1d.ops", "x, weight, *, bias=None, mode='a: b'")
    changed = {"causal_conv1d_fn": other, "causal_conv1d_varlen_states": None}
    edited, notes = propose(("causal_conv1d", "1.8.0", 2, seen("causal_conv1d", 2, **changed)))
    begin = """\
      - versions: ">=1.8.0,<1.8.1"
        proven: [1.8.0]
        holders: *fla
        callables:
          - attribute: causal_conv1d_fn
            module: causal_conv1d.ops
            adapter: causal_conv1d.causal_conv1d_fn@1.8.0
            parameters: 'x, weight, *, bias=None, mode=''a: b'''
          - attribute: causal_conv1d_update
            module: causal_conv1d.causal_conv1d_interface
            adapter: causal_conv1d.causal_conv1d_update@1.5.0
            parameters: x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
          - attribute: causal_conv1d_fwd_function
"""
    end = """\
              silu_activation
          - attribute: causal_conv1d_update_function
            module: causal_conv1d.cpp_functions
            adapter: causal_conv1d.causal_conv1d_update_function
            parameters: x, conv_state, weight, bias, silu_activation, cache_seqlens, conv_state_indices

  mamba:
"""
    assert notes == [] and begin in edited and end in edited[edited.index(begin) :]
    row = matrix.parse(edited).targets["causal_conv1d"].ranges[-1]
    assert row.callables[0].parameters == other.parameters and row.holders and len(row.callables) == 5
    assert edited.replace(edited[edited.index(begin) : edited.index("\n  mamba:")], "") == TEXT


def test_a_release_within_a_row_that_differs_splits_it():
    other = read.Found("fla.modules.conv.triton.ops", "x, cache")
    edited, notes = propose(("short_conv", "0.5.3", 3, seen("short_conv", 3, causal_conv1d_update=other)))
    before, after = matrix.parse(edited).targets["short_conv"].ranges[3:5]
    assert notes == [] and '- versions: ">=0.5.1,<0.5.3"\n        proven: [0.5.1, 0.5.2]\n' in edited
    assert '- versions: ">=0.5.3,<0.6.0"\n        proven: [0.5.3]\n' in edited
    assert before.callables[1:] == after.callables[1:]
    assert (after.callables[0].adapter, after.callables[0].parameters) == (
        "fla.causal_conv1d_update@0.5.3",
        "x, cache",
    )


def test_what_else_a_row_has_comes_with_a_new_one():
    other = read.Found("transformers.models.*.modeling_*", "hidden_states")
    for version, index in (("5.25.1", 2), ("5.14.9", 1)):
        name = TARGETS["transformers"].ranges[index].callables[0].attribute
        edited, notes = propose(("transformers", version, index, seen("transformers", index, **{name: other})))
        old, new = matrix.parse(edited).targets["transformers"].ranges[index : index + 2]
        assert notes == [] and new.callables[0].parameters == "hidden_states"
        assert (old.needs, old.holders, old.closures, old.caches) == (new.needs, new.holders, new.closures, new.caches)


def test_a_holder_that_is_gone():
    reads = [("mamba", str(version), 0, read.Reading([], {3: None}, [], [])) for version in TARGETS["mamba"].proven]
    gone = "          - {module: mamba_ssm.modules.mamba2, attribute: causal_conv1d_update}\n"
    assert propose(*reads) == (TEXT.replace(gone, ""), [])


def test_releases_of_one_row_that_differ_are_not_overruled():
    other = read.Found("fla.elsewhere", TARGETS["short_conv"].ranges[3].callables[0].parameters)
    apart = seen("short_conv", 3, causal_conv1d_update=other)
    edited, notes = propose(("short_conv", "0.5.1", 3, seen("short_conv", 3)), ("short_conv", "0.5.2", 3, apart))
    assert edited == TEXT and len(notes) == 1
    assert "short_conv 0.5.1: fla.modules.conv.triton.ops; short_conv 0.5.2: fla.elsewhere" in notes[0]
    apart = seen("short_conv", 0, causal_conv1d_update=None)
    edited, notes = propose(("short_conv", "0.3.1", 0, apart))
    assert edited == TEXT and "short_conv 0.3.1 is older than every row: causal_conv1d_update is gone" in notes[0]


@pytest.fixture
def package(tmp_path):
    """A package that cannot be imported, so that its source has to do."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / "broken" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return [tmp_path]

    write(__init__="import no_such_module\n")
    return write


ROW = """
targets:
  t:
    summary: s
    distribution: broken
    ranges:
      - versions: ">=1"
        proven: [1.0.0]
        callables: [{module: broken.MODULE, attribute: f, adapter: a, parameters: x}]
        holders: [{module: broken.ops, attribute: held, of: [f]}, {module: broken.ops, attribute: f}]
modules: []
planned: []
aliases: {}
architectures: {compiled: [], run: []}
operations: {}
faults: []
"""


def row(module):
    (found,) = matrix.parse(ROW.replace("MODULE", module)).targets["t"].ranges
    return found


def test_a_package_that_cannot_be_imported_is_read_in_its_source(package, monkeypatch):
    held = "try:\n    from a import b as held\nexcept ImportError:\n    held = None\n"
    folders = package(ops=f"{held}if 1:\n    def f(x: int, /, *y, z=1): ...\n")
    reading = read.release(row("ops"), "broken", folders)
    assert reading.callables == [("broken.ops", "x, /, *y, z=1")] and reading.lacking == []
    assert "No module named 'no_such_module'" in reading.notes[0] and "source of broken.ops" in reading.notes[0]
    monkeypatch.setattr(read, "probe", lambda places, folders: [{"error": "the same"}] * len(places))
    package(ops="held = 1\n", other="def f(x): ...\n")
    reading = read.release(row("ops"), "broken", folders)
    assert reading.callables == [("broken.other", "x")] and reading.lacking == [1]
    package(third="def f(y): ...\n")
    with pytest.raises(read.UnclearError, match="broken.ops has no f, and broken.other and broken.third have one"):
        read.release(row("ops"), "broken", folders)
    package(other="", third="")
    assert read.release(row("ops"), "broken", folders).callables == [None]


def test_a_pattern_is_the_one_list_of_its_modules(package, monkeypatch):
    monkeypatch.setattr(read, "probe", lambda places, folders: [{"error": "nothing"}] * len(places))
    folders = package(ops="held = f = 1\n", m_one="def f(x, y): ...\n", m_two="def f(x, y): ...\n")
    assert read.release(row("m_*"), "broken", folders).callables == [("broken.m_*", "x, y")]
    package(m_two="def f(x): ...\n")
    reading = read.release(row("m_*"), "broken", folders)
    assert reading.callables == [("broken.m_*", "x")]
    assert reading.apart == ["f takes (x, y) in broken.m_one, where it would not be served"]
    assert read.release(row("n_*"), "broken", folders).callables == [None]


def test_what_is_kept_is_kept_where_kernels_are(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    assert releases.kept() == tmp_path / "releases"
    monkeypatch.delenv("ACCEL_CACHE_DIR")
    assert releases.kept().parts[-2:] == ("accel", "releases") and isinstance(releases.kept(), Path)
