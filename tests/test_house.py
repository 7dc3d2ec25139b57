"""The house rules as detectors: a rule that can be broken silently is checked here, from the source text alone."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Ground first. A module imports from its own floor and from those below.
FLOORS = (
    ("report", "site.*"),
    ("call", "errors", "memory", "reasons", "environment", "tracing", "tables", "imports", "triton_cpu"),
    ("kernels", "kernels.contract", "kernels.layout", "kernels.cache", "kernels.capture"),
    ("kernels.jit",),
    ("kernels.packing", "kernels.last_tokens", "kernels.dense_mma"),
    (
        "kernels.conv_update",
        "kernels.conv_update_tokens",
        "kernels.conv_fwd",
        "kernels.conv_bwd_*",
        "kernels.conv_reduce",
    ),
    ("kernels.dense_wgmma", "kernels.dense_weight_wgmma"),
    ("kernels.dense_weight",),
    ("kernels.conv_bwd", "kernels.dense"),
    ("kernels.device", "kernels.device.compiler"),
    ("kernels.device.tokens", "kernels.device.packing", "kernels.device.slots", "kernels.device.last_tokens"),
    ("kernels.device.dense_rows", "kernels.device.dense_product", "kernels.device.dense_end"),
    ("kernels.device.dense_groups",),
    ("kernels.device.conv_*", "kernels.device.dense_*"),
    ("checks", "dense_checks", "dense_torch"),
    ("admission", "routes", "cpu", "ops", "ops.*"),
    ("dispatch", "repeat", "nn"),
    (
        "adapters",
        "adapters.*",
        "patch",
        "holders",
        "matrix",
        "modules",
        "standin",
        "plan",
        "switch",
        "warmup",
    ),
    ("",),
    ("launch", "doctor", "bench", "bench.*", "upkeep", "upkeep.*", "cli", "demo", "__main__"),
)
DOOR = "accel/ops/door.py"
CACHE = "accel.kernels.cache"  # what the command line reads; it is as light as the contract
UPSTREAMS = ("fla", "causal_conv1d", "mamba_ssm", "transformers", "triton", "cutlass", "tvm_ffi")
ON_THE_WAY_OF_A_CALL = ("accel/adapters/", "accel/ops/", "accel/admission.py", "accel/dispatch.py", "accel/routes.py")


def sources(*folders: str) -> list[str]:
    """Python files, relative to the root."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), path)


def module_name(path: str) -> str:
    """The name that a file is imported by: kernels/jit.py is accel.kernels.jit."""
    parts = pathlib.Path(path).with_suffix("").parts
    parts = ("accel", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sources("accel", "kernels")}


def imports(path: str, node: ast.AST | None = None) -> Iterator[str]:
    """Every module that a file imports, `from accel import routes` being accel.routes."""
    name = module_name(path)
    package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    for statement in ast.walk(node or tree(path)):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            base = statement.module or ""
            if statement.level:
                above = package.rsplit(".", statement.level - 1)[0] if statement.level > 1 else package
                base = f"{above}.{base}".rstrip(".")
            for alias in statement.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def floor(module: str) -> int:
    """The floor of one of our modules; a module without one is a failure of its own."""
    inner = module.removeprefix("accel").removeprefix(".")
    for level, names in enumerate(FLOORS):
        for name in names:
            if inner == name or (name.endswith("*") and inner.startswith(name[:-1])):
                return level
    raise AssertionError(f"{module} has no floor: name it in FLOORS")


def functions(path: str) -> Iterator[ast.AST]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def calls_and_attributes(path: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute in a file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("path", sources("accel", "kernels"))
def test_imports_go_down(path):
    own = floor(module_name(path))
    above = [name for name in imports(path) if name.split(".")[0] == "accel" and floor(name) > own]
    assert not above, f"{path} imports from a higher floor: {above}"


@pytest.mark.parametrize("path", sources("kernels"))
def test_kernels_stand_alone(path):
    foreign = [name for name in imports(path) if name.split(".")[0] == "accel" and not name.startswith("accel.kernels")]
    assert not foreign, f"{path} imports {foreign}"


@pytest.mark.parametrize("path", [path for path in sources("accel", "kernels") if path != DOOR])
def test_no_import_inside_a_function(path):
    found = {name for function in functions(path) for name in imports(path, function)}
    assert not found, f"{path} imports {found} inside a function; {DOOR} is the one door"


@pytest.mark.parametrize("path", sources("accel"))
def test_one_door_leads_to_the_kernels(path):
    heavy = [
        name
        for name in imports(path)
        if name.startswith("accel.kernels") and name not in ("accel.kernels", "accel.kernels.contract", CACHE)
    ]
    assert path == DOOR or not heavy, f"{path} imports {heavy}; {DOOR} is the one door"


@pytest.mark.parametrize("path", sources("accel", "kernels"))
def test_device_code_alone_imports_the_compiler(path):
    """Or a kernel that the disk holds would cost the import; kernels/jit.py is the one way to the device code."""
    heavy = [name for name in imports(path) if name.startswith(("cutlass", "tvm_ffi", "accel.kernels.device"))]
    assert path.startswith("kernels/device/") or not heavy, f"{path} imports {heavy}"


@pytest.mark.parametrize("path", sources("accel", "kernels", "tests", "benchmarks", "examples"))
def test_file_names_say_something(path):
    assert pathlib.Path(path).name not in ("utils.py", "helpers.py", "common.py", "misc.py")


@pytest.mark.parametrize(("folder", "limit"), [("accel", 300), ("kernels", 500)])
def test_files_are_short(folder, limit):
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in sources(folder)}
    assert not {path: length for path, length in lengths.items() if length > limit}


@pytest.mark.parametrize("path", sources("accel", "kernels", "tests", "benchmarks", "examples"))
def test_comments_are_notes(path):
    banner = re.compile(r"^\s*#\s*[-=#*~]{4,}")
    # the word in two pieces, so that this file passes its own test; an anchor is a name or an issue in parentheses
    unanchored = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME)\b(?!\(\S+\))")
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        assert not banner.match(line), f"{path}:{number}: a banner comment"
        assert not unanchored.search(line), f"{path}:{number}: unfinished work without an anchor"


@pytest.mark.parametrize("path", sources("accel"))
def test_one_reader_of_the_environment(path):
    if path == "accel/environment.py":
        return
    assert "importlib.metadata" not in set(imports(path)), f"{path}: accel.environment reads importlib.metadata"
    for line, name in calls_and_attributes(path):
        assert not name.startswith("torch.cuda"), f"{path}:{line}: accel.environment reads torch.cuda"


@pytest.mark.parametrize("path", sources("accel/adapters"))
def test_adapters_only_translate(path):
    for line, name in calls_and_attributes(path):
        word = name.rpartition(".")[2]
        assert word not in ("dtype", "stride", "is_contiguous", "__version__"), f"{path}:{line}: {name}"


@pytest.mark.parametrize("path", [path for path in sources("accel") if path.startswith(ON_THE_WAY_OF_A_CALL)])
def test_nothing_copies_or_waits_on_the_way_of_a_call(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            assert name not in ("contiguous", "to", "item", "tolist", "clone", "synchronize"), (
                f"{path}:{node.lineno}: .{name}()"
            )


@pytest.mark.parametrize("path", sources("accel", "kernels"))
def test_no_bare_except_and_no_reload(path):
    bare = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.ExceptHandler) and node.type is None]
    assert not bare, f"{path}: bare except at {bare}"
    assert not [line for line, name in calls_and_attributes(path) if name == "importlib.reload"]


def test_import_is_light():
    """`import accel` brings no upstream and no compiler, and costs under 50 ms of CPU time beside torch."""
    script = (
        "import json, sys, time, torch; before = set(sys.modules); start = time.process_time(); import accel; "
        "print(json.dumps([time.process_time() - start, sorted(set(sys.modules) - before)]))"
    )
    # with bytecode, as an installation has it; the first process writes it
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    costs = []
    for _ in range(4):
        command = [sys.executable, "-X", "importtime", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        cost, brought = json.loads(done.stdout)
        costs.append(cost)
        assert not [name for name in brought if name.split(".")[0] in UPSTREAMS]
    own = done.stderr.splitlines()[-len(brought) :]
    slowest = sorted(own, key=lambda line: int(line.split(":")[1].split("|")[0]))[-10:]
    assert min(costs) < 0.05, "\n".join([f"import accel took {costs} s, in the last run:", *slowest])


def test_the_matrix_is_shipped():
    shipped = ROOT / "accel" / "compat_matrix.yaml"
    assert shipped.is_symlink() and shipped.resolve() == ROOT / "compat_matrix.yaml"


def test_every_package_is_shipped():
    """pyproject.toml lists packages by hand, and an editable install works without."""
    listed = re.search(r"^packages = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    packages = {name.strip('" ') for name in listed.split(",")}
    # accel/site is no package: its one file is imported by name, and shipped as data
    files = [path for path in sources("accel", "kernels") if path != "accel/site/sitecustomize.py"]
    folders = {pathlib.Path(path).parent / "__init__.py" for path in files}
    assert packages == {module_name(str(path)) for path in folders}
