"""Times variants of our kernels against copy and add on one GPU: what NOTES.md records. `python -m benchmarks.tune`."""

import statistics
import sys

import torch

from accel.kernels import conv_bwd, conv_bwd_last, conv_fwd
from accel.ops import causal_conv1d

SHAPES = {"A": (1, 8192, 4096), "B": (4, 4096, 4096), "C": (8, 2048, 8192), "S": (1, 512, 2048), "P": (1, 32768, 4096)}
RAGGED = [0, 2100, 4096, 4097, 9000, 12288, 15000, 17001, 20000, 24576, 27000, 30001, 32768]


def graph_time(calls, rounds=15):
    """Median microseconds of one call, from a graph that makes all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def sets(name):
    b, t, d = SHAPES[name]
    count = 24 if name == "S" else 4
    make = lambda: torch.randn(b, t, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)  # noqa: E731
    weight = torch.randn(d, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    cu = torch.tensor(RAGGED, device="cuda", dtype=torch.int32) if name == "P" else None
    return [(make().requires_grad_(), make(), make()) for _ in range(count)], weight, cu


def forward(name, data, weight, cu, **kwargs):
    with torch.no_grad():
        return graph_time([lambda x=x: causal_conv1d(x, weight, activation="silu", cu_seqlens=cu, **kwargs) for x, _, _ in data])


def backward(name, data, weight, cu, needs=("x", "w")):
    calls = []
    for x, dy, _ in data:
        y = causal_conv1d(x, weight, activation="silu", cu_seqlens=cu)
        inputs = [t for t, n in ((x, "x"), (weight, "w")) if n in needs]
        calls.append(lambda y=y, dy=dy, inputs=inputs: torch.autograd.grad(y, inputs, dy, retain_graph=True))
    return graph_time(calls)


def variant(module, **changes):
    original = module.specify

    def specify(*args):
        spec = original(*args)
        return spec._replace(**changes) if spec.vec > 1 else spec

    module.specify = specify
    return lambda: setattr(module, "specify", original)


def main(which):
    for name in which:
        data, weight, cu = sets(name)
        copy = graph_time([lambda x=x, o=o: o.copy_(x) for x, _, o in data])
        add = graph_time([lambda x=x, dy=dy, o=o: torch.add(x.detach(), dy, out=o) for x, dy, o in data])
        print(f"{name} {SHAPES[name]} copy {copy:.1f} add {add:.1f}", flush=True)
        report = lambda label, time, limit: print(f"  {name} {label:44s} {time:8.2f} us  {time / limit:.3f}", flush=True)  # noqa: E731

        def attempt(label, function, limit):
            try:
                report(label, function(), limit)
            except Exception as error:
                print(f"  {name} {label}: {type(error).__name__} {str(error)[:150]}", flush=True)

        attempt("fwd", lambda: forward(name, data, weight, cu), copy)
        for rows, warps, vec in ((8, 4, 4), (16, 2, 4), (4, 2, 4), (8, 2, 2), (8, 1, 4), (8, 2, 8)):
            undo = variant(conv_fwd, rows=rows, warps=warps, vec=vec, align_x=min(16, vec * 2), align_y=min(16, vec * 2))
            attempt(f"fwd rows {rows} warps {warps} vec {vec}", lambda: forward(name, data, weight, cu), copy)
            undo()
        attempt("bwd", lambda: backward(name, data, weight, cu), add)
        attempt("bwd dx only", lambda: backward(name, data, weight, cu, ("x",)), add)
        attempt("bwd dw only", lambda: backward(name, data, weight, cu, ("w",)), add)
        for stages in (3, 6):
            undo = variant(conv_bwd_last, stages=stages)
            attempt(f"bwd stages {stages}", lambda: backward(name, data, weight, cu), add)
            undo()
        plan = conv_bwd.plan
        for warps, per_sm, stages in ((4, 2, 4), (4, 3, 4), (8, 2, 4), (2, 4, 4), (4, 2, 6)):
            conv_bwd_last.WARPS = conv_bwd.WARPS = warps
            conv_bwd.plan = lambda cb, b, t, sm, per_sm=per_sm: plan(cb, b, t, sm * per_sm)
            undo = variant(conv_bwd_last, stages=stages, weight_rows=True)
            from accel.kernels import jit
            kept = dict(jit._compiled)
            for spec in list(jit._compiled):
                if isinstance(spec, conv_bwd_last.BackwardSpec):
                    del jit._compiled[spec]
            attempt(f"bwd warps {warps} x {per_sm} an SM, stages {stages}", lambda: backward(name, data, weight, cu), add)
            jit._compiled.clear()
            jit._compiled.update(kept)
            undo()
        conv_bwd_last.WARPS = conv_bwd.WARPS = 8
        conv_bwd.plan = plan
        del data
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ABCSP")
