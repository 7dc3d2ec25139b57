"""Every kernel compiled without a GPU, in the families that calls can ask for, and what came out of the compiler.

A call of the table goes the usual way, through admission and its operation, with a device that claims to be a GPU; at
the end of that way its specifications are written down instead of compiled. So the families are those of the launchers.
"""

import functools
import importlib
import importlib.util
import itertools
import math
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel import dense_checks, environment, matrix
from accel.call import BackwardCall, ConvCall, DenseBackwardCall, DenseCall, StatesCall, UpdateCall
from accel.dispatch import OPERATIONS
from accel.environment import DeviceFacts
from accel.errors import StatusWord
from accel.kernels import contract
from accel.ops import dense as dense_op
from accel.reasons import Decline

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
jit = importlib.import_module("accel.kernels.jit")
cute = importlib.import_module("cutlass.cute")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MAIN = "sm_90a"  # where all families are compiled; elsewhere a few of each kernel
TRITON = importlib.util.find_spec("triton")
CUOBJDUMP = pathlib.Path(TRITON.origin if TRITON else "").parent / "backends/nvidia/bin/cuobjdump"

DTYPES = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32))  # of x and of weight
BIASES = (None, "as weight", "fp32")
SMALL, LARGE, MANY_ROWS = (2, 1024), (2, 20000), (40000, 1)  # batch rows and tokens

UPDATE_AXES = {
    "dtypes": DTYPES,
    "width": tuple(range(2, 9)),
    "bias": BIASES,
    "residual": (False, True),
    "indices": (False, True),
    "activation": (None, "silu"),
    "form": ("ND", "N1D", "1ND", "ND1"),
    "state": ("compact", "compact W", "channel-last", "strided", "long", None),
    "channels": (512, 510, 511),
    "rows": (8, 600),
    "sliced": (False, True),
    "shift": (0, 1),
    "weight_rows": (True, False),
}
SEVERAL_AXES = {
    "dtypes": DTYPES,
    "width": (2, 4, 8),
    "bias": BIASES,
    "residual": (False, True),
    "indices": (False, True),
    "activation": (None, "silu"),
    "state": ("window", "ring", "kept", None),
}
SEQUENCE_AXES = {
    "dtypes": DTYPES,
    "width": (2, 3, 4, 6, 8),  # up to 5, and above, the backward gives a thread different shares
    "bias": BIASES,
    "activation": (None, "silu"),
    "packing": ("dense", "int32", "int64", "seq_idx"),
    "initial": (False, True),
    "final": (False, True),
    "channels": (64, 62, 63),
    "size": (SMALL, LARGE, MANY_ROWS),
    "shift": (0, 1),
    "weight_rows": (True, False),
}
LAST = {"layout": ("channel-last", "sliced", "strided")}
FIRST = {"layout": ("channel-first",)}
FORWARD_AXES = SEQUENCE_AXES | {"residual": (None, "like", "strided")}
BACKWARD_AXES = SEQUENCE_AXES | {
    "dy": ("like", "expanded", "transposed", None),
    "needs": ("all", "x", "parameters", "initial"),
}

DENSE_AXES = {
    "dtype": (BF16, FP16),
    "bias": (False, True),
    "activation": (None, "silu", "relu", "gelu"),
    "outputs": (64, 128),
    "inputs": (64, 256),
    "tokens": (256, 250, 251),
    "dilation": (8, 4, 2, 1),
    "unaligned": (False, True),
}
DENSE_BACKWARD_AXES = {
    "dtype": (BF16, FP16),
    "outputs": (64, 128),
    "inputs": (64, 128),
    "tokens": (256, 251),
    "dilation": (8, 2),
    "unaligned": (False, True),
    "unaligned_dy": (False, True),
}
# of rows that come as boxes: all of these, since registers are short
DENSE_BOXES_AXES = {"dtype": (BF16, FP16), "outputs": (64, 128), "inputs": (64, 128), "dilation": (8, 2, 1)}


def pairs(axes: dict[str, tuple]) -> Iterator[dict]:
    """A few choices of one value an axis such that any two values of two axes meet in one of them."""
    todo = dict.fromkeys(
        frozenset(((a, x), (b, y))) for a, b in itertools.combinations(axes, 2) for x in axes[a] for y in axes[b]
    )
    while todo:
        choice = dict(next(iter(todo)))
        for name in [name for name in axes if name not in choice]:
            gains = [sum(frozenset(((name, value), other)) in todo for other in choice.items()) for value in axes[name]]
            choice[name] = axes[name][gains.index(max(gains))]
        for pair in itertools.combinations(choice.items(), 2):
            todo.pop(frozenset(pair), None)
        yield choice


def tensor(*shape: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Dense memory of that shape, `shift` elements behind an aligned address."""
    return torch.empty(math.prod(shape) + shift, dtype=dtype)[shift:].view(shape)


def parameters(dtypes: tuple, channels: int, width: int, bias: str | None, weight_rows: bool) -> tuple:
    dtype = dtypes[1]
    weight = tensor(channels, width, dtype=dtype) if weight_rows else tensor(width, channels, dtype=dtype).t()
    if bias is None:
        return weight, None
    return weight, tensor(channels, dtype=FP32 if bias == "fp32" else dtype)


def update(
    dtypes=(BF16, BF16), width=4, bias=None, residual=False, indices=False, activation="silu", form="ND",
    state="compact W", channels=512, rows=8, sliced=False, shift=0, weight_rows=True,
) -> UpdateCall:  # fmt: skip
    """A decode step."""
    dtype = dtypes[0]
    weight, bias = parameters(dtypes, channels, width, bias, weight_rows)

    def like_x(pitch):
        rows_of_x = tensor(rows, pitch, dtype=dtype, shift=shift)[:, pitch - channels :]
        return rows_of_x if form == "ND" else rows_of_x.unsqueeze({"N1D": 1, "1ND": 0, "ND1": 2}[form])

    length = {"compact": width - 1, "long": 12}.get(state, width)
    if state is None:
        conv_state = None
    elif state == "channel-last":
        conv_state = tensor(rows, length, channels, dtype=dtype, shift=shift).transpose(1, 2)
    elif state == "strided":
        conv_state = tensor(rows, channels, length + 1, dtype=dtype, shift=shift)[:, :, 1:]
    else:
        conv_state = tensor(rows, channels, length, dtype=dtype, shift=shift)
    slots = torch.zeros(rows, dtype=torch.int32) if indices and state else None
    x = like_x(3 * channels if sliced else channels)
    other = like_x(channels) if residual else None
    return UpdateCall(x, form, conv_state, weight, bias, other, activation, None, slots, -1)


def several(
    dtypes=(BF16, BF16), width=4, bias=None, residual=False, indices=False, activation="silu", state="window",
) -> UpdateCall:  # fmt: skip
    """A decode step of three tokens; `state` is a window, a ring, one whose steps are kept, or absent."""
    dtype, n, d, t = dtypes[0], 8, 64, 3
    weight, bias = parameters(dtypes, d, width, bias, True)
    held = None if state is None else tensor(n, d, 9, dtype=dtype)
    per_row = torch.zeros(n, dtype=torch.int32)
    return UpdateCall(
        tensor(n, d, t, dtype=dtype), "NDT", held, weight, bias, tensor(n, d, t, dtype=dtype) if residual else None,
        activation, per_row if state == "ring" else None, per_row if indices and state else None, -1,
        tensor(n, t, d, 9, dtype=dtype) if state == "kept" else None,
    )  # fmt: skip


def sequence(layout: str, b: int, d: int, t: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """[B, D, T]."""
    if layout == "channel-first":
        return tensor(b, d, t, dtype=dtype, shift=shift)
    if layout == "strided":
        return tensor(b, t, d, 2, dtype=dtype, shift=shift)[..., 0].transpose(1, 2)
    pitch = 3 * d if layout == "sliced" else d
    return tensor(b, t, pitch, dtype=dtype, shift=shift)[:, :, pitch - d :].transpose(1, 2)


def extents(packing: str, size: tuple[int, int]) -> tuple[int, int]:
    """Batch rows and tokens; tokens that are packed lie in one row."""
    b, t = size
    return (1, b * t) if packing in ("int32", "int64") else (b, t)


def boundaries(packing: str, b: int, t: int, sequences: int) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """(cu_seqlens, seq_idx, sequences)."""
    if packing == "seq_idx":
        return None, torch.zeros(b, t, dtype=torch.int32), b
    if packing == "dense":
        return None, None, b
    return torch.zeros(sequences + 1, dtype=getattr(torch, packing)), None, sequences


def forward(
    dtypes=(BF16, BF16), width=4, bias=None, activation="silu", packing="dense", initial=False, final=False,
    layout="channel-last", channels=64, size=LARGE, shift=0, weight_rows=True, residual=None, sequences=3,
) -> ConvCall:  # fmt: skip
    """A full sequence. `seq_idx` has no final states."""
    dtype = dtypes[0]
    b, t = extents(packing, size)
    x = sequence(layout, b, channels, t, dtype, shift)
    weight, bias = parameters(dtypes, channels, width, bias, weight_rows)
    cu_seqlens, seq_idx, n = boundaries(packing, b, t, sequences)
    other = None if residual is None else sequence(layout if residual == "like" else "strided", b, channels, t, dtype)
    history = tensor(n, channels, width - 1, dtype=dtype) if initial else None
    return ConvCall(
        x, weight, bias, other, activation, cu_seqlens, seq_idx, history, final and packing != "seq_idx", None,
        width - 1, False, False,
    )  # fmt: skip


def backward(
    dtypes=(BF16, BF16), width=4, bias=None, activation="silu", packing="dense", initial=False, final=False,
    layout="channel-last", channels=64, size=LARGE, shift=0, weight_rows=True, dy="like", needs="all",
    sequences=3,
) -> BackwardCall:  # fmt: skip
    """The gradients of a full sequence."""
    dtype = dtypes[0]
    b, t = extents(packing, size)
    x = sequence(layout, b, channels, t, dtype, shift)
    weight, bias = parameters(dtypes, channels, width, bias, weight_rows)
    cu_seqlens, seq_idx, n = boundaries(packing, b, t, sequences)
    history = tensor(n, channels, width - 1, dtype=dtype)
    gradient = {
        "like": lambda: sequence(layout, b, channels, t, dtype),
        "expanded": lambda: torch.empty((), dtype=dtype).expand(b, channels, t),
        "transposed": lambda: sequence("strided", b, channels, t, dtype),
        None: lambda: None,
    }[dy]()
    return BackwardCall(
        x, gradient, history if final else None, weight, bias, None, activation, cu_seqlens, seq_idx,
        history if initial else None, width - 1, needs in ("all", "x"), needs in ("all", "parameters"),
        bias is not None and needs in ("all", "parameters"), initial and needs in ("all", "initial"), False,
    )  # fmt: skip


def states(dtype=BF16, packing="dense", initial=False, channels=64, size=SMALL, sequences=3) -> StatesCall:
    """The last tokens of every sequence."""
    b, t = extents(packing, size)
    cu_seqlens, _, n = boundaries(packing, b, t, sequences)
    x = sequence("channel-last", b, channels, t, dtype)
    return StatesCall(x, tensor(n, channels, 3, dtype=dtype) if initial else None, cu_seqlens, 3, False)


def dense(
    dtype=BF16, bias=True, activation=None, outputs=128, inputs=128, tokens=256, dilation=8, unaligned=False
) -> DenseCall:
    """A dense convolution; `unaligned`: no vector may be read from x."""
    x = tensor(2, inputs, tokens, dtype=dtype, shift=int(unaligned))
    weight = tensor(outputs, inputs, 3, dtype=dtype)
    return DenseCall(x, weight, tensor(outputs, dtype=dtype) if bias else None, dilation, 1, activation)


def dense_backward(unaligned_dy=False, **options) -> DenseBackwardCall:
    """Its gradients."""
    call = dense(bias=True, **options)
    dy = tensor(2, call.weight.shape[0], call.x.shape[2], dtype=call.x.dtype, shift=int(unaligned_dy))
    return DenseBackwardCall(call.x, dy, call.weight, call.dilation, 1, True, True, True)


def wide_backward(**options) -> DenseBackwardCall:
    """Its gradients where a block has an SM for itself in that of the weight."""
    return dense_backward(outputs=256, tokens=16384, **options)


def specifications(call: Any, arch: str = MAIN, trap: bool = False) -> list[Any]:
    """The specification of every kernel that a call launches, in order."""
    found = []

    def note(spec):
        found.append(spec)
        return lambda *tensors: None

    cpu = torch.device("cpu")
    facts = DeviceFacts(cpu, "cute", arch, "compiled only", 132, False, trap, StatusWord(cpu))
    operation = OPERATIONS.get(type(call))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(jit, "get", note)
        patch.setattr(dense_checks, "FASTER", ())  # the kernels take any rows, as a gradient may have them
        if operation is None:
            dense_op.backward(call, facts)
            return found
        plan = operation.prepare(call, facts)
        assert not isinstance(plan, Decline), f"{plan}: {call}"
        operation.run(call, facts, plan)
    return found


def table() -> Iterator[Any]:
    """Calls of all families."""
    yield from (update(**choice) for choice in pairs(UPDATE_AXES))
    yield from (several(**choice) for choice in pairs(SEVERAL_AXES))
    for layouts in (LAST, FIRST):
        yield from (forward(**choice) for choice in pairs(FORWARD_AXES | layouts))
        yield from (backward(**choice) for choice in pairs(BACKWARD_AXES | layouts))
    for dtype, packing, initial in itertools.product((BF16, FP16, FP32), ("dense", "int32", "int64"), (False, True)):
        yield states(dtype, packing, initial)
    for choice in pairs(DENSE_AXES):
        yield dense(**choice)
    for choice in pairs(DENSE_BACKWARD_AXES):
        yield dense_backward(**choice)
    for choice in itertools.product(*DENSE_BOXES_AXES.values()):
        yield dense_backward(**dict(zip(DENSE_BOXES_AXES, choice, strict=True)))
    # where registers are shortest: the widest tile, whose sums are moved along; everything at once
    for dilation in (1, 2, 4):
        yield dense(inputs=256, activation="silu", dilation=dilation)
    for dilation, inputs in itertools.product((1, 2, 8), (64, 128)):
        yield wide_backward(dilation=dilation, inputs=inputs)
    everything = {"bias": "as weight", "initial": True, "final": True}
    for layout, width, packing in itertools.product(
        ("channel-last", "channel-first"), (6, 8), ("dense", "int32", "seq_idx")
    ):
        yield backward(width=width, packing=packing, layout=layout, **everything)
    yield backward(width=6, shift=1, dy="transposed", weight_rows=False, **everything)


def few() -> Iterator[Any]:
    """One call for each kernel and packing, as real models make them; narrow ones where compiling takes long."""
    yield update()
    yield update(state="channel-last", indices=True, bias="as weight", rows=600)
    yield several(state="ring", indices=True)
    yield forward()
    yield forward(packing="int32", initial=True, final=True, size=SMALL)
    yield forward(packing="seq_idx", size=SMALL)
    yield forward(layout="channel-first")
    yield forward(layout="channel-first", packing="int64", size=SMALL)
    yield backward()
    yield backward((FP32, FP32), 3, packing="int32", initial=True, final=True, channels=63)
    yield backward((FP32, FP32), 3, packing="seq_idx", channels=63)
    yield backward(layout="channel-first")
    yield backward(layout="channel-first", width=3, packing="int32")
    yield states(packing="int64", initial=True)
    yield dense(activation="silu")
    yield dense_backward(outputs=64)


def families() -> dict[Any, None]:
    """Every specification once, in order."""
    found = [spec for call in table() for spec in specifications(call)]
    found += specifications(forward(packing="int32"), trap=True)
    found += specifications(forward(packing="int64"), trap=True)
    found += [spec for call in few() for arch in contract.ARCHITECTURES for spec in specifications(call, arch)]
    return dict.fromkeys(found)


def label(spec: Any) -> str:
    """What tells one specification from another at a glance; the assertion shows all of it."""
    words = [type(spec).__name__.removesuffix("Spec"), spec.arch]
    for name in ("dtype", "width", "packing", "layout"):
        value = getattr(spec, name, None)
        if value is not None:
            words.append(str(value).removeprefix("torch."))
    return "-".join(words)


FAMILIES = families()
ALL = [pytest.param(spec, id=f"{number}-{label(spec)}") for number, spec in enumerate(FAMILIES)]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """artifacts(spec): the PTX as text and the path of the CUBIN, compiled once."""
    compile_ = cute.compile

    @functools.cache
    def compiled(spec):
        folder = tmp_path_factory.mktemp("kernel")
        with pytest.MonkeyPatch.context() as patch:
            # the compiler takes the folder for what it keeps from the process's start, not from each call
            patch.setattr(
                cute,
                "compile",
                lambda *args, options, **others: compile_(*args, options=f"{options} --dump-dir {folder}", **others),
            )
            jit.body(spec).build(spec, keep=True)
        (ptx,), (cubin,) = folder.glob("*.ptx"), folder.glob("*.cubin")  # sm_110a names its files sm_101a
        return ptx.read_text(), cubin

    return compiled


@pytest.mark.parametrize("spec", ALL)
def test_a_family_compiles(spec, artifacts):
    ptx, cubin = artifacts(spec)
    assert cubin.read_bytes()[:4] == b"\x7fELF", spec
    assert not re.search(r"\.local\b", ptx), f"local memory: {spec}"
    dependent = not spec.arch.startswith("sm_8")
    for instruction in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
        assert (instruction in ptx) == dependent, f"{instruction}: {spec}"


@pytest.mark.skipif(not CUOBJDUMP.is_file(), reason="the triton package and its cuobjdump are not installed")
@pytest.mark.parametrize("spec", ALL)
def test_a_family_spills_no_registers(spec, artifacts):
    _, cubin = artifacts(spec)
    done = subprocess.run([CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    usage = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    assert usage, done.stdout
    assert all(stack == local == "0" for _, stack, local in usage), f"(REG, STACK, LOCAL) {usage}: {spec}"


def accesses(ptx: str, kind: str) -> set[int]:
    """Bytes a thread of every load (ld) or store (st) of global memory; asynchronous copies are loads."""
    found = re.findall(rf"\b{kind}\.global(?:\.v(\d))?\.[bsuf](\d+)\b", ptx)
    widths = {int(count or 1) * int(bits) // 8 for count, bits in found}
    if kind == "ld":
        widths |= {int(bytes_) for bytes_ in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*\], (\d+), ", ptx)}
    return widths


@pytest.mark.parametrize("arch", contract.ARCHITECTURES)
@pytest.mark.parametrize(
    "call, load, store, narrowest",
    [
        pytest.param(update(), 16, 16, 4, id="update"),  # two channels a thread: 4 bytes of x, 16 of the state
        pytest.param(update(state="channel-last", rows=600), 16, 16, 16, id="update-channel-last"),
        pytest.param(forward(), 16, 8, 8, id="forward-channel-last"),  # 8 bytes of x are faster than 16
        pytest.param(forward(layout="channel-first"), 16, 16, 2, id="forward-channel-first"),  # the tail by elements
        pytest.param(backward(), 16, 8, 2, id="backward-channel-last"),  # the window before a run by elements
        pytest.param(backward(layout="channel-first"), 16, 16, 2, id="backward-channel-first"),
    ],
)
def test_aligned_bf16_moves_in_wide_pieces(call, load, store, narrowest, arch, artifacts):
    spec = specifications(call, arch)[0]
    ptx, _ = artifacts(spec)
    loads, stores = accesses(ptx, "ld"), accesses(ptx, "st")
    assert (max(loads), max(stores), min(loads | stores)) == (load, store, narrowest), (loads, stores, spec)


def test_the_backward_copies_16_bytes_at_a_time(artifacts):
    ptx, _ = artifacts(specifications(backward())[0])
    assert set(re.findall(r"(cp\.async\.c\w)\.[^;]*, (\d+), ", ptx)) == {("cp.async.cg", "16")}


def test_the_dense_convolution_uses_the_tensor_cores(artifacts):
    for arch in contract.ARCHITECTURES:
        specs = [*specifications(dense(activation="silu"), arch), *specifications(dense_backward(outputs=64), arch)]
        instructions = [re.findall(r"\b(wgmma\.mma_async|mma\.sync)", artifacts(spec)[0]) for spec in specs]
        kind = "wgmma.mma_async" if arch == "sm_90a" else "mma.sync"
        assert [set(found) for found in instructions] == [{kind}] * 3, arch
    for inputs, tile in ((64, 128), (256, 256)):
        (spec,) = specifications(dense(inputs=inputs))
        ptx, _ = artifacts(spec)
        assert f"wgmma.mma_async.sync.aligned.m64n{tile}k16.f32.bf16.bf16" in ptx
        assert "cp.async.bulk.tensor.3d" in ptx


def assembled(artifacts, spec: Any, *options: str) -> str:
    """What cuobjdump says of a kernel."""
    _, cubin = artifacts(spec)
    return subprocess.run([CUOBJDUMP, *options, cubin], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not CUOBJDUMP.is_file(), reason="the triton package and its cuobjdump are not installed")
@pytest.mark.parametrize("call", [
    *(dense(inputs=c, dilation=d, activation="silu") for c, d in itertools.product((64, 256), (1, 2, 8))),
    dense_backward(dilation=8),
    wide_backward(dilation=8),
])  # fmt: skip
def test_the_products_of_a_step_are_in_flight_together(call, artifacts):
    """The assembler waits for each of them where it sees their sums touched: a wait is marked by gsb0."""
    products = re.findall(r"HGMMA[^;]*", assembled(artifacts, specifications(call)[-1], "-sass"))
    assert len(products) == 4 and ["gsb0" in product for product in products] == [False, False, False, True], products


@pytest.mark.skipif(not CUOBJDUMP.is_file(), reason="the triton package and its cuobjdump are not installed")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("outputs", [64, 128, 256])
@pytest.mark.parametrize("inputs", [64, 128])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_product_is_in_flight_while_registers_of_the_next_are_loaded(dilation, inputs, outputs, dtype, artifacts):
    """The assembler leaves none in flight where registers are too few for that, and then says so to nobody."""
    wide = outputs == 256
    call = wide_backward if wide else functools.partial(dense_backward, outputs=outputs)
    spec = specifications(call(dtype=dtype, inputs=inputs, dilation=dilation))[-1]
    assert spec.tile_n == outputs
    code = assembled(artifacts, spec, "-sass")
    found = re.findall(r"HGMMA|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d", code)
    assert found == ["WARPGROUP.DEPBAR.LE gsb0, 0x1", "HGMMA"] * 4 + ["WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    (registers,) = re.findall(r"REG:(\d+)", assembled(artifacts, spec, "--dump-resource-usage"))
    assert int(registers) <= (224 if wide else 112), "too many for a block of nine warps, or two, on an SM"


def test_a_wide_tile_is_for_calls_that_give_every_sm_something_to_do():
    def tile(outputs, inputs, tokens):
        return specifications(dense_backward(outputs=outputs, inputs=inputs, tokens=tokens))[-1].tile_n

    assert [tile(*call) for call in ((128, 512, 16384), (64, 64, 16384), (256, 128, 512))] == [128, 64, 128]
    assert [tile(*call) for call in ((136, 128, 16384), (256, 512, 3072), (256, 512, 2560))] == [256, 256, 128]


# Calls that differ in sizes, strides and counts alone, within one family of alignment.
SAME = {
    "update": [update(rows=n, channels=d, sliced=n > 1) for n, d in ((1, 512), (8, 2048), (600, 64), (33, 8))],
    "update-slots": [update(rows=n, channels=d, indices=True) for n, d in ((1, 64), (100, 512))],
    "update-channel-last": [update(rows=n, channels=d, state="channel-last") for n, d in ((1, 64), (32, 4096))],
    "update-channel-last-large": [
        update(rows=n, channels=d, state="channel-last") for n, d in ((64, 4096), (256, 2048))
    ],
    "update-long-state": [update(rows=n, channels=d, state="long") for n, d in ((1, 64), (100, 512))],
    "forward-small": [
        forward(layout=layout, channels=d, size=size)
        for layout, d, size in (("channel-last", 64, SMALL), ("sliced", 128, (1, 1)), ("channel-last", 8, (7, 333)))
    ],
    "forward-large": [
        forward(layout=layout, channels=d, size=size, final=True)
        for layout, d, size in (
            ("channel-last", 64, LARGE),
            ("sliced", 512, (1, 5000)),
            ("channel-last", 256, (9, 999)),
        )
    ],
    "forward-packed": [
        forward(packing="int32", channels=d, size=size, initial=True, final=True, sequences=n)
        for d, size, n in ((64, LARGE, 1), (512, (1, 5000), 100), (256, (1, 9999), 2))
    ],
    "forward-channel-first": [
        forward(layout="channel-first", channels=d, size=size) for d, size in ((64, LARGE), (1, (1, 4096)))
    ],
    "backward": [
        backward(layout=layout, channels=d, size=size)
        for layout, d, size in (("channel-last", 64, LARGE), ("sliced", 128, (1, 8)), ("channel-last", 512, (9, 333)))
    ],
    "backward-packed": [
        backward(packing="int64", channels=d, size=size, initial=True, sequences=n)
        for d, size, n in ((64, LARGE, 1), (512, (1, 500), 100))
    ],
    "backward-channel-first": [
        backward(layout="channel-first", channels=d, size=size) for d, size in ((64, LARGE), (3, (5, 8)))
    ],
    "dense": [dense(outputs=m, inputs=c, tokens=t) for m, c, t in ((128, 256, 256), (640, 512, 8), (65, 1000, 8192))],
    "dense-rows": [dense(outputs=m, inputs=c, tokens=t) for m, c, t in ((64, 64, 251), (3, 1, 9))],
    "states": [states(channels=d, size=size) for d, size in ((64, SMALL), (63, (5, 1)))],
}


@pytest.mark.parametrize("calls", SAME.values(), ids=list(SAME))
def test_sizes_and_strides_are_no_part_of_a_specification(calls):
    first, *others = (specifications(call) for call in calls)
    assert all(other == first for other in others)


def test_a_second_call_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path))
    calls = [update(rows=1, channels=512), update(rows=100, channels=2048, sliced=True)]
    # an architecture of which no other test keeps kernels
    spec, again = (specifications(call, "sm_87")[0] for call in calls)
    before = jit.compilations()
    function = jit.get(spec)
    assert jit.compilations() == before + 1
    assert jit.get(again) is function
    assert jit.compilations() == before + 1


@pytest.mark.parametrize("arch", contract.ARCHITECTURES)
def test_every_kernel_is_compiled_for_every_architecture(arch):
    folder = pathlib.Path(jit.__file__).parent / "device"
    kernel_files = {path.stem for path in folder.glob("*.py") if re.search("^def build", path.read_text(), re.M)}
    if arch != "sm_90a":
        kernel_files -= {"dense_wgmma", "dense_weight_wgmma"}  # instructions that no other architecture has
    assert {type(spec).__module__.rpartition(".")[2] for spec in FAMILIES if spec.arch == arch} == kernel_files


def test_the_matrix_says_what_the_contracts_say():
    table = matrix.load()
    assert tuple(environment.ARCHITECTURES.values()) == contract.ARCHITECTURES
    assert table.architectures.compiled == tuple(arch.removesuffix("a") for arch in contract.ARCHITECTURES)
    assert set(table.architectures.run) <= set(table.architectures.compiled)
    contracts = {found.op: found for found in vars(contract).values() if isinstance(found, contract.Contract)}
    assert contracts.keys() <= table.operations.keys()
    for operation, backends in table.operations.items():
        limits = contracts.get(operation, contract.CONV)
        assert backends.keys() == {"cute", "cpu"}
        if operation == contract.DENSE.op:
            limits, backends = contract.DENSE, {"cute": backends["cute"]}  # torch takes any dtype on the CPU
        for support in backends.values():
            assert support.dtypes == tuple(str(dtype).removeprefix("torch.") for dtype in limits.dtypes)
            if operation in contracts:
                extra = (str(dtype).removeprefix("torch.") for dtype in limits.parameter_dtypes)
                assert support.parameter_dtypes == ("as x", *extra)
                assert support.widths == tuple(range(limits.min_width, limits.max_width + 1))
