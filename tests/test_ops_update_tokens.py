"""`causal_conv1d_update` of several tokens, of a ring, and with the states in between, against the float64 oracle."""

import itertools

import pytest
import reference
import torch

import accel
from accel import ops

CASES = list(itertools.product((1, 2, 5, 9), (False, True), (None, "silu"), (torch.bfloat16, torch.float32)))


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def drawn(device, dtype, tokens, n=5, dim=37, width=4, length=6, slots=9, bias=True, residual=False, strided=False):
    """Arguments whose x is channel-first, or a slice of a wider channel-last projection."""
    x = torch.randn(n, dim, tokens)
    if strided:
        x = torch.randn(n, tokens, dim + 11)[:, :, 3 : 3 + dim].transpose(1, 2)
    arguments = dict(
        x=x.to(dtype).to(device),
        conv_state=torch.randn(slots, dim, length).to(dtype).to(device),
        weight=torch.randn(dim, width).to(dtype).to(device),
        bias=torch.randn(dim).to(device) if bias else None,
        residual=torch.randn(n, dim, tokens).to(dtype).to(device) if residual else None,
    )
    if strided:
        big = torch.randn(n, tokens, dim + 11).to(dtype).to(device)
        arguments["x"] = big[:, :, 3 : 3 + dim].transpose(1, 2)
    return arguments


def oracle(arguments, **options):
    named = {name: value for name, value in arguments.items() if name != "conv_state"}
    x, weight, bias = (named.pop(name) for name in ("x", "weight", "bias"))
    y, state = reference.causal_conv1d_update(x, arguments["conv_state"], weight, bias, **named, **options)
    plain, _ = reference.causal_conv1d_update(
        x, arguments["conv_state"], weight, bias, **named, **options, compute=torch.float32
    )
    return y, state, 4 * (plain.double() - y).abs() + 1e-6


@pytest.mark.parametrize("tokens, ring, activation, dtype", CASES)
def test_against_the_oracle(device, tokens, ring, activation, dtype):
    for strided, residual, width, length in ((False, True, 4, 6), (True, False, 3, 2), (False, False, 8, 7)):
        arguments = drawn(device, dtype, tokens, width=width, length=length, residual=residual, strided=strided)
        options = dict(activation=activation)
        options["conv_state_indices"] = torch.tensor([7, -1, 0, 3, 8], dtype=torch.int32, device=device)
        if ring:
            options["cache_seqlens"] = torch.tensor([0, 3, 5, 11, 2**31 - 2], dtype=torch.int32, device=device)
        want, state, slack = oracle(arguments, **options)
        y = ops.causal_conv1d_update(**arguments, **options)
        reference.assert_close_ulp(y, want, slack)
        assert torch.equal(bits(arguments["conv_state"]), bits(state))
        assert y.shape == arguments["x"].shape and y.is_contiguous()


@pytest.mark.parametrize("tokens", (1, 3, 8))
@pytest.mark.parametrize("indices", (False, True))
def test_the_states_in_between(device, tokens, indices):
    """After each token the state is that of a call that ends there; rows without a slot receive nothing."""
    arguments = drawn(device, torch.bfloat16, tokens, slots=9 if indices else 5)
    kept = torch.full((5, tokens, 37, 6), -7.0, dtype=torch.bfloat16, device=device)
    options = {}
    if indices:
        options["conv_state_indices"] = torch.tensor([1, -1, 4, 0, 8], dtype=torch.int32, device=device)
    before = arguments["conv_state"].clone()
    ops.causal_conv1d_update(**arguments, **options, intermediate_states_out=kept)
    for count in range(1, tokens + 1):
        part = dict(arguments, x=arguments["x"][:, :, :count], conv_state=before)
        _, state, _ = oracle(part, **options)
        for row, slot in enumerate(options["conv_state_indices"].tolist() if indices else range(5)):
            expected = state[slot] if slot >= 0 else torch.full_like(kept[row, 0], -7.0)
            assert torch.equal(kept[row, count - 1], expected)


@pytest.mark.parametrize("ring", (False, True))
def test_any_split_is_one_call(device, ring):
    """Five tokens in pieces of 1, 3 and 1 leave the bits of five at once."""
    whole = drawn(device, torch.float16, 5, slots=5)
    pieces = dict(whole, conv_state=whole["conv_state"].clone())
    start = torch.tensor([4, 0, 9, 2, 6], dtype=torch.int32, device=device)
    expected = ops.causal_conv1d_update(**whole, cache_seqlens=start if ring else None)
    got = []
    for first, last in ((0, 1), (1, 4), (4, 5)):
        part = dict(pieces, x=whole["x"][:, :, first:last])
        got.append(ops.causal_conv1d_update(**part, cache_seqlens=start + first if ring else None))
    assert torch.equal(bits(torch.cat(got, dim=2)), bits(expected))
    assert torch.equal(bits(pieces["conv_state"]), bits(whole["conv_state"]))


def test_a_bad_slot_of_several_tokens(device):
    arguments = drawn(device, torch.bfloat16, 3)
    before = arguments["conv_state"].clone()
    slots = torch.tensor([0, 9, 2, 2, -1], dtype=torch.int32, device=device)
    y = ops.causal_conv1d_update(**arguments, conv_state_indices=slots)
    with pytest.raises(accel.StateIndexError):
        accel.check()
    assert y[1].isnan().all() and not y[4].any() and not y[0].isnan().any()
    assert torch.equal(arguments["conv_state"][3:], before[3:])
