"""Four bytes of qs hold eight codes: the low nibbles are elements 4i ... 4i+3, the high ones are
elements 16+4i ... 16+4i+3. They belong to words i and i+4 of the activations. This kernel takes
the next two words, 2i and 2i+1, as eight consecutive elements would need. It uses all 32
activations once, reads nothing out of range, and its sums have the right size."""

from __future__ import annotations

from numba import cuda, float32, int32

from steps.learn.pitfalls.exhibit import Pitfall, product
from steps.learn.pitfalls.right import half, kernel


@cuda.jit(device=True)
def wrong(w, q, d, s, n, m, b):
    at, dots = b * 18, int32(0)
    for i in range(4):
        for t in range(4):
            byte = int32(w[n, at + 2 + 4 * i + t])
            dots += (byte & 15) * int32(q[m, b * 32 + 4 * (2 * i) + t])  # <- word 2i, not i
            dots += (byte >> 4) * int32(q[m, b * 32 + 4 * (2 * i + 1) + t])  # <- not i + 4
    return half(w, n, at) * (d[m, b] * float32(dots) - float32(8) * s[m, b])


PITFALL = Pitfall(
    number=3,
    title="activations at words 2i, 2i+1",
    story=__doc__,
    wrong=product(kernel(wrong)),
    golden=85.0,
)
