"""Decode steps that repeat: they are not read again, and whatever differs takes the whole way."""

import threading

import pytest
import torch
from test_dispatch import swapped
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from accel import StateIndexError, environment, errors, last_route, ops, repeat, reset_routes, route_counts

N, D, W = 4, 16, 4
ADAPTERS = {  # the names of state and x, and whether the state comes back
    "fla.causal_conv1d_update": ("x", "cache", True),
    "causal_conv1d.causal_conv1d_update@1.4.0": ("x", "conv_state", False),
    "causal_conv1d.causal_conv1d_update@1.5.0": ("x", "conv_state", False),
    "transformers.causal_conv1d_update": ("hidden_states", "conv_state", False),
    "transformers.torch_causal_conv1d_update": ("hidden_states", "conv_state", False),
}
FLA = "fla.causal_conv1d_update"


def normal(*shape, **options):
    """Random numbers at an address that a kept step allows."""
    tensor = torch.randn(*shape, **options)
    assert tensor.data_ptr() % 16 == 0
    return tensor


def step(bias=False, x="x", state="cache", rows=(N, D)):
    given = {x: normal(*rows), state: normal(N, D, W), "weight": normal(D, W), "activation": "silu"}
    return given | ({"bias": normal(D)} if bias else {})


class Reads:
    """A swapped callable whose readings of arguments are counted."""

    def __init__(self, adapter=FLA):
        self.wrapper, self.original = swapped(adapter)
        self.binding = self.wrapper.__accel__
        self.count, read = 0, self.binding.adapter.read

        def counting(*args, **kwargs):
            self.count += 1
            return read(*args, **kwargs)

        self.binding.adapter = self.binding.adapter._replace(read=counting)

    def __call__(self, *args, **kwargs):
        return self.wrapper(*args, **kwargs)


@pytest.fixture
def kept():
    """A callable that keeps a step, whose arguments it has in `given`."""
    reads = Reads()
    reads.given = step()
    for _ in range(2):
        reads(**reads.given)
    assert reads.count == 1
    return reads


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_step_like_the_last_is_not_read_again(adapter, bias):
    x, state, gives_state = ADAPTERS[adapter]
    reads = Reads(adapter)
    reset_routes()
    for positional in (False, False, adapter != FLA):
        given = step(bias, x, state)
        cache = given[state].clone()
        expected = ops.causal_conv1d_update(
            given[x], cache, given["weight"], given.get("bias"), activation=given["activation"]
        )
        if positional:
            found = reads(given[x], given[state], given["weight"], given.get("bias"), "".join("silu"))
        else:
            found = reads(**given)
        y = found[0] if gives_state else found
        assert torch.equal(y, expected) and torch.equal(given[state], cache) and y.is_contiguous()
        assert not gives_state or found[1] is given[state]
    assert reads.count == 1 and reads.original.calls == []
    assert [(route.path, count) for route, count in route_counts().items()] == [("native", 3)]


@pytest.mark.parametrize("rows", [(N, D), (N, 1, D), (1, N, D)])
def test_rows_in_every_form(rows):
    reads = Reads()
    for _ in range(3):
        given = step(rows=rows)
        cache = given["cache"].clone()
        expected = ops.causal_conv1d_update(given["x"].view(N, D), cache, given["weight"], activation="silu")
        y, _ = reads(**given)
        assert y.shape == rows and torch.equal(y.view(N, D), expected) and torch.equal(given["cache"], cache)
    assert reads.count == 1


def test_a_strided_row_is_read_in_place():
    reads = Reads()
    for _ in range(3):
        wide, given = normal(N, 3 * D), step()
        given["x"] = wide[:, D : 2 * D]
        cache = given["cache"].clone()
        expected = ops.causal_conv1d_update(given["x"], cache, given["weight"], activation="silu")
        assert torch.equal(reads(**given)[0], expected)
    assert reads.count == 1


def shifted(tensor):
    """The same numbers and strides, elsewhere than at a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].as_strided(tensor.shape, tensor.stride(), 1)
    return room.copy_(tensor)


SERVED = {  # natively, after a look
    "fewer rows": lambda g: dict(x=g["x"][:1], cache=g["cache"][:1]),
    "x wider rows": lambda g: dict(x=normal(N, 2 * D)[:, :D]),
    "x address": lambda g: dict(x=shifted(g["x"])),
    "state address": lambda g: dict(cache=shifted(g["cache"])),
    "weight address": lambda g: dict(weight=shifted(g["weight"])),
    "state strides": lambda g: dict(cache=normal(N, W, D).transpose(1, 2)),
    "longer state": lambda g: dict(cache=normal(N, D, W + 4)),
    "weight width": lambda g: dict(weight=normal(D, W - 1)),
    "another activation": lambda g: dict(activation="swish"),
    "no activation": lambda g: dict(activation=None),
    "a bias": lambda g: dict(bias=normal(D)),
    "a residual": lambda g: dict(residual=normal(N, D)),
    "no cache": lambda g: dict(cache=None),
    "16 bits": lambda g: {name: g[name].bfloat16() for name in ("x", "cache", "weight")},
    "a parameter": lambda g: dict(weight=torch.nn.Parameter(g["weight"], requires_grad=False)),
}
DECLINED = {
    "float64": lambda g: {name: g[name].double() for name in ("x", "cache", "weight")},
    "gradient": lambda g: dict(weight=normal(D, W, requires_grad=True)),
    "activation": lambda g: dict(activation="gelu"),
    "activation tensor": lambda g: dict(activation=normal(4)),
    "bias list": lambda g: dict(bias=[0.0] * D),
    "x None": lambda g: dict(x=None),
    "x list": lambda g: dict(x=[1.0]),
    "weight None": lambda g: dict(weight=None),
    "meta": lambda g: dict(weight=g["weight"].to("meta")),
    "unknown keyword": lambda g: dict(speed=3),
    "a subclass": lambda g: dict(x=g["x"].as_subclass(type("Sub", (torch.Tensor,), {}))),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_differs_is_read(name, kept):
    other = kept.given | SERVED[name](kept.given)
    for turn in range(2):
        cache = None if other["cache"] is None else other["cache"].clone()
        expected = ops.causal_conv1d_update(
            other["x"], cache, other["weight"], other.get("bias"),
            activation=other["activation"], residual=other.get("residual"),
        )  # fmt: skip
        y, returned = kept(**other)
        assert torch.equal(y, expected) and returned is other["cache"]
        assert cache is None or torch.equal(returned, cache)
        if turn == 0:
            assert kept.count == 2
    assert kept.original.calls == []
    count = kept.count
    kept(**kept.given)
    assert kept.count == count  # the first kind is still kept


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_declined_goes_to_the_original(name, kept):
    other = kept.given | DECLINED[name](kept.given)
    for turn in range(1, 3):
        assert kept(**other) is kept.original.answer
        assert kept.count == 1 + turn and len(kept.original.calls) == turn
        ((_, seen),) = kept.original.calls[-1:]
        assert seen.keys() == other.keys() and all(seen[key] is other[key] for key in other)


def test_too_many_arguments_are_the_originals(kept):
    values = [kept.given["x"], kept.given["cache"], None, kept.given["weight"], None, "silu"]
    kept(*values)
    assert kept.count == 1
    assert kept(*values, 7) is kept.original.answer and kept.original.calls[-1][0][-1] == 7
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        kept(*values, x=values[0])


def test_gradients_that_are_switched_on_are_read(kept):
    given = step()
    given["weight"].requires_grad_()
    with torch.no_grad():
        kept(**given)
        count = kept.count
        kept(**given)
        assert kept.count == count
    assert kept(**given) is kept.original.answer


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Unguarded(Dispatch):
    """A mode that torch's guards look past."""

    @classmethod
    def ignore_compile_internals(cls):
        return True


@pytest.mark.parametrize(
    "scope", [Functions, Dispatch, Unguarded, torch.inference_mode, forward_ad.dual_level, profile]
)
def test_who_looks_on_sees_the_whole_way(scope, kept):
    """And a step that was served so is not kept for those who do not."""
    for _ in range(2):
        with scope():
            kept(**kept.given)
    own = scope is torch.inference_mode  # its dispatch keys are a kind of their own, which is kept
    assert kept.count == (2 if own else 3)
    kept(**kept.given)
    assert kept.count == (2 if own else 3) and len(kept.binding.steps.kept) == 1 + own


def test_a_default_device_looks_at_nothing(kept):
    with torch.device("cpu"):
        kept(**kept.given)
    assert kept.count == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_is_no_step(kept):
    given = kept.given
    torch.jit.trace(lambda x: kept(**{**given, "x": x})[0], given["x"], check_trace=False)
    assert kept.count > 1


def test_fake_tensors_are_no_steps(kept):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(v) if torch.is_tensor(v) else v for name, v in kept.given.items()}
        y, _ = kept(**fake)
    assert type(y).__name__ == "FakeTensor" and kept.count == 2


def test_functorch_is_no_step(kept):
    given = kept.given
    torch.func.vmap(lambda x: kept(**{**given, "x": x}) and x)(given["x"].expand(2, N, D))
    assert kept.count == 2 and len(kept.original.calls) == 1


def test_a_restored_callable_is_the_original(kept):
    kept.binding.live = False
    assert kept(**kept.given) is kept.original.answer and kept.count == 1


def test_forgotten_facts_take_kept_steps_along(kept, monkeypatch):
    environment.forget()
    kept(**kept.given)
    assert kept.count == 2
    monkeypatch.setenv("ACCEL_DISABLE", "1")
    environment.forget()
    try:
        assert kept(**kept.given) is kept.original.answer
    finally:
        monkeypatch.undo()
        environment.forget()


def test_an_error_of_an_earlier_call_is_raised_and_recorded(kept):
    status = environment.facts(torch.device("cpu")).status
    status.view[0] = errors.pack(errors.SLOT_OUT_OF_RANGE, 1, 7)
    before = kept.given["cache"].clone()
    reset_routes()
    with pytest.raises(StateIndexError):
        kept(**kept.given)
    assert torch.equal(kept.given["cache"], before) and kept.count == 1
    assert {route.path: n for route, n in route_counts().items()} == {"error": 1}
    assert last_route().reason == "StateIndexError"
    kept(**kept.given)
    assert str(last_route()) == "native:cpu"


def test_a_failed_step_is_raised_and_not_retried(kept, monkeypatch):
    def fail(*_):
        raise TypeError("inside")

    monkeypatch.setattr(repeat.cpu, "update", fail)
    with pytest.raises(TypeError, match="inside"):
        kept(**kept.given)
    assert kept.count == 1 and kept.original.calls == [] and str(last_route()) == "error:TypeError"


def test_kept_steps_are_bounded(monkeypatch):
    monkeypatch.setattr(repeat, "MAX_STEPS", 3)
    reads = Reads()
    for rows in (*range(1, 7), *range(1, 7)):
        for _ in range(2):
            y, _ = reads(normal(rows, D), normal(rows, D, W), weight=normal(D, W))
            assert y.shape == (rows, D)
    assert reads.count == 12 and len(reads.binding.steps.kept) == 3


def test_threads_keep_steps_at_once():
    reads, wrong = Reads(), []

    def work(rows):
        for _ in range(50):
            given = dict(x=normal(rows, D), cache=normal(rows, D, W), weight=normal(D, W))
            expected = ops.causal_conv1d_update(given["x"], given["cache"].clone(), given["weight"])
            if not torch.equal(reads(**given)[0], expected):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_steps_on_a_gpu_repeat(bias):
    """Bit for bit what the operation gives, on the device of the tensors whichever is current, and in a graph."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    reads = Reads()

    def given():
        wide = torch.randn(N, 3 * 64, device=device).bfloat16()
        made = dict(x=wide[:, 64:128], cache=torch.randn(N, 64, W, device=device).bfloat16(), activation="silu")
        made |= {"weight": torch.randn(64, W, device=device).bfloat16()}
        return made | ({"bias": torch.randn(64, device=device).bfloat16()} if bias else {})

    def expected(call):
        return ops.causal_conv1d_update(
            call["x"], call["cache"], call["weight"], call.get("bias"), activation=call["activation"]
        )

    for _ in range(3):
        call = given()
        kept = call["cache"].clone()
        y, returned = reads(**call)
        assert returned is call["cache"] and torch.equal(y, expected(call | {"cache": kept}))
        assert torch.equal(returned, kept) and y.is_contiguous() and str(last_route()) == "native:cute"
    assert reads.count == 1 and reads.original.calls == []
    call, graph = given(), torch.cuda.CUDAGraph()
    kept = call["cache"].clone()
    with torch.cuda.device(device):
        with torch.cuda.graph(graph):
            y, _ = reads(**call)
        for _ in range(2):
            graph.replay()
            want = expected(call | {"cache": kept})
            torch.cuda.synchronize(device)
            assert torch.equal(y, want) and torch.equal(call["cache"], kept)
    assert reads.count == 1
