"""What happens to a finished sum of the dense convolution: bias, activation, one rounding, the store."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from accel.kernels.device import apply_silu, store_vector

SQRT_HALF = 0.70710678118654752


@cute.jit
def finish(
    spec: cutlass.Constexpr, rSum: cute.Tensor, tC: cute.Tensor, mBias, mOut: cute.Tensor, b: Int32, m: Int32, t: Int32
):
    """Write a thread's sums of the tile at (m, t); neighbours in rSum are neighbours in time, two by two."""
    _, channels, tokens = mOut.shape
    for pair in cutlass.range_constexpr(cute.size(rSum) // 2):
        row, column = m + tC[2 * pair][0], t + tC[2 * pair][1]
        if row < channels and column < tokens:
            rTwo = cute.make_rmem_tensor(2, Float32)
            for j in cutlass.range_constexpr(2):
                rTwo[j] = rSum[2 * pair + j]
                if const_expr(mBias is not None):
                    rTwo[j] = rTwo[j] + mBias[row].to(Float32)
            activate(rTwo, spec.activation)
            rOut = cute.make_rmem_tensor(2, mOut.element_type)
            for j in cutlass.range_constexpr(2):
                rOut[j] = rTwo[j].to(mOut.element_type)
            offset = Int64(b) * mOut.stride[0] + Int64(row) * mOut.stride[1] + column
            if const_expr(spec.pairs):
                store_vector(rOut, mOut, offset, 4)
            else:
                for j in cutlass.range_constexpr(2):
                    if column + j < tokens:
                        mOut[b, row, column + j] = rOut[j]


def activate(rU: cute.Tensor, activation: str | None) -> None:
    """u <- act(u), right for any finite u before a rounding to 16 bits."""
    if activation == "silu":
        apply_silu(rU, False)
    elif activation == "relu":
        for i in range(cute.size(rU)):
            rU[i] = cutlass.max(rU[i], Float32(0.0))
    elif activation == "gelu":
        for i in range(cute.size(rU)):
            rU[i] = rU[i] * 0.5 * cute.math.erfc(rU[i] * -SQRT_HALF)
