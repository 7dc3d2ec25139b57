"""The cases that are measured, their buffers, the float64 reference and what their gates ask. Torch only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

W = 4  # the width of a case that names none
RAGGED = (5003, 1, 4097, 2048, 7777, 63, 129, 3000, 1024, 2511, 3115, 4000)  # twelve sequences, 32768 tokens
DTYPE = torch.bfloat16
# Relative L2 error. bf16 rounding alone gives 0.0017; peers may use a rough sigmoid or keep u in bf16.
LIMITS = {"ours": 4e-3, "peer": 2e-2}
ELEMENT = (0.0118, 1e-4)  # ours, forward: 1.5 ulp of bf16, and a floor for cancellation


@dataclass(frozen=True)
class Decode:
    N: int
    D: int
    bias: bool = False
    width: int = W

    @property
    def name(self) -> str:
        return f"N={self.N} D={self.D}" + (" bias" if self.bias else "")

    @property
    def bytes(self) -> int:
        """x, y, the state in and out, the weights: each once."""
        return 2 * (self.N * self.D * (2 + 2 * self.width) + self.D * self.width)


@dataclass(frozen=True)
class Sequence:
    B: int
    T: int
    D: int
    lengths: tuple[int, ...] = ()
    bias: bool = False
    states: bool = False
    strided: bool = False  # x is the middle third of a fused projection
    small: bool = False
    width: int = W

    @property
    def name(self) -> str:
        flags = [
            ("packed", bool(self.lengths)),
            ("bias", self.bias),
            ("states", self.states),
            ("strided", self.strided),
        ]
        return " ".join([f"{self.B},{self.T},{self.D}", *(word for word, on in flags if on)])

    @property
    def plain(self) -> bool:
        return not (self.lengths or self.bias or self.states or self.strided)


@dataclass
class UpdateBuffers:
    case: Decode
    x: Tensor  # [N, D], row stride 3 D
    state: Tensor  # [N, D, width]
    weight: Tensor
    bias: Tensor | None

    def fresh(self) -> UpdateBuffers:
        return UpdateBuffers(self.case, self.x, self.state.clone(), self.weight, self.bias)


@dataclass
class ConvBuffers:
    case: Sequence
    x: Tensor  # [B, T, D], a leaf
    weight: Tensor
    bias: Tensor | None
    dy: Tensor  # [B, T, D]
    initial: Tensor | None  # [N, D, width - 1], channel-last, a leaf
    initial_fla: Tensor | None  # [N, D, width], a leaf
    cu_seqlens: Tensor | None  # int64
    cu_seqlens32: Tensor | None
    seq_idx: Tensor | None  # int32 [B, T]

    def inputs(self, initial: Tensor | None) -> list[Tensor]:
        return [t for t in (self.x, self.weight, self.bias, initial) if t is not None]


def update_buffers(case: Decode, device: torch.device) -> UpdateBuffers:
    projection = torch.randn(case.N, 3 * case.D, device=device).to(DTYPE)
    return UpdateBuffers(
        case,
        projection[:, case.D : 2 * case.D],
        torch.randn(case.N, case.D, case.width, device=device).to(DTYPE),
        (torch.randn(case.D, case.width, device=device) * 0.5).to(DTYPE),
        torch.randn(case.D, device=device).to(DTYPE) if case.bias else None,
    )


def conv_buffers(case: Sequence, device: torch.device) -> ConvBuffers:
    B, T, D, width = case.B, case.T, case.D, case.width
    x = torch.randn(B, T, 3 * D if case.strided else D, device=device, dtype=DTYPE)
    x = x[..., D : 2 * D] if case.strided else x
    initial = initial_fla = cu = seq_idx = None
    if case.states:
        history = torch.randn(len(case.lengths) or B, width - 1, D, device=device).to(DTYPE)
        initial = history.transpose(1, 2).detach().requires_grad_()
        initial_fla = torch.nn.functional.pad(history.transpose(1, 2), (1, 0)).contiguous().requires_grad_()
    if case.lengths:
        cu = torch.tensor((0, *case.lengths), device=device).cumsum(0)
        index = torch.arange(len(case.lengths), device=device, dtype=torch.int32)
        seq_idx = index.repeat_interleave(torch.tensor(case.lengths, device=device)).view(1, -1)
    return ConvBuffers(
        case,
        x.detach().requires_grad_(),
        (torch.randn(D, width, device=device) * 0.5).to(DTYPE).requires_grad_(),
        torch.randn(D, device=device).to(DTYPE).requires_grad_() if case.bias else None,
        torch.randn(B, T, D, device=device, dtype=DTYPE),
        initial,
        initial_fla,
        cu,
        None if cu is None else cu.to(torch.int32),
        seq_idx,
    )


def update_reference(b: UpdateBuffers) -> tuple[Tensor, Tensor]:
    """(y in float64, the new state's exact bits)."""
    state = torch.cat([b.state, b.x.unsqueeze(-1)], -1)[..., -b.case.width :].contiguous()
    u = (state.double() * b.weight.double()).sum(-1)
    u = u if b.bias is None else u + b.bias.double()
    return u * torch.sigmoid(u), state


@torch.no_grad()
def conv_reference(b: ConvBuffers) -> dict[str, Tensor]:
    """y, dx, dw, db, dinitial in float64, final as exact bits (width - 1 columns); one sequence after the other."""
    (B, T, D), width = b.x.shape, b.case.width
    spans = [(0, end - start, start, end) for start, end in pairwise(b.cu_seqlens.tolist())] if b.case.lengths else None
    rows = spans or [(i, T, 0, T) for i in range(B)]
    w = b.weight.double()
    out = {"y": b.dy.new_empty(B, T, D, dtype=torch.float64), "dx": b.dy.new_empty(B, T, D, dtype=torch.float64)}
    out |= {"dw": torch.zeros_like(w), "db": w.new_zeros(D)}
    dinitial, final = [], []
    for n, (i, length, start, end) in enumerate(rows):
        history = b.x.new_zeros(width - 1, D) if b.initial is None else b.initial[n].T
        tokens = torch.cat([history, b.x[i, start:end]])
        final.append(tokens[1 - width :].T)
        wide = tokens.double()
        u = sum(w[:, j] * wide[j : j + length] for j in range(width))
        u = u if b.bias is None else u + b.bias.double()
        s = torch.sigmoid(u)
        out["y"][i, start:end] = u * s
        du = b.dy[i, start:end].double() * s * (1 + u * (1 - s))
        dwide = torch.zeros_like(wide)
        for j in range(width):
            dwide[j : j + length] += w[:, j] * du
            out["dw"][:, j] += (du * wide[j : j + length]).sum(0)
        out["db"] += du.sum(0)
        out["dx"][i, start:end] = dwide[width - 1 :]
        dinitial.append(dwide[: width - 1].T)
    return out | {"dinitial": torch.stack(dinitial), "final": torch.stack(final)}


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2 distance; NaN where an element was not written."""
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


class GateError(AssertionError):
    """A provider's result is not what the operation is."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise GateError(message)


def require_close(name: str, got: Tensor, want: Tensor, ours: bool, elements: bool = False) -> None:
    found, limit = distance(got, want), LIMITS["ours" if ours else "peer"]
    require(found <= limit, f"{name} is {found:.2e} from float64, limit {limit:.0e}")
    if ours and elements:
        slack = want.abs() * ELEMENT[0] + ELEMENT[1]
        worst = ((got.double() - want).abs() - slack).max().item()
        require(worst <= 0, f"{name} has an element {worst:.2e} beyond 1.5 ulp")


def require_bits(name: str, got: Tensor, want: Tensor) -> None:
    require(got.dtype == want.dtype and got.shape == want.shape, f"{name} is {got.dtype} {tuple(got.shape)}")
    same = torch.equal(got.contiguous().view(torch.int16), want.contiguous().view(torch.int16))
    require(same, f"{name} differs bit for bit")
