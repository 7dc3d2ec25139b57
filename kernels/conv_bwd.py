"""Backward of the full-sequence convolution, host side: which kernels run, on how many blocks.

`cu_seqlens` becomes bits (packing), the initial states get their gradient (conv_bwd_state) where it is asked for, dx
and the partial weight gradients come from one launch (conv_bwd_last or conv_bwd_first), conv_reduce sums the partials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from accel.kernels import conv_bwd_first, conv_bwd_last, conv_bwd_state, conv_reduce, jit
from accel.kernels.contract import is_channel_last
from accel.kernels.conv_bwd_last import BATCH
from accel.kernels.packing import mark_starts


class Found(NamedTuple):
    """How a backward runs; it serves every call of the same layouts and alignments."""

    function: Callable
    scalars: tuple[int, ...]  # its last arguments
    partial: tuple[int, int, int] | None  # the shape of the partial weight gradients


def plan(channel_blocks: int, batch: int, tokens: int, places: int, warps: int) -> tuple[int, int]:
    """(run, blocks): tokens that a warp walks at once, and blocks that share the runs of a channel block.

    `places` is how many blocks the GPU holds at once. Whole waves of them waste least, and few waves have the fewest
    look-ahead rows.
    """
    best, slots = 0.0, 1
    for waves in range(1, 5):
        count = max(1, waves * places // channel_blocks)
        used = count * channel_blocks
        share = used / (-(-used // places) * places)
        if share > best + 0.05:
            best, slots = share, count
    runs = max(1, slots * warps // batch)  # of one batch row
    rows = -(-tokens // runs)
    run = max(8, (rows + BATCH - 1) // BATCH * BATCH)
    items = batch * -(-tokens // run)
    return run, min(slots, -(-items // warps))


def find(call, dy, dx, parameters: bool, facts) -> Found | None:
    """What computes dx and the weight gradients, None where x is empty; `dy` is dense enough."""
    x = call.x
    if x.numel() == 0:
        return None
    batch, d, tokens = x.shape
    if call.cu_seqlens is not None:
        batch, tokens = 1, batch * tokens
    sums = call.weight.shape[1] + (0 if call.bias is None else 1)
    if is_channel_last(x):
        spec = conv_bwd_last.specify(call, dy, dx, parameters, facts.arch)
        scalars = plan(-(-d // (32 * spec.vec)), batch, tokens, facts.sm_count * spec.per_sm, spec.warps)
        parts = scalars[1]
    else:
        spec = conv_bwd_first.specify(call, dy, dx, parameters, facts.arch)
        tiles = -(-tokens // conv_bwd_first.TILE)
        scalars = (min(batch, max(1, conv_bwd_first.WARPS_IN_FLIGHT // (d * tiles))),)
        parts = scalars[0] * tiles
    return Found(jit.get(spec), scalars, (parts, sums, d) if parameters else None)


def launch(found: Found | None, call, dy, dx, dweight, dbias, dinitial, facts) -> None:
    """Run an admitted backward on x's device and its current stream; fills the gradients that are given."""
    x = call.x
    words = None
    if call.cu_seqlens is not None:
        tokens = x.shape[0] * x.shape[2]
        words = mark_starts(call.cu_seqlens, tokens, facts.status.address, facts.trap, facts.arch)
    if dinitial is not None and dinitial.numel():
        conv_bwd_state.launch(call, dy, words, dinitial, facts.arch)
    if found is None:
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
        return
    function, scalars, shape = found
    partial = None if shape is None else torch.empty(shape, dtype=torch.float32, device=x.device)
    function(
        x,
        dy,
        call.weight,
        call.bias,
        call.initial_states,
        call.dfinal_states,
        call.cu_seqlens,
        words,
        call.seq_idx,
        dx,
        partial,
        *scalars,
    )
    if partial is not None:
        conv_reduce.launch(partial, dweight, dbias, call.weight.shape[1], facts.arch)


def dense_enough(dy: torch.Tensor | None, call) -> torch.Tensor:
    """dy as the kernels read it: any strides in place, but packed batch rows have to lie at one token stride."""
    x = call.x
    if dy is None:
        return x.new_zeros(()).expand(x.shape)
    if call.cu_seqlens is not None and x.shape[0] > 1:
        b, d, t = x.shape
        # a view where there is one; it also replaces the stride of T = 1, which may be anything
        return dy.transpose(1, 2).reshape(1, b * t, d).transpose(1, 2)
    return dy
