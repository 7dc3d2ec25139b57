"""A decode call of several tokens, with a ring or with the states in between, host side."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accel.kernels import jit


class UpdateTokensSpec(NamedTuple):
    """What the kernel is specialised for; any strides, any T and L."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    has_state: bool
    has_residual: bool
    has_indices: bool
    ring: bool  # the state is circular: token t goes to column (cache_seqlens + t) % L
    has_intermediate: bool
    silu: bool
    width: int
    arch: str


def find(call, arch: str):
    """What serves this call: called as the function of `conv_update.find` is, on the tensors of this call alone."""
    spec = UpdateTokensSpec(
        call.x.dtype,
        call.weight.dtype,
        None if call.bias is None else call.bias.dtype,
        call.conv_state is not None,
        call.residual is not None,
        call.conv_state_indices is not None,
        call.cache_seqlens is not None,
        call.intermediate_states_out is not None,
        call.activation is not None,
        call.weight.shape[1],
        arch,
    )
    function = jit.get(spec)

    def launch(x, state, weight, bias, residual, y, indices, pad_slot_id, status) -> None:
        x, residual, y = (
            tensor.unsqueeze(2) if tensor is not None and tensor.dim() == 2 else tensor for tensor in (x, residual, y)
        )
        function(
            x, state, weight, bias, residual, y, indices, call.cache_seqlens, call.intermediate_states_out,
            pad_slot_id, status,
        )  # fmt: skip

    return launch
