"""Byte j of qs is read as elements 2j and 2j + 1, as most other 4-bit formats pack them. ggml packs
elements j and j + 16. Weights packed in adjacent pairs suffer the opposite confusion; its cure,
interleaving the nibbles after unpacking, is a bug here. Find out first how the bytes are packed,
then write the unpacking."""

from __future__ import annotations

import numpy as np
from numba import cuda, float32, int32

from reference import GOLDEN
from steps.learn.pitfalls.exhibit import Pitfall, product
from steps.learn.pitfalls.right import half, kernel


@cuda.jit(device=True)
def wrong(w, q, d, s, n, m, b):
    at, dots = b * 18, int32(0)
    for j in range(16):
        byte = int32(w[n, at + 2 + j])
        dots += (byte & 15) * int32(q[m, b * 32 + 2 * j])  # <- element j
        dots += (byte >> 4) * int32(q[m, b * 32 + 2 * j + 1])  # <- element j + 16
    return half(w, n, at) * (d[m, b] * float32(dots) - float32(8) * s[m, b])


def other_packing() -> tuple[float, float]:
    """The golden weights packed in adjacent pairs, and two ways to read them wrongly.

    With loads for ggml's half blocks; and word by word, low nibbles before high ones, which leaves
    each group of eight elements in the order 0 2 4 6 1 3 5 7.
    """
    codes = (np.arange(32) + 1) // 2 % 16
    q = GOLDEN["q4_0"].q81.q[0].astype(int)
    low, high = codes[0::2], codes[1::2]  # the nibbles of byte j: elements 2j and 2j + 1
    eights = q.reshape(4, 2, 4)
    sums = (
        low @ q[:16] + high @ q[16:],
        low @ eights[:, 0].ravel() + high @ eights[:, 1].ravel(),
    )
    by_halves, by_words = (0.25 * (0.5 * float(dots) - 8.0 * -8.0) for dots in sums)
    return by_halves, by_words


def aside() -> str:
    by_halves, by_words = other_packing()
    return (
        f"Packed in adjacent pairs, the same block gives {by_halves:g} with loads for half blocks "
        f"and {by_words:g} with nibbles left in groups of four."
    )


PITFALL = Pitfall(
    number=6,
    title="nibbles as adjacent pairs",
    story=__doc__,
    wrong=product(kernel(wrong)),
    golden=64.0,
    aside=aside,
)
