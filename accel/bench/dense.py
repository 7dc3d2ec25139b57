"""Dense, dilated causal convolution: cases, buffers, torch's forms of it, the float64 reference and the gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from accel import last_route, ops
from accel.bench.cases import require, require_bits, require_close
from accel.bench.gates import poison
from accel.kernels.contract import has_whole_vectors

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
OURS = "accel (ops)"


@dataclass(frozen=True)
class Dense:
    B: int
    Cin: int
    Cout: int
    K: int
    dilation: int
    T: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.B},{self.Cin},{self.Cout},{self.K},{self.dilation},{self.T} {self.kind}"

    @property
    def reach(self) -> int:
        return (self.K - 1) * self.dilation

    @property
    def flops(self) -> int:
        return 2 * self.B * self.Cin * self.Cout * self.K * self.T


@dataclass
class Buffers:
    case: Dense
    x: Tensor  # a leaf, as weight and bias
    weight: Tensor
    bias: Tensor
    dy: Tensor

    @property
    def inputs(self) -> list[Tensor]:
        return [self.x, self.weight, self.bias]


def chomped(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    reach = (weight.shape[2] - 1) * dilation
    return F.conv1d(x, weight, bias, padding=reach, dilation=dilation)[:, :, : x.shape[2]]


def padded(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    reach = (weight.shape[2] - 1) * dilation
    return F.conv1d(F.pad(x, (reach, 0)), weight, bias, dilation=dilation)


def ours(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    return ops.causal_conv1d_dense(x, weight, bias, dilation=dilation)


@cache
def form(name: str) -> Callable[..., Tensor]:
    plain = {OURS: ours, "conv + chomp": chomped, "pad + conv": padded}
    if name in plain:
        return plain[name]
    return torch.compile(chomped if "chomp" in name else padded, dynamic=False)


def buffers(case: Dense, device: torch.device) -> Buffers:
    dtype = KINDS[case.kind]
    scale = (case.Cin * case.K) ** -0.5
    return Buffers(
        case,
        torch.randn(case.B, case.Cin, case.T, device=device).to(dtype).requires_grad_(),
        (torch.randn(case.Cout, case.Cin, case.K, device=device) * scale).to(dtype).requires_grad_(),
        torch.randn(case.Cout, device=device).to(dtype).requires_grad_(),
        torch.randn(case.B, case.Cout, case.T, device=device).to(dtype),
    )


def reference(b: Buffers) -> dict[str, Tensor]:
    """y and the gradients in float64, tap by tap: each is one matrix product a batch row."""
    x, weight, bias, dy = (tensor.detach().double() for tensor in (*b.inputs, b.dy))
    y = bias[:, None].expand(dy.shape).clone()
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
    for tap in range(b.case.K):
        back = (b.case.K - 1 - tap) * b.case.dilation
        kept = b.case.T - back
        if kept > 0:
            y[:, :, back:] += weight[:, :, tap] @ x[:, :, :kept]
            dx[:, :, :kept] += weight[:, :, tap].T @ dy[:, :, back:]
            dweight[:, :, tap] = sum(dy[i, :, back:] @ x[i, :, :kept].T for i in range(b.case.B))
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dy.sum((0, 2))}


def forward_call(name: str, b: Buffers) -> Callable[[], Tensor]:
    function = form(name)

    def call() -> Tensor:
        with torch.no_grad():
            return function(*b.inputs, b.case.dilation)

    return call


def backward_call(name: str, b: Buffers) -> Callable[[], tuple[Tensor, ...]]:
    with torch.enable_grad():
        y = form(name)(*b.inputs, b.case.dilation)
    return lambda: torch.autograd.grad(y, b.inputs, b.dy, retain_graph=True)


def gate(name: str, b: Buffers, want: dict[str, Tensor]) -> None:
    """Values and gradients against float64, the route, and for a native one the same bits twice."""
    exact = name == OURS and b.case.kind != "tf32"
    poison(2 * b.dy.numel(), b.x.device)
    require_close("y", forward_call(name, b)(), want["y"], exact)
    route = str(last_route("conv1d")) if name == OURS else ""
    backward = backward_call(name, b)
    poison(2 * b.x.numel(), b.x.device)
    for gradient, key, tensor in zip(backward(), ("dx", "dweight", "dbias"), backward(), strict=True):
        require_close(key, gradient, want[key], exact)
        if route.startswith("native"):
            require_bits(f"{key} of a second run", tensor, gradient)
    if name == OURS and b.x.is_cuda:
        expected = "native:cute" if has_whole_vectors(b.x) else "fallback:layout"
        expected = expected if b.x.element_size() == 2 else "fallback:dtype"
        require(route == expected, f"the route is {route}")
