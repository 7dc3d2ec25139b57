"""Device code that kernels share: vector loads and stores, the activation, the status word.

Undecorated functions are macros of the kernel that calls them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm

LOG2_E = 1.44269502162933349609375  # the fp32 nearest to log2(e)
LOG2_E_LOW = 1.9259629911266175e-8  # log2(e) - LOG2_E
LN2 = 0.6931471805599453


def global_vector(mX: cute.Tensor, offset: Int64, count: int, align: int) -> cute.Tensor:
    """`count` neighbouring elements at an element offset, known to be `align` bytes aligned."""
    address = (mX.iterator + offset).toint()
    align = max(align, mX.element_type.width // 8)
    pointer = cute.make_ptr(mX.element_type, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def load_vector(mX: cute.Tensor, offset: Int64, count: int, align: int) -> cute.Tensor:
    """Load neighbouring elements into registers, in the widest pieces that `align` allows."""
    rX = cute.make_rmem_tensor(count, mX.element_type)
    cute.autovec_copy(global_vector(mX, offset, count, align), rX)
    return rX


def store_vector(rX: cute.Tensor, mX: cute.Tensor, offset: Int64, align: int) -> None:
    """Store registers to neighbouring elements, in the widest pieces that `align` allows."""
    cute.autovec_copy(rX, global_vector(mX, offset, cute.size(rX), align))


def to_float(rX: cute.Tensor, index: int) -> Float32:
    """One register element in fp32. Half of a bf16 pair is a shift or a mask away; the compiler takes two to three."""
    if rX.element_type is not BFloat16 or cute.size(rX) % 2:
        return rX[index].to(Float32)
    pair = cute.recast_tensor(rX, Int32)[index // 2]
    bits = pair & Int32(-65536) if index % 2 else pair << 16
    return Float32(llvm.bitcast(Float32.mlir_type, bits.ir_value()))


def apply_silu(rZ: cute.Tensor, precise: bool) -> None:
    """z <- z * sigmoid(z), right for any finite z; `precise` where the result is not rounded to 16 bits.

    1 + exp(-z) overflows below z = -88 where the result is still normal, so both factors carry 2^-24. One element is a
    chain of slow instructions, and the assembler keeps the order it is given: here the chains are interleaved.
    """
    count = cute.size(rZ)
    if precise:
        for i in range(count):
            rZ[i] = silu_precise(rZ[i])
        return
    rE = cute.make_rmem_tensor(count, Float32)
    for i in range(count):
        rE[i] = cute.math.exp2(rZ[i] * -LOG2_E - 24.0, fastmath=True)
    for i in range(count):
        rE[i] = cute.arch.rcp_approx(rE[i] + 2.0**-24)
    for i in range(count):
        rZ[i] = rZ[i] * 2.0**-24 * rE[i]


@cute.jit
def silu_precise(z: Float32) -> Float32:
    """Within a few fp32 ulp: exp(-z) from a product in two parts, and a real division."""
    near = cutlass.max(cutlass.min(z, Float32(200.0)), Float32(-200.0))  # beyond, sigmoid is 1 or 0
    product = near * -LOG2_E
    # what the rounding of the product lost, and what LOG2_E lost itself
    lost = cute.math.fma(near, Float32(-LOG2_E), -product) + near * -LOG2_E_LOW
    y = Float32(0.0)
    if z > -80.0:
        e = cute.math.exp2(product, fastmath=True)
        y = z / (e * (lost * LN2) + e + 1.0)
    else:
        # sigmoid(z) is exp(z) here; the exponent moves up so that nothing is subnormal before the end
        e = cute.math.exp2(-product + 64.0, fastmath=True)
        y = (e * (-lost * LN2) + e) * z * 2.0**-64
    return y


def report(status: Int64, code: int | Int32, row: Int32, value: Int32) -> None:
    """Write code, row and value as one word to pinned host memory at the address `status`."""
    row = Int64(cutlass.min(row, Int32((1 << 28) - 1)))
    word = (Int64(code) << 60) | (row << 32) | (Int64(value) & 0xFFFFFFFF)
    pointer = cute.make_ptr(Int64, status, cute.AddressSpace.gmem, assumed_align=8)
    cute.arch.store(pointer, word, sem="relaxed", scope="sys")


def trap() -> None:
    """Stop the device: every later call in this process fails."""
    cute.arch.inline_ptx("trap;")


def has_dependent_launch(arch: str) -> bool:
    """Programmatic dependent launch exists from Hopper on."""
    return not arch.startswith("sm_8")


def multiply_silu_gradient(rG: cute.Tensor, rU: cute.Tensor) -> None:
    """g <- g * (s + u * s * (1 - s)) with s = sigmoid(u); interleaved as in `apply_silu`."""
    count = cute.size(rU)
    rS = cute.make_rmem_tensor(count, Float32)
    for i in range(count):
        rS[i] = cute.math.exp2(rU[i] * -LOG2_E, fastmath=True)
    for i in range(count):
        rS[i] = cute.arch.rcp_approx(rS[i] + 1.0)
    for i in range(count):
        rG[i] = rG[i] * rS[i]
    for i in range(count):
        rS[i] = rU[i] * (1.0 - rS[i]) + 1.0
    for i in range(count):
        rG[i] = rG[i] * rS[i]


def copy_async(sOut: cute.Pointer, mIn: cute.Pointer, width: int, exists: Int32) -> None:
    """Copy `width` bytes (4, 8 or 16) to shared memory without waiting; bytes from `exists` on become 0."""
    cache = "cg" if width == 16 else "ca"
    cute.arch.inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {width}, {{$r2}};",
        read_only_args=[sOut.toint(), mIn.toint(), exists],
    )


def load_shared(sIn: cute.Tensor, offset: Int32, count: int, align: int) -> cute.Tensor:
    """Load neighbouring elements of shared memory into registers."""
    pointer = cute.make_ptr(
        sIn.element_type, (sIn.iterator + offset).toint(), cute.AddressSpace.smem, assumed_align=align
    )
    rIn = cute.make_rmem_tensor(count, sIn.element_type)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), rIn)
    return rIn
