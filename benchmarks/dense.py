"""Dense, dilated causal convolution, forward and backward, against torch's forms: `python -m benchmarks.dense`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import accel
from accel import ops
from benchmarks import harness, results
from benchmarks.cases import require, require_bits, require_close
from benchmarks.harness import Call, Entry

SHAPES = [  # B, Cin, Cout, K, dilation, T
    (16, 64, 64, 3, 2, 4096),
    (8, 256, 256, 3, 4, 8192),
    (4, 512, 512, 5, 8, 8192),
    (64, 64, 128, 3, 4, 65536),
]
DRY = [(2, 8, 12, 3, 2, 40), (1, 5, 3, 2, 1, 7)]
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
TORCH_FORMS = ("conv + chomp", "pad + conv", "compiled chomp", "compiled pad")
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


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


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


def forward_call(name: str, b: Buffers) -> Call:
    function = form(name)

    def call() -> Tensor:
        with torch.no_grad():
            return function(*b.inputs, b.case.dilation)

    return call


def backward_call(name: str, b: Buffers) -> Call:
    with torch.enable_grad():
        y = form(name)(*b.inputs, b.case.dilation)
    return lambda: torch.autograd.grad(y, b.inputs, b.dy, retain_graph=True)


def gate(name: str, b: Buffers, want: dict[str, Tensor]) -> None:
    """Values and gradients against float64, the route, and for a native one the same bits twice."""
    exact = name == OURS and b.case.kind != "tf32"
    harness.poison(2 * b.dy.numel(), b.x.device)
    require_close("y", forward_call(name, b)(), want["y"], exact)
    route = str(accel.last_route("conv1d")) if name == OURS else ""
    backward = backward_call(name, b)
    harness.poison(2 * b.x.numel(), b.x.device)
    for gradient, key, tensor in zip(backward(), ("dx", "dweight", "dbias"), backward(), strict=True):
        require_close(key, gradient, want[key], exact)
        if route.startswith("native"):
            require_bits(f"{key} of a second run", tensor, gradient)
    if name == OURS and b.x.is_cuda:
        expected = "native:cute" if b.x.element_size() == 2 else "fallback:dtype"
        require(route == expected, f"the route is {route}")


def peak_bytes(call: Call) -> int:
    """What a call allocates at most, beside what was there before it."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def admitted(names: list[str], b: Buffers, rows: list[dict]) -> list[str]:
    want = reference(b)
    passed = []
    for name in names:
        entry = Entry(name, [])
        if harness.surviving([entry], lambda _, n=name: gate(n, b, want)):
            passed.append(name)
        else:
            rows.append({"op": "dense", "case": b.case.name, "provider": name, "gate": entry.note})
    return passed


def measure(case: Dense, names: list[str], device: torch.device, rows: list[dict], dry: bool) -> None:
    b = buffers(case, device)
    passed = admitted(names, b, rows)
    if dry:
        print(case.name, passed)
        return
    torch.cuda.empty_cache()
    for op, make in (("forward", forward_call), ("backward", backward_call)):
        made = [Entry(name, [], prepare=lambda n=name, m=make: [m(n, b)]) for name in passed]
        harness.cold_times(made)
        factor = 1 if op == "forward" else 2
        for entry in made:
            row = {"op": op, "case": case.name, "provider": entry.name, "gate": entry.note or "ok", **entry.times}
            if "device_us" in entry.times:
                row["tflops"] = factor * case.flops / entry.times["device_us"] / 1e6
                row["peak_bytes"] = peak_bytes(make(entry.name, b))
            rows.append(row)


def ratios(rows: list[dict]) -> list[dict]:
    """Ours over the best of torch's forms, by case, and the geometric mean for each dtype and direction."""
    found = []
    for op in ("forward", "backward"):
        timed = [row for row in rows if row["op"] == op and "device_us" in row]
        for case in dict.fromkeys(row["case"] for row in timed):
            times = {row["provider"]: row["device_us"] for row in timed if row["case"] == case}
            if OURS in times and len(times) > 1:
                best = min((name for name in times if name != OURS), key=times.__getitem__)
                found.append({"op": op, "case": case, "best": best, "over_best": times[OURS] / times[best]})
    for op in ("forward", "backward"):
        for kind in KINDS:
            values = [row["over_best"] for row in found if row["op"] == op and row["case"].endswith(kind)]
            if values:
                print(f"{op} {kind}: {harness.geometric_mean(values):.3f} x the best form of torch, over {len(values)}")
    return found


def show(rows: list[dict]) -> None:
    for op in ("forward", "backward"):
        part = [row for row in rows if row["op"] == op and "device_us" in row]
        names = list(dict.fromkeys(row["provider"] for row in part))
        print(f"\n{op}: device us (TFLOP/s, peak MiB)")
        print(f"{'':<32}" + "".join(f"{name:>26}" for name in names))
        for case in dict.fromkeys(row["case"] for row in part):
            cells = {row["provider"]: row for row in part if row["case"] == case}
            text = {
                name: f"{row['device_us']:.1f} ({row['tflops']:.0f}, {row['peak_bytes'] / 2**20:.1f})"
                for name, row in cells.items()
            }
            print(f"{case:<32}" + "".join(f"{text.get(name, '-'):>26}" for name in names))


def main(
    out: Annotated[Path, typer.Option(help="the JSON file")] = Path("benchmarks/results/dense.json"),
    kinds: Annotated[str, typer.Option(help="comma-separated, of bf16, fp16, fp32, tf32")] = "bf16,fp32,tf32",
    compiled: Annotated[bool, typer.Option(help="torch.compile of both forms too")] = True,
    dry_run: Annotated[bool, typer.Option(help="tiny cases on the CPU, gates only")] = False,
) -> None:
    device = torch.device("cpu" if dry_run else "cuda")
    names = [OURS, *(name for name in TORCH_FORMS if not name.startswith("compiled") or compiled and not dry_run)]
    rows: list[dict] = []
    for kind in kinds.split(","):
        for shape in DRY if dry_run else SHAPES:
            case = Dense(*shape, kind)
            with tf32(kind == "tf32"):
                step = Entry(case.name, [])
                harness.surviving([step], lambda _, c=case: measure(c, names, device, rows, dry_run))
            if not dry_run:
                torch.cuda.empty_cache()
            results.write(out, "dense", rows)
    if not dry_run:
        show(rows)
    results.write(out, "dense", rows, over_best=ratios(rows))
    for row in rows:
        if row["gate"] != "ok":
            print(f"no figure: {row['op']} {row['case']} {row['provider']}: {row['gate']}")


if __name__ == "__main__":
    typer.run(main)
