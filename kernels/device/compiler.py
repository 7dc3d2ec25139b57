"""Compiling a kernel for one architecture, from stand-in tensors, and making a function of what comes out.

The compiler would make one itself, of code that it generates a second time: that took twice as long as the compilation.
No GPU is needed.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.runtime import find_runtime_libraries, load_module, make_fake_stream, make_fake_tensor

CUTE_DTYPE = {
    torch.bfloat16: BFloat16,
    torch.float16: Float16,
    torch.float32: Float32,
    torch.int32: Int32,
    torch.int64: Int64,
}


def compile_for(arch: str, kernel: Any, *args: Any, keep: bool = False) -> Any:
    """Compile `kernel(*args, stream)` for one architecture, to be linked or loaded; it cannot be called yet.

    `keep` leaves PTX and CUBIN files in the working folder.
    """
    options = f"--enable-tvm-ffi --gpu-arch {arch}" + (" --keep-ptx --keep-cubin" if keep else "")
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *args, stream, options=options, no_jit_engine=True)


def fake(dtype: torch.dtype | None, shape: tuple, stride: tuple) -> Any:
    """A stand-in tensor for compilation: None in `shape` or `stride` is any extent or stride; None for no tensor."""
    if dtype is None:
        return None
    extents = tuple(cute.sym_int() if extent is None else extent for extent in shape)
    strides = tuple(cute.sym_int64() if step is None else step for step in stride)
    return make_fake_tensor(CUTE_DTYPE[dtype], extents, strides)


def link(compiled: Any, library: pathlib.Path, symbol: str) -> None:
    """Write a compiled kernel as a shared library in which TVM-FFI finds its function as `symbol`.

    The library names the folders of the two that it needs, so that loading it takes no search. Raises OSError where
    there is no linker, or it fails.
    """
    found = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    linker = shlex.split(os.environ.get("CC", "")) or ([found] if found else None)
    if linker is None:
        raise FileNotFoundError("no C compiler to link with (CC, cc, gcc, clang)")
    code = library.with_suffix(".o")
    compiled.export_to_c(str(code), function_name=symbol, export_only_tvm_ffi_symbols=True)
    needed = [pathlib.Path(path) for path in find_runtime_libraries(enable_tvm_ffi=True)]
    folders = [f"-Wl,-rpath,{path.parent}" for path in needed]
    done = subprocess.run(
        [*linker, "-shared", "-nostdlib", "-o", library, code, *needed, *folders], capture_output=True, text=True
    )
    if done.returncode:
        raise OSError(f"{linker[0]} cannot link: {done.stderr.strip()}")


def load(compiled: Any, symbol: str) -> Callable:
    """The function of a compiled kernel, by way of no disk and no linker."""
    descriptor = os.memfd_create(symbol)
    try:
        code = f"/proc/self/fd/{descriptor}"
        compiled.export_to_c(code, function_name=symbol)
        return load_module(code, enable_tvm_ffi=True)[symbol]
    finally:
        os.close(descriptor)
