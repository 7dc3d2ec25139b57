"""The only place that chooses: read the call, admit it, record the route, run the operation or the original.

A decline hands the original the very arguments that came, before anything was touched. A failure after admission is
raised, never turned into a fallback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from accel import admission, environment
from accel.call import BackwardCall, ConvCall, StatesCall, UpdateCall
from accel.ops import conv, update
from accel.reasons import Decline, Reason
from accel.routes import Route, amend, profiler_range, profiling, record


class Operation(NamedTuple):
    """What serves one kind of call.

    prepare(call, facts) admits: a Decline, or what run(call, facts, plan) needs besides.
    """

    prepare: Callable
    run: Callable


OPERATIONS: dict[type, Operation] = {
    UpdateCall: Operation(update.prepare, update.run),
    ConvCall: Operation(admission.admit, conv.run),
    BackwardCall: Operation(admission.admit, conv.backward),
    StatesCall: Operation(admission.admit, conv.run_states),
}


def as_it_is(result: Any, call: Any) -> Any:
    """What an upstream returns that has our results."""
    return result


class Adapter(NamedTuple):
    """One upstream callable: `read` has its signature and gives a call, or a Decline where our words do not reach.

    `give` turns (result, call) into what the upstream returns.
    """

    call: type
    read: Callable[..., Any]
    give: Callable[[Any, Any], Any] = as_it_is


class Binding:
    """One swapped callable. `live` is False once it was restored: then it is the original, in other wrappers too."""

    __slots__ = ("adapter", "callable", "live", "native", "operation", "original", "target")

    def __init__(self, adapter: Adapter, target: str, name: str, original: Callable):
        self.adapter = adapter
        self.operation = OPERATIONS[adapter.call]
        self.target = target
        self.callable = name
        self.original = original
        self.native = {backend: Route(target, name, "native", backend, None, "") for backend in ("cute", "cpu")}
        self.live = True


def wrap(adapter: Adapter, target: str, name: str, original: Callable) -> Callable:
    """The replacement of `original`: its signature, name, module and docs; `__accel__` holds the binding."""
    binding = Binding(adapter, target, name, original)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return run(binding, args, kwargs)

    for name in [name for name in wrapper.__dict__ if name.startswith("_torchdynamo")]:
        # copied from the original, they would send a compiler past us
        del wrapper.__dict__[name]
    wrapper.__accel__ = binding
    return wrapper


def run(binding: Binding, args: tuple, kwargs: dict) -> Any:
    """Serve one call of a swapped callable."""
    if not binding.live:
        return binding.original(*args, **kwargs)
    try:
        call = binding.adapter.read(*args, **kwargs)
    except Exception as error:
        call = _unreadable(error)
    if type(call) is Decline:
        return _fall_back(binding, call, args, kwargs)
    facts = environment.facts(call.x.device)
    operation = binding.operation
    plan = operation.prepare(call, facts)
    if type(plan) is Decline:
        return _fall_back(binding, plan, args, kwargs)
    record(binding.native[facts.backend])
    try:
        if profiling():
            with profiler_range(binding.target, "native"):
                return binding.adapter.give(operation.run(call, facts, plan), call)
        return binding.adapter.give(operation.run(call, facts, plan), call)
    except Exception as error:
        route = Route(binding.target, binding.callable, "error", None, type(error).__name__, str(error))
        amend(binding.native[facts.backend], route)
        raise


def _unreadable(error: Exception) -> Decline:
    # arguments that do not bind, a non-tensor, a view that would copy: the original answers in its own words
    return Decline(Reason.UNSUPPORTED_ARGUMENT, "arguments", "the upstream's signature", str(error), TypeError)


def _fall_back(binding: Binding, decline: Decline, args: tuple, kwargs: dict) -> Any:
    record(Route(binding.target, binding.callable, "fallback", None, decline.reason.value, str(decline)))
    if profiling():
        with profiler_range(binding.target, "fallback"):
            return binding.original(*args, **kwargs)
    return binding.original(*args, **kwargs)


class Explanation(NamedTuple):
    """Why a call would take its route: the route, and every failed check."""

    route: Route
    failed: tuple[Decline, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.route), *(f"  {decline.reason}: {decline}" for decline in self.failed)])


def explain(function: Callable, *args: Any, **kwargs: Any) -> Explanation:
    """What a swapped callable would do with these arguments, without running it.

    Raises ValueError where `function` is not one that accel has swapped.
    """
    binding = getattr(function, "__accel__", None)
    if not isinstance(binding, Binding):
        raise ValueError(f"function: expected a callable that accel has swapped, got {function!r}")
    call = _read(binding.adapter, args, kwargs)
    failed = _failed(call)
    if failed:
        first = failed[0]
        return Explanation(
            Route(binding.target, binding.callable, "fallback", None, first.reason.value, str(first)), failed
        )
    return Explanation(binding.native[environment.facts(call.x.device).backend], ())


def declines(adapter: Adapter, args: tuple, kwargs: dict) -> tuple[Decline, ...]:
    """Every failed check of a call, without running it."""
    return _failed(_read(adapter, args, kwargs))


def _read(adapter: Adapter, args: tuple, kwargs: dict) -> Any:
    try:
        return adapter.read(*args, **kwargs)
    except Exception as error:
        return _unreadable(error)


def _failed(call: Any) -> tuple[Decline, ...]:
    if type(call) is Decline:
        return (call,)
    return tuple(admission.CHECKS[type(call)](call, environment.facts(call.x.device)))
