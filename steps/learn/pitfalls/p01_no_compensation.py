"""Q4_0 stores q and means q - 8. The dot product runs over the stored codes, because they fit a
packed multiply. The kernel must then subtract 8 times the sum of the activations, which Q8_1
carries as s. This one forgets it, so every block is too large by 8 d s. Where activations sum to
about zero the result still looks like a product: right size, right sign half of the time."""

from __future__ import annotations

from numba import cuda, float32, int32

from steps.learn.pitfalls.exhibit import Pitfall, product
from steps.learn.pitfalls.right import half, kernel


@cuda.jit(device=True)
def wrong(w, q, d, s, n, m, b):
    at, dots = b * 18, int32(0)
    for j in range(16):
        byte = int32(w[n, at + 2 + j])
        dots += (byte & 15) * int32(q[m, b * 32 + j])
        dots += (byte >> 4) * int32(q[m, b * 32 + 16 + j])
    return half(w, n, at) * (d[m, b] * float32(dots))  # <- no - 8 s


PITFALL = Pitfall(
    number=1,
    title="no compensation",
    story=__doc__,
    wrong=product(kernel(wrong)),
    golden=125.0,  # 141 without the 0.25 * 8 * 8 = 16 of compensation
)
