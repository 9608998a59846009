"""The unpacking subtracts 8 from each code, which is right. The kernel also keeps the - 8 s of the
kernel that it was copied from, which is right without that unpacking. Together they subtract the
offset twice. The bug often comes with a refactoring that moves one of the two into a helper."""

from __future__ import annotations

from numba import cuda, float32, int32

from steps.learn.pitfalls.exhibit import Pitfall, product
from steps.learn.pitfalls.right import half, kernel


@cuda.jit(device=True)
def wrong(w, q, d, s, n, m, b):
    at, dots = b * 18, int32(0)
    for j in range(16):
        byte = int32(w[n, at + 2 + j])
        dots += ((byte & 15) - 8) * int32(q[m, b * 32 + j])  # <- signed already ...
        dots += ((byte >> 4) - 8) * int32(q[m, b * 32 + 16 + j])
    return half(w, n, at) * (d[m, b] * float32(dots) - float32(8) * s[m, b])  # <- ... again


PITFALL = Pitfall(
    number=2,
    title="compensated twice",
    story=__doc__,
    wrong=product(kernel(wrong)),
    golden=157.0,  # 141 and the 16 of compensation once more
)
