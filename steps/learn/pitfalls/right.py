"""The two right kernels, Q4_0 and Q5_0 times Q8_1; most exhibits change one line of them.

One thread computes one output and reads bytes. `exhibit.launch` says what the arguments are.
"""

from __future__ import annotations

from numba import cuda, float32, int32, uint32

from steps.instructions import half_to_float


@cuda.jit(device=True)
def half(w, n, at):
    """The f16 at byte `at` of row n, as float32."""
    return half_to_float(uint32(w[n, at]) | uint32(w[n, at + 1]) << uint32(8))


@cuda.jit(device=True)
def fifth_bits(w, n, at):
    """The 32 fifth bits at byte `at` of row n: bit j belongs to element j."""
    word = uint32(0)
    for i in range(4):
        word |= uint32(w[n, at + i]) << uint32(8 * i)
    return word


@cuda.jit
def w4a8(w, q, d, s, c):
    """Q4_0: 18 bytes, f16 d, 16 bytes of nibbles; byte j holds elements j and j + 16."""
    n, m = cuda.grid(2)
    if m >= c.shape[0] or n >= c.shape[1]:
        return
    total = float32(0)
    for b in range(d.shape[1]):
        at = b * 18
        dots = int32(0)
        for j in range(16):
            byte = int32(w[n, at + 2 + j])
            dots += (byte & 15) * int32(q[m, b * 32 + j])
            dots += (byte >> 4) * int32(q[m, b * 32 + 16 + j])
        total += half(w, n, at) * (d[m, b] * float32(dots) - float32(8) * s[m, b])
    c[m, n] = total


@cuda.jit
def w5a8(w, q, d, s, c):
    """Q5_0: 22 bytes, f16 d, 4 bytes of fifth bits, 16 bytes of nibbles."""
    n, m = cuda.grid(2)
    if m >= c.shape[0] or n >= c.shape[1]:
        return
    total = float32(0)
    for b in range(d.shape[1]):
        at = b * 22
        fifth = fifth_bits(w, n, at + 2)
        dots = int32(0)
        for j in range(16):
            byte = int32(w[n, at + 6 + j])
            low = (byte & 15) | (int32(fifth >> uint32(j)) & 1) << 4
            high = (byte >> 4) | (int32(fifth >> uint32(j + 16)) & 1) << 4
            dots += low * int32(q[m, b * 32 + j]) + high * int32(q[m, b * 32 + 16 + j])
        total += half(w, n, at) * (d[m, b] * float32(dots) - float32(16) * s[m, b])
    c[m, n] = total
