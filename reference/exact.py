"""The exact cases: A and W of integers, of which every sum of every step is exact.

A right kernel equals the float64 product bit for bit, in any order of summation. Those of small
integers are drawn; the extreme ones are codes and activations at their most, of either sign, which
make the sums of integers as large as they can be.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from qformats import BLOCK, FORMATS

Array = np.ndarray[Any, np.dtype[Any]]

# Above this many quanta a float32 sum of integers may round: 24 bits of significand.
EXACT_QUANTA: Final = 2**24

# The largest |sum of q| of a Q8_1 block that is exact in its f16 field s: 11 bits of significand.
EXACT_HALF: Final = 2**11

# Scales are 1 or 2 quanta. A quantum of weight is 2^-3, one of activation 2^-4: any power would do
# that is far from the ends of f16, and different for the two so that mixing them shows.

WEIGHT_QUANTUM: Final = 2.0**-3

WEIGHT_QUANTA: Final = 2  # the larger of the two weight scales, in quanta

ACTIVATION_QUANTUM: Final = 2.0**-4

ACTIVATION_QUANTA: Final = 2

# |offset| / |scale| of value = scale * code + offset, at most: -8, -16 by the format; m is drawn.
OFFSET_QUANTA: Final = {"q4_0": 8, "q4_1": 8, "q5_0": 16, "q5_1": 16, "q8_0": 0}


def code_range(name: str) -> tuple[int, int]:
    """The lowest and highest code a block of the format can store, both included.

    For q8_0 that is -128: ggml's quantizer never writes it, but a file may hold it.
    """
    return {4: (0, 15), 5: (0, 31), 8: (-128, 127)}[FORMATS[name].bits]


def exact_activations(rng: np.random.Generator, m: int, k: int, reach: int) -> Array:
    """float32[M, K] that Q8_1 stores without error, small enough for exact float32 sums.

    Each block holds one element of +-127 * 2^e, so a quantizer's d = amax / 127 is exactly 2^e and
    every code an exact integer, whichever way it divides; its sum of codes stays within 2^11,
    so s is exact even in f16, and equal in both of its definitions.

    The rest of a block is as large as fits: with `reach` weight quanta per element at most, a row
    whose sum of |codes| (in activation quanta) stays below 2^24 / reach has float32 sums that are
    integers below 2^24 quanta in any order. Where K is so long that even the extremes alone do not
    fit, some blocks are all zero (d = 0: a case of its own).
    """
    blocks = k // BLOCK
    budget = (EXACT_QUANTA - 1) // reach  # activation quanta per row
    share = budget // blocks // ACTIVATION_QUANTA - 127  # for the 31 others of a block, at least
    peak = int(np.clip(share // (BLOCK - 1), 1, 127))
    codes = rng.integers(-peak, peak, size=(m, blocks, BLOCK), endpoint=True)
    where = rng.integers(0, BLOCK, size=(m, blocks, 1))
    sign = rng.choice(np.array([-127, 127]), size=(m, blocks, 1))
    np.put_along_axis(codes, where, sign, axis=-1)
    # Alternating signs bring any sum within 16 * 127 = 2032 < 2^11.
    alternating = np.abs(codes) * np.where(np.arange(BLOCK) % 2, -1, 1)
    heavy = np.abs(codes.sum(axis=-1, keepdims=True)) > EXACT_HALF
    codes = np.where(heavy, alternating, codes)

    quanta = codes * rng.integers(1, ACTIVATION_QUANTA, size=(m, blocks, 1), endpoint=True)
    cost = np.abs(quanta).sum(axis=-1)
    order = rng.permuted(np.broadcast_to(np.arange(blocks), (m, blocks)), axis=1)
    spent = np.cumsum(np.take_along_axis(cost, order, axis=1), axis=1)
    fits = np.empty((m, blocks), dtype=bool)
    np.put_along_axis(fits, order, spent <= budget, axis=1)
    quanta = quanta * fits[..., None]

    worst = int(np.abs(quanta).sum(axis=(1, 2)).max()) * reach
    assert worst < EXACT_QUANTA, f"sums reach {worst} quanta, float32 is exact below {EXACT_QUANTA}"
    assert int(np.abs(codes.sum(axis=-1)).max()) <= EXACT_HALF, "s would round in f16"
    return (quanta * ACTIVATION_QUANTUM).astype(np.float32).reshape(m, k)


def exact_blocks(rng: np.random.Generator, n: int, k: int, name: str) -> Array:
    """Blocks [N, K/32] with every code possible, scales and offsets small multiples of a quantum.

    Codes are drawn over the whole range and each block holds both extremes. Q4_0's and Q5_0's
    scales are of either sign, as ggml's quantizer makes them.
    """
    low, high = code_range(name)
    shape = (n, k // BLOCK)
    codes = rng.integers(low, high, size=(*shape, BLOCK), endpoint=True)
    ends = rng.integers(0, BLOCK, size=(*shape, 1))
    step = rng.integers(1, BLOCK, size=(*shape, 1))
    np.put_along_axis(codes, ends, low, axis=-1)
    np.put_along_axis(codes, (ends + step) % BLOCK, high, axis=-1)
    scale = rng.integers(1, WEIGHT_QUANTA, size=shape, endpoint=True) * WEIGHT_QUANTUM
    if name in ("q4_0", "q5_0"):
        return pack_block(name, codes, scale * rng.choice(np.array([-1.0, 1.0]), size=shape))
    if name in ("q4_1", "q5_1"):
        most = OFFSET_QUANTA[name] * WEIGHT_QUANTA
        m = rng.integers(-most, most, size=shape, endpoint=True) * WEIGHT_QUANTUM
        return pack_block(name, codes, scale, m)
    return pack_block(name, codes, scale)


def extreme_activations(rng: np.random.Generator, m: int, k: int) -> Array:
    """float32[M, K] of which every Q8_1 code is 127 or -127, see `_at_ends`. Scales are 1 / K, of a
    K that is rounded up to a power of two, so that C is small enough for a float16."""
    codes = _at_ends(rng, m, k, -127, 127)
    return np.ldexp(codes, -(k - 1).bit_length()).astype(np.float32)


def extreme_blocks(rng: np.random.Generator, n: int, k: int, name: str) -> Array:
    """Blocks [N, K/32] of which every code is the lowest or the highest, see `_at_ends`. Scales are
    a quantum, minima the most quanta, of either sign."""
    low, high = code_range(name)
    codes = _at_ends(rng, n, k, low, high).reshape(n, k // BLOCK, BLOCK)
    scale = np.full(codes.shape[:-1], WEIGHT_QUANTUM)
    if name in ("q4_1", "q5_1"):
        m = OFFSET_QUANTA[name] * scale * rng.choice(np.array([-1.0, 1.0]), size=scale.shape)
        return pack_block(name, codes, scale, m)
    return pack_block(name, codes, scale)


def _at_ends(rng: np.random.Generator, rows: int, k: int, low: int, high: int) -> Array:
    """int64[rows, K]: a row of `high`, one of `low`, one of both in turns, one drawn; and again."""
    is_high = rng.integers(0, 1, size=(rows, k), endpoint=True) == 1
    is_high[0::4], is_high[1::4], is_high[2::4] = True, False, np.arange(k) % 2 == 0
    return np.where(is_high, high, low)


def pack_block(name: str, codes: Array, scale: Array, m: Array | None = None) -> Array:
    """Blocks from stored codes int[..., 32], d and m [...].

    The codec's own packing is one of the things the exact case checks, so it is not used here.
    Byte j of qs holds element j below and element j + 16 above; bit j of qh is the fifth bit of
    element j.
    """
    blocks = np.zeros(codes.shape[:-1], dtype=FORMATS[name].dtype)
    blocks["d"] = scale
    if m is not None:
        blocks["m"] = m
    if FORMATS[name].bits == 8:
        blocks["qs"] = codes
        return blocks
    half = BLOCK // 2
    low, high = codes[..., :half], codes[..., half:]
    blocks["qs"] = (low & 15) | (high & 15) << 4
    if FORMATS[name].bits == 5:
        fifth = (codes >> 4 & 1).astype(np.uint32) << np.arange(BLOCK, dtype=np.uint32)
        word = np.bitwise_or.reduce(fifth, axis=-1).astype("<u4")
        blocks["qh"] = np.ascontiguousarray(word)[..., None].view(np.uint8)
    return blocks
