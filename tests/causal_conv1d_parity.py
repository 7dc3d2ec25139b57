"""Real causal-conv1d, accelerated, against the float64 reference: values, gradients, states, layouts, routes.

Run by test_causal_conv1d.py in a process of its own for each release; not collected by name. The extension is a stub
that notes what reaches it and raises: a call that is not native fails here. Every call goes through `capturing`, which
took the callables by name before anything was swapped, as mamba_ssm does.
"""

import sys
import types

import pytest
import reference
import torch

from accel import accelerated, is_accelerated, record_routes


class NoExtension(Exception):
    """A call has reached the extension, which is not there."""


REACHED = []


def unbuilt(name):
    def function(*args):
        REACHED.append((name, args))
        raise NoExtension(name)

    return function


extension = types.ModuleType("causal_conv1d_cuda")
for entry in ("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update"):
    setattr(extension, entry, unbuilt(entry))
sys.modules[extension.__name__] = extension

import causal_conv1d  # noqa: E402
from causal_conv1d import causal_conv1d_interface, causal_conv1d_varlen  # noqa: E402

try:
    from causal_conv1d import cpp_functions
except ImportError:  # before 1.5.1
    cpp_functions = None

capturing = types.ModuleType("capturing")
capturing.fn = causal_conv1d.causal_conv1d_fn
capturing.update = causal_conv1d.causal_conv1d_update
capturing.varlen_states = causal_conv1d_varlen.causal_conv1d_varlen_states
if cpp_functions is not None:
    capturing.fwd_function = cpp_functions.causal_conv1d_fwd_function
    capturing.bwd_function = cpp_functions.causal_conv1d_bwd_function
    capturing.update_function = cpp_functions.causal_conv1d_update_function
sys.modules[capturing.__name__] = capturing
FOUND = dict(vars(capturing))

has_slots = causal_conv1d.__version__ != "1.4.0"
needs_cpp = pytest.mark.skipif(cpp_functions is None, reason="cpp_functions came with 1.5.1")
B, D, T, W = 2, 24, 11, 4
P = 2 * D + 5
# strides of [B, D, T], elements before the first one: what the package's callers have
LAYOUTS = {
    "channel-first": ((D * T, T, 1), 0),
    "rows of a matrix": ((T, B * T, 1), 0),  # Mamba's projection, [2D, B * T]
    "half of xz": ((2 * D * T, T, 1), D * T),
    "channel-last": ((T * D, 1, D), 0),
    "projection": ((T * P, 1, P), 3),
    "tokens first": ((D, 1, B * D), 0),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# bias, activation, seq_idx, initial states, final states
CASES = {
    "plain": (False, None, False, False, False),
    "silu": (True, "silu", False, False, False),
    "documents": (True, "swish", True, False, False),
    "documents after states": (False, "silu", True, True, False),
    "states": (True, "silu", False, True, True),
    "final states": (False, None, False, False, True),
}
cases = pytest.mark.parametrize("case", CASES)


def normal(device, dtype, *shape):
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def room(device, dtype, layout):
    """An unwritten [B, D, T] in a layout, and the memory around it, all of it NaN."""
    strides, offset = LAYOUTS[layout]
    memory = torch.full((2 * B * T * P,), float("nan"), device=device, dtype=dtype)
    return memory.as_strided((B, D, T), strides, offset), memory


def placed(device, dtype, layout):
    return room(device, dtype, layout)[0].copy_(normal(device, dtype, B, D, T))


def states(device, dtype, columns=W - 1):
    return normal(device, dtype, B, columns, D).transpose(1, 2)


def documents(device):
    numbers = torch.tensor([[0] * 4 + [1] * 2 + [2] * 4 + [-1], [5] + [6] * 10], dtype=torch.int32)
    return numbers.to(device)


def served(device, name, function):
    """function() with the target on; every call inside has to be native."""
    REACHED.clear()
    with accelerated("causal_conv1d", verbose=False), record_routes() as routes:
        result = function()
    backend = "native:cpu" if device == "cpu" else "native:cute"
    assert [(route.target, route.callable, str(route)) for route in routes] == [("causal_conv1d", name, backend)]
    assert REACHED == []
    return result


def size_of(x, initial, weight, bias, seq_idx):
    return reference.magnitude(reference.causal_conv1d, x, initial, weight, bias, seq_idx=seq_idx)


class Case:
    """Tensors of a full-sequence call, and what it must give."""

    def __init__(self, device, dtype, layout, case):
        with_bias, self.activation, with_documents, with_initial, self.final = CASES[case]
        self.x, self.weight = placed(device, dtype, layout), normal(device, dtype, D, W)
        self.bias = normal(device, dtype, D) if with_bias else None
        self.seq_idx = documents(device) if with_documents else None
        self.initial = states(device, dtype) if with_initial else None
        self.dy, self.dfinal = normal(device, dtype, B, D, T), states(device, dtype) if self.final else None

    def leaves(self):
        named = dict(x=self.x, weight=self.weight, bias=self.bias, initial_states=self.initial)
        return {name: value for name, value in named.items() if value is not None}

    def oracle(self, compute=torch.float64, change=lambda value: value):
        """(y, final states, gradients by name)."""
        leaves = {k: change(v.detach().cpu().to(compute)).requires_grad_() for k, v in self.leaves().items()}
        seq_idx = None if self.seq_idx is None else self.seq_idx.cpu()
        y, final = reference.causal_conv1d(**leaves, activation=self.activation, seq_idx=seq_idx, compute=compute)
        total = (y * change(self.dy.cpu().to(compute))).sum()
        if self.dfinal is not None:
            total = total + (final * change(self.dfinal.cpu().to(compute))).sum()
        return y.detach(), final, dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))

    def check_values(self, y, final=None):
        exact, state, _ = self.oracle()
        size = size_of(*(None if v is None else v.cpu() for v in (self.x, self.initial, self.weight, self.bias)),
                       None if self.seq_idx is None else self.seq_idx.cpu())  # fmt: skip
        reference.assert_close_ulp(y.cpu(), exact, 32 * reference.UNIT_FP32 * (size + 1))
        assert y.stride() == torch.empty_like(self.x.detach()).stride()
        if final is not None:
            reference.assert_same_bits(final.detach(), state.detach().to(final.dtype), "final_states")
            assert final.stride() == ((W - 1) * D, 1, D)

    def check_gradients(self, gradients):
        _, _, exact = self.oracle()
        _, _, plain = self.oracle(torch.float32)
        _, _, size = self.oracle(change=torch.abs)
        for name, gradient in gradients.items():
            slack = 4 * size[name].abs() + 1
            reference.assert_gradient(gradient.detach().cpu(), exact[name], plain[name], slack, B * T, name)


@dtypes
@layouts
@cases
def test_fn(device, dtype, layout, case):
    c = Case(device, dtype, layout, case)
    leaves = {name: value.detach().requires_grad_() for name, value in c.leaves().items()}
    named = dict(
        x=leaves["x"],
        weight=leaves["weight"],
        bias=leaves.get("bias"),
        seq_idx=c.seq_idx,
        initial_states=leaves.get("initial_states"),
        return_final_states=c.final,
        final_states_out=None,
        activation=c.activation,
    )
    args, kwargs = (tuple(named.values()), {}) if dtype == torch.float32 else ((), named)
    result = served(device, "causal_conv1d_fn", lambda: capturing.fn(*args, **kwargs))
    y, final = result if c.final else (result, None)
    c.check_values(y, final)
    outputs, seeds = ([y, final], [c.dy, c.dfinal]) if c.final else ([y], [c.dy])
    c.check_gradients(dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), seeds), strict=True)))


def test_final_states_out(device):
    c = Case(device, torch.float32, "channel-last", "states")
    out = torch.full((B, W - 1, D), float("nan"), device=device).transpose(1, 2)
    args = (c.x, c.weight, c.bias, None, c.initial)
    with torch.no_grad():
        y, final = served(device, "causal_conv1d_fn", lambda: capturing.fn(*args, True, out, c.activation))
    assert final is out
    c.check_values(y, final)
    out.fill_(7)
    with torch.no_grad():
        y = served(device, "causal_conv1d_fn", lambda: capturing.fn(*args, False, out, c.activation))
    c.check_values(y)
    assert (out == 7).all()


@dtypes
@pytest.mark.parametrize("form", ["ND", "slice", "ND1", "projection"])
@pytest.mark.parametrize("layout", ["compact", "channel-last"])
@pytest.mark.parametrize("columns", [W - 1, W, W + 2])
@pytest.mark.parametrize("slots", [False, pytest.param(True, marks=pytest.mark.skipif(not has_slots, reason="1.5.0"))])
def test_update(device, dtype, form, layout, columns, slots):
    n, count = 3, 5 if slots else 3
    pitch = D if form in ("ND", "ND1") else P
    x = torch.full((n, pitch), float("nan"), device=device, dtype=dtype)[:, pitch - D :]
    x.copy_(normal(device, dtype, n, D))
    x = x if form in ("ND", "slice") else x.as_strided((n, D, 1), (pitch, 1, pitch))
    state = normal(device, dtype, count, D, columns)
    state = state if layout == "compact" else state.transpose(1, 2).contiguous().transpose(1, 2)
    weight, bias = normal(device, dtype, D, W), normal(device, dtype, D)
    rows = torch.tensor([4, -1, 0], dtype=torch.int32, device=device) if slots else None
    more = dict(conv_state_indices=rows) if slots else {}
    exact, after = reference.causal_conv1d_update(
        x.cpu(), state.cpu(), weight.cpu(), bias.cpu(), activation="silu",
        conv_state_indices=None if rows is None else rows.cpu(),
    )  # fmt: skip
    size = reference.magnitude(
        reference.causal_conv1d_update, x.cpu(), state.cpu(), weight.cpu(), bias.cpu(),
        conv_state_indices=None if rows is None else rows.cpu(),
    )  # fmt: skip
    named = dict(x=x, conv_state=state.clone(), weight=weight, bias=bias, activation="silu", cache_seqlens=None, **more)
    states_of = [named["conv_state"]]
    calls = [("causal_conv1d_update", lambda: capturing.update(*named.values()))]
    again = {**named, "conv_state": state.clone()}
    states_of.append(again["conv_state"])
    calls.append(("causal_conv1d_update", lambda: capturing.update(**again)))
    if cpp_functions is not None and x.dim() == 3:
        states_of.append(state.clone())
        calls.append(
            (
                "causal_conv1d_update_function",
                lambda: capturing.update_function(x, states_of[2], weight, bias, True, None, rows),
            )
        )
    for (name, call), written in zip(calls, states_of, strict=True):
        assert written.stride() == state.stride()
        y = served(device, name, call)
        assert y.shape == x.shape and y.dtype == dtype
        reference.assert_close_ulp(y.cpu(), exact, 32 * reference.UNIT_FP32 * (size + 1))
        reference.assert_same_bits(written, after)


@dtypes
@pytest.mark.parametrize("layout", ["channel-first", "projection"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("columns", [W - 1, W + 2])
def test_update_of_several_tokens(device, dtype, layout, tokens, ring, columns):
    x = placed(device, dtype, layout)[:, :, 2 : 2 + tokens]
    state, weight, bias = states(device, dtype, columns), normal(device, dtype, D, W), normal(device, dtype, D)
    position = torch.tensor([0, 7], dtype=torch.int32, device=device) if ring else None
    on_cpu = (x.cpu(), state.cpu(), weight.cpu(), bias.cpu())
    where = dict(cache_seqlens=position.cpu() if ring else None)
    exact, after = reference.causal_conv1d_update(*on_cpu, activation="swish", **where)
    size = reference.magnitude(reference.causal_conv1d_update, *on_cpu, **where)
    calls = {"causal_conv1d_update": lambda s: capturing.update(x, s, weight, bias, "swish", position)}
    if cpp_functions is not None:
        calls["causal_conv1d_update_function"] = lambda s: capturing.update_function(
            x, s, weight, bias, True, position, None
        )
    for name, call in calls.items():
        written = state.clone()
        y = served(device, name, lambda call=call, written=written: call(written))
        assert y.shape == x.shape
        reference.assert_close_ulp(y.cpu(), exact, 32 * reference.UNIT_FP32 * (size + 1))
        reference.assert_same_bits(written, after)


@dtypes
@pytest.mark.parametrize("pitch", [D, P])
@pytest.mark.parametrize("columns", [W - 1, W, 20])
def test_varlen_states(device, dtype, pitch, columns):
    x = torch.full((17, pitch), float("nan"), device=device, dtype=dtype)[:, pitch - D :]
    x.copy_(normal(device, dtype, 17, D)).requires_grad_()
    bounds = torch.tensor([0, 2, 2, 9, 17], dtype=torch.int32, device=device)
    exact = reference.causal_conv1d_varlen_states(x.detach().cpu(), bounds.cpu(), columns)
    name = "causal_conv1d_varlen_states"
    for call in (
        lambda: capturing.varlen_states(x, bounds, columns),
        lambda: capturing.varlen_states(x=x, cu_seqlens=bounds, state_len=columns),
    ):
        found = served(device, name, call)
        reference.assert_same_bits(found, exact)
        assert found.stride() == (columns * D, 1, D) and not found.requires_grad


@needs_cpp
@dtypes
@layouts
@cases
def test_fwd_function(device, dtype, layout, case):
    c = Case(device, dtype, layout, case)
    out = torch.full((B, W - 1, D), float("nan"), device=device, dtype=dtype).transpose(1, 2) if c.final else None
    args = (c.x, c.weight, c.bias, c.seq_idx, c.initial, out, c.activation is not None)
    with torch.no_grad():
        y = served(device, "causal_conv1d_fwd_function", lambda: capturing.fwd_function(*args))
    c.check_values(y, out)


@needs_cpp
@dtypes
@layouts
@cases
def test_bwd_function(device, dtype, layout, case):
    c = Case(device, dtype, layout, case)
    dx = check_backward(device, c, None)
    assert dx.stride() == torch.empty_like(c.x).stride()


@needs_cpp
@layouts
@pytest.mark.parametrize("given", LAYOUTS)
def test_bwd_function_fills_a_given_dx(device, layout, given):
    """Of whatever layout, in place and nothing around it, and it is what comes back."""
    c = Case(device, torch.bfloat16, layout, "silu")
    dx, memory = room(device, torch.bfloat16, given)
    assert check_backward(device, c, dx) is dx
    assert int(memory.isnan().sum()) == memory.numel() - dx.numel()


def check_backward(device, c, dx):
    named = dict(
        x=c.x,
        weight=c.weight,
        bias=c.bias,
        dout=c.dy.transpose(1, 2).contiguous().transpose(1, 2),
        seq_idx=c.seq_idx,
        initial_states=c.initial,
        dfinal_states=c.dfinal,
        dx=dx,
        return_dinitial_states=c.initial is not None,
        silu_activation=c.activation is not None,
    )
    args, kwargs = (tuple(named.values()), {}) if dx is None else ((), named)
    gradients = served(device, "causal_conv1d_bwd_function", lambda: capturing.bwd_function(*args, **kwargs))
    assert isinstance(gradients, tuple)
    found = dict(zip(("x", "weight", "bias", "initial_states"), gradients, strict=True))
    c.check_gradients({name: found[name] for name in c.leaves()})
    assert {name for name in found if found[name] is None} == found.keys() - c.leaves().keys()
    if c.initial is not None:
        assert found["initial_states"].stride() == ((W - 1) * D, 1, D)
    return found["x"]


@needs_cpp
def test_what_a_given_dx_must_not_be(device):
    """Memory that the backward reads: the original gets the call, with the same arguments."""
    c = Case(device, torch.float32, "channel-last", "silu")
    args = (c.x, c.weight, c.bias, c.dy, None, None, None, c.x, False, True)
    with accelerated("causal_conv1d", verbose=False), record_routes() as routes:
        with pytest.raises(NoExtension):
            capturing.bwd_function(*args)
    assert [str(route) for route in routes] == ["fallback:layout"]


# what the package does not serve here either: dtype, arguments that exclude each other, an activation it does not know
DECLINED = {
    "dtype": (lambda c: ((c.x.double(), c.weight.double()), {}), NoExtension, "dtype"),
    "both": (
        lambda c: ((c.x, c.weight), dict(seq_idx=documents(c.x.device), return_final_states=True)),
        AssertionError,
        "unsupported-argument",
    ),
    "activation": (lambda c: ((c.x, c.weight), dict(activation="gelu")), NotImplementedError, "activation"),
    "unknown keyword": (lambda c: ((c.x, c.weight), dict(residual=c.x)), TypeError, "unsupported-argument"),
    "wide": (lambda c: ((c.x, c.weight.repeat(1, 3)), {}), NoExtension, "width"),
    "final columns": (
        lambda c: (
            (c.x, c.weight),
            dict(return_final_states=True, final_states_out=states(c.x.device, torch.float32, W)),
        ),
        NoExtension,
        "shape",
    ),
}


@pytest.mark.parametrize("name", DECLINED)
def test_a_declined_call_is_the_original(device, name, monkeypatch):
    make, error, reason = DECLINED[name]
    args, kwargs = make(Case(device, torch.float32, "channel-last", "plain"))
    with pytest.raises(error) as alone:
        capturing.fn(*args, **kwargs)
    with accelerated("causal_conv1d", verbose=False):
        with record_routes() as routes, pytest.raises(error) as caught:
            capturing.fn(*args, **kwargs)
        assert str(caught.value) == str(alone.value)
        assert (routes[0].callable, str(routes[0])) == ("causal_conv1d_fn", f"fallback:{reason}")
        seen = []
        binding = capturing.fn.__accel__
        monkeypatch.setattr(binding, "original", lambda *args, **kwargs: seen.append((args, kwargs)))
        capturing.fn(*args, **kwargs)
        monkeypatch.undo()
    ((found, named),) = seen
    assert len(found) == len(args) and all(a is b for a, b in zip(found, args, strict=True))
    assert named.keys() == kwargs.keys() and all(named[key] is kwargs[key] for key in kwargs)


def test_a_declined_update_is_the_original(device):
    x, state, weight = (normal(device, torch.float32, *shape) for shape in ((3, D), (3, D, W), (D, W)))
    before = state.clone()
    for args, reason, error in (
        ((x, state, weight.requires_grad_()), "autograd", NoExtension),
        ((x, None, weight.detach()), "unsupported-argument", None),
    ):
        with accelerated("causal_conv1d", verbose=False), record_routes() as routes:
            with pytest.raises(error or Exception):
                capturing.update(*args)
        assert (routes[0].callable, str(routes[0])) == ("causal_conv1d_update", f"fallback:{reason}")
    assert torch.equal(state, before)


def test_every_reference_and_back():
    owners = [causal_conv1d, causal_conv1d_interface, causal_conv1d_varlen, capturing]
    owners += [cpp_functions] if cpp_functions is not None else []
    before = [dict(vars(owner)) for owner in owners]
    callables = [value for name, value in FOUND.items() if not name.startswith("__")]
    with accelerated("causal_conv1d", verbose=False) as on:
        assert on == ("causal_conv1d",) and is_accelerated("causal_conv1d")
        for owner in owners:
            assert not [name for name, value in vars(owner).items() if any(value is found for found in callables)]
        assert capturing.fn is causal_conv1d.causal_conv1d_fn is causal_conv1d_interface.causal_conv1d_fn
        assert capturing.fn.__wrapped__ is FOUND["fn"]
        if cpp_functions is not None:
            captured = causal_conv1d_interface.causal_conv1d_bwd_function
            assert captured is capturing.bwd_function is cpp_functions.causal_conv1d_bwd_function
            assert captured.__accel__.live
    assert not is_accelerated("causal_conv1d")
    for owner, names in zip(owners, before, strict=True):
        assert vars(owner).keys() == names.keys()
        assert [name for name, value in names.items() if vars(owner)[name] is not value] == []
    with pytest.raises(NoExtension):
        capturing.fn(torch.ones(1, 8, 8), torch.ones(8, 4))
