"""The fifth bits of Q5_0 are one 32-bit word in two halves: bit j belongs to element j, bit j + 16
to element j + 16. Byte j of qs holds elements j and j + 16 side by side, so reading bits 2j and
2j + 1 for them looks natural. About half of the codes come out wrong, by 16."""

from __future__ import annotations

from numba import cuda, float32, int32, uint32

from steps.learn.pitfalls.exhibit import RIGHT, Pitfall, product
from steps.learn.pitfalls.right import fifth_bits, half, kernel


@cuda.jit(device=True)
def wrong(w, q, d, s, n, m, b):
    at, dots = b * 22, int32(0)
    fifth = fifth_bits(w, n, at + 2)
    for j in range(16):
        byte = int32(w[n, at + 6 + j])
        low = (byte & 15) | (int32(fifth >> uint32(2 * j)) & 1) << 4  # <- bit j
        high = (byte >> 4) | (int32(fifth >> uint32(2 * j + 1)) & 1) << 4  # <- bit j + 16
        dots += low * int32(q[m, b * 32 + j]) + high * int32(q[m, b * 32 + 16 + j])
    return half(w, n, at) * (d[m, b] * float32(dots) - float32(16) * s[m, b])


PITFALL = Pitfall(
    number=4,
    title="qh read interleaved",
    story=__doc__,
    format="q5_0",
    right=RIGHT["q5_0"],
    wrong=product(kernel(wrong)),
    golden=214.0,  # codes 8-15 gain 16, 16-23 lose it: sumi falls by 16 * (36 + 28), 342 - 128
)
