"""The dense kernels without a GPU: the operation as it is, whose launches are interpreted from PTX (ptx.py)."""

import functools
import importlib

import pytest
import torch
from ptx import Block, Memory, Program, TensorMap, tensor_parameter
from test_dense import close, gpu_facts, gradients, reference, serve_like

from accel import dense_checks, environment, ops
from accel.kernels import dense_weight, jit
from accel.kernels.dense_weight_wgmma import CHUNK

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
cute = importlib.import_module("cutlass.cute")

BF16, FP16 = torch.bfloat16, torch.float16


def ceil(a, b):
    return -(-a // b)


def blocks_of_product(spec, packed, source, bias, out, *_):
    tokens = getattr(spec, "tile_n", 128) - (8 if getattr(spec, "grain", 8) < 8 else 0)
    return ceil(out.shape[1], spec.tile_m) * ceil(out.shape[2], tokens) * out.shape[0]


def blocks_of_weight(spec, a, b, partial, *_):
    parts, taps, rows, columns = partial.shape
    return ceil(rows, spec.tile_m) * ceil(columns, spec.tile_n) * taps * parts


# Blocks of a launch, as the kernels' hosts count them
GRIDS = {
    "DenseSpec": blocks_of_product,
    "DenseWgmmaSpec": blocks_of_product,
    "DenseWeightSpec": blocks_of_weight,
    "DenseWeightWgmmaSpec": blocks_of_weight,
}


def boxes_of_product(spec):
    return (0, (64, spec.tile_m), (1, 0, 2)), (1, (64, 64), (0, 1, 2))


def boxes_of_weight(spec):
    both = (0, (64, spec.tile_m), (1, 0, 2)), (1, (64, spec.tile_n), (1, 0, 2))
    return both if spec.grain == 8 else (*both, (0, (8, spec.tile_m), (1, 0, 2)))


# The boxes of a launch: which argument, elements and rows, the argument's axes from the innermost on
BOXES = {"DenseWgmmaSpec": boxes_of_product, "DenseWeightWgmmaSpec": boxes_of_weight}


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
            # the plan of the product, and for each box a tensor map and extents
            parameters.append(bytes(1))
            for number, box, axes in boxes(spec):
                argument = given[number]
                storage = torch.empty(0, dtype=torch.uint8).set_(argument.untyped_storage())
                address = memory.place(storage.numpy().tobytes()) + 2 * argument.storage_offset()
                extents, strides = zip(
                    *((argument.shape[axis], 2 * argument.stride(axis)) for axis in axes), strict=True
                )
                parameters.append(TensorMap(address, extents, strides, (*box, 1)))
                parameters.append(tensor_parameter(0, argument.shape, ())[8:][: 4 * argument.dim()])
            given, sizes = given[2:], sizes[len(parameters) :]
        for size, argument in zip(sizes, given, strict=True):
            if isinstance(argument, int):
                parameters.append(argument.to_bytes(4, "little", signed=True))
                continue
            storage = torch.empty(0, dtype=torch.uint8).set_(argument.untyped_storage())
            address = memory.place(storage.numpy().tobytes())
            placed.append((storage, address))
            strides = list(argument.stride())
            if (size - ceil(8 + 4 * argument.dim(), 8) * 8) // 8 < len(strides):
                strides.remove(1)  # it is static
            offset = argument.storage_offset() * argument.element_size()
            parameters.append(tensor_parameter(address + offset, argument.shape, strides))
        for block in range(GRIDS[type(spec).__name__](spec, *arguments)):
            Block(code, memory, parameters, code.threads, block, seed=block).run()
        for storage, address in placed:
            storage.copy_(torch.from_numpy(memory.read(address, storage.numel())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_checks, "FASTER", ())
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
    ("sm_90a", FP16, (1, 72, 136, 2, 136, 264), "dense", None),
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
    assert ["Wgmma" in type(spec).__name__ for spec in interpreted] == [arch == "sm_90a"] * 4
    want, size = reference(x.detach(), weight.detach(), bias.detach(), dilation, activation=activation)
    close(y, want, size, dtype, slack=1.3)
    for one, wanted in zip(found, gradients((x, weight, bias), dilation, dy), strict=True):
        close(one, *wanted, dtype, slack=1.3)


@pytest.mark.parametrize("dilation", [1, 2, 8])
def test_stages_are_used_again(dilation, interpreted, monkeypatch):
    """One block makes a tap's gradient from more chunks than it has stages."""
    monkeypatch.setattr(dense_weight, "SHARE", 1024)
    x, dy = (torch.randn(2, channels, 264).to(BF16) for channels in (72, 16))
    weight, bias = torch.zeros(16, 72, 2, dtype=BF16), torch.zeros(16, dtype=BF16)
    dweight = torch.empty_like(weight)
    dense_weight.launch(x, dy, dweight, dilation, gpu_facts("sm_90a", sm_count=8))
    (spec,) = interpreted
    assert 2 * ceil(264, CHUNK) > jit.body(spec).DenseWeightWgmma(spec).stages + 1
    close(dweight, *gradients((x, weight, bias), dilation, dy)[1], BF16, slack=1.3)
