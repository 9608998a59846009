"""Byte j of qs is read as elements 2j and 2j + 1, as most other 4-bit formats pack them. ggml packs
elements j and j + 16. Weights packed in adjacent pairs suffer the opposite confusion (the golden
weights packed so give 71 with loads for half blocks, 139 with nibbles left in groups of four); its
cure, interleaving the nibbles after unpacking, is a bug here. Find out first how the bytes are
packed, then write the unpacking."""

from __future__ import annotations

from numba import cuda, float32, int32

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


PITFALL = Pitfall(
    number=6,
    title="nibbles as adjacent pairs",
    story=__doc__,
    wrong=product(kernel(wrong)),
    golden=64.0,
)
