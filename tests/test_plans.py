"""Kept plans of full sequences: they hide no reason, serve no other layout, and know what differs beside metadata.

The kernels' side is a recorder here; tests/test_admission.py has the same for decode steps.
"""

from types import SimpleNamespace

import pytest
import torch
from test_admission import ROWS, good_backward, good_indexed, good_packed, layout, made_up, tensors
from test_repeat import Dispatch, Unguarded

from accel import admission
from accel.ops import conv, gradients
from accel.ops.outputs import layout_like
from accel.reasons import Decline

GOOD = {
    "packed": lambda: good_packed()._replace(final_states_out=None),
    "indexed": good_indexed,
}
EVERY = [
    (key, name)
    for key in GOOD
    for name, row in ROWS[key].items()
    if not row.facts and "elsewhere" not in name and row.argument != "final_states_out" and "out" not in name.split()
]


def seen_of(call, *outputs):
    """What a kernel may be specialised for."""
    found = {name: layout(tensor, True) for name, tensor in tensors(call).items()}
    rest = tuple(value for value in call if not isinstance(value, torch.Tensor))
    return found, rest, tuple(layout(output, False) for output in outputs)


@pytest.fixture
def searches(monkeypatch):
    """Every search for a kernel, forward and backward; launches do nothing."""
    seen = []

    def find(call, y, final_states, arch):
        seen.append(seen_of(call, y, final_states))
        return seen[-1]

    def find_backward(call, dy, dx, parameters, facts):
        seen.append(SimpleNamespace(function=seen_of(call, dy, dx), _replace=lambda function: seen[-1]))
        return seen[-1]

    fwd = SimpleNamespace(find=find, launch=lambda *_: None)
    bwd = SimpleNamespace(find=find_backward, launch=lambda *_: None, dense_enough=lambda dy, call: dy)
    for module in (conv, gradients):
        monkeypatch.setattr(module, "kernels", {"conv_fwd": fwd, "conv_bwd": bwd}.get)
    return seen


def kept(key, facts, searches):
    call = GOOD[key]()
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors(call).values())
    assert conv.prepare(call, facts) == conv.prepare(call, facts)
    assert len(searches) == 1 and len(facts.plans) == 1
    return call


def afresh(call):
    return conv.prepare(call, made_up("cute"))


@pytest.mark.parametrize("key, name", EVERY)
def test_a_kept_plan_hides_no_reason(key, name, searches):
    row, facts = ROWS[key][name], made_up("cute")
    call = kept(key, facts, searches)
    bad = call._replace(**row.change(call))
    for _ in range(2):
        decline = row.inside(lambda: conv.prepare(bad, facts))
        assert isinstance(decline, Decline) and decline == row.inside(lambda: admission.admit(bad, facts))
    conv.prepare(call, facts)
    assert len(searches) == 1


def shifted(tensor):
    out = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].as_strided(tensor.shape, tensor.stride(), 1)
    return out.copy_(tensor)


def dense(tensor):
    return tensor.contiguous()


OTHERS = {
    "values": lambda c: dict(x=c.x + 1),
    "x address": lambda c: dict(x=shifted(c.x)),
    "x channel-first": lambda c: dict(x=dense(c.x[:1]), residual=c.residual[:1], cu_seqlens=None, seq_idx=None,
                                      initial_states=c.initial_states[:1], channel_last=False),
    "weight dtype": lambda c: dict(weight=c.weight.float()),
    "weight strides": lambda c: dict(weight=c.weight.t().contiguous().t()),
    "weight grows a gradient": lambda c: dict(weight=c.weight.clone().requires_grad_()),
    "bias address": lambda c: dict(bias=shifted(c.bias)),
    "no bias": lambda c: dict(bias=None),
    "no residual": lambda c: dict(residual=None),
    "no initial states": lambda c: dict(initial_states=None),
    "no activation": lambda c: dict(activation=None),
    "no final states": lambda c: dict(return_final_states=False),
    "a longer state": lambda c: dict(state_len=c.state_len + 1),
    "compact states": lambda c: dict(compact_states=not c.compact_states),
    "fewer tokens": lambda c: dict(x=c.x[:1], residual=c.residual[:1]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_kept_plan_serves_no_other_call(name, searches):
    facts = made_up("cute")
    call = kept("packed", facts, searches)
    other = call._replace(**OTHERS[name](call))
    for _ in range(2):
        assert conv.prepare(other, facts) == afresh(other)
        assert conv.prepare(call, facts) == afresh(call)


@pytest.mark.parametrize("mode", [Dispatch, Unguarded])
@pytest.mark.parametrize("key", GOOD)
def test_a_kept_plan_is_not_for_those_who_look_on(key, mode, searches):
    facts = made_up("cute")
    call = kept(key, facts, searches)
    for _ in range(2):
        with mode():
            assert conv.prepare(call, facts) is None  # so it goes by the registered operator
        assert conv.prepare(call, facts) == afresh(call)


def test_a_kept_plan_knows_who_asks_for_gradients(searches):
    facts, call = made_up("cute"), GOOD["packed"]()
    with_gradient = call._replace(weight=call.weight.clone().requires_grad_())
    for _ in range(2):
        assert conv.prepare(with_gradient, facts).differentiable
        assert not conv.prepare(call, facts).differentiable
        with torch.no_grad():
            assert not conv.prepare(with_gradient, facts).differentiable


def test_given_final_states_are_looked_at_in_every_call(searches):
    facts, call = made_up("cute"), good_packed()
    assert conv.prepare(call, facts).final_states is None
    assert conv.prepare(call._replace(final_states_out=call.initial_states), facts).argument == "final_states_out"
    assert facts.plans == {}


def test_outputs_of_a_plan_are_those_of_a_fresh_call(searches):
    facts = made_up("cute")
    for key in GOOD:
        call = GOOD[key]()
        for _ in range(2):
            y, final_states = conv.forward(call, facts, conv.prepare(call, facts))
            want = conv.allocate(call)
            assert (y.shape, y.stride(), y.dtype) == (want[0].shape, want[0].stride(), want[0].dtype)
            if final_states is not None:
                assert (final_states.shape, final_states.stride()) == (want[1].shape, want[1].stride())


def test_backward_plans(searches):
    facts, call = made_up("cute"), good_backward()._replace(dx=None)
    first = gradients.backward(call, facts)
    again = gradients.backward(call, facts)
    assert len(searches) == 1
    for one, other in zip(first, again, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert (tuple(first[0].shape), first[0].stride()) == layout_like(call)
    others = (
        dict(dy=dense(call.dy)),
        dict(dy=shifted(call.dy)),
        dict(dy=None),
        dict(dfinal_states=None),
        dict(needs_x=False),
        dict(needs_weight=False, needs_bias=False),
        dict(x=shifted(call.x)),
        dict(activation=None),
    )
    for number, change in enumerate(others):
        gradients.backward(call._replace(**change), facts)
        assert len(searches) == 2 + number, change
        assert searches[-1].function[0] == seen_of(call._replace(**change))[0]
    gradients.backward(call, facts)
    assert len(searches) == 1 + len(others)
