"""What happens to a finished sum of the dense convolution: bias, activation, one rounding, the store; or the store."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from accel.kernels.device import LOG2_E, apply_silu, store_vector

SQRT_HALF = 0.70710678118654752
# erfc(x) = t * exp(-x^2 + the polynomial in t of these), t = 1 / (1 + x / 2), within 1.2e-7 of itself for any x >= 0:
# Press et al., Numerical Recipes, "erfcc"
ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip


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
            rU[i] = gelu(rU[i])


def gelu(u: Float32) -> Float32:
    """u * Phi(u), Phi from erfc, which does not cancel where it is small."""
    size = cutlass.max(u, -u) * SQRT_HALF
    t = cute.arch.rcp_approx(0.5 * size + 1.0)
    power = Float32(ERFC[-1])
    for coefficient in reversed(ERFC[:-1]):
        power = power * t + coefficient
    tail = 0.5 * t * cute.math.exp2((power - size * size) * LOG2_E, fastmath=True)
    return u * cutlass.select_(u < 0.0, tail, 1.0 - tail)


@cute.jit
def move_sums(rSum: cute.Tensor, distance: Int32, grain: cutlass.Constexpr[int]):
    """sum[t] <- sum[t + distance], for sums in wgmma's order; distance is a multiple of `grain` below a vector.

    What would come from behind the tile comes from its last vector, and counts for nothing.
    """
    for bit in cutlass.range_constexpr(3):
        if const_expr(grain <= 1 << bit):
            if (distance & (1 << bit)) != 0:
                move_by(rSum, 1 << bit)


def move_by(rSum: cute.Tensor, distance: int) -> None:
    """`move_sums` by 1, 2 or 4 tokens.

    Four lanes hold a row's eight tokens of a block, two each: (token, token + 1) of row and row + 8 in turns.
    """
    lane = cute.arch.lane_idx()
    pairs = max(distance // 2, 1)  # between the lanes of giver and taker
    giver = (lane & ~3) | ((lane + pairs) & 3)
    # what these give is taken for the block before theirs
    early = (lane & 3) < pairs
    last = cute.size(rSum) - 4
    for at in range(0, cute.size(rSum), 4):
        for half in (0, 2):
            for i in (0,) if distance == 1 else (0, 1):
                index = at + half + i
                given = cutlass.select_(early, rSum[min(index + 4, last + half + i)], rSum[index])
                taken = cute.arch.shuffle_sync(given, giver)
                if distance == 1:
                    rSum[index], rSum[index + 1] = rSum[index + 1], taken
                else:
                    rSum[index] = taken


@cute.jit
def finish_rows(
    spec: cutlass.Constexpr,
    rSum: cute.Tensor,
    tC: cute.Tensor,
    mBias,
    mOut: cute.Tensor,
    b: Int32,
    m: Int32,
    t: Int32,
    count: cutlass.Constexpr[int],
):
    """As `finish`, for sums in wgmma's order and rows of whole vectors: lane q of four gets block q of four blocks.

    A thread has pairs of eight-token blocks, (row, row + 8) in turns; four lanes of one row trade them, so that each
    stores eight tokens of its own. `count`: tokens of the tile that are stored.
    """
    channels, tokens = mOut.shape[1], cutlass.min(mOut.shape[2], t + count)
    lane = cute.arch.lane_idx() % 4
    blocks = cute.size(rSum) // 4
    for half in cutlass.range_constexpr(2):
        row = m + tC[2 * half][0]
        bias = Float32(0.0)
        if const_expr(mBias is not None):
            if row < channels:
                bias = mBias[row].to(Float32)
        for first in cutlass.range_constexpr(0, blocks, 4):
            rWord = cute.make_rmem_tensor(4, Int32)
            for j in cutlass.range_constexpr(4):
                rTwo = cute.make_rmem_tensor(2, Float32)
                for i in cutlass.range_constexpr(2):
                    rTwo[i] = rSum[4 * (first + j) + 2 * half + i] + bias
                activate(rTwo, spec.activation)
                rOut = cute.make_rmem_tensor(2, mOut.element_type)
                for i in cutlass.range_constexpr(2):
                    rOut[i] = rTwo[i].to(mOut.element_type)
                rWord[j] = cute.recast_tensor(rOut, Int32)[0]
            for bit in cutlass.range_constexpr(1, 3):
                trade(rWord, lane, bit)
            # the column of the thread's first sum has the lane's own pair in it
            column = t + tC[4 * first][1] - 2 * lane + 8 * lane
            if row < channels and column < tokens:
                offset = Int64(b) * mOut.stride[0] + Int64(row) * mOut.stride[1] + column
                store_vector(cute.recast_tensor(rWord, mOut.element_type), mOut, offset, 16)


def trade(rWord: cute.Tensor, lane: Int32, bit: int) -> None:
    """Words i and i + bit: the lane with the bit keeps the upper one and gets the partner's."""
    upper = (lane & bit) != 0
    for i in range(4):
        if i & bit == 0:
            low, high = rWord[i], rWord[i + bit]
            other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, low, high), bit)
            rWord[i] = cutlass.select_(upper, other, low)
            rWord[i + bit] = cutlass.select_(upper, high, other)


@cute.jit
def store_partial(
    rSum: cute.Tensor, tC: cute.Tensor, mPartial: cute.Tensor, part: Int32, tap: Int32, m: Int32, n: Int32
):
    """A thread's sums of the tile at (m, n) of a weight gradient, as they are."""
    for pair in cutlass.range_constexpr(cute.size(rSum) // 2):
        row, column = m + tC[2 * pair][0], n + tC[2 * pair][1]
        for j in cutlass.range_constexpr(2):
            if row < mPartial.shape[2] and column + j < mPartial.shape[3]:
                mPartial[part, tap, row, column + j] = rSum[2 * pair + j]
