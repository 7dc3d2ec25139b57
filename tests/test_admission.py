"""Admission: every reason by one mutation of a good call, nothing but metadata is read, kept decisions are never stale.

Facts of a GPU are made up: the tensors stay on the CPU, and so does the device that the facts name.
"""

import dataclasses
import itertools
import mmap
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from accel import Reason, admission, environment, ops
from accel.adapters import ADAPTERS
from accel.call import BackwardCall, ConvCall, StatesCall, UpdateCall
from accel.environment import DeviceFacts
from accel.errors import StatusWord
from accel.kernels.contract import CONV, UPDATE
from accel.ops import plans, update
from accel.reasons import Decline

CPU = torch.device("cpu")
N, D, T, W = 4, 16, 12, 4
BF16 = torch.bfloat16


class SomeGPU:
    """A device of type cuda on which all tensors are."""

    type = "cuda"

    def __eq__(self, other):
        return True

    __hash__ = None


class Mine(torch.Tensor):
    """A subclass as users write them."""


def made_up(backend="cpu", **changes):
    arch = "sm_90a" if backend == "cute" else None
    return dataclasses.replace(DeviceFacts(CPU, backend, arch, "", 1, False, False, StatusWord(CPU)), **changes)


def normal(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype)


def channel_last(*shape, dtype=BF16):
    return normal(shape[0], shape[2], shape[1], dtype=dtype).transpose(1, 2)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def good_update():
    state, slots = normal(N, D, W), torch.arange(N, dtype=torch.int32)
    return UpdateCall(normal(N, D), "ND", state, normal(D, W), normal(D), normal(N, D), "silu", None, slots, -1)


def good_packed():
    x, residual, bounds = channel_last(2, D, T), channel_last(2, D, T), ints([0, 5, 2 * T])
    initial, final = normal(2, D, W), normal(2, D, W)
    return ConvCall(x, normal(D, W), normal(D), residual, "silu", bounds, None, initial, True, final, W, False, True)


def good_indexed():
    seq_idx = torch.zeros(2, T, dtype=torch.int32)
    return good_packed()._replace(
        cu_seqlens=None, seq_idx=seq_idx, return_final_states=False, final_states_out=None, channel_last=False
    )


def good_backward():
    x, weight, bias, residual, activation, bounds, _, initial, *_ = good_packed()
    dy, dfinal, dx = channel_last(2, D, T), normal(2, D, W), channel_last(2, D, T)
    return BackwardCall(
        x, dy, dfinal, weight, bias, residual, activation, bounds, None, initial, W, True, True, True, True, True,
        False, dx,
    )  # fmt: skip


def good_states():
    return StatesCall(channel_last(1, D, T), normal(2, D, W), ints([0, 5, T]), W, False)


GOOD = {
    "update": (good_update, admission.update_checks, admission.admit),
    "packed": (good_packed, admission.conv_checks, admission.admit),
    "indexed": (good_indexed, admission.conv_checks, admission.admit),
    "backward": (good_backward, admission.backward_checks, admission.admit),
    "states": (good_states, admission.states_checks, admission.admit),
}


def through_the_op(call):
    """The public operation that makes this call, where there is one."""
    if isinstance(call, UpdateCall):
        return lambda: ops.causal_conv1d_update(
            call.x,
            call.conv_state,
            call.weight,
            call.bias,
            activation=call.activation,
            residual=call.residual,
            cache_seqlens=call.cache_seqlens,
            conv_state_indices=call.conv_state_indices,
            pad_slot_id=call.pad_slot_id,
            intermediate_states_out=call.intermediate_states_out,
        )
    if isinstance(call, ConvCall):
        names = "activation residual cu_seqlens seq_idx initial_states return_final_states final_states_out state_len"
        return lambda: ops.causal_conv1d(
            call.x, call.weight, call.bias, **{name: getattr(call, name) for name in names.split()}
        )
    if isinstance(call, StatesCall) and call.x.dim() == 3 and call.initial_states is None:
        return lambda: ops.causal_conv1d_varlen_states(call.x[0].t(), call.cu_seqlens, call.state_len)
    return None


def inside_vmap(function):
    answers = []
    torch.func.vmap(lambda x: (answers.append(function()), x)[1])(torch.zeros(2))
    return answers[0]


def inside_grad(function):
    answers = []
    torch.func.grad(lambda x: (answers.append(function()), x)[1])(torch.zeros(()))
    return answers[0]


class Row(NamedTuple):
    """One mutation: `change` gives the fields of the call that differ, `facts` those of the device."""

    reason: Reason
    argument: str
    change: Callable[[Any], dict] = lambda call: {}
    error: type[Exception] = ValueError
    facts: Mapping = {}
    inside: Callable = lambda function: function()
    has_op: bool = True


PARAMETERS = {
    "x float64": Row(Reason.DTYPE, "x", lambda c: dict(x=c.x.double()), TypeError),
    "x int32": Row(Reason.DTYPE, "x", lambda c: dict(x=c.x.int()), TypeError),
    "weight fp16": Row(Reason.DTYPE, "weight", lambda c: dict(weight=c.weight.half()), TypeError),
    "bias fp16": Row(Reason.DTYPE, "bias", lambda c: dict(bias=c.bias.half()), TypeError),
    "weight channels": Row(Reason.SHAPE, "weight", lambda c: dict(weight=c.weight[1:])),
    "weight rank": Row(Reason.SHAPE, "weight", lambda c: dict(weight=c.weight[:, None])),
    "narrow": Row(Reason.WIDTH, "weight", lambda c: dict(weight=normal(D, UPDATE.min_width - 1)), NotImplementedError),
    "wide": Row(Reason.WIDTH, "weight", lambda c: dict(weight=normal(D, CONV.max_width + 1)), NotImplementedError),
    "bias shape": Row(Reason.SHAPE, "bias", lambda c: dict(bias=c.bias[1:])),
    "bias rank": Row(Reason.SHAPE, "bias", lambda c: dict(bias=c.bias[None])),
    "gelu": Row(Reason.ACTIVATION, "activation", lambda c: dict(activation="gelu")),
    "activation module": Row(Reason.ACTIVATION, "activation", lambda c: dict(activation=torch.nn.SiLU())),
    "residual shape": Row(Reason.SHAPE, "residual", lambda c: dict(residual=c.residual[1:])),
    "residual dtype": Row(Reason.DTYPE, "residual", lambda c: dict(residual=c.residual.float()), TypeError),
}
UPDATES = {
    "x rank": Row(Reason.SHAPE, "x", lambda c: dict(x=c.x[:, :, None, None], form="ND1")),
    "two tokens": Row(Reason.SHAPE, "x", lambda c: dict(x=c.x[:, None].repeat(1, 2, 1), form="N1D"), has_op=False),
    "x channels apart": Row(Reason.LAYOUT, "x", lambda c: dict(x=normal(N, 2 * D)[:, ::2])),
    "residual channels apart": Row(Reason.LAYOUT, "residual", lambda c: dict(residual=normal(N, 2 * D)[:, ::2])),
    "ring shape": Row(Reason.SHAPE, "cache_seqlens", lambda c: dict(cache_seqlens=ints([0] * (N + 1)))),
    "ring int64": Row(Reason.DTYPE, "cache_seqlens", lambda c: dict(cache_seqlens=ints([0] * N).long()), TypeError),
    "ring without state": Row(
        Reason.UNSUPPORTED_ARGUMENT,
        "conv_state",
        lambda c: dict(cache_seqlens=ints([0] * N), conv_state=None, conv_state_indices=None),
    ),
    "intermediate states of a ring": Row(
        Reason.UNSUPPORTED_ARGUMENT,
        "intermediate_states_out",
        lambda c: dict(cache_seqlens=ints([0] * N), intermediate_states_out=normal(N, 1, D, c.conv_state.shape[2])),
        NotImplementedError,
    ),
    "intermediate shape": Row(
        Reason.SHAPE, "intermediate_states_out", lambda c: dict(intermediate_states_out=normal(N, 2, D, 9))
    ),
    "intermediate dtype": Row(
        Reason.DTYPE,
        "intermediate_states_out",
        lambda c: dict(intermediate_states_out=normal(N, 1, D, c.conv_state.shape[2]).double()),
        TypeError,
    ),
    "intermediate expanded": Row(
        Reason.LAYOUT,
        "intermediate_states_out",
        lambda c: dict(intermediate_states_out=normal(1, 1, D, c.conv_state.shape[2]).expand(N, -1, -1, -1)),
    ),
    "indices shape": Row(
        Reason.SHAPE, "conv_state_indices", lambda c: dict(conv_state_indices=c.conv_state_indices[1:])
    ),
    "indices int64": Row(
        Reason.DTYPE, "conv_state_indices", lambda c: dict(conv_state_indices=c.conv_state_indices.long()), TypeError
    ),
    "indices without state": Row(Reason.UNSUPPORTED_ARGUMENT, "conv_state", lambda c: dict(conv_state=None)),
    "state dtype": Row(Reason.DTYPE, "conv_state", lambda c: dict(conv_state=c.conv_state.float()), TypeError),
    "state rank": Row(Reason.SHAPE, "conv_state", lambda c: dict(conv_state=c.conv_state[0])),
    "state channels": Row(Reason.SHAPE, "conv_state", lambda c: dict(conv_state=c.conv_state[:, 1:])),
    "state too short": Row(Reason.SHAPE, "conv_state", lambda c: dict(conv_state=c.conv_state[:, :, 2:])),
    "slots": Row(Reason.SHAPE, "conv_state", lambda c: dict(conv_state=normal(N + 1, D, W), conv_state_indices=None)),
    "state expanded": Row(Reason.LAYOUT, "conv_state", lambda c: dict(conv_state=c.conv_state[:1].expand(N, D, W))),
}
CONVS = {
    "x rank": Row(Reason.SHAPE, "x", lambda c: dict(x=c.x[0])),
    "initial dtype": Row(
        Reason.DTYPE, "initial_states", lambda c: dict(initial_states=c.initial_states.float()), TypeError
    ),
    "initial rows": Row(Reason.SHAPE, "initial_states", lambda c: dict(initial_states=c.initial_states[1:])),
    "initial too short": Row(Reason.SHAPE, "initial_states", lambda c: dict(initial_states=c.initial_states[..., 2:])),
    "state_len": Row(Reason.SHAPE, "state_len", lambda c: dict(state_len=W - 2)),
}
BOUNDS = {
    "cu_seqlens int16": Row(
        Reason.DTYPE, "cu_seqlens", lambda c: dict(cu_seqlens=c.cu_seqlens.to(torch.int16)), TypeError
    ),
    "cu_seqlens rank": Row(Reason.SHAPE, "cu_seqlens", lambda c: dict(cu_seqlens=c.cu_seqlens[None])),
    "cu_seqlens empty": Row(Reason.SHAPE, "cu_seqlens", lambda c: dict(cu_seqlens=c.cu_seqlens[:0])),
}
PACKED = {
    "tokens not at one stride": Row(Reason.LAYOUT, "x", lambda c: dict(x=channel_last(4, D, T)[::2])),
    "residual not at one stride": Row(
        Reason.LAYOUT, "residual", lambda c: dict(residual=channel_last(4, D, T)[::2])
    ),
    "channel-first": Row(Reason.LAYOUT, "x", lambda c: dict(x=normal(2, D, T)), has_op=False),
    "both packings": Row(
        Reason.UNSUPPORTED_ARGUMENT, "seq_idx", lambda c: dict(seq_idx=torch.zeros(2, T, dtype=torch.int32))
    ),
    "sequences": Row(Reason.SHAPE, "initial_states", lambda c: dict(cu_seqlens=ints([0, 5, 9, 2 * T]))),
    "out not asked for": Row(
        Reason.UNSUPPORTED_ARGUMENT, "final_states_out", lambda c: dict(return_final_states=False)
    ),
    "out columns": Row(Reason.SHAPE, "final_states_out", lambda c: dict(final_states_out=normal(2, D, W + 1))),
    "out dtype": Row(
        Reason.DTYPE, "final_states_out", lambda c: dict(final_states_out=normal(2, D, W).float()), TypeError
    ),
    "out expanded": Row(
        Reason.LAYOUT, "final_states_out", lambda c: dict(final_states_out=normal(1, D, W).expand(2, D, W))
    ),
    "out is initial_states": Row(
        Reason.LAYOUT, "final_states_out", lambda c: dict(final_states_out=c.initial_states)
    ),
    "out inside x": Row(
        Reason.LAYOUT, "final_states_out", lambda c: dict(final_states_out=c.x[:, :, -W:])
    ),
}  # fmt: skip
INDEXED = {
    "seq_idx shape": Row(Reason.SHAPE, "seq_idx", lambda c: dict(seq_idx=c.seq_idx[:, 1:])),
    "seq_idx int64": Row(Reason.DTYPE, "seq_idx", lambda c: dict(seq_idx=c.seq_idx.long()), TypeError),
    "seq_idx and final states": Row(
        Reason.UNSUPPORTED_ARGUMENT, "return_final_states", lambda c: dict(return_final_states=True)
    ),
}
BACKWARDS = {
    "dy shape": Row(Reason.SHAPE, "dy", lambda c: dict(dy=c.dy[:, :, 1:])),
    "dy dtype": Row(Reason.DTYPE, "dy", lambda c: dict(dy=c.dy.float()), TypeError),
    "dfinal_states shape": Row(Reason.SHAPE, "dfinal_states", lambda c: dict(dfinal_states=c.dfinal_states[1:])),
    "dfinal_states dtype": Row(
        Reason.DTYPE, "dfinal_states", lambda c: dict(dfinal_states=c.dfinal_states.float()), TypeError
    ),
    "gradient of no initial states": Row(
        Reason.UNSUPPORTED_ARGUMENT, "initial_states", lambda c: dict(initial_states=None)
    ),
    "dx shape": Row(Reason.SHAPE, "dx", lambda c: dict(dx=c.dx[:, :, 1:])),
    "dx dtype": Row(Reason.DTYPE, "dx", lambda c: dict(dx=c.dx.float()), TypeError),
    "dx expanded": Row(Reason.LAYOUT, "dx", lambda c: dict(dx=channel_last(1, D, T).expand(2, D, T))),
    "dx is x": Row(Reason.LAYOUT, "dx", lambda c: dict(dx=c.x)),
    "dx is dy": Row(Reason.LAYOUT, "dx", lambda c: dict(dx=c.dy)),
}  # fmt: skip
STATES = {
    "x rank": Row(Reason.SHAPE, "x", lambda c: dict(x=c.x[0])),
    "x float64": Row(Reason.DTYPE, "x", lambda c: dict(x=c.x.double()), TypeError),
    "state_len": Row(Reason.SHAPE, "state_len", lambda c: dict(state_len=0)),
    "initial dtype": Row(
        Reason.DTYPE, "initial_states", lambda c: dict(initial_states=c.initial_states.float()), TypeError
    ),
    "initial rows": Row(Reason.SHAPE, "initial_states", lambda c: dict(initial_states=c.initial_states[1:])),
    "initial channels": Row(Reason.SHAPE, "initial_states", lambda c: dict(initial_states=c.initial_states[:, 1:])),
}
SITUATIONS = {
    "vmap": Row(Reason.FUNCTORCH, "x", error=NotImplementedError, inside=inside_vmap),
    "grad transform": Row(Reason.FUNCTORCH, "x", error=NotImplementedError, inside=inside_grad),
    "disabled": Row(Reason.DISABLED, "ACCEL_DISABLE", error=NotImplementedError, facts={"disabled": True}),
    "no backend": Row(Reason.DEVICE, "x", error=NotImplementedError, facts={"backend": None}),
    "unknown GPU": Row(
        Reason.ARCH, "x", error=NotImplementedError, facts={"backend": None, "device": SomeGPU(), "detail": "sm_75"}
    ),
}


def tensors(call):
    return {name: value for name, value in call._asdict().items() if isinstance(value, torch.Tensor)}


def each_tensor(build, forward_only):
    """Rows that hold for every tensor of a call."""
    for name in tensors(build()):
        yield (
            f"{name} subclass",
            Row(
                Reason.TENSOR_SUBCLASS,
                name,
                lambda c, name=name: {name: getattr(c, name).as_subclass(Mine)},
                TypeError,
            ),
        )
        if name != "x":  # a fake x means that torch traces, and is served: test_compile.py
            yield (
                f"{name} fake",
                Row(
                    Reason.TENSOR_SUBCLASS,
                    name,
                    lambda c, name=name: {name: FakeTensorMode().from_tensor(getattr(c, name))},
                    TypeError,
                ),
            )
        # facts follow x: an op finds no backend for meta tensors, and says so
        yield (
            f"{name} elsewhere",
            Row(Reason.DEVICE, name, lambda c, name=name: {name: getattr(c, name).to("meta")}, has_op=name != "x"),
        )
        if forward_only and getattr(build(), name).is_floating_point():
            yield (
                f"{name} gradient",
                Row(
                    Reason.AUTOGRAD,
                    name,
                    lambda c, name=name: {name: getattr(c, name).clone().requires_grad_()},
                    RuntimeError,
                ),
            )


ROWS = {
    "update": {**PARAMETERS, **UPDATES},
    "packed": {**PARAMETERS, **CONVS, **BOUNDS, **PACKED},
    "indexed": INDEXED,
    "backward": {**PARAMETERS, **CONVS, **BOUNDS, **BACKWARDS},
    "states": {**STATES, **BOUNDS},
}
ROWS = {key: {**rows, **SITUATIONS, **dict(each_tensor(GOOD[key][0], key == "update"))} for key, rows in ROWS.items()}
every_row = pytest.mark.parametrize("key, name", [(key, name) for key, rows in ROWS.items() for name in rows])
backends = pytest.mark.parametrize("backend", ["cpu", "cute"])


def mutated(key, name):
    call = GOOD[key][0]()
    return call._replace(**ROWS[key][name].change(call))


@backends
@pytest.mark.parametrize("key", GOOD)
def test_a_good_call_is_admitted(key, backend):
    build, checks, admit = GOOD[key]
    call, facts = build(), made_up(backend)
    assert admit(call, facts) is None and list(checks(call, facts)) == []
    with torch.no_grad():
        leaves = {name: value.requires_grad_(value.is_floating_point()) for name, value in tensors(call).items()}
        assert admit(call._replace(**leaves), facts) is None


@backends
@every_row
def test_one_mutation_one_reason(key, name, backend, monkeypatch):
    _, checks, admit = GOOD[key]
    row, call = ROWS[key][name], mutated(key, name)
    facts = made_up(**{"backend": backend, **row.facts})
    decline = row.inside(lambda: admit(call, facts))
    assert (decline.reason, decline.argument, decline.error) == (row.reason, row.argument, row.error)
    assert str(decline).startswith(f"{row.argument}: expected ") and ", got " in str(decline)
    assert row.inside(lambda: list(checks(call, facts)))[0] == decline
    operation = through_the_op(call)
    if operation is not None and row.has_op:
        with monkeypatch.context() as patch:
            patch.setitem(environment._facts, CPU, facts)
            with pytest.raises(row.error, match=rf"^causal_conv1d\w*: {row.argument}: expected ") as caught:
                row.inside(operation)
        assert type(caught.value) is row.error


def test_the_last_tokens_operation_refuses_too():
    """Through [T, D] the rows above that it can have, without initial states."""
    x, bounds = normal(T, D), ints([0, 5, T])
    for error, argument, arguments in (
        (TypeError, "x", (x.double(), bounds, W)),
        (ValueError, "x", (x[None], bounds, W)),
        (TypeError, "cu_seqlens", (x, bounds.float(), W)),
        (ValueError, "cu_seqlens", (x, bounds[None], W)),
        (ValueError, "state_len", (x, bounds, 0)),
    ):
        with pytest.raises(error, match=f"^causal_conv1d_varlen_states: {argument}: expected "):
            ops.causal_conv1d_varlen_states(*arguments)


def test_x_without_a_backend():
    x, state, weight = (torch.randn(shape, device="meta") for shape in ((N, D), (N, D, W), (D, W)))
    with pytest.raises(NotImplementedError, match="x: expected a device .*, got no backend for meta devices"):
        ops.causal_conv1d_update(x, state, weight)
    with pytest.raises(NotImplementedError, match="x: expected a device .*, got no backend for meta devices"):
        ops.causal_conv1d(x[None], weight)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: ops.causal_conv1d_update(x, None, torch.ones(D, W)),
        lambda x: ops.causal_conv1d(x[None], torch.ones(T, W)),
    ],
)
def test_what_a_transform_wraps_is_refused(function, transform):
    x = torch.randn(2, T, D) if transform is torch.func.vmap else torch.randn(T, D)
    with pytest.raises(NotImplementedError, match="x: expected no torch.func transform"):
        transform(function)(x)


def test_a_missing_weight_is_refused():
    with pytest.raises(TypeError, match=r"\bweight\b"):
        ops.causal_conv1d_update(normal(N, D), normal(N, D, W), None)
    with pytest.raises(TypeError, match=r"\bweight\b"):
        ops.causal_conv1d(channel_last(2, D, T), None)


SHARD = SimpleNamespace(cu_seqlens=torch.tensor([0, T], dtype=torch.int32))  # all that is read of a cp_context
FLA_ROWS = {
    "fla.causal_conv1d@0.6.0": ({"backend": "cuda", "cp_context": SHARD}, Reason.CONTEXT_PARALLEL),
    "fla.causal_conv1d@0.4.2": ({"backend": "mix"}, Reason.UNSUPPORTED_ARGUMENT),
    "fla.causal_conv1d@0.3.2": ({"backend": "cuda"}, Reason.UNSUPPORTED_ARGUMENT),
}


@pytest.mark.parametrize("adapter", FLA_ROWS)
def test_what_an_adapter_declines(adapter):
    arguments, reason = FLA_ROWS[adapter]
    x, weight = normal(2, T, D), normal(D, W)
    assert isinstance(ADAPTERS[adapter].read(x, weight), ConvCall)
    decline = ADAPTERS[adapter].read(x, weight, **arguments)
    assert isinstance(decline, Decline) and (decline.reason, decline.argument) == (reason, "backend")


@pytest.mark.parametrize("adapter, kept", [("fla.causal_conv1d@0.6.0", True), ("fla.causal_conv1d@0.4.2", False)])
def test_what_an_adapter_hands_on(adapter, kept):
    """A context-parallel call is the convolution of this rank; FLA before 0.6.0 drops the residual and the backend."""
    x, weight, residual = normal(1, T, D), normal(D, W), normal(1, T, D)
    backend = "mix" if kept else "cuda"
    name, call = ADAPTERS[adapter].read(x, weight, residual=residual, backend=backend, cp_context=SHARD)
    assert name == "causal_conv1d_fwd" and isinstance(call, ConvCall)
    assert call.cu_seqlens is SHARD.cu_seqlens and call.weight is weight and (call.residual is None) == (not kept)


def test_every_reason_has_a_row():
    found = {row.reason for rows in ROWS.values() for row in rows.values()} | {
        reason for _, reason in FLA_ROWS.values()
    }
    assert found == set(Reason)


def test_disabled_by_the_environment(monkeypatch):
    monkeypatch.setenv("ACCEL_DISABLE", "1")
    environment.forget()
    try:
        with pytest.raises(NotImplementedError, match="ACCEL_DISABLE: expected unset, got 1"):
            ops.causal_conv1d_update(normal(N, D), normal(N, D, W), normal(D, W))
    finally:
        monkeypatch.undo()
        environment.forget()
    assert admission.admit(good_update(), environment.facts(CPU)) is None


class NothingRuns(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} while a call was decided")


@every_row
def test_a_decision_runs_nothing(key, name):
    _, checks, admit = GOOD[key]
    row, call = ROWS[key][name], mutated(key, name)
    facts = made_up(**{"backend": "cute", **row.facts})

    def decide():
        with NothingRuns():
            return admit(call, facts), list(checks(call, facts))

    first, every = row.inside(decide)
    assert first == every[0] and first.reason == row.reason


def unreadable(tensor):
    """The same metadata over memory that no one may touch."""
    size = max(tensor.untyped_storage().nbytes(), 1)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    return torch.frombuffer(pages, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("key", GOOD)
def test_a_decision_reads_no_data(key):
    build, checks, admit = GOOD[key]
    call = build()
    call = call._replace(**{name: unreadable(tensor) for name, tensor in tensors(call).items()})
    facts = made_up("cute")
    with NothingRuns():
        assert admit(call, facts) is None and list(checks(call, facts)) == []


def wider(tensor):
    """The same numbers as a slice of a wider tensor, at an aligned address."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 8, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def shifted(tensor):
    """The same numbers one element after an aligned address."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


# What stays native, one change each: the kernel that serves it may be another one.
SERVED = {
    "values": lambda c: dict(x=c.x + 1),
    "one row": lambda c: dict(x=c.x[:1], residual=c.residual[:1], conv_state_indices=c.conv_state_indices[:1]),
    "x strides": lambda c: dict(x=wider(c.x)),
    "x address": lambda c: dict(x=shifted(c.x)),
    "state strides": lambda c: dict(conv_state=c.conv_state.transpose(1, 2).contiguous().transpose(1, 2)),
    "state length": lambda c: dict(conv_state=normal(N, D, W + 2)),
    "state slots": lambda c: dict(conv_state=normal(N + 3, D, W)),
    "state address": lambda c: dict(conv_state=shifted(c.conv_state)),
    "no state": lambda c: dict(conv_state=None, conv_state_indices=None),
    "weight dtype": lambda c: dict(weight=c.weight.float()),
    "weight strides": lambda c: dict(weight=c.weight.t().contiguous().t()),
    "weight address": lambda c: dict(weight=shifted(c.weight)),
    "weight parameter": lambda c: dict(weight=torch.nn.Parameter(c.weight, requires_grad=False)),
    "narrowest": lambda c: dict(weight=normal(D, UPDATE.min_width)),
    "widest": lambda c: dict(weight=normal(D, UPDATE.max_width), conv_state=normal(N, D, UPDATE.max_width - 1)),
    "bias dtype": lambda c: dict(bias=c.bias.float()),
    "bias strides": lambda c: dict(bias=normal(2 * D)[::2]),
    "no bias": lambda c: dict(bias=None),
    "residual strides": lambda c: dict(residual=wider(c.residual)),
    "residual address": lambda c: dict(residual=shifted(c.residual)),
    "no residual": lambda c: dict(residual=None),
    "swish": lambda c: dict(activation="swish"),
    "no activation": lambda c: dict(activation=None),
    "indices strides": lambda c: dict(conv_state_indices=ints(range(2 * N))[::2]),
    "no indices": lambda c: dict(conv_state_indices=None),
    "padding": lambda c: dict(pad_slot_id=-7),
    "N1D": lambda c: dict(x=c.x[:, None], residual=c.residual[:, None], form="N1D"),
    "1ND": lambda c: dict(x=c.x[None], residual=c.residual[None], form="1ND"),
    "ND1": lambda c: dict(x=c.x[:, :, None], residual=c.residual[:, :, None], form="ND1"),
    "one channel": lambda c: dict(
        x=normal(N, 8)[:, ::8], conv_state=c.conv_state[:, :1], weight=c.weight[:1], bias=c.bias[:1], residual=None
    ),
}
for dtype in UPDATE.dtypes:
    SERVED[f"{dtype}"] = lambda c, dtype=dtype: {
        name: value.to(dtype) for name, value in tensors(c).items() if name != "conv_state_indices"
    }


@backends
@pytest.mark.parametrize("name", SERVED)
def test_other_good_updates_are_admitted(name, backend):
    call = good_update()
    assert admission.admit(call._replace(**SERVED[name](call)), made_up(backend)) is None


def layout(tensor, address):
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15 if address else 0


def kernel_for(x, form, state, weight, bias, residual, indices, activation, arch):
    """What a kernel may be specialised for, in place of one."""
    addressed = tuple(layout(tensor, True) for tensor in (x, state, weight, residual))
    return form, addressed, layout(bias, False), layout(indices, False), activation, arch


def expected_kernel(call):
    x, form, state, weight, bias, residual, activation, _, indices, *_ = call
    return kernel_for(x, form, state, weight, bias, residual, indices, activation is not None, "sm_90a")


@pytest.fixture
def searches(monkeypatch):
    """Every search for a kernel that `prepare` makes."""
    seen = []

    def find(*arguments):
        seen.append(kernel_for(*arguments))
        return seen[-1]

    monkeypatch.setattr(update, "kernels", {"conv_update": SimpleNamespace(find=find)}.get)
    return seen


def kept(facts, searches):
    """A good call whose decision is kept: a second look makes no search."""
    call = good_update()
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors(call).values())
    assert update.prepare(call, facts) == update.prepare(call, facts) == expected_kernel(call)
    assert len(searches) == 1 and len(facts.plans) == 1
    return call


# not on meta: meta and CPU tensors share the device number -1, and no GPU has it
DECIDED_AFRESH = [name for name, row in ROWS["update"].items() if not row.facts and "elsewhere" not in name]


@pytest.mark.parametrize("name", DECIDED_AFRESH)
def test_a_kept_decision_hides_no_reason(name, searches):
    row, facts = ROWS["update"][name], made_up("cute")
    call = kept(facts, searches)
    bad = call._replace(**row.change(call))
    for _ in range(2):
        decline = row.inside(lambda: update.prepare(bad, facts))
        assert isinstance(decline, Decline) and decline.reason is row.reason
        assert decline == row.inside(lambda: admission.admit(bad, facts))
    assert update.prepare(call, facts) == expected_kernel(call)
    assert len(searches) == 1 and len(facts.plans) == 1


@pytest.mark.parametrize("name", SERVED)
def test_a_kept_decision_serves_no_other_layout(name, searches):
    facts = made_up("cute")
    call = kept(facts, searches)
    other = call._replace(**SERVED[name](call))
    for _ in range(2):
        assert update.prepare(other, facts) == expected_kernel(other)
        assert update.prepare(call, facts) == expected_kernel(call)


def test_a_kept_decision_knows_the_grad_mode(searches):
    facts, call = made_up("cute"), good_update()
    call = call._replace(weight=call.weight.requires_grad_())
    with torch.no_grad():
        assert update.prepare(call, facts) == update.prepare(call, facts) == expected_kernel(call)
    assert update.prepare(call, facts).reason is Reason.AUTOGRAD
    with torch.inference_mode():
        assert update.prepare(call, facts) == expected_kernel(call)
    assert len(searches) == 2  # inference mode has dispatch keys of its own


def test_a_kept_decision_knows_which_axes_are_rows(searches):
    """[1, 1, D] is one token in FLA's forms and D tokens of one channel in ours."""
    facts = made_up("cute")
    call = UpdateCall(normal(1, 1, D), "1ND", normal(1, D, W), normal(D, W), None, None, None, None, None, -1)
    for form in ("1ND", "N1D", "1ND"):
        assert update.prepare(call._replace(form=form), facts) == expected_kernel(call._replace(form=form))
    assert update.prepare(call._replace(form="ND1"), facts).reason is Reason.SHAPE


def test_a_kept_decision_reads_no_data(searches):
    facts = made_up("cute")
    call = kept(facts, searches)
    with NothingRuns():
        update.prepare(call, facts)
        update.prepare(call._replace(x=call.x, activation=None), facts)


def test_kept_decisions_are_bounded(searches, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    facts, weight = made_up("cute"), normal(D, W)
    for n in (*range(1, 9), *range(1, 9)):
        call = UpdateCall(normal(n, D), "ND", normal(n, D, W), weight, None, None, None, None, None, -1)
        assert update.prepare(call, facts) == update.prepare(call, facts) == expected_kernel(call)
        assert 1 <= len(facts.plans) <= 3


def test_nothing_is_kept_where_no_kernel_is_needed(searches):
    for call, facts in ((good_update(), made_up("cpu")), (good_update_of_no_rows(), made_up("cute"))):
        assert update.prepare(call, facts) is None
        assert facts.plans == {} and searches == []


def good_update_of_no_rows():
    call = good_update()
    return call._replace(x=call.x[:0], residual=call.residual[:0], conv_state_indices=call.conv_state_indices[:0])


def test_forgotten_facts_take_kept_decisions_along():
    facts = environment.facts(CPU)
    environment.forget()
    assert environment.facts(CPU) is not facts and environment.facts(CPU).plans is not facts.plans


def test_more_tokens_than_a_coordinate_holds():
    """Declined by name: a wrapped coordinate would be a valid one, and the numbers wrong."""
    x = torch.zeros(1, dtype=torch.bfloat16).expand(1, 1, 2**31)
    weight = normal(1, W)
    calls = (
        ConvCall(x, weight, None, None, None, None, None, None, False, None, W - 1, False, False),
        StatesCall(x, None, None, W, False),
    )
    for call, kind in itertools.product(calls, ("cpu", "cute")):
        decline = admission.admit(call, made_up(kind))
        assert decline.reason is Reason.SHAPE and decline.argument == "x" and decline.error is NotImplementedError
        assert admission.admit(call._replace(x=x[:, :, 1:]), made_up(kind)) is None
