"""causal-conv1d's extension of 1.5.1 and later, over reference.py: what a call computes without accel.

Importing it puts it in the place of an extension that is not built; one that is built stays. Dense calls only.
"""

import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec

import reference
import torch
import torch.nn.functional as F

NAME = "causal_conv1d_cuda"


def activation(silu):
    return "silu" if silu else None


def fwd(x, weight, bias, seq_idx, initial_states, out, final_states_out, silu):
    assert seq_idx is None and initial_states is None and final_states_out is None
    y, _ = reference.causal_conv1d(x, weight, bias, activation=activation(silu), compute=torch.float32)
    out.copy_(y)


def bwd(x, weight, bias, dout, seq_idx, initial_states, dfinal, dx, dweight, dbias, dinitial, silu):
    assert seq_idx is None and initial_states is None and dfinal is None and dinitial is None
    # written out: inside of a custom operator there is no autograd
    pre, _ = reference.preactivation(x, weight, bias, compute=torch.float32)
    du = dout.float() * reference.activation_slope(pre, activation(silu))
    width, length = weight.shape[1], x.shape[2]
    before, after = F.pad(x.float(), (width - 1, 0)), F.pad(du, (0, width - 1))
    taps = [weight[:, tap, None].float() * after[..., width - 1 - tap :][..., :length] for tap in range(width)]
    dx.copy_(sum(taps))
    for tap in range(width):
        dweight[:, tap] = (du * before[..., tap : tap + length]).sum((0, 2))
    if dbias is not None:
        dbias.copy_(du.sum((0, 2)))


def update(x, conv_state, weight, bias, out, silu, cache_seqlens, conv_state_indices):
    assert cache_seqlens is None and conv_state_indices is None
    y, state = reference.causal_conv1d_update(
        x, conv_state, weight, bias, activation=activation(silu), compute=torch.float32
    )
    out.copy_(y)
    conv_state.copy_(state)


if importlib.util.find_spec(NAME) is None:
    extension = types.ModuleType(NAME)
    extension.__spec__ = ModuleSpec(NAME, None)  # find_spec asks for it
    extension.causal_conv1d_fwd, extension.causal_conv1d_bwd, extension.causal_conv1d_update = fwd, bwd, update
    sys.modules[NAME] = extension
