"""`warmup`: what a model needs, compiled before it is needed.

A specification depends on dtypes, layouts, alignments and the upstream's own calls, so nothing is guessed from the
parameters of a model: either the model is run once, or the specifications of such a run are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from accel.environment import check
from accel.ops.door import kernels


def warmup(model_or_specs: Callable | Iterable[tuple], /, *args: Any, **kwargs: Any) -> list[tuple]:
    """Compile, or load from the disk, what a model needs: before a benchmark, a deadline or the capture of a graph.

    Args:
        model_or_specs: a model, or any other callable: it is called once, as `model_or_specs(*args, **kwargs)`, in the
            grad mode of the caller, and waited for. Or the specifications that an earlier `warmup` returned, in this
            process or, pickled, in another: they are compiled or loaded one by one and nothing is run; their code
            reaches the GPU at its first launch.
        args, kwargs: of the call.

    Returns:
        The specifications of all kernels that this process holds now, those of this call among them; none on the CPU.

    Raises:
        TypeError: `model_or_specs` is neither, or specifications come with arguments.
        PackedMetadataError, StateIndexError: the run left bad device data behind.
        Whatever the model raises.

    Run what will be run: a decode step and a prefill, each batch size that matters, the backward where there is one.
    """
    jit = kernels("jit")
    if callable(model_or_specs):
        model_or_specs(*args, **kwargs)
        check()
        return jit.specifications()
    specs = list(model_or_specs)
    wrong = [spec for spec in specs if not hasattr(spec, "arch")]
    if args or kwargs or wrong:
        found = f"{wrong[0]!r} among them" if wrong else f"arguments for {len(specs)} specifications"
        raise TypeError(f"model_or_specs: expected a callable, or specifications that warmup returned; got {found}")
    for spec in specs:
        jit.get(spec)
    return jit.specifications()
