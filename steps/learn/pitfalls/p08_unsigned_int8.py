"""Activation codes are int8. Read through a uint8 view, or taken out of a word with a mask and no
sign extension, every negative code gains 256. Data without negative values passes: activations
after a ReLU, or a test that uses np.arange."""

from __future__ import annotations

from numba import cuda, float32, int32

from steps.learn.pitfalls.exhibit import Pitfall, product
from steps.learn.pitfalls.right import half, kernel


@cuda.jit(device=True)
def wrong(w, q, d, s, n, m, b):
    at, dots = b * 18, int32(0)
    for j in range(16):
        byte = int32(w[n, at + 2 + j])
        dots += (byte & 15) * (int32(q[m, b * 32 + j]) & 255)  # <- the sign is masked away
        dots += (byte >> 4) * (int32(q[m, b * 32 + 16 + j]) & 255)
    return half(w, n, at) * (d[m, b] * float32(dots) - float32(8) * s[m, b])


PITFALL = Pitfall(
    number=8,
    title="int8 read as unsigned",
    story=__doc__,
    wrong=product(kernel(wrong)),
    golden=2189.0,  # 16 negative activations whose codes sum to 64: + 0.125 * 256 * 64
)
