"""The only place that chooses: read the call, admit it, record the route, run the operation or the original.

A decline hands the original the very arguments that came, before anything was touched. A failure after admission is
raised, never turned into a fallback. A call that the upstream takes apart is handed on without a route: the parts come
back here and have theirs. torch.compile traces through here: what it cannot trace, or what belongs to a run and not to
a graph (kept plans and steps, the recorder, profiler ranges), is behind `is_dynamo_compiling`. Decode steps that were
chosen before go by `accel.repeat`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from accel import admission, environment
from accel.call import BackwardCall, ConvCall, DenseCall, InnerCall, StatesCall, UpdateCall
from accel.ops import conv, dense, gradients, states, update
from accel.reasons import Decline, Reason
from accel.repeat import Steps
from accel.routes import Route, failed, note, profiler_range, profiling, record


class Operation(NamedTuple):
    """What serves one kind of call.

    prepare(call, facts) admits: a Decline, or what run(call, facts, plan) needs besides.
    """

    prepare: Callable
    run: Callable


OPERATIONS: dict[type, Operation] = {
    UpdateCall: Operation(update.prepare, update.run),
    ConvCall: Operation(conv.prepare, conv.run),
    BackwardCall: Operation(admission.admit, gradients.run_backward),
    StatesCall: Operation(admission.admit, states.run),
    DenseCall: Operation(admission.admit, dense.run),
}


def as_it_is(result: Any, call: Any) -> Any:
    """What an upstream returns that has our results."""
    return result


class Adapter(NamedTuple):
    """One upstream callable: `read` has its signature and gives a call, or a Decline where our words do not reach.

    Or an InnerCall, which the upstream will come back with. `give` turns (result, call) into what the upstream returns.
    `again`, of a decode step's callable: takes `Steps.serve` and any arguments, and returns what the upstream does, or
    None where `read` has to look at them. `inner`, of an upstream that only prepares such a step: the name by which its
    module knows the callable that it hands the step to. That one's kept steps are served, in its name.
    """

    call: type
    read: Callable[..., Any]
    give: Callable[[Any, Any], Any] = as_it_is
    again: Callable[..., Any] | None = None
    inner: str = ""


class Binding:
    """One swapped callable. `live` is False once it was restored: then it is the original, in other wrappers too."""

    __slots__ = ("adapter", "callable", "live", "native", "operation", "original", "steps", "target")

    def __init__(self, adapter: Adapter, target: str, name: str, original: Callable):
        self.adapter = adapter
        self.operation = OPERATIONS[adapter.call]
        self.target = target
        self.callable = name
        self.original = original
        self.native = {backend: Route(target, name, "native", backend, None, "") for backend in ("cute", "cpu")}
        self.live = True
        self.steps = Steps()


def wrap(adapter: Adapter, target: str, name: str, original: Callable) -> Callable:
    """The replacement of `original`: its signature, name, module and docs; `__accel__` holds the binding."""
    binding = Binding(adapter, target, name, original)
    again, serve = adapter.again, binding.steps.serve
    if adapter.inner:
        serve = functools.partial(_serve_inner, getattr(original, "__globals__", {}), adapter.inner)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if again is not None and binding.live and not is_dynamo_compiling():
            result = again(serve, *args, **kwargs)
            if result is not None:
                return result
        return run(binding, args, kwargs)

    for name in [name for name in wrapper.__dict__ if name.startswith("_torchdynamo")]:
        # copied from the original, they would send a compiler past us
        del wrapper.__dict__[name]
    wrapper.__accel__ = binding
    return wrapper


def _serve_inner(names: dict[str, Any], inner: str, *step: Any) -> Tensor | None:
    """What `Steps.serve` of the callable of that name gives, as long as it is a live one of ours."""
    binding = getattr(names.get(inner), "__accel__", None)
    return binding.steps.serve(*step) if type(binding) is Binding and binding.live else None


def run(binding: Binding, args: tuple, kwargs: dict) -> Any:
    """Serve one call of a swapped callable."""
    if not binding.live:
        return binding.original(*args, **kwargs)
    adapter = binding.adapter
    try:
        call = adapter.read(*args, **kwargs)
    except Exception as error:
        call = _unreadable(error)
    if type(call) is not adapter.call:
        if type(call) is InnerCall:
            return binding.original(*args, **kwargs)
        return _fall_back(binding, call, args, kwargs)
    facts = environment.facts(call.x.device)
    operation = binding.operation
    tracing = is_dynamo_compiling()
    plan = admission.admit(call, facts) if tracing else operation.prepare(call, facts)
    if type(plan) is Decline:
        return _fall_back(binding, plan, args, kwargs)
    if tracing:
        note(binding.target, binding.callable, "native", facts.backend, None, "")
        return adapter.give(operation.run(call, facts, plan), call)
    record(binding.native[facts.backend])
    try:
        if profiling():
            with profiler_range(binding.target, "native"):
                return adapter.give(operation.run(call, facts, plan), call)
        result = adapter.give(operation.run(call, facts, plan), call)
    except Exception as error:
        failed(binding.native[facts.backend], error)
        raise
    if adapter.again is not None:
        binding.steps.keep(call, facts, plan, binding.native[facts.backend])
    return result


def _unreadable(error: Exception) -> Decline:
    # arguments that do not bind, a non-tensor, a view that would copy: the original answers in its own words
    return Decline(Reason.UNSUPPORTED_ARGUMENT, "arguments", "the upstream's signature", str(error), TypeError)


def _fall_back(binding: Binding, decline: Decline, args: tuple, kwargs: dict) -> Any:
    if is_dynamo_compiling():
        note(binding.target, binding.callable, "fallback", None, decline.reason.value, str(decline))
        return binding.original(*args, **kwargs)
    record(Route(binding.target, binding.callable, "fallback", None, decline.reason.value, str(decline)))
    if profiling():
        with profiler_range(binding.target, "fallback"):
            return binding.original(*args, **kwargs)
    return binding.original(*args, **kwargs)


class Explanation(NamedTuple):
    """Why a call would take its route: the route, every failed check, and the call as its adapter has read it.

    `arguments` are names in accel's words, each with what came; empty where the adapter could not read the call.
    """

    route: Route
    failed: tuple[Decline, ...]
    arguments: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """The route, the arguments as found, then a paragraph for each failed check: found, wanted, what to do."""
        lines = [f"{self.route.target}.{self.route.callable} would take {self.route}"]
        width = max((len(name) for name, _ in self.arguments), default=0)
        lines += [f"  {name.ljust(width)}  {found}" for name, found in self.arguments]
        for decline in self.failed:
            lines += [
                f"{decline.reason}: {decline.argument}",
                f"  found   {decline.found}",
                f"  wanted  {decline.expected}",
                f"  fix     {decline.reason.fix}",
            ]
        return "\n".join(lines if self.failed else [*lines, "every check holds"])


def explain(function: Callable, *args: Any, **kwargs: Any) -> Explanation:
    """What a swapped callable would do with these arguments, without running it.

    Of a call that the upstream takes apart, that is the route of the convolution inside. Raises ValueError where
    `function` is not one that accel has swapped.
    """
    binding = getattr(function, "__accel__", None)
    if not isinstance(binding, Binding):
        raise ValueError(f"function: expected a callable that accel has swapped, got {function!r}")
    call = _read(binding.adapter, args, kwargs)
    name = binding.callable
    if type(call) is InnerCall:
        name, call = call
    failed = _failed(call)
    arguments = () if type(call) is Decline else _arguments(call)
    if failed:
        first = failed[0]
        route = Route(binding.target, name, "fallback", None, first.reason.value, str(first))
        return Explanation(route, failed, arguments)
    native = binding.native[environment.facts(call.x.device).backend]
    return Explanation(native._replace(callable=name), (), arguments)


def _arguments(call: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name, _found(value)) for name, value in zip(call._fields, call, strict=True) if value is not None)


def _found(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    strides = f", strides {tuple(value.stride())}" if value.layout is torch.strided and not value.is_nested else ""
    kind = "" if type(value) is Tensor else f"{type(value).__name__} "
    grad = ", requires grad" if value.requires_grad else ""
    shape = "nested" if value.is_nested else list(value.shape)
    return f"{kind}{shape} {str(value.dtype).removeprefix('torch.')} on {value.device}{strides}{grad}"


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
