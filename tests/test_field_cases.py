"""Small inputs that failed for users of other convolutions. `field_cases.yaml` maps each report to its test here or
elsewhere, or says why it cannot occur; this file holds the cases that are no point of a grid, and the worked numbers.
"""

import ast
import collections
import dataclasses
import itertools
import pathlib
import threading

import pytest
import reference
import torch
import yaml
from torch.utils.checkpoint import checkpoint

import accel
from accel import admission, call, environment, ops

TESTS = pathlib.Path(__file__).parent
CASES = yaml.safe_load((TESTS / "field_cases.yaml").read_text())
# How many reports each category of the collection has: a case that is dropped from the map is missed here.
COUNTS = {
    "Argument order/activation": 3,
    "CUDA graph / launch cache": 3,
    "Captured reference/version drift": 7,
    "Checkpointing/saved tensors": 1,
    "Code generation": 1,
    "Compile/graph break": 5,
    "Dtype/autocast": 4,
    "Empty/short": 4,
    "Grid limit": 3,
    "Install": 11,
    "Instance patching": 4,
    "Int32 overflow": 7,
    "Multi-GPU/stream": 4,
    "Nondeterminism/race/threads": 2,
    "Packed batches": 4,
    "Padding rows/tokens": 11,
    "Performance/compile cache": 8,
    "Rounding/extreme values": 1,
    "Stale state/cache": 10,
    "Stride/layout": 8,
    "Unpatching/global patch": 2,
    "Width/state length": 5,
    "Wrong gradient": 6,
}


def test_every_case_is_mapped_once():
    assert dict(collections.Counter(case["category"] for case in CASES)) == COUNTS
    assert len({case["id"] for case in CASES}) == len(CASES)
    for case in CASES:
        answers = [key for key in ("test", "not_here", "later") if case.get(key)]
        assert len(answers) == 1 and set(case) == {"id", "category", "case", *answers}, case["id"]


def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_mapped_test_exists():
    there = {path.name: functions(path) for path in TESTS.glob("test_*.py")}
    missing = []
    for case in CASES:
        for node in case.get("test", "").split():
            file, _, function = node.partition("::")
            if function not in there.get(file, ()):
                missing.append(f"{case['id']}: {node}")
    assert not missing, missing


# Worked numbers: width 4, one channel, taps 1 10 100 1000.


def weight_on(device):
    return torch.tensor([[1.0, 10.0, 100.0, 1000.0]], device=device)


def tokens(*values, device="cpu"):
    return torch.tensor([[values]], dtype=torch.float32, device=device).reshape(1, 1, len(values))


def forward(engine, device, x, **options):
    """(y, states) as nested lists, by the oracle or by the operation."""
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    if engine == "oracle":
        y, states = reference.causal_conv1d(x.to(device), weight_on(device), **options)
    else:
        options.setdefault("return_final_states", "seq_idx" not in options)
        result = ops.causal_conv1d(x.to(device), weight_on(device), **options)
        y, states = result if options["return_final_states"] else (result, None)
    return y[0, 0].tolist(), None if states is None else states[:, 0].tolist()


engines = pytest.mark.parametrize("engine", ("oracle", "operation"))


@engines
@pytest.mark.parametrize("state_len", (3, 4))
def test_worked_whole_and_parts(device, engine, state_len):
    def last(*values):
        return [list(values[-state_len:])]

    y, states = forward(engine, device, tokens(1, 2, 3, 4, 5), state_len=state_len)
    assert y == [1000, 2100, 3210, 4321, 5432] and states == last(2, 3, 4, 5)
    y, states = forward(engine, device, tokens(1, 2), state_len=state_len)
    assert y == [1000, 2100] and states == last(0, 0, 1, 2)
    initial = torch.tensor([states], dtype=torch.float32).reshape(1, 1, -1)
    y, states = forward(engine, device, tokens(3, 4, 5), initial_states=initial, state_len=state_len)
    assert y == [3210, 4321, 5432] and states == last(2, 3, 4, 5)


@engines
@pytest.mark.parametrize("state_len", (3, 4))
def test_worked_packed(device, engine, state_len):
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    y, states = forward(engine, device, tokens(1, 2, 3, 4, 5), cu_seqlens=bounds, state_len=state_len)
    assert y == [1000, 2100, 3000, 4300, 5430]
    assert states == [row[-state_len:] for row in ([0, 0, 1, 2], [0, 0, 0, 0], [0, 3, 4, 5])]


@engines
def test_worked_document_numbers(device, engine):
    numbers = torch.tensor([[7, 7, -1, 8, 8]], dtype=torch.int32)
    assert forward(engine, device, tokens(1, 2, 9, 4, 5), seq_idx=numbers)[0] == [1000, 2100, 0, 4000, 5400]


@pytest.mark.parametrize("state_len", (3, 4))
@engines
def test_worked_step(device, engine, state_len):
    update = reference.causal_conv1d_update if engine == "oracle" else ops.causal_conv1d_update
    state = torch.tensor([[[2.0, 3.0, 4.0, 5.0][-state_len:]]], device=device)
    result = update(torch.tensor([[6.0]], device=device), state, weight_on(device))
    y, state = result if engine == "oracle" else (result, state)
    assert y.tolist() == [[6543]] and state[0, 0].tolist() == [3, 4, 5, 6][-state_len:]


@engines
def test_worked_reserved_slot(device, engine):
    update = reference.causal_conv1d_update if engine == "oracle" else ops.causal_conv1d_update
    state = torch.tensor([[[1.0, 2, 3]], [[7, 7, 7]], [[4, 5, 6]]], device=device)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    x = torch.tensor([[7.0], [9], [4]], device=device)
    result = update(x, state, weight_on(device), torch.ones(1, device=device), conv_state_indices=slots)
    y, state = result if engine == "oracle" else (result, state)
    assert y.tolist() == [[7655], [0], [4322]]
    assert state[:, 0].tolist() == [[2, 3, 4], [7, 7, 7], [5, 6, 7]]


@engines
def test_worked_ring(device, engine):
    """The circular buffer."""
    state = torch.zeros(1, 1, 4, device=device)

    def step(values, position, state):
        x = torch.tensor([[values]] if len(values) > 1 else [values], device=device)
        at = torch.tensor([position], dtype=torch.int32, device=device)
        if engine == "oracle":
            return reference.causal_conv1d_update(x, state, weight_on(device), cache_seqlens=at)
        return ops.causal_conv1d_update(x, state, weight_on(device), cache_seqlens=at), state

    for position in range(5):
        _, state = step([position + 1.0], position, state)
    assert state.tolist() == [[[5, 2, 3, 4]]]
    y, state = step([6.0], 5, state)
    assert y.tolist() == [[6543]] and state.tolist() == [[[5, 6, 3, 4]]]
    y, state = step([7.0, 8.0], 6, state)
    assert y.tolist() == [[[7654, 8765]]] and state.tolist() == [[[5, 6, 7, 8]]]


@engines
def test_worked_gradient_of_a_one_token_chunk(device, engine):
    function = reference.causal_conv1d if engine == "oracle" else ops.causal_conv1d
    options = {} if engine == "oracle" else dict(return_final_states=True)
    x = tokens(4, device=device).requires_grad_()
    history = tokens(1, 2, 3, device=device).requires_grad_()
    weight = weight_on(device).requires_grad_()
    y, state = function(x, weight, initial_states=history, **options)
    assert state.tolist() == [[[2, 3, 4]]]
    a, b, c = 0.5, 0.25, 2.0
    seeds = [torch.ones_like(y), torch.tensor([[[a, b, c]]], device=device).to(state)]
    dx, dhistory, dweight = torch.autograd.grad([y, state], (x, history, weight), seeds)
    assert dx.tolist() == [[[1000 + c]]]
    assert dhistory.tolist() == [[[1, 10 + a, 100 + b]]]
    assert dweight.tolist() == [[1, 2, 3, 4]]


@engines
@pytest.mark.parametrize("layout", ("channel-last", "channel-first"))
def test_worked_expanded_gradient(device, engine, layout):
    function = reference.causal_conv1d if engine == "oracle" else lambda *args: (ops.causal_conv1d(*args), None)
    x = torch.arange(1.0, 6.0, device=device).expand(2, 5)[None]  # two equal channels: both layouts are themselves
    x = reference.sequences(x, torch.float32, layout=layout).requires_grad_()
    weight = weight_on(device).repeat(2, 1).requires_grad_()
    y, _ = function(x, weight)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.tolist() == [[[1111, 1111, 1110, 1100, 1000]] * 2]
    assert dweight.tolist() == [[3, 6, 10, 15]] * 2


def test_the_dense_shortcut_agrees_with_the_oracle():
    x, weight, bias = torch.randn(2, 5, 9), torch.randn(5, 4), torch.randn(5)
    pre, _ = reference.preactivation(x, weight, bias)
    assert torch.allclose(reference.dense(x, weight, bias), pre, rtol=1e-14, atol=1e-14)
    assert torch.equal(reference.dense(x[:, :, :0], weight), x[:, :, :0].double())


def test_the_oracle_equals_torch():
    x, weight, bias = torch.randn(2, 5, 30).double(), torch.randn(5, 6).double(), torch.randn(5).double()
    y, _ = reference.causal_conv1d(x, weight, bias, activation="silu")
    same = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=5, groups=5)[:, :, :30]
    assert torch.allclose(y, torch.nn.functional.silu(same), rtol=1e-13, atol=1e-13)


def test_the_tolerance_is_one_ulp():
    one = torch.ones(1, dtype=torch.bfloat16)
    reference.assert_close_ulp(one, torch.tensor([1 + 2.0**-7], dtype=torch.float64), 0)
    for wrong in (1 + 2.0**-6, float("nan"), float("inf"), -1.0):
        with pytest.raises(AssertionError):
            reference.assert_close_ulp(one, torch.tensor([wrong], dtype=torch.float64), 0)
    with pytest.raises(AssertionError):
        reference.assert_close_ulp(torch.full((1,), float("inf")), torch.tensor([1e38], dtype=torch.float64), 0)
    reference.assert_close_ulp(torch.full((1,), float("inf")), torch.tensor([1e39], dtype=torch.float64), 0)


def test_fresh_memory_holds_nan():
    for fresh in (torch.empty(3), torch.empty_like(torch.ones(2)), torch.ones(1).new_empty(4), torch.empty(2).half()):
        assert fresh.isnan().all()
    assert torch.empty(3, dtype=torch.int32).dtype == torch.int32


def test_the_copy_detector_detects(no_copies):
    x = torch.ones(4, 6)
    with no_copies(allow={"add"}) as mode:
        torch.empty_like(x).view(6, 4).t()[:, 1:].select(0, 0)
        x + x.detach()
        for copies in (
            x.clone,
            x.t().contiguous,
            x.double,
            lambda: x.t().reshape(24),
            lambda: x.mul(2),
            lambda: x.copy_(x.clone()),
        ):
            with pytest.raises(AssertionError, match="on the way of a native call"):
                copies()
    assert mode.seen.count("add") == 1


# The cases.


def close(actual, expected, size=None):
    slack = 16 * reference.UNIT_FP32 * (expected.double().abs().max() + 1 if size is None else size)
    reference.assert_close_ulp(actual, expected, slack)


def grads(x, weight, *others, dy=None, **options):
    """y and the gradients of x, weight and others (bias) on fresh leaves."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, *others)]
    y = ops.causal_conv1d(*leaves, **options)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return y, torch.autograd.grad(y, wanted, torch.ones_like(y) if dy is None else dy)


def test_no_bias_is_a_bias_of_zero(device):
    x, weight = torch.randn(2, 8, 40).to(device), torch.randn(8, 4).to(device)
    y, (dx, dw) = grads(x, weight, None, activation="silu")
    same, (dx_same, dw_same, _) = grads(x, weight, torch.zeros(8, device=device), activation="silu")
    for one, other in ((y, same), (dx, dx_same), (dw, dw_same)):
        reference.assert_same_bits(one, other)


@pytest.mark.parametrize("layout", ("channel-last", "channel-first"))
def test_a_batch_is_each_row_alone(device, layout):
    x = reference.sequences(torch.randn(3, 16, 50), torch.float32, layout=layout, gap=2).to(device)
    weight, dy = torch.randn(16, 4).to(device), torch.randn(3, 16, 50).to(device)
    y, (dx, dw) = grads(x, weight, dy=dy, activation="silu")
    total = torch.zeros(16, 4, dtype=torch.float64, device=device)
    for row in range(3):
        alone, (dx_alone, dw_alone) = grads(x[row : row + 1], weight, dy=dy[row : row + 1], activation="silu")
        reference.assert_same_values(y[row : row + 1], alone)
        reference.assert_same_values(dx[row : row + 1], dx_alone, "dx")
        total += dw_alone.double()
    close(dw, total)


@pytest.mark.parametrize("packed", (False, True))
def test_gradient_from_a_split_view(device, packed):
    """strides (T * 3D, 3D, 1): as for dy.contiguous()."""
    x, weight = torch.randn(2, 60, 32).to(device).transpose(1, 2), torch.randn(32, 4).to(device)
    options = dict(cu_seqlens=torch.tensor([0, 7, 70, 120], device=device)) if packed else {}
    for part in torch.randn(2, 60, 96).to(device).split(32, dim=2):
        dy = part.transpose(1, 2)
        _, view = grads(x, weight, dy=dy, activation="silu", **options)
        _, copy = grads(x, weight, dy=dy.contiguous(), activation="silu", **options)
        for one, other in zip(view, copy, strict=True):
            reference.assert_same_values(one, other)


PITCHES = {
    "fla#519": (1, 20, 384, 2 * 128 + 2 * 128 + 2, 128),
    "mamba#351": (1, 64, 192, 2 * 128 + 2 * 64 + 5, 128),
    "mamba#413": (2, 33, 100, 301, 51),
    "mamba#643": (100, 64, 64, 644, 128),
    "mamba#345": (2, 17, 13, 13, 0),
}


@pytest.mark.parametrize("name", PITCHES)
def test_any_slice_of_a_projection(device, name):
    """D, the row pitch and the offset are multiples of nothing: as for the contiguous copy."""
    batch, length, dim, pitch, start = PITCHES[name]
    pitch = max(pitch, dim + start)
    x = torch.randn(batch, length, pitch).bfloat16().to(device)[:, :, start : start + dim].transpose(1, 2)
    weight, bias = torch.randn(dim, 4).bfloat16().to(device), torch.randn(dim).bfloat16().to(device)
    y, view = grads(x, weight, bias, activation="silu")
    same, copy = grads(x.transpose(1, 2).contiguous().transpose(1, 2), weight, bias, activation="silu")
    reference.assert_same_values(y, same)
    for name, one, other in zip(("dx", "dw", "db"), view, copy, strict=True):
        reference.assert_same_values(one, other, name)


@pytest.mark.parametrize("layout", ("channel-last", "channel-first"))
def test_channels_that_fill_no_tile(device, layout):
    """D = 24, all parameters at the end of buffers that go on as NaN."""
    x = reference.sequences(torch.randn(1, 24, 40), torch.float32, layout=layout, pitch=8).to(device)
    weight = torch.full((32, 4), float("nan"), device=device)
    weight[:24] = torch.randn(24, 4)
    bias = torch.full((32,), float("nan"), device=device)
    bias[:24] = 1
    y, (dx, dw, db) = grads(x, weight[:24], bias[:24])
    close(y, reference.dense(x, weight[:24], bias[:24]))
    assert dx.isfinite().all() and dw.isfinite().all() and (db == 40).all()
    token = x[:, :, 0].contiguous()
    close(ops.causal_conv1d_update(token, None, weight[:24], bias[:24]), weight[:24, 3] * token.double() + 1)


@pytest.mark.parametrize("length", (1025, 1026))
def test_no_states_asked_for_none_written(device, length):
    x = torch.randn(1, length, 64).bfloat16().to(device).transpose(1, 2)
    weight = torch.randn(64, 4).bfloat16().to(device)
    y = ops.causal_conv1d(x, weight)
    assert isinstance(y, torch.Tensor)
    close(y, reference.dense(x, weight), reference.dense(x.abs(), weight.abs()).cpu())


@pytest.mark.parametrize("packed", (False, True))
def test_no_tokens_leave_the_state(device, packed):
    state = torch.randn(1, 8, 3).to(device)
    options = dict(cu_seqlens=torch.tensor([0, 0], device=device)) if packed else {}
    y, after = ops.causal_conv1d(
        torch.empty(1, 8, 0, device=device),
        torch.ones(8, 4, device=device),
        initial_states=state,
        return_final_states=True,
        **options,
    )
    assert y.shape == (1, 8, 0)
    reference.assert_same_bits(after, state)


def test_beams_reorder_the_state(device):
    """The state is a plain tensor, slots first: index_select follows the beams, in either layout."""
    x = torch.randn(3, 9, 8).to(device)
    weight, beams = torch.randn(8, 4).to(device), torch.tensor([2, 2, 0], device=device)
    _, state = ops.causal_conv1d(x.transpose(1, 2), weight, return_final_states=True)
    step = torch.randn(3, 8).to(device)
    y = ops.causal_conv1d_update(step, state.index_select(0, beams), weight)
    history = torch.cat([x[beams], step[:, None]], dim=1)
    close(y, reference.dense(history.transpose(1, 2), weight)[:, :, -1])


def test_document_numbers_together_with_initial_states(device):
    """The state belongs to the document of token 0, wherever its number comes again."""
    x, weight, initial = torch.randn(2, 8, 6), torch.randn(8, 4), torch.randn(2, 8, 3)
    numbers = torch.tensor([[5, 5, 6, 6, 6, 6], [3, 4, 3, 3, -1, 3]], dtype=torch.int32)
    expected, _ = reference.causal_conv1d(x, weight, seq_idx=numbers, initial_states=initial)
    y = ops.causal_conv1d(
        x.to(device), weight.to(device), seq_idx=numbers.to(device), initial_states=initial.to(device)
    )
    close(y, expected)
    alone, _ = reference.causal_conv1d(x[:1, :, :2], weight, initial_states=initial[:1])
    close(y[:1, :, :2], alone)
    alone, _ = reference.causal_conv1d(x[:1, :, 2:], weight)
    close(y[:1, :, 2:], alone)


def test_packed_rows_of_unequal_length_go_on_from_their_states(device):
    lengths, dim = (1, 3, 2), 16
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    x, weight, state = torch.randn(1, dim, 6), torch.randn(dim, 4), torch.randn(3, dim, 3)
    y, after = ops.causal_conv1d(
        x.to(device),
        weight.to(device),
        cu_seqlens=bounds.to(device),
        initial_states=state.to(device),
        return_final_states=True,
    )
    for n, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        alone, tail = reference.causal_conv1d(x[:, :, start:end], weight, initial_states=state[n : n + 1])
        close(y[:, :, start:end], alone)
        reference.assert_same_bits(after[n : n + 1], tail.float())


@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_tokens_change_nothing(device, side):
    """Prompts of 3 and 7 tokens in a batch of 7, padded on either side with rubbish: each row as if alone."""
    lengths, dim = (3, 7), 8
    x = torch.full((2, 7, dim), 1e4)
    numbers = torch.full((2, 7), -1, dtype=torch.int32)
    prompts = [torch.randn(1, dim, length) for length in lengths]
    places = [slice(7 - n, 7) if side == "left" else slice(0, n) for n in lengths]
    for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        x[row, place] = prompt[0].t()
        numbers[row, place] = 0
    weight, bias = torch.randn(dim, 4), torch.randn(dim)
    y = ops.causal_conv1d(
        x.to(device).transpose(1, 2), weight.to(device), bias.to(device), seq_idx=numbers.to(device), activation="silu"
    )
    for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        alone, _ = reference.causal_conv1d(prompt, weight, bias, activation="silu")
        close(y[row : row + 1, :, place], alone)
    assert not y.cpu().transpose(1, 2)[numbers < 0].any()


def test_the_state_of_a_padded_batch_is_that_of_its_real_tokens(device):
    """Lengths 3 and 7, W = 4: packed, the states are the last real tokens, whatever lies behind them."""
    prompts = [torch.randn(8, 3), torch.randn(8, 7)]
    x = torch.cat([*prompts, torch.full((8, 6), 1e4)], dim=1)[None].to(device)
    bounds = torch.tensor([0, 3, 10, 16], dtype=torch.int32, device=device)
    options = dict(cu_seqlens=bounds, return_final_states=True, state_len=4)
    _, states = ops.causal_conv1d(x, torch.ones(8, 4, device=device), **options)
    reference.assert_same_bits(states[0], torch.cat([torch.zeros(8, 1), prompts[0]], dim=1))
    reference.assert_same_bits(states[1], prompts[1][:, -4:])


def test_tokens_added_for_an_alignment(device):
    """y and the states of the real sequences do not see a last sequence of padding."""
    x, weight = torch.randn(1, 8, 13).to(device), torch.randn(8, 4).to(device)
    padded = torch.cat([x, torch.full((1, 8, 3), 1e4, device=device)], dim=2)
    for bounds in ([0, 13], [0, 5, 13]):
        cu = torch.tensor(bounds, dtype=torch.int32, device=device)
        y, states = ops.causal_conv1d(x, weight, cu_seqlens=cu, return_final_states=True)
        more = torch.tensor([*bounds, 16], dtype=torch.int32, device=device)
        same, wider = ops.causal_conv1d(padded, weight, cu_seqlens=more, return_final_states=True)
        reference.assert_same_values(same[:, :, :13], y)
        reference.assert_same_bits(wider[:-1], states)
    dense = ops.causal_conv1d(x, weight)
    reference.assert_same_values(ops.causal_conv1d(padded, weight)[:, :, :13], dense)


@pytest.mark.parametrize("dim", (2064, 4096))
@pytest.mark.parametrize("width", (3, 4))
def test_negative_indices_in_a_batch_of_three(device, dim, width):
    state = torch.randn(10, dim, width - 1).bfloat16()
    x, weight = torch.randn(3, dim).bfloat16(), torch.randn(dim, width).bfloat16()
    slots = torch.tensor([7, -1, 3], dtype=torch.int32)
    expected, after = reference.causal_conv1d_update(x, state, weight, conv_state_indices=slots)
    size = reference.magnitude(reference.causal_conv1d_update, x, state, weight, conv_state_indices=slots)
    state = state.to(device)
    y = ops.causal_conv1d_update(x.to(device), state, weight.to(device), conv_state_indices=slots.to(device))
    close(y, expected, size)
    reference.assert_same_bits(state, after)


@pytest.mark.parametrize("width", range(2, 9))
def test_widths_to_eight_and_the_length_of_y(device, width):
    x, weight = torch.randn(1, 8, 20).to(device), torch.randn(8, width).to(device)
    y, (dx, dw) = grads(x, weight)
    assert y.shape == x.shape
    close(y, reference.dense(x, weight))
    assert dx.shape == x.shape and dw.shape == weight.shape
    short, state = ops.causal_conv1d(x[:, :, :1], weight, return_final_states=True)
    assert short.shape == (1, 8, 1) and state.shape == (1, 8, width - 1)


def test_float64_is_refused_by_name(device):
    with pytest.raises(TypeError, match="x: .*float64"):
        ops.causal_conv1d(torch.ones(1, 8, 4, device=device).double(), torch.ones(8, 4, device=device).double())


def test_states_of_width_and_of_one_less(device):
    """One convention: the last W-1 columns count, whatever the length."""
    x, weight = torch.randn(2, 8).to(device), torch.randn(8, 4).to(device)
    long = torch.randn(2, 8, 4).to(device)
    short = long[:, :, 1:].clone()
    reference.assert_same_bits(
        ops.causal_conv1d_update(x, long, weight), ops.causal_conv1d_update(x, short, weight), "y"
    )
    reference.assert_same_bits(long[:, :, 1:], short)


def test_fp16_trains_with_fp32_parameters(device):
    x = torch.randn(2, 16, 30).half().to(device)
    weight, bias = torch.randn(16, 4).to(device), torch.randn(16).to(device)
    y, (dx, dw, db) = grads(x, weight, bias, activation="silu")
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (torch.float16, torch.float16, torch.float32, torch.float32)
    assert all(t.isfinite().all() for t in (y, dx, dw, db))
    expected, _ = reference.causal_conv1d(x.cpu(), weight.cpu(), bias.cpu(), activation="silu")
    close(y, expected)


def test_large_bf16_tokens_stay_finite(device):
    """1e5 is no float16: the intermediates are float32."""
    x = torch.full((1, 8, 6), 1e5).bfloat16().to(device)
    weight = torch.full((8, 4), 0.25).bfloat16().to(device)
    y, (_, dw) = grads(x, weight, activation="silu")
    assert y[0, 0, 5] == x[0, 0, 5] and dw.isfinite().all()
    state = x[:, :, :3].clone()
    assert ops.causal_conv1d_update(x[:, :, 0].contiguous(), state, weight)[0, 0] == x[0, 0, 0]


def test_the_slope_of_silu_does_not_cancel(device):
    """z = 6.25: 1 - sigmoid(z) from a sigmoid rounded to bf16 is 0; and the far tails, where the slope is tiny."""
    z = torch.tensor([6.25, 12.0, -12.0, -30.0, -80.0, 60.0]).bfloat16()
    exact = reference.activation_slope(z.double(), "silu")
    x = z.to(device).reshape(1, -1, 1)
    weight = torch.zeros(len(z), 4, dtype=torch.bfloat16, device=device)
    weight[:, 3] = 1
    _, (dx, _) = grads(x, weight, activation="silu")
    reference.assert_close_ulp(dx[0, :, 0], exact, 256 * reference.UNIT_FP32 * exact.abs())


def test_a_returned_state_keeps_its_value(device):
    x, weight = torch.randn(2, 1, 8, 20).to(device), torch.randn(8, 4).to(device)
    y, state = ops.causal_conv1d(x[0], weight, return_final_states=True)
    y_before, before = y.clone(), state.clone()
    other_y, other = ops.causal_conv1d(x[1], weight, return_final_states=True)
    ops.causal_conv1d_update(x[1, :, :, 0].contiguous(), other, weight)
    reference.assert_same_bits(state, before)
    reference.assert_same_bits(y, y_before)
    assert other.data_ptr() != state.data_ptr() and other_y.data_ptr() != y.data_ptr()


def test_threads_of_a_cold_start_agree(device):
    """Eight threads, one shape that nothing else uses: one answer, forward, backward and update."""
    x, weight = torch.randn(2, 19, 72).to(device).transpose(1, 2), torch.randn(72, 5).to(device)
    results, gate = [], threading.Barrier(8)

    def work():
        gate.wait()
        y, (dx, dw) = grads(x, weight, activation="silu")
        state = torch.zeros(2, 72, 4, device=device)
        step = ops.causal_conv1d_update(x[:, :, 0], state, weight, activation="silu")
        results.append([t.cpu() for t in (y, dx, dw, step, state)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            reference.assert_same_bits(one, other)


def test_recomputation_saves_the_same_tensors(device):
    x, weight = torch.randn(2, 8, 20).to(device), torch.randn(8, 4).to(device).requires_grad_()
    leaf = x.clone().requires_grad_()

    def block(values):
        return ops.causal_conv1d(values, weight, activation="silu").square().sum()

    expected = torch.autograd.grad(block(leaf), (leaf, weight))
    for _ in range(2):
        found = torch.autograd.grad(checkpoint(block, leaf, use_reentrant=False), (leaf, weight))
        for one, other in zip(found, expected, strict=True):
            reference.assert_same_bits(one, other)


@pytest.mark.parametrize("op", ("forward", "update"))
def test_swish_is_silu(device, op):
    x, weight = torch.randn(2, 8, 5).to(device), torch.randn(8, 4).to(device)
    results = []
    for name in ("silu", "swish", None):
        if op == "forward":
            results.append(ops.causal_conv1d(x, weight, activation=name))
        else:
            results.append(ops.causal_conv1d_update(x[:, :, 0].contiguous(), None, weight, activation=name))
    reference.assert_same_bits(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_unknown_architectures_are_declined():
    device = torch.device("cuda", 0)
    known = environment.facts(torch.device("cpu"))
    facts = dataclasses.replace(known, device=device, backend=None, arch=None, detail="sm_999")
    x, weight = torch.ones(2, 8), torch.ones(8, 4)
    found = admission.update_checks(call.UpdateCall(x, "ND", None, weight, None, None, None, None, None, -1), facts)
    declined = [decline for decline in found if decline.reason is accel.Reason.ARCH]
    assert declined and "sm_999" in str(declined[0])


@pytest.mark.gpu
def test_the_device_of_x_is_the_one_that_works():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    current = torch.cuda.current_device()
    x, weight = torch.randn(2, 8, 20), torch.randn(8, 4)
    y, (dx, dw) = grads(x.to("cuda:1"), weight.to("cuda:1"), activation="silu")
    same, (dx_same, dw_same) = grads(x.to("cuda:0"), weight.to("cuda:0"), activation="silu")
    for one, other in ((y, same), (dx, dx_same), (dw, dw_same)):
        assert one.device.index == 1
        reference.assert_same_bits(one, other)
    state = torch.zeros(2, 8, 4, device="cuda:1")
    step = ops.causal_conv1d_update(x[:, :, 0].contiguous().to("cuda:1"), state, weight.to("cuda:1"))
    assert step.device.index == 1 and torch.equal(state[:, :, 3].cpu(), x[:, :, 0])
    assert torch.cuda.current_device() == current


def test_a_plain_bf16_call_of_64_channels_and_32_tokens(device):
    x, weight = torch.randn(1, 64, 32).bfloat16(), torch.randn(64, 4).bfloat16()
    expected, state = reference.causal_conv1d(x, weight)
    size = reference.magnitude(reference.causal_conv1d, x, None, weight)
    y, after = ops.causal_conv1d(x.to(device), weight.to(device), return_final_states=True)
    close(y, expected, size)
    reference.assert_same_bits(after, state.bfloat16())
