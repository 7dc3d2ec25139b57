"""`CausalConv1d`: `nn.Conv1d` behind a causal pad that is never in memory, and its streaming form.

Imports torch and `accel.ops`. The one surprise: it is a subclass of `nn.Conv1d`, whose own padding stays 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from accel.dense_torch import activate
from accel.kernels.contract import DENSE
from accel.ops import causal_conv1d_dense


class Stream(NamedTuple):
    """The last inputs of a stream, written in place by `CausalConv1d.step`.

    ring: [B, Cin, (K-1) * dilation], token t in column t mod (K-1) * dilation; position: [1] int64, the column of the
    next token. Both stay where they are, so that a CUDA graph may hold them.
    """

    ring: Tensor
    position: Tensor


class CausalConv1d(nn.Conv1d):
    """A dense causal convolution with the parameters, initialisation and `state_dict` of `nn.Conv1d`.

    y[b, :, t] depends on x[b, :, :t+1] alone: `nn.Conv1d` behind a left pad of (kernel_size - 1) * dilation zeros.
    x is [B, Cin, T] or [Cin, T], y has Cout in Cin's place. `activation` comes after the bias, as in
    `ops.causal_conv1d_dense`, which also says what is native and what torch computes. Source: `nn.Conv1d` of torch.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        *,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        if activation not in DENSE.activations:
            raise ValueError(f"activation: expected one of {DENSE.activations}, got {activation!r}")
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            dilation=dilation,
            groups=groups,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.activation = activation

    @classmethod
    def from_conv1d(cls, conv: nn.Conv1d, *, activation: str | None = None) -> CausalConv1d:
        """A layer with the very parameters of a convolution that stands behind a causal pad, or has none yet.

        Raises ValueError where it could not be one: a stride, a padding mode, or a padding other than 0 and
        (kernel_size - 1) * dilation.
        """
        reach = (conv.kernel_size[0] - 1) * conv.dilation[0]
        expected = {"stride": [(1,)], "padding_mode": ["zeros"], "padding": [(0,), (reach,), "valid"]}
        for name, allowed in expected.items():
            found = getattr(conv, name)
            if found not in allowed:
                raise ValueError(f"conv.{name}: expected {' or '.join(map(str, allowed))}, got {found}")
        made = cls(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            dilation=conv.dilation,
            groups=conv.groups,
            bias=conv.bias is not None,
            activation=activation,
            device="meta",  # draws no random numbers
        )
        made.weight, made.bias = conv.weight, conv.bias
        return made.train(conv.training)

    def forward(self, input: Tensor) -> Tensor:
        batched = input if input.dim() == 3 else input.unsqueeze(0)
        y = causal_conv1d_dense(
            batched,
            self.weight,
            self.bias,
            dilation=self.dilation[0],
            groups=self.groups,
            activation=self.activation,
        )
        return y if input.dim() == 3 else y.squeeze(0)

    def stream(self, x: Tensor) -> Stream:
        """The stream after the tokens x [B, Cin, T]; T may be 0."""
        batch, channels, tokens = x.shape
        length = (self.kernel_size[0] - 1) * self.dilation[0]
        ring = x.new_zeros(batch, channels, length)
        position = torch.zeros(1, dtype=torch.int64, device=x.device)
        if length:
            kept = min(tokens, length)
            columns = torch.arange(tokens - kept, tokens, device=x.device) % length
            ring[:, :, columns] = x[:, :, tokens - kept :].detach()
            position.fill_(tokens % length)
        return Stream(ring, position)

    @torch.no_grad()
    def step(self, x_t: Tensor, state: Stream) -> Tensor:
        """y of the next token, [B, Cout], from x_t [B, Cin] and a stream, which moves on in place. No gradient."""
        ring, position = state
        taps, dilation = self.kernel_size[0], self.dilation[0]
        expected = (*x_t.shape, (taps - 1) * dilation)
        if x_t.shape[1:] != (self.in_channels,) or ring.shape != expected or ring.dtype != x_t.dtype:
            wanted = f"[B, {self.in_channels}] and a ring [B, {self.in_channels}, {expected[-1]}] of one dtype"
            found = f"{list(x_t.shape)} {x_t.dtype} and {list(ring.shape)} {ring.dtype}"
            raise ValueError(f"x_t, state: expected {wanted}, got {found}")
        window = x_t.unsqueeze(2)
        if taps > 1:
            length = ring.shape[2]
            # the column of the new token still holds the oldest one, which is the first tap's
            columns = (position + torch.arange(0, length, dilation, device=ring.device)) % length
            window = torch.cat((ring.index_select(2, columns), window), dim=2)
            ring.index_copy_(2, position, x_t.unsqueeze(2))
            position.add_(1).remainder_(length)
        y = nn.functional.conv1d(window, self.weight, self.bias, groups=self.groups)
        return activate(y, self.activation).squeeze(2)

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        return shown if self.activation is None else f"{shown}, activation={self.activation}"
