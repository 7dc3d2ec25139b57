"""Compiled kernels on disk: one shared library a specification, which TVM-FFI loads without the compiler.

An entry's name is a hash of all that its code depends on. Only a regular file of this user, writable by nobody else,
whose last bytes are the checksum of the rest, is loaded; anything else counts as absent and is written anew. A folder
that cannot be used costs one warning, and kernels then live in memory alone. Imports neither CUTLASS nor torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import logging
import os
import pathlib
import platform
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import filelock
import platformdirs

SYMBOL = "kernel"  # of the function in every library
LOCK_TIMEOUT = 120.0  # seconds; then a process compiles for itself
_STACK = ("nvidia_cutlass_dsl", "apache_tvm_ffi-")  # folders with the versions begin so, and end with .dist-info
_SOURCES = os.path.dirname(__file__)
_CHECKSUM = 32  # bytes
_log = logging.getLogger("accel")
_warned = False


class Info(NamedTuple):
    """What `python -m accel cache info` prints; `problem` says why the folder is not used, else it is empty."""

    folder: pathlib.Path
    entries: int
    size: int
    problem: str


def folder() -> pathlib.Path:
    """Where the entries are: `kernels` in ACCEL_CACHE_DIR or in the user's cache folder."""
    chosen = os.environ.get("ACCEL_CACHE_DIR")
    return (pathlib.Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("accel")) / "kernels"


def get(spec: Any, compile_: Callable[[Any], Any]) -> Callable:
    """The function of a specification: loaded, or made of what `compile_(spec)` returns and stored.

    Of many processes that want the same one at once, one compiles and the others wait for it.
    """
    try:
        path = _open_folder() / f"{key(spec)}.so"
    except OSError as error:
        _warn(error)
        return _compiler().load(compile_(spec), SYMBOL)
    function = load(path)
    if function is None:
        with _locked(path.with_suffix(".lock")):
            function = load(path) or store(path, compile_(spec))
    return function


def key(spec: Any) -> str:
    """The hash that names a specification's entry: kernel sources, compiler and its options, driver, machine, spec.

    Raises FileNotFoundError where no installed compiler can be told by its version.
    """
    words = (*_stack(), type(spec).__name__, *(f"{name}={value}" for name, value in spec._asdict().items()))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def load(path: pathlib.Path) -> Callable | None:
    """The function of an entry; None where there is none that can be trusted."""
    content = _read(path)
    if content is None or hashlib.sha256(content[:-_CHECKSUM]).digest() != content[-_CHECKSUM:]:
        return None
    try:
        return importlib.import_module("tvm_ffi").load_module(str(path))[SYMBOL]
    except (OSError, RuntimeError, AttributeError) as error:
        # a library that the entry was linked to has moved, say: it is linked anew
        _log.debug("accel: %s cannot be loaded: %s", path, error)
        return None


def store(path: pathlib.Path, compiled: Any) -> Callable:
    """Write an entry at once or not at all; returns its function, which is in memory alone where that failed."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="new-") as room:
            library = pathlib.Path(room) / path.name
            _compiler().link(compiled, library, SYMBOL)
            content = library.read_bytes()
            library.chmod(0o600)
            with library.open("ab") as file:
                file.write(hashlib.sha256(content).digest())
                file.flush()
                os.fsync(file.fileno())
            # of machines that see no lock of each other's the first one stays: others may have mapped its entry
            if load(path) is None:
                library.replace(path)
        function = load(path)
        if function is None:
            raise OSError(f"{path} was written and cannot be loaded; may files there be executed?")
    except OSError as error:
        _warn(error)
        return _compiler().load(compiled, SYMBOL)
    return function


def info() -> Info:
    """What the cache holds."""
    place = folder()
    files = _entries(place)
    problem = ""
    if place.exists():
        try:
            _require_private(place)
        except OSError as error:
            problem = str(error)
    return Info(place, len(files), sum(file.stat().st_size for file in files), problem)


def clear() -> int:
    """Remove all entries; returns how many there were. What other processes have loaded stays loaded.

    Locks stay: removing one that a process holds would let a second in.
    """
    entries = _entries(folder())
    for entry in entries:
        entry.unlink(missing_ok=True)
    for room in folder().glob("new-*"):  # left by a process that died while it stored
        shutil.rmtree(room, ignore_errors=True)
    return len(entries)


def _compiler() -> ModuleType:
    return importlib.import_module(f"{__package__}.device.compiler")


def _entries(place: pathlib.Path) -> list[pathlib.Path]:
    # ACCEL_CACHE_DIR may name a place with libraries of somebody else
    return [path for path in place.glob("*.so") if re.fullmatch("[0-9a-f]{64}", path.stem)]


@functools.cache
def _stack() -> tuple[str, ...]:
    # a first call waits for this: through pathlib it took four times as long
    names = {name for place in sys.path for name in _names_in(place) if name.startswith(_STACK)}
    names = {name for name in names if name.endswith(".dist-info")}
    if not any(name.startswith("nvidia_cutlass_dsl") for name in names):
        raise FileNotFoundError("the version of nvidia-cutlass-dsl cannot be found beside its package")
    sources = hashlib.sha256()
    for name, content in sorted(_sources()):
        sources.update(name.encode() + b"\0" + content + b"\0")
    options = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("CUTE_DSL_"))
    return (sources.hexdigest(), *sorted(names), *options, _driver(), platform.machine())


def _names_in(place: str) -> list[str]:
    with contextlib.suppress(OSError):  # an entry of sys.path may be an archive, or nothing
        return os.listdir(place or os.curdir)
    return []


def _sources() -> Iterator[tuple[str, bytes]]:
    """The source of every module here, by its place under this folder."""
    for folder, _, names in os.walk(_SOURCES):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    yield os.path.relpath(path, _SOURCES), file.read()


def _driver() -> str:
    """The CUDA version of the driver, by which the compiler chooses among its installed toolkits."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "no driver"
    return f"driver for CUDA {version.value // 1000}"


def _open_folder() -> pathlib.Path:
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(place)
    return place


def _require_private(place: pathlib.Path) -> None:
    found = place.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{place} belongs to another user or can be written by others")


def _read(path: pathlib.Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            trusted = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if not trusted or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            return file.read()
    except OSError:  # there is none; or, on a network disk, another machine has replaced it meanwhile
        return None


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    lock = filelock.FileLock(path, timeout=LOCK_TIMEOUT, mode=0o600)
    # a timeout is an OSError; a file system may know no locks: then two processes compile the same, and one wins
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _warn(error: OSError) -> None:
    global _warned
    if not _warned:
        _warned = True
        _log.warning("accel: compiled kernels are kept in memory only: %s", error)
