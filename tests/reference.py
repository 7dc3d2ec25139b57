"""The oracle: what every operation must return, written from the formulas, in float64 and differentiable by autograd.

Plain loops over taps and sequences; nothing here is fast, nothing is shared with the code under test. `compute` lowers
the precision (float32 gives the "plain torch" whose gradients bound those of the kernels). Below the oracle: the
tolerances, the only ones the tests of the operations use, and the builders of oddly strided tensors.
"""

import torch

UNIT_FP32 = 2.0**-24  # half an ulp of 1.0 in float32: the relative error of one rounding
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}  # the smallest subnormal
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def activate(pre, activation):
    if activation is None:
        return pre
    assert activation in ("silu", "swish")
    return pre * torch.sigmoid(pre)


def activation_slope(pre, activation):
    """The derivative of the activation, in the form that does not cancel."""
    if activation is None:
        return torch.ones_like(pre)
    return torch.sigmoid(pre) + pre * torch.sigmoid(pre) * torch.sigmoid(-pre)


def column(history, token):
    """Column of token `token` < 0 in a history [D, Li]; zeros before it, or without one."""
    if history.shape[1] + token < 0:
        return torch.zeros_like(history[:, :1]).squeeze(1) if history.shape[1] else history.new_zeros(history.shape[0])
    return history[:, history.shape[1] + token]


def sequence(tokens, history, weight, bias, state_len):
    """One sequence: tokens [D, T], history [D, Li] -> pre-activation [D, T], state [D, state_len]."""
    width, length = weight.shape[1], tokens.shape[1]
    need = max(width - 1, state_len)
    past = [column(history, token) for token in range(-need, 0)]
    line = torch.cat([torch.stack(past, dim=1), tokens], dim=1) if past else tokens  # [D, need + T]
    pre = torch.zeros_like(tokens) + (0 if bias is None else bias[:, None])
    for tap in range(width):
        start = need - (width - 1) + tap
        pre = pre + weight[:, tap, None] * line[:, start : start + length]
    return pre, line[:, line.shape[1] - state_len :]


def documents(tokens, numbers, history, weight, bias):
    """One row with document numbers, tap by tap: tokens [D, T], numbers [T] -> pre-activation [D, T]."""
    width, length = weight.shape[1], tokens.shape[1]
    numbers = numbers.tolist()
    columns = []
    for now in range(length):
        total = torch.zeros_like(tokens[:, 0]) + (0 if bias is None else bias)
        for tap in range(width):
            then = now - (width - 1) + tap
            if numbers[then if then >= 0 else 0] == numbers[now]:
                total = total + weight[:, tap] * (tokens[:, then] if then >= 0 else column(history, then))
        columns.append(total)
    return torch.stack(columns, dim=1) if columns else torch.zeros_like(tokens)


def causal_conv1d(
    x,  # [B, D, T]
    weight,  # [D, W]
    bias=None,
    *,
    activation=None,
    residual=None,
    cu_seqlens=None,
    seq_idx=None,
    initial_states=None,  # [B or N, D, Li]
    state_len=None,
    compute=torch.float64,
):
    """(y [B, D, T], final_states [B or N, D, state_len]); final_states is None with seq_idx."""
    pre, final_states = preactivation(
        x,
        weight,
        bias,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
        initial_states=initial_states,
        state_len=state_len,
        compute=compute,
    )
    y = activate(pre, activation)
    if residual is not None:
        y = y + residual.to(compute)
    if seq_idx is not None:
        y = torch.where(seq_idx[:, None, :] < 0, torch.zeros_like(y), y)
    return y, final_states


def preactivation(
    x,
    weight,
    bias=None,
    *,
    cu_seqlens=None,
    seq_idx=None,
    initial_states=None,
    state_len=None,
    compute=torch.float64,
):
    batch, dim, length = x.shape
    x, weight = x.to(compute), weight.to(compute)
    bias = None if bias is None else bias.to(compute)
    state_len = weight.shape[1] - 1 if state_len is None else state_len
    nothing = x.new_zeros(dim, 0)

    def history(row):
        return nothing if initial_states is None else initial_states[row].to(compute)

    if seq_idx is not None:
        rows = [documents(x[b], seq_idx[b], history(b), weight, bias) for b in range(batch)]
        return (torch.stack(rows) if rows else torch.zeros_like(x)), None
    if cu_seqlens is None:
        pairs = [sequence(x[b], history(b), weight, bias, state_len) for b in range(batch)]
        if not pairs:
            return torch.zeros_like(x), x.new_zeros(0, dim, state_len)
        return torch.stack([pre for pre, _ in pairs]), torch.stack([state for _, state in pairs])
    flat = x.transpose(0, 1).reshape(dim, batch * length)
    bounds = cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == batch * length and bounds == sorted(bounds)
    pairs = [
        sequence(flat[:, start:end], history(n), weight, bias, state_len)
        for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
    ]
    pre = torch.cat([pre for pre, _ in pairs], dim=1) if pairs else flat
    states = torch.stack([state for _, state in pairs]) if pairs else x.new_zeros(0, dim, state_len)
    return pre.reshape(dim, batch, length).transpose(0, 1), states


def dense(x, weight, bias=None):
    """The pre-activation of dense rows without a history, in float64, as shifted sums: for inputs too big for loops."""
    x, weight, length = x.double(), weight.double(), x.shape[2]
    pre = torch.zeros_like(x) + (0 if bias is None else bias.double()[:, None])
    for back in range(min(weight.shape[1], length)):
        pre[:, :, back:] += weight[:, weight.shape[1] - 1 - back, None] * x[:, :, : length - back]
    return pre


def causal_conv1d_update(
    x,  # [N, D] or [N, D, T]
    conv_state,  # [S, D, L] or None
    weight,
    bias=None,
    *,
    activation=None,
    residual=None,
    cache_seqlens=None,
    conv_state_indices=None,
    pad_slot_id=-1,
    compute=torch.float64,
):
    """(y, new_state). The state holds exact copies in its own dtype; a bad slot gives NaN and is not applied."""
    tokens = x if x.dim() == 3 else x[:, :, None]
    n, dim, length = tokens.shape
    width = weight.shape[1]
    weight, bias = weight.to(compute), None if bias is None else bias.to(compute)
    new_state = None if conv_state is None else conv_state.clone()
    y = torch.zeros(n, dim, length, dtype=compute, device=x.device)
    slots = list(range(n)) if conv_state_indices is None else conv_state_indices.tolist()
    for row, slot in enumerate(slots):
        if conv_state_indices is not None and slot == pad_slot_id:
            continue
        if conv_state is not None and not 0 <= slot < conv_state.shape[0]:
            y[row] = float("nan")
            continue
        state = x.new_zeros(dim, width - 1) if conv_state is None else conv_state[slot]  # [D, L]
        state_len = state.shape[1]
        if cache_seqlens is None:
            line = torch.cat([state, tokens[row]], dim=1)
            after = line[:, line.shape[1] - state_len :]
        else:
            after = state.clone()
            position = int(cache_seqlens[row])
            past = [state[:, (position - back) % state_len] for back in range(width - 1, 0, -1)]
            line = torch.cat([torch.stack(past, dim=1), tokens[row]], dim=1)
            for t in range(length):
                after[:, (position + t) % state_len] = tokens[row, :, t]
        if new_state is not None:
            new_state[slot] = after
        past_len = line.shape[1] - length
        for t in range(length):
            window = line[:, past_len + t - (width - 1) : past_len + t + 1].to(compute)
            pre = (weight * window).sum(dim=1) + (0 if bias is None else bias)
            y[row, :, t] = activate(pre, activation)
        if residual is not None:
            y[row] += residual[row].to(compute).reshape(dim, length)
    return y.reshape(x.shape), new_state


def causal_conv1d_varlen_states(x, cu_seqlens, state_len):
    """x [T, D] -> [N, D, state_len] in x's dtype: the last tokens of each sequence, zeros before its start."""
    bounds = cu_seqlens.tolist()
    states = x.new_zeros(len(bounds) - 1, x.shape[1], state_len)
    for n, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        kept = min(state_len, end - start)
        states[n, :, state_len - kept :] = x[end - kept : end].t()
    return states


def magnitude(function, x, state, weight, bias=None, *, residual=None, **kwargs):
    """The same sum over absolute values, before the activation: what float32 rounding errors are relative to."""

    def size(tensor):
        return None if tensor is None else tensor.double().abs()

    kwargs["activation"] = None
    if function is causal_conv1d:
        return function(size(x), size(weight), size(bias), initial_states=size(state), **kwargs)[0]
    return function(size(x), size(state), size(weight), size(bias), **kwargs)[0]


def ulp(values, dtype):
    """The distance between neighbours of `dtype` at |values| (float64 in, float64 out)."""
    digits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}[dtype]
    _, exponent = torch.frexp(values.double().abs())  # |values| = m * 2**exponent, 0.5 <= m < 1
    step = torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - digits)
    return step.clamp_min(SMALLEST[dtype])


def fp32_error(pre, size, width, activation, residual=None):
    """What float32 arithmetic may add to y: width + 1 roundings of the sum, two of the exponent's argument, carried
    through the activation's slope; eight of the activation itself; one of the residual's addition. A subnormal
    exponential keeps an absolute error of one subnormal step, times |pre|."""
    out = activation_slope(pre, activation).abs() * (width + 4) * UNIT_FP32 * size
    if activation is not None:
        value = activate(pre, activation).abs()
        out = out + 8 * UNIT_FP32 * value + pre.abs() * SMALLEST[torch.float32]
    if residual is not None:
        out = out + UNIT_FP32 * (residual.double().abs() + activate(pre, activation).abs())
    return out


def assert_close_ulp(actual, expected, slack, name="y"):
    """|actual - expected| <= 1 ulp of actual's dtype at expected, plus `slack` (float32 error: a tensor or a number).

    Both NaN where either is; an infinity only where expected, with its tolerance, rounds to one.
    """
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not actual.numel():
        return
    dtype, actual = actual.dtype, actual.detach().double()
    expected = expected.detach().to(actual)
    tolerance = ulp(expected, dtype) + torch.as_tensor(slack).to(actual)
    limit = torch.finfo(dtype).max
    top = limit + ulp(torch.tensor(limit, dtype=torch.float64), dtype).item() / 2  # from here on infinity is nearest
    overflow = actual.isinf() & (actual.sign() == expected.sign()) & (expected.abs() + tolerance >= top)
    good = ((actual - expected).abs() <= tolerance) | (actual.isnan() & expected.isnan()) | overflow
    if not good.all():
        excess = torch.where(good, 0.0, (actual - expected).abs() / tolerance)
        excess = torch.where(excess.isnan(), float("inf"), excess)
        where = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{name}: {int((~good).sum())} of {good.numel()} elements off; worst at {where}: {actual[where].item()!r}, "
            f"expected {expected[where].item()!r}, tolerance {tolerance[where].item():.3g} ({dtype})"
        )


def bits(tensor):
    """The bit pattern, so that -0.0 and NaN payloads count."""
    return tensor.detach().contiguous().view(BITS[tensor.element_size()])


def assert_same_bits(actual, expected, name="state"):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    same = bits(actual.cpu()) == bits(expected.cpu())
    assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} elements differ in bits"


def assert_same_values(actual, expected, name="y"):
    """Two native results that came by other tiles or layouts: 1 ulp, or a few roundings of the largest value."""
    largest = expected.detach().abs().max().item() if expected.numel() else 0.0
    assert_close_ulp(actual, expected.detach().double(), 16 * UNIT_FP32 * largest, name)


def assert_gradient(actual, exact, plain, size, terms, name):
    """Two bounds. Element by element: 1 ulp of the dtype plus float32 error: 16 roundings and the random walk of
    a sum of `terms`. As a whole: root mean square at most twice that of plain float32 torch rounded to the same dtype.
    """
    assert_close_ulp(actual, exact, (16 + 2 * terms**0.5) * UNIT_FP32 * size.cpu(), name)
    if actual.numel() < 64:
        return
    exact, size = exact.cpu(), size.cpu()
    error = (actual.detach().cpu().double() - exact).square().mean().sqrt()
    bound = (plain.to(actual.dtype).cpu().double() - exact).square().mean().sqrt()
    floor = 4 * UNIT_FP32 * size.square().mean().sqrt()
    assert error <= 2 * bound + floor, f"{name}: rms error {error:.3g}, plain float32 torch {bound:.3g}"


def rows(values, dtype, *, pitch=0, offset=0):
    """[N, D] with row stride D + pitch, `offset` elements into a buffer of NaN: a slice of a wider projection."""
    n, dim = values.shape
    buffer = torch.full((n * (dim + pitch) + offset + dim,), float("nan"), dtype=dtype, device=values.device)
    view = buffer.as_strided((n, dim), (dim + pitch, 1), offset)
    return view.copy_(values)


def sequences(values, dtype, *, layout="channel-last", pitch=0, gap=0, offset=0):
    """[B, D, T] in the layout, with a row pitch, a gap of rows between batches and an offset, in a buffer of NaN."""
    batch, dim, length = values.shape
    outer, inner = (length, dim) if layout == "channel-last" else (dim, length)
    ld = inner + pitch
    stride = (outer + gap) * ld
    buffer = torch.full((batch * stride + offset + inner,), float("nan"), dtype=dtype, device=values.device)
    strides = (stride, 1, ld) if layout == "channel-last" else (stride, ld, 1)
    return buffer.as_strided((batch, dim, length), strides, offset).copy_(values)
