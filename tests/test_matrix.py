"""compat_matrix.yaml: what is refused, and every row against the release that it describes."""

import inspect

import pytest
from packaging.version import Version
from upstreams import CACHE

from accel import matrix
from accel.adapters import ADAPTERS
from accel.matrix import MatrixError
from accel.tables import Parameters
from accel.upkeep import read, releases

TEXT = matrix.PATH.read_text(encoding="utf-8")
TARGETS = matrix.load().targets
SHORT_CONV = TARGETS["short_conv"]
ROWS = [
    pytest.param(target, version, row, id=f"{target.distribution}-{version}")
    for target in TARGETS.values()
    for row in target.ranges
    for version in row.proven
]
POINTS = [point for target in TARGETS.values() for row in target.ranges for point in row.callables]
ADAPTERS_NAMED = {point.adapter: point for point in POINTS}


@pytest.mark.parametrize("target, version, row", ROWS)
def test_a_row_is_what_the_release_has(target, version, row):
    """As it is imported, and the same in its source, where upkeep looks when it cannot be imported."""
    folders = releases.folders(target.distribution, str(version), CACHE)
    assert list(folders[0].glob(f"{target.distribution.replace('-', '_')}-{version}.dist-info"))
    package = target.distribution.removesuffix("-core").replace("-", "_")  # test_fla_layers.py has FLA's own names
    reading = read.release(row, package, folders)
    assert reading.callables == [(point.module, point.parameters) for point in row.callables]
    assert set(reading.held.values()) <= {"NoneType"}  # no causal-conv1d is on the path
    assert not reading.apart and not reading.notes
    source = read.Source(folders[0], package)
    points = [point for point in row.callables if not point.is_pattern]
    assert [source.parameters(point.module, point.attribute) for point in points] == [p.parameters for p in points]
    assert all(source.binds(row.holders[index].module, row.holders[index].attribute) for index in reading.held)
    assert len(reading.held) == (16 if package == "mamba_ssm" else 0)


@pytest.mark.parametrize("name", ADAPTERS_NAMED)
def test_an_adapter_exists_and_takes_the_rows_parameters(name):
    assert name in ADAPTERS
    assert Parameters.of(ADAPTERS[name].read) == ADAPTERS_NAMED[name].parameters


def test_one_adapter_has_one_parameter_list():
    for point in POINTS:
        assert point.parameters == ADAPTERS_NAMED[point.adapter].parameters


def test_the_file_is_read_once_and_frozen():
    table = matrix.load()
    assert matrix.load() is table
    with pytest.raises(AttributeError):
        table.planned = ()
    with pytest.raises(TypeError):
        table.targets["other"] = SHORT_CONV


def test_names():
    table = matrix.load()
    assert table.canonical("fla") == table.canonical("shortconv") == table.canonical("short_conv") == "short_conv"
    assert table.canonical("mamba") == "mamba" and table.canonical("conv1d") == "conv1d"
    with pytest.raises(ValueError, match=r"short_conv, .*mamba.*fla = short_conv.*'shrt_conv'"):
        table.canonical("shrt_conv")


@pytest.mark.parametrize(
    "version, proven",
    [
        ("0.3.1", None),
        ("0.3.2", "0.3.2"),
        ("0.4.0", "0.3.2"),
        ("0.5.2", "0.5.1"),
        ("0.6.0", "0.6.0"),
        ("0.6.0+git1", "0.6.0"),
        ("0.6.1.dev0", None),
        ("0.7", None),
    ],
)
def test_range_of_a_version(version, proven):
    row = SHORT_CONV.range_of(Version(version))
    assert (row and str(row.proven[0])) == proven


def test_parameters_are_compared_without_annotations_and_spelling():
    def function(x: int, /, y: str = "a", *args, z: float = 1.0, **kwargs) -> None: ...

    assert Parameters.of(function) == Parameters('x,/, y = "a",*args, z=1.0, **kwargs')
    assert Parameters.of(function) != Parameters("x, y='a', *args, z=1.0, **kwargs")
    assert Parameters.of(inspect.signature) == "obj, *, follow_wrapped=True, globals=None, locals=None, eval_str=False"


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "    module: ",
            "    modul: ",
            r"short_conv\.ranges\[0\]\.callables\[0\]\.modul \(line \d+\): unknown key; known",
        ),
        (
            "            module: fla.modules.convolution\n",
            "",
            r"^targets\..*callables\[0\]\.module \(line \d+\): missing key",
        ),
        (
            '">=0.4.1,<0.4.2"',
            "0.4.1 and up",
            r"ranges\[1\]\.versions \(line \d+\): not a valid SpecifierSet: '0.4.1 and",
        ),
        ('">=0.4.1,<0.4.2"', '">=0.4.1"', r"ranges\[2\]\.proven: 0\.4\.2 must lie in this range and in no other"),
        ("[0.4.1]", "[four]", r"ranges\[1\]\.proven\[0\] \(line \d+\): not a valid Version: 'four'"),
        ("[0.4.1]", "[0.4]", r"ranges\[1\]\.proven\[0\] \(line \d+\): expected str, got float"),
        ("[0.4.1]", "0.4.1", r"ranges\[1\]\.proven \(line \d+\): expected a list, got str"),
        ("[0.4.1]", "[0.5.0]", r"ranges\[1\]\.proven: 0\.5\.0 must lie in this range and in no other"),
        ("[0.3.2, 0.4.0]", "[0.4.0, 0.3.2]", r"^targets\.short_conv\.ranges: expected proven versions from the oldest"),
        ("parameters: x, cache", "parameters: x cache", r"callables\[0\]\.parameters \(line \d+\): not a valid Param"),
        ("distribution: fla-core", "distribution: [fla-core]", r"distribution \(line \d+\): expected str, got seq"),
        ("  fla: short_conv", "  fla: shortconv", r"^aliases\.fla: 'shortconv' is no target"),
        ("planned: [", "planned: [short_conv, ", r"^planned\[0\]: 'short_conv' is a target already"),
        ("run: [sm_90]", "run: sm_90", r"^architectures\.run \(line \d+\): expected a list, got str"),
        (
            "widths: [2,",
            "widths: [two,",
            r"^operations\.causal_conv1d_update\.cute\.widths\[0\].*: expected int, got str",
        ),
        ("needs: [causal_conv1d]", "needs: [conv]", r"^targets\.mamba\.ranges\[0\]\.needs\[0\]: 'conv' is no target"),
        (
            "mamba_simple, attribute: causal_conv1d_fn}",
            "mamba_simple, attribute: conv_fn}",
            r"^targets\.mamba\.ranges\[0\]\.holders\[0\]: 'conv_fn' is no callable of this target or of what it needs",
        ),
        (
            "mamba_simple, attribute: causal_conv1d_fn}",
            "mamba_simple, attribute: causal_conv1d_fn, form: list}",
            r"holders\[0\]\.form: expected one of callable, tuple, package, all, got 'list'",
        ),
        (
            "mamba_simple, attribute: causal_conv1d_fn}",
            "mamba_simple, attribute: causal_conv1d_fn, of: [causal_conv1d_fn, causal_conv1d_update]}",
            r"holders\[0\]\.of: expected one name for a callable, got 2",
        ),
        ("version: 1.7.0+accel", "version: ours", r"standin\.version \(line \d+\): not a valid Version: 'ours'"),
        ("- target: short_conv", "- target: shortconv", r"^faults\[0\]\.target: 'shortconv' is no target"),
        (
            "callables: [causal_conv1d_update]",
            "callables: [update]",
            r"^faults\[0\]\.callables: 'update' is no callable of",
        ),
        ("planned:", "extra: 1\nplanned:", r"^extra \(line \d+\): unknown key; known here: targets, modules, planned"),
        ("planned:", "planned: []\nplanned:", r"^planned \(line \d+\): key given twice"),
    ],
)
def test_one_wrong_line_is_named(old, new, message):
    assert old in TEXT
    with pytest.raises(MatrixError, match=message):
        matrix.parse(TEXT.replace(old, new, 1))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected a mapping, got an empty file"),
        ("[]", r"^the file \(line 1\): expected a mapping, got seq"),
        ("a: [", "^not YAML: while parsing a flow node"),
    ],
)
def test_no_matrix_at_all(text, message):
    with pytest.raises(MatrixError, match=message):
        matrix.parse(text)
