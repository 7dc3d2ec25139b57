"""The disk cache of compiled kernels: real kernels, compiled for one GPU or another, stored and loaded without any.

What needs a GPU is the launch: the last tests, in processes of their own.
"""

import errno
import hashlib
import importlib
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import filelock
import pytest
import torch
from upstreams import ROOT

from accel.kernels import cache, contract, conv_update, jit, last_tokens, packing

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

SPEC = packing.PackingSpec(torch.int64, False, "sm_87")
OTHER = last_tokens.LastTokensSpec(torch.bfloat16, None, False, "sm_87")


def compile_(spec):
    return jit.body(spec).build(spec)


def refuse(spec):
    raise AssertionError(f"{spec} was compiled although the disk holds it")


def takes_four_arguments(function) -> bool:
    """Whether it is the function of SPEC, as its own error message tells."""
    with pytest.raises(TypeError, match=r"Expects 4 parameters.*mCu.*mWords.*tokens: int32, status: int64"):
        function(1)
    return True


def sealed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The bytes of SPEC's entry, made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCEL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        cache.get(SPEC, compile_)
        return entry_of(SPEC).read_bytes()


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """A cache of its own for every test, and no warning given yet."""
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)


@pytest.fixture
def entry(good):
    """The path of SPEC's entry, which is there."""
    path = entry_of(SPEC)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(good)
    path.chmod(0o600)
    return path


@pytest.fixture
def another_user(monkeypatch):
    """another_user(): from then on this process belongs to another user than its files."""
    uid = os.geteuid()
    return lambda: monkeypatch.setattr(os, "geteuid", lambda: uid + 1)


@pytest.fixture
def kept_in_memory(caplog):
    """kept_in_memory(): two kernels are compiled and work although the disk is no use; returns the one warning."""

    def check() -> str:
        made = []
        for spec in (SPEC, OTHER):
            function = cache.get(spec, lambda spec: made.append(spec) or compile_(spec))
            assert type(function) is importlib.import_module("tvm_ffi").Function
            assert spec is OTHER or takes_four_arguments(function)
        assert made == [SPEC, OTHER]
        (warning,) = warnings(caplog)
        assert "kept in memory only" in warning
        return warning

    return check


def entry_of(spec) -> pathlib.Path:
    return cache.folder() / f"{cache.key(spec)}.so"


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_entry_is_loaded_instead_of_compiled(entry):
    assert takes_four_arguments(cache.get(SPEC, refuse))


def test_a_function_is_stored_and_what_was_stored_is_used(caplog):
    function = cache.get(SPEC, compile_)
    assert type(function) is importlib.import_module("tvm_ffi").Function
    assert takes_four_arguments(function) and takes_four_arguments(cache.get(SPEC, refuse))
    assert [path.suffix for path in sorted(cache.folder().iterdir())] == [".lock", ".so"]
    assert not warnings(caplog)


def test_only_the_user_can_read_and_write():
    cache.get(SPEC, compile_)
    assert cache.folder().stat().st_mode & 0o777 == 0o700
    for path in cache.folder().iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_the_checksum(path):
    path.write_bytes(path.read_bytes()[:-32])


def link_elsewhere(path):
    target = path.with_suffix(".elsewhere")
    path.rename(target)
    path.symlink_to(target)


def become_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def need_a_library_that_is_gone(path):
    linker = shutil.which("cc")
    library, needs_it = path.with_name("libgone.so"), path.with_name("needs.so")
    for command in (
        ["-o", library, "-Wl,-soname,libgone.so"],
        ["-o", needs_it, "-Wl,--no-as-needed", library],
    ):
        subprocess.run([linker, "-shared", "-nostdlib", "-x", "c", "/dev/null", "-x", "none", *command], check=True)
    path.write_bytes(sealed(needs_it.read_bytes()))
    library.unlink()
    needs_it.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        cut_in_half,
        flip_a_bit,
        lose_the_checksum,
        link_elsewhere,
        become_a_pipe,
        need_a_library_that_is_gone,
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(sealed(b"")), id="sealed_nothing"),
        pytest.param(lambda path: path.write_bytes(sealed(b"no library")), id="sealed_nonsense"),
        pytest.param(lambda path: path.chmod(0o602), id="world_writable"),
        pytest.param(lambda path: path.chmod(0o620), id="group_writable"),
    ],
)
def test_a_bad_entry_is_not_loaded_but_written_anew(damage, entry, caplog):
    damage(entry)
    assert cache.load(entry) is None
    assert takes_four_arguments(cache.get(SPEC, compile_))
    assert takes_four_arguments(cache.get(SPEC, refuse))
    assert entry.is_file() and not entry.is_symlink() and entry.stat().st_mode & 0o777 == 0o600
    assert not warnings(caplog)


def test_the_entry_of_another_user_is_not_loaded(entry, another_user):
    assert cache.load(entry) is not None
    another_user()
    assert cache.load(entry) is None


def test_an_entry_that_goes_stale_while_it_is_read_is_not_loaded(entry, monkeypatch):
    def stale(descriptor):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        assert cache.load(entry) is None
    assert cache.load(entry) is not None


def test_a_good_entry_is_not_replaced(entry):
    """Two machines whose locks do not reach each other compile the same: what one has mapped stays on the disk."""
    before = entry.stat().st_ino
    assert takes_four_arguments(cache.store(entry, compile_(SPEC)))
    assert entry.stat().st_ino == before


def write_for_all(folder):
    folder.chmod(0o777)


def write_for_the_group(folder):
    folder.chmod(0o770)


@pytest.mark.parametrize("spoil", [write_for_all, write_for_the_group])
def test_a_folder_that_others_write_to_is_not_used(spoil, entry, kept_in_memory):
    spoil(entry.parent)
    content = entry.read_bytes()
    assert "written by others" in kept_in_memory()
    assert entry.read_bytes() == content and "written by others" in cache.info().problem


def test_the_folder_of_another_user_is_not_used(entry, another_user, kept_in_memory):
    another_user()
    assert "belongs to another user" in kept_in_memory()


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch, kept_in_memory):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "file"))
    assert "Not a directory" in kept_in_memory()


def test_a_read_only_disk(entry, monkeypatch, kept_in_memory):
    """What is there is loaded; neither a lock nor a file can be made. (Root may write anywhere, hence the patches.)"""
    assert takes_four_arguments(cache.get(SPEC, refuse))
    entry.unlink()

    def read_only(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock.FileLock, "acquire", read_only)
    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    assert "Read-only file system" in kept_in_memory()
    assert list(entry.parent.iterdir()) == []


def test_a_full_disk(monkeypatch, kept_in_memory):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in kept_in_memory()
    assert {path.suffix for path in cache.folder().iterdir()} == {".lock"}


def test_a_place_without_execution(monkeypatch, kept_in_memory):
    def refuse_to_map(path):
        raise RuntimeError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(importlib.import_module("tvm_ffi"), "load_module", refuse_to_map)
    assert "cannot be loaded" in kept_in_memory()


def test_no_linker(monkeypatch, tmp_path, kept_in_memory):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in kept_in_memory()
    assert cache.info().entries == 0


def test_a_linker_that_fails_says_why(monkeypatch, kept_in_memory):
    monkeypatch.setenv("CC", f"{sys.executable} -c 'raise SystemExit(\"no room\")'")
    assert "cannot link: no room" in kept_in_memory()


def test_a_lock_that_never_opens_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0.1)
    cache.folder().mkdir(parents=True, mode=0o700)
    # another lock object of this process holds the file as another process would
    with filelock.FileLock(entry_of(SPEC).with_suffix(".lock")):
        assert takes_four_arguments(cache.get(SPEC, compile_))
    assert cache.load(entry_of(SPEC)) is not None


def test_the_key_holds_every_field_and_the_kind():
    values = {"dtype": torch.float16, "arch": "sm_90a", "length": 3, "bias_dtype": torch.float32, "silu": False}
    spec = conv_update.UpdateSpec(
        torch.bfloat16, torch.bfloat16, None, False, False, True, "ND", 4, 4, "compact", 2, True, 4, 16, 16, 0, "sm_87"
    )
    keys = {cache.key(spec), cache.key(SPEC), cache.key(OTHER)}
    keys |= {cache.key(spec._replace(**{name: value})) for name, value in values.items()}
    keys |= {cache.key(SPEC._replace(arch=arch)) for arch in contract.ARCHITECTURES if arch != SPEC.arch}
    assert len(keys) == 3 + len(values) + len(contract.ARCHITECTURES) - 1
    assert cache.key(SPEC) == cache.key(packing.PackingSpec(torch.int64, False, "sm_87"))


@pytest.fixture
def read_again():
    """The facts behind a key are read once a process: read them before and after the test."""
    cache._stack.cache_clear()
    yield cache._stack.cache_clear
    cache._stack.cache_clear()


@pytest.mark.parametrize("name", ["jit.py", "device/packing.py", "device/__init__.py", "conv_fwd.py"])
def test_the_key_holds_the_sources(name, tmp_path, monkeypatch, read_again):
    copy = tmp_path / "kernels"
    shutil.copytree(cache._SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = cache.key(SPEC)
    monkeypatch.setattr(cache, "_SOURCES", copy)
    read_again()
    assert cache.key(SPEC) == before
    (copy / name).write_text((copy / name).read_text() + "\n")
    read_again()
    assert cache.key(SPEC) != before


def test_the_key_holds_the_version_of_every_part_of_the_compiler(tmp_path, monkeypatch, read_again):
    names = [name for name in cache._stack() if name.endswith(".dist-info")]
    for distribution in ("nvidia_cutlass_dsl-", "nvidia_cutlass_dsl_libs_base-", "apache_tvm_ffi-"):
        assert any(name.startswith(distribution) for name in names), names
    keys = {cache.key(SPEC)}
    for name in names:
        monkeypatch.syspath_prepend(tmp_path / name)
        distribution, _, _ = name.removesuffix(".dist-info").rpartition("-")
        (tmp_path / name / f"{distribution}-9.9.dist-info").mkdir(parents=True)
        read_again()
        keys.add(cache.key(SPEC))
    assert len(keys) == 1 + len(names)


def test_the_key_holds_the_options_of_the_compiler(monkeypatch, read_again):
    before = cache.key(SPEC)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    read_again()
    assert cache.key(SPEC) != before


def test_a_compiler_of_unknown_version_is_not_trusted_to_the_disk(monkeypatch, kept_in_memory, read_again):
    monkeypatch.setattr(cache, "_STACK", ("apache_tvm_ffi-",))
    assert "the version of nvidia-cutlass-dsl" in kept_in_memory()


def test_where_the_folder_is(monkeypatch, tmp_path):
    assert cache.folder() == tmp_path / "cache" / "kernels"
    monkeypatch.setenv("ACCEL_CACHE_DIR", "~/elsewhere")
    assert cache.folder() == pathlib.Path.home() / "elsewhere" / "kernels"
    for unset in (lambda: monkeypatch.setenv("ACCEL_CACHE_DIR", ""), lambda: monkeypatch.delenv("ACCEL_CACHE_DIR")):
        unset()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        assert cache.folder() == tmp_path / "home" / "accel" / "kernels"


def test_info_and_clear(entry):
    found = cache.info()
    assert (found.folder, found.entries, found.size, found.problem) == (entry.parent, 1, entry.stat().st_size, "")
    left = entry.parent / "new-abc"
    left.mkdir()
    (left / "half.o").touch()
    lock = entry.with_suffix(".lock")
    lock.touch()
    assert cache.clear() == 1
    assert list(entry.parent.iterdir()) == [lock]
    assert cache.clear() == 0 and cache.info().entries == 0


def python(script: str, **env) -> subprocess.CompletedProcess:
    """Run a script to its end in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


GET = """
import json, sys, torch
from accel.kernels import jit, packing
jit.get(packing.PackingSpec(torch.int64, False, "sm_87"))
modules = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([jit.compilations(), "cutlass" in modules, "accel.kernels.device" in sys.modules]))
"""


def test_a_second_process_imports_no_compiler():
    assert json.loads(python(GET).stdout) == [1, True, True]
    assert json.loads(python(GET).stdout) == [0, False, False]


def together(script: str, count: int) -> list[str]:
    """What `count` processes print that run at once."""
    command = [sys.executable, "-c", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [subprocess.Popen(command, text=True, cwd=ROOT, **pipes) for _ in range(count)]
    outputs = [process.communicate(timeout=300) for process in started]
    assert all(process.returncode == 0 for process in started), outputs
    return [stdout for stdout, _ in outputs]


def test_of_many_processes_one_compiles():
    found = [json.loads(output) for output in together(GET, 4)]
    assert sorted(compiled for compiled, _, _ in found) == [0, 0, 0, 1]
    assert all(compiler == (compiled == 1) for compiled, compiler, _ in found)
    assert cache.info().entries == 1


DIES = """
import time, torch
from accel.kernels import cache, packing
def compile_(spec):
    print("compiling", flush=True)
    time.sleep(600)
cache.get(packing.PackingSpec(torch.int64, False, "sm_87"), compile_)
"""


def test_a_process_that_dies_while_it_compiles_holds_nobody_up():
    """A rank that is killed: its lock goes with it, and the next one compiles."""
    dying = subprocess.Popen([sys.executable, "-c", DIES], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert dying.stdout.readline() == "compiling\n"
        lock = filelock.FileLock(entry_of(SPEC).with_suffix(".lock"), timeout=0.2)
        with pytest.raises(filelock.Timeout):
            lock.acquire()
    finally:
        dying.kill()
        dying.communicate()
    with lock:
        pass
    assert takes_four_arguments(cache.get(SPEC, compile_)) and cache.info().entries == 1


CALLS = """
import importlib, json, sys, torch
from accel import ops
torch.manual_seed(0)

def run(device):
    x, dy = (torch.randn(2, 64, 40, generator=random).to(device, torch.bfloat16) for _ in range(2))
    weight, bias = (torch.randn(*shape, generator=random).to(device) for shape in ((64, 4), (64,)))
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    y, final = ops.causal_conv1d(*leaves, activation="silu", return_final_states=True)
    gradients = torch.autograd.grad(y, leaves, dy)
    state = torch.randn(5, 64, 4, generator=random).to(device, torch.bfloat16)
    step = torch.randn(5, 64, generator=random).to(device, torch.bfloat16)
    out = ops.causal_conv1d_update(step, state, weight.detach(), bias.detach(), activation="silu")
    return [tensor.detach().float().cpu() for tensor in (y, final, *gradients, out, state)]

random = torch.Generator().manual_seed(1)
found = run("cuda")
random = torch.Generator().manual_seed(1)
torch.testing.assert_close(found, run("cpu"), atol=2e-2, rtol=2e-2)
modules = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([importlib.import_module("accel.kernels.jit").compilations(), "cutlass" in modules]))
"""


@pytest.mark.gpu
def test_a_warm_cache_gives_right_numbers_without_the_compiler():
    compiled, _ = json.loads(python(CALLS).stdout)
    assert compiled == cache.info().entries > 3
    assert json.loads(python(CALLS).stdout) == [0, False]


@pytest.mark.gpu
def test_eight_processes_compile_every_kernel_once():
    found = [json.loads(output) for output in together(CALLS, 8)]
    assert sum(compiled for compiled, _ in found) == cache.info().entries > 3


@pytest.mark.gpu
def test_damaged_entries_give_right_numbers():
    python(CALLS)
    entries = sorted(cache.folder().glob("*.so"))
    for entry, damage in zip(entries, (truncate, flip_a_bit, lose_the_checksum), strict=False):
        damage(entry)
    assert json.loads(python(CALLS).stdout) == [3, True]
    assert json.loads(python(CALLS).stdout) == [0, False]
