"""Compiling and keeping kernels: one dict from specification to compiled function.

A specification is a NamedTuple of everything that a kernel is specialised for, and nothing else: no tensor, no B, T, N.
It is the compile key as it stands. The compiled function takes torch tensors through TVM-FFI, switches to their device
and launches on its current torch stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

CUTE_DTYPE = {
    torch.bfloat16: BFloat16,
    torch.float16: Float16,
    torch.float32: Float32,
    torch.int32: Int32,
    torch.int64: Int64,
}

_compiled: dict[Any, Callable] = {}
_lock = threading.Lock()
_compilations = 0


def compilations() -> int:
    """How many kernels this process has compiled."""
    return _compilations


def get(spec: Any, build: Callable[[Any], Callable]) -> Callable:
    """The compiled function of a specification; `build(spec)` makes it once, whichever thread comes first."""
    function = _compiled.get(spec)
    if function is None:
        with _lock:
            function = _compiled.get(spec)
            if function is None:
                global _compilations
                function = _compiled[spec] = build(spec)
                _compilations += 1
    return function


def compile_for(arch: str, kernel: Any, *args: Any, keep: bool = False) -> Callable:
    """Compile `kernel(*args, stream)` for one architecture; `keep` leaves PTX and CUBIN files in the working folder."""
    options = f"--enable-tvm-ffi --gpu-arch {arch}" + (" --keep-ptx --keep-cubin" if keep else "")
    return cute.compile(kernel, *args, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)


def fake(dtype: torch.dtype | None, shape: tuple, stride: tuple) -> Any:
    """A stand-in tensor for compilation: None in `shape` or `stride` is any extent or stride; None for no tensor."""
    if dtype is None:
        return None
    extents = tuple(cute.sym_int() if extent is None else extent for extent in shape)
    strides = tuple(cute.sym_int64() if step is None else step for step in stride)
    return make_fake_tensor(CUTE_DTYPE[dtype], extents, strides)


def widest(chunk: int) -> int:
    """Bytes of the widest access, at most 16, that divides a chunk of neighbouring bytes."""
    return min(16, chunk & -chunk)


def alignment(limit: int, element: int, *quantities: int) -> int:
    """`limit` bytes where every address and byte stride is a multiple of it, else one element.

    Two answers and not all powers of two between: each one is another kernel to compile.
    """
    bits = limit
    for quantity in quantities:
        bits |= quantity
    return limit if bits & -bits >= limit else element
