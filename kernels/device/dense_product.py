"""The matrix product of a block with mma instructions: tiles in shared memory, sums in registers of eight warps."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from accel.kernels.device.compiler import CUTE_DTYPE


def make_mma(dtype: torch.dtype) -> cute.TiledMma:
    """Eight warps, two along M and four along N, each with two neighbouring instructions along N."""
    op = cute.nvgpu.warp.MmaF16BF16Op(CUTE_DTYPE[dtype], Float32, (16, 8, 16))
    return cute.make_tiled_mma(op, cute.make_layout((2, 4, 1)), permutation_mnk=(32, 64, 16))


class Product(NamedTuple):
    """What a thread multiplies: its sums; for either operand the copy from shared memory, its ends, the registers."""

    mma: cute.TiledMma
    rSum: cute.Tensor
    copies: tuple
    sources: tuple
    views: tuple
    fragments: tuple


def begin(mma: cute.TiledMma, sA: cute.Tensor, sB: cute.Tensor, turned_b: bool, tid: Int32) -> Product:
    """Sums at 0 for tiles [M, depth, stage] and [N, depth, stage]; `turned_b`: N is what lies together in sB."""
    part = mma.get_slice(tid)
    shape = (cute.size(sA, mode=[0]), cute.size(sB, mode=[0]))
    rSum = cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)
    rSum.fill(0.0)
    fragments = (
        mma.make_fragment_A(part.partition_A(sA)[None, None, None, 0]),
        mma.make_fragment_B(part.partition_B(sB)[None, None, None, 0]),
    )
    operands = ((cute.make_tiled_copy_A, sA, False), (cute.make_tiled_copy_B, sB, turned_b))
    copies = tuple(
        make(cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(turned, 4), sIn.element_type), mma)
        for make, sIn, turned in operands
    )
    own = [copy.get_slice(tid) for copy in copies]
    sources = tuple(mine.partition_S(sIn) for mine, (_, sIn, _) in zip(own, operands, strict=True))
    views = tuple(mine.retile(fragment) for mine, fragment in zip(own, fragments, strict=True))
    return Product(mma, rSum, copies, sources, views, fragments)


def add(product: Product, stage: Int32) -> None:
    """Multiply one stage and add it to the sums."""
    mma, rSum, copies, sources, views, fragments = product
    for k in range(cute.size(fragments[0], mode=[2])):
        for copy, source, view in zip(copies, sources, views, strict=True):
            cute.copy(copy, source[None, None, k, stage], view[None, None, k])
        cute.gemm(mma, rSum, fragments[0][None, None, k], fragments[1][None, None, k], rSum)
