"""The dense kernels without a GPU: the operation as it is, whose launches are interpreted from PTX (ptx.py)."""

import functools
import importlib

import pytest
import torch
from ptx import Block, Memory, Program, TensorMap, tensor_parameter
from test_dense import close, gpu_facts, gradients, reference, serve_like

from accel import environment, ops
from accel.kernels import dense_weight, jit

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
cute = importlib.import_module("cutlass.cute")

BF16, FP16 = torch.bfloat16, torch.float16


def ceil(a, b):
    return -(-a // b)


def blocks_of_product(spec, packed, source, bias, out, *_):
    tokens = getattr(spec, "tile_n", 128) - (8 if getattr(spec, "grain", 8) < 8 else 0)
    return ceil(out.shape[1], spec.tile_m) * ceil(out.shape[2], tokens) * out.shape[0]


def blocks_of_weight(spec, dy, x, partial, *_):
    parts, taps, outputs, inputs = partial.shape
    return ceil(outputs, spec.tile_m) * ceil(inputs, spec.tile_n) * taps * parts


# Blocks of a launch, as the kernels' hosts count them
GRIDS = {
    "DenseSpec": blocks_of_product,
    "DenseWgmmaSpec": blocks_of_product,
    "DenseWeightSpec": blocks_of_weight,
    "DenseWeightWgmmaSpec": blocks_of_weight,
}
# Rows of 64 elements in a box of either operand, and its axes from the innermost on
BOXES = {
    "DenseWgmmaSpec": lambda spec: ((spec.tile_m, (1, 0, 2)), (64, (0, 1, 2))),
    "DenseWeightWgmmaSpec": lambda spec: ((spec.tile_m, (1, 0, 2)), (spec.tile_n, (1, 0, 2))),
}


@pytest.fixture
def interpreted(tmp_path, monkeypatch):
    """A device whose kernels are interpreted; its list holds the specifications of the launches."""
    compile_, launched = cute.compile, []

    @functools.cache
    def program(spec):
        folder = tmp_path / str(len(launched))
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                cute,
                "compile",
                lambda *args, options, **others: compile_(*args, options=f"{options} --dump-dir {folder}", **others),
            )
            jit.body(spec).build(spec, keep=True)
        (text,) = folder.glob("*.ptx")
        return Program(text.read_text())

    def launch(spec, *arguments):
        launched.append(spec)
        code, memory, parameters, placed = program(spec), Memory(), [], []
        given = [argument for argument in arguments if argument is not None]
        sizes = code.sizes
        if boxes := BOXES.get(type(spec).__name__):
            # the plan of the product, and for each of its operands a tensor map and extents
            parameters.append(bytes(1))
            for argument, (rows, axes) in zip(given, boxes(spec), strict=False):
                storage = torch.empty(0, dtype=torch.uint8).set_(argument.untyped_storage())
                address = memory.place(storage.numpy().tobytes()) + 2 * argument.storage_offset()
                extents, strides = zip(
                    *((argument.shape[axis], 2 * argument.stride(axis)) for axis in axes), strict=True
                )
                parameters.append(TensorMap(address, extents, strides, (64, rows, 1)))
                parameters.append(tensor_parameter(0, argument.shape, ())[8:][: 4 * argument.dim()])
            given, sizes = given[2:], sizes[5:]
        for size, argument in zip(sizes, given, strict=True):
            if isinstance(argument, int):
                parameters.append(argument.to_bytes(4, "little", signed=True))
                continue
            storage = torch.empty(0, dtype=torch.uint8).set_(argument.untyped_storage())
            address = memory.place(storage.numpy().tobytes())
            placed.append((storage, address))
            strides = (size - ceil(8 + 4 * argument.dim(), 8) * 8) // 8  # those that are not static
            offset = argument.storage_offset() * argument.element_size()
            parameters.append(tensor_parameter(address + offset, argument.shape, argument.stride()[:strides]))
        for block in range(GRIDS[type(spec).__name__](spec, *arguments)):
            Block(code, memory, parameters, code.threads, block, seed=block).run()
        for storage, address in placed:
            storage.copy_(torch.from_numpy(memory.read(address, storage.numel())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_weight, "SHARE", 64)  # so that few tokens are shared by several blocks
        patch.setattr(jit, "get", lambda spec: functools.partial(launch, spec))
        yield launched


# batch, Cin, Cout, K, dilation, T: several tiles and chunks, offsets on both sides of a vector, rows without alignment
CASES = [
    ("sm_80", BF16, (2, 40, 72, 2, 5, 136), "dense", "silu"),
    ("sm_80", FP16, (1, 24, 130, 2, 129, 136), "dense", None),
    ("sm_80", BF16, (2, 33, 20, 3, 2, 37), "dense", "gelu"),
    ("sm_80", BF16, (1, 16, 8, 4, 3, 24), "sliced", "relu"),
    ("sm_90a", BF16, (2, 40, 24, 3, 8, 136), "dense", "silu"),
    ("sm_90a", FP16, (1, 72, 136, 2, 136, 136), "dense", None),
    ("sm_90a", BF16, (1, 136, 72, 3, 24, 264), "dense", None),
    ("sm_90a", BF16, (1, 72, 40, 1, 3, 136), "dense", None),
    # taps of several phases: every grain, phases without a tap, more taps than phases
    ("sm_90a", BF16, (2, 40, 24, 3, 4, 136), "dense", "silu"),
    ("sm_90a", FP16, (1, 72, 136, 4, 12, 264), "dense", None),
    ("sm_90a", BF16, (1, 24, 72, 3, 2, 264), "dense", None),
    ("sm_90a", BF16, (1, 136, 40, 6, 6, 136), "dense", None),
    ("sm_90a", BF16, (1, 40, 136, 3, 1, 136), "dense", None),
    ("sm_90a", FP16, (1, 16, 24, 12, 5, 264), "dense", "gelu"),
    ("sm_90a", BF16, (1, 24, 16, 2, 131, 136), "dense", None),
]


@pytest.mark.parametrize("arch, dtype, shape, layout, activation", CASES)
def test_forward_and_gradients(arch, dtype, shape, layout, activation, interpreted):
    b, cin, cout, taps, dilation, t = shape
    x = serve_like(layout, torch.randn(b, cin, t).to(dtype)).requires_grad_()
    weight = (torch.randn(cout, cin, taps) / (cin * taps) ** 0.5).to(dtype).requires_grad_()
    bias = torch.randn(cout).to(dtype).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(environment._facts, torch.device("cpu"), gpu_facts(arch, sm_count=8))
        with torch.no_grad():
            y = ops.causal_conv1d_dense(x, weight, bias, dilation=dilation, activation=activation)
        plain = ops.causal_conv1d_dense(x, weight, bias, dilation=dilation)
        dy = torch.randn(plain.shape).to(dtype)
        found = torch.autograd.grad(plain, (x, weight, bias), dy)
    assert [spec.arch for spec in interpreted] == [arch] * 4
    boxes = arch == "sm_90a"
    whole = boxes and (taps == 1 or dilation % 8 == 0)
    assert ["Wgmma" in type(spec).__name__ for spec in interpreted] == [boxes, boxes, boxes, whole]
    want, size = reference(x.detach(), weight.detach(), bias.detach(), dilation, activation=activation)
    close(y, want, size, dtype, slack=1.3)
    for one, wanted in zip(found, gradients((x, weight, bias), dilation, dy), strict=True):
        close(one, *wanted, dtype, slack=1.3)
