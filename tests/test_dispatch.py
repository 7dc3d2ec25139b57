"""One swapped call: what a fallback hands on, what a failure does, what comes back, and what `explain` says."""

import inspect
import pickle
import sys
import types

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from accel import cpu, dispatch, explain, last_route, ops, record_routes
from accel.adapters import ADAPTERS
from accel.dispatch import Explanation, wrap
from accel.reasons import Reason

N, D, T, W = 3, 8, 5, 4
UPDATE, CONV, CONV_060 = "fla.causal_conv1d_update", "fla.causal_conv1d@0.4.2", "fla.causal_conv1d@0.6.0"
BACKWARD, STATES = "fla.causal_conv1d_bwd@0.6.0", "fla.causal_conv1d_update_states"


class Original:
    """Stands where an upstream's callable does, and notes the very objects that it gets."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error
        self.answer = object()

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        if self.error is not None:
            raise self.error
        return self.answer


def swapped(adapter=UPDATE, error=None):
    original = Original(error)

    def causal_conv1d(*args, **kwargs):
        return original(*args, **kwargs)

    return wrap(ADAPTERS[adapter], "short_conv", "causal_conv1d", causal_conv1d), original


def step():
    """A good update, as FLA's callers write it."""
    return dict(x=torch.randn(N, D), cache=torch.randn(N, D, W), weight=torch.randn(D, W), activation="silu")


def sequence():
    return dict(x=torch.randn(2, T, D), weight=torch.randn(D, W), activation="silu", output_final_state=True)


def parallel(**options):
    """A rank's part of two sequences, as FLA's context-parallel code is called."""
    context = types.SimpleNamespace(cu_seqlens=torch.tensor([0, 2, T], dtype=torch.int32))
    return {"x": torch.randn(1, T, D), "weight": torch.randn(D, W), "cp_context": context, **options}


def split_heads():
    """[B, T, H, d] whose heads are not neighbours in memory."""
    return torch.randn(2, T, 4, D // 4).transpose(2, 3)


FALLBACKS = {
    "activation": (UPDATE, lambda: {**step(), "activation": "gelu"}, Reason.ACTIVATION),
    "gradient": (UPDATE, lambda: {**step(), "weight": torch.randn(D, W, requires_grad=True)}, Reason.AUTOGRAD),
    "meta": (UPDATE, lambda: {**step(), "weight": torch.randn(D, W, device="meta")}, Reason.DEVICE),
    "no tensor": (UPDATE, lambda: {**step(), "bias": [0.0] * D}, Reason.TENSOR_SUBCLASS),
    "x no tensor": (UPDATE, lambda: {**step(), "x": [1.0]}, Reason.UNSUPPORTED_ARGUMENT),
    "unknown keyword": (UPDATE, lambda: {**step(), "speed": 3}, Reason.UNSUPPORTED_ARGUMENT),
    "no cache given": (UPDATE, lambda: dict(x=torch.randn(N, D)), Reason.UNSUPPORTED_ARGUMENT),
    "no weight": (UPDATE, lambda: dict(x=torch.randn(N, D), cache=None), None),
    "activation list": (UPDATE, lambda: {**step(), "activation": ["silu"]}, None),
    "x without axes": (UPDATE, lambda: {**step(), "x": torch.tensor(1.0)}, None),
    "context parallel": (CONV_060, lambda: parallel(backend="cuda"), Reason.CONTEXT_PARALLEL),
    "no context": (CONV, lambda: {**sequence(), "cp_context": object()}, Reason.UNSUPPORTED_ARGUMENT),
    "backend": (CONV, lambda: {**sequence(), "backend": "cuda"}, Reason.UNSUPPORTED_ARGUMENT),
    "heads apart": (CONV, lambda: {**sequence(), "x": split_heads()}, Reason.UNSUPPORTED_ARGUMENT),
    "no filter": (CONV, lambda: {**sequence(), "weight": None}, Reason.UNSUPPORTED_ARGUMENT),
    "x of two axes": (CONV, lambda: {**sequence(), "x": torch.randn(T, D)}, None),
    "weight of one axis": (CONV, lambda: {**sequence(), "weight": torch.randn(D)}, None),
    "no length": (STATES, lambda: dict(x=torch.randn(1, T, D), state_len=None), None),
}


def memory(arguments):
    return {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def assert_untouched(arguments, before):
    for name, value in before.items():
        assert value.is_meta or torch.equal(arguments[name], value), name


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("name", FALLBACKS)
def test_a_fallback_is_the_original_with_the_very_arguments(name, positional):
    adapter, build, reason = FALLBACKS[name]
    wrapper, original = swapped(adapter)
    kwargs = build()
    before = memory(kwargs)
    args = (kwargs.pop("x"),) if positional else ()
    with record_routes() as routes:
        assert wrapper(*args, **kwargs) is original.answer
    ((got_args, got_kwargs),) = original.calls
    assert len(got_args) == len(args) and all(a is b for a, b in zip(got_args, args, strict=True))
    assert list(got_kwargs) == list(kwargs) and all(got_kwargs[key] is kwargs[key] for key in kwargs)
    assert_untouched(kwargs, {key: value for key, value in before.items() if key in kwargs})
    (route,) = routes
    assert route.path == "fallback" and route.backend is None
    assert reason is None or route.reason == reason.value


@pytest.mark.parametrize("adapter", [CONV, CONV_060])
@pytest.mark.parametrize("dtype, expected", [(torch.float32, "native:cpu"), (torch.float64, "fallback:dtype")])
def test_a_call_that_the_upstream_takes_apart_has_the_route_of_its_part(adapter, dtype, expected):
    wrapper, original = swapped(adapter)
    kwargs = parallel(x=torch.randn(1, T, D, dtype=dtype))
    with record_routes() as routes:
        assert wrapper(**kwargs) is original.answer
    ((args, got),) = original.calls
    assert args == () and all(got[key] is kwargs[key] for key in kwargs)
    assert routes == []
    found = explain(wrapper, **kwargs)
    assert (found.route.callable, str(found.route)) == ("causal_conv1d_fwd", expected)
    assert [str(decline.reason) for decline in found.failed] == ([] if dtype == torch.float32 else ["dtype"])


def test_too_many_arguments_are_the_originals_too():
    wrapper, original = swapped()
    arguments = tuple(object() for _ in range(9))
    assert wrapper(*arguments) is original.answer
    assert original.calls == [(arguments, {})]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("error", [ValueError("no"), AttributeError("no"), KeyboardInterrupt(), StopIteration()])
def test_an_error_of_the_original_is_passed_on_and_not_retried(error, live):
    wrapper, original = swapped(error=error)
    wrapper.__accel__.live = live
    with pytest.raises(type(error)) as caught:
        wrapper(**{**step(), "activation": "gelu"})
    assert caught.value is error and len(original.calls) == 1


def break_operation(wrapper, monkeypatch, error):
    def run(call, facts, plan):
        raise error

    monkeypatch.setattr(wrapper.__accel__, "operation", wrapper.__accel__.operation._replace(run=run))


@pytest.mark.parametrize("adapter, build", [(UPDATE, step), (CONV, sequence)])
@pytest.mark.parametrize("error", [ValueError("a fault of ours"), TypeError("no bind"), RuntimeError("launch")])
def test_a_failure_after_admission_is_raised(adapter, build, error, monkeypatch):
    wrapper, original = swapped(adapter)
    break_operation(wrapper, monkeypatch, error)
    with pytest.raises(type(error)) as caught:
        wrapper(**build())
    assert caught.value is error and original.calls == []
    route = last_route("short_conv")
    assert str(route) == f"error:{type(error).__name__}"
    assert (route.path, route.backend, route.callable, route.detail) == ("error", None, "causal_conv1d", str(error))


def test_a_failed_call_has_one_route(monkeypatch):
    wrapper, _ = swapped()
    break_operation(wrapper, monkeypatch, ValueError("a fault of ours"))
    with record_routes() as routes, pytest.raises(ValueError):
        wrapper(**step())
    assert [str(route) for route in routes] == ["error:ValueError"]


def test_a_restored_wrapper_is_the_original():
    wrapper, original = swapped()
    wrapper.__accel__.live = False
    arguments = step()
    with record_routes() as routes:
        assert wrapper(**arguments) is original.answer
    ((_, got),) = original.calls
    assert all(got[name] is arguments[name] for name in arguments) and routes == []


def test_disabled_is_a_fallback(monkeypatch):
    monkeypatch.setenv("ACCEL_DISABLE", "1")
    dispatch.environment.forget()
    try:
        for adapter, build in ((UPDATE, step), (CONV, sequence)):
            wrapper, original = swapped(adapter)
            assert wrapper(**build()) is original.answer and str(last_route()) == "fallback:disabled"
    finally:
        monkeypatch.undo()
        dispatch.environment.forget()


SOURCE = '''
def causal_conv1d_update(x, cache, residual=None, *, weight: int = 3) -> None:
    """What the upstream says."""


causal_conv1d_update._torchdynamo_disable = True
causal_conv1d_update._torchdynamo_orig_callable = causal_conv1d_update
causal_conv1d_update.anything_else = "kept"
'''


@pytest.fixture
def upstream():
    module = types.ModuleType("made_up_upstream")
    exec(compile(SOURCE, "made_up_upstream.py", "exec"), vars(module))
    sys.modules["made_up_upstream"] = module
    yield module
    del sys.modules["made_up_upstream"]


def test_a_wrapper_looks_like_the_original(upstream):
    original = upstream.causal_conv1d_update
    wrapper = upstream.causal_conv1d_update = wrap(ADAPTERS[UPDATE], "short_conv", "causal_conv1d_update", original)
    assert inspect.signature(wrapper) == inspect.signature(original)
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "anything_else"):
        assert getattr(wrapper, name) == getattr(original, name)
    assert wrapper.__wrapped__ is original
    assert inspect.isfunction(wrapper) and inspect.unwrap(wrapper) is original
    assert pickle.loads(pickle.dumps(wrapper)) is wrapper
    assert [name for name in vars(wrapper) if name.startswith("_torchdynamo")] == []
    assert original._torchdynamo_disable is True


FORMS = {"ND": (N, D), "N1D": (N, 1, D), "1ND": (1, N, D)}


def row_strided(*shape):
    """Random numbers as a slice of a wider projection."""
    return torch.randn(*shape[:-1], 2 * shape[-1] + 3)[..., 2 : shape[-1] + 2]


@pytest.mark.parametrize("form", FORMS)
def test_an_update_gives_the_cache_that_came(form):
    wrapper, original = swapped()
    x, cache, weight = row_strided(*FORMS[form]), torch.randn(N, D, W), torch.randn(D, W)
    expected_cache, address = cache.clone(), cache.data_ptr()
    expected = ops.causal_conv1d_update(x.reshape(N, D), expected_cache, weight, activation="silu")
    y, returned = wrapper(x, cache, None, weight, None, "silu")
    assert returned is cache and cache.data_ptr() == address and torch.equal(cache, expected_cache)
    assert y.shape == x.shape and y.is_contiguous() and torch.equal(y.view(N, D), expected)
    assert original.calls == [] and str(last_route()) == "native:cpu"
    y, returned = wrapper(x, None, weight=weight)
    assert returned is None and y.shape == x.shape


def test_sequences_come_back_in_the_upstreams_words():
    wrapper, original = swapped(CONV)
    x, weight, bias = row_strided(2, T, D), torch.randn(D, W), torch.randn(D)
    initial, residual = torch.randn(2, D, W), row_strided(2, T, D)
    y, final = wrapper(x, weight, bias, residual, initial, True, "silu")
    expected, expected_final = ops.causal_conv1d(
        x.transpose(1, 2),
        weight,
        bias,
        activation="silu",
        residual=residual.transpose(1, 2),
        initial_states=initial,
        return_final_states=True,
        state_len=W,
    )
    assert torch.equal(y, expected.transpose(1, 2)) and y.is_contiguous()
    assert torch.equal(final, expected_final) and final.is_contiguous()
    heads, nothing = wrapper(x=torch.randn(2, T, 4, D // 4), weight=weight)
    assert heads.shape == (2, T, D) and nothing is None
    assert original.calls == []


def test_gradients_and_states_come_back_in_the_upstreams_words():
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((2, T, D), (D, W), (D,), (2, T, D), (2, D, W))]
    x, weight, bias, residual, initial = leaves
    dy, dfinal = torch.randn(2, T, D), torch.randn(2, D, W)
    y, final = swapped(CONV)[0](*leaves, True, "silu")
    expected = torch.autograd.grad((y, final), leaves, (dy, dfinal))
    backward, original = swapped(BACKWARD)
    dx, dweight, dbias, dresidual, dinitial = backward(
        x.detach(), dy, dfinal, weight.detach(), bias.detach(), residual.detach(), initial.detach(), "silu"
    )
    for got, gradient in zip((dx, dweight, dbias, dresidual, dinitial), expected, strict=True):
        assert torch.equal(got, gradient)
    states, other = swapped(STATES)
    assert torch.equal(states(x.detach(), W, initial.detach()), final.detach())
    assert original.calls == other.calls == []


@pytest.mark.parametrize("form", FORMS)
def test_no_copy_around_an_update(form, no_copies, monkeypatch):
    monkeypatch.setattr(cpu, "update", lambda call, y, status: None)
    wrapper, original = swapped()
    x, residual = row_strided(*FORMS[form]), row_strided(*FORMS[form])
    cache, weight = torch.randn(N, W, D).transpose(1, 2), torch.randn(D, W)
    with no_copies() as mode:
        y, returned = wrapper(x, cache, residual, weight, None, "silu")
    assert returned is cache and mode.seen == ["empty_like"] and original.calls == []


def test_no_copy_around_a_sequence(no_copies, monkeypatch):
    for name in ("conv", "conv_backward", "states"):
        monkeypatch.setattr(cpu, name, lambda *arguments: None)
    x, weight, bounds = row_strided(1, T, D), torch.randn(D, W), torch.tensor([0, 2, T], dtype=torch.int32)
    initial, dy = torch.randn(2, W, D).transpose(1, 2), torch.zeros(1, 1, 1).expand(1, T, D)
    originals = []
    with no_copies():
        for adapter, args, kwargs in (
            (CONV, (x, weight), dict(initial_state=initial, output_final_state=True, cu_seqlens=bounds)),
            (CONV, (x.unflatten(2, (2, -1)), weight), dict(residual=x)),
            (BACKWARD, (x, dy, None, weight), dict(initial_state=initial, cu_seqlens=bounds)),
            (STATES, (x, W, initial, bounds), {}),
        ):
            wrapper, original = swapped(adapter)
            wrapper(*args, **kwargs)
            originals.append(original)
    assert all(original.calls == [] for original in originals)


def test_explain_a_native_call():
    wrapper, original = swapped()
    arguments = step()
    before = memory(arguments)
    with record_routes() as routes:
        answer = explain(wrapper, **arguments)
    assert isinstance(answer, Explanation) and answer.failed == () and str(answer.route) == "native:cpu"
    lines = str(answer).splitlines()
    assert lines[0] == "short_conv.causal_conv1d would take native:cpu" and lines[-1] == "every check holds"
    assert routes == [] and original.calls == []
    assert_untouched(arguments, before)
    wrapper(**arguments)
    assert last_route() == answer.route


def test_explain_lists_every_failed_check():
    wrapper, original = swapped()
    arguments = step() | dict(weight=torch.randn(D, W, requires_grad=True), bias=torch.randn(D + 1), activation="gelu")
    arguments["cache"] = arguments["cache"].double()
    before = memory(arguments)
    with record_routes() as routes:
        answer = explain(wrapper, **arguments)
    assert [(decline.reason.value, decline.argument) for decline in answer.failed] == [
        ("autograd", "weight"),
        ("shape", "bias"),
        ("activation", "activation"),
        ("dtype", "conv_state"),
    ]
    assert str(answer).splitlines() == [
        "short_conv.causal_conv1d would take fallback:autograd",
        "  x            [3, 8] float32 on cpu, strides (8, 1)",
        "  form         'ND'",
        "  conv_state   [3, 8, 4] float64 on cpu, strides (32, 4, 1)",
        "  weight       [8, 4] float32 on cpu, strides (4, 1), requires grad",
        "  bias         [9] float32 on cpu, strides (1,)",
        "  activation   'gelu'",
        "  pad_slot_id  -1",
        "autograd: weight",
        "  found   requires_grad",
        "  wanted  no gradient (decode is inference only)",
        "  fix     decode under `torch.no_grad()` or `torch.inference_mode()`",
        "shape: bias",
        "  found   [9]",
        "  wanted  [8]",
        "  fix     give the argument the shape that the check wanted",
        "activation: activation",
        "  found   'gelu'",
        "  wanted  None, 'silu', 'swish'",
        "  fix     activation None, and the other function after the call",
        "dtype: conv_state",
        "  found   torch.float64",
        "  wanted  x's dtype torch.float32",
        "  fix     x and its states in one of bfloat16, float16, float32; weight and bias like x or in float32",
    ]
    assert routes == [] and original.calls == []
    assert_untouched(arguments, before)
    wrapper(**arguments)
    assert last_route() == answer.route


@pytest.mark.parametrize("name", FALLBACKS)
def test_explain_says_what_a_call_would_do(name):
    adapter, build, _ = FALLBACKS[name]
    wrapper, original = swapped(adapter)
    arguments = build()
    answer = explain(wrapper, **arguments)
    assert answer.failed and original.calls == []
    assert str(answer).splitlines()[0].endswith(f"would take {answer.route}")
    wrapper(**arguments)
    assert answer.route == last_route()


@pytest.mark.parametrize("function", [explain, torch.relu, Original(), None])
def test_explain_what_was_never_swapped(function):
    with pytest.raises(ValueError, match="function: expected a callable that accel has swapped, got "):
        explain(function, 1)


def test_profiler_ranges():
    wrapper, _ = swapped()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        wrapper(**step())
        wrapper(**step())
        wrapper(**{**step(), "activation": "gelu"})
    counts = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("accel::")}
    assert counts == {"accel::short_conv.native": 2, "accel::short_conv.fallback": 1}


def test_no_range_without_a_profiler(monkeypatch):
    def refuse(*_):
        raise AssertionError("a range, and no profiler")

    monkeypatch.setattr(dispatch, "profiler_range", refuse)
    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    wrapper, original = swapped()
    wrapper(**step())
    assert wrapper(**{**step(), "activation": "gelu"}) is original.answer
