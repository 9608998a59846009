"""What is right: a kernel, and a block of Q4_0 and of Q5_0 times one of Q8_1.

One thread computes one output and reads bytes; most exhibits change a line of the block's product.
`exhibit.launch` says what the arguments are.
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


def kernel(block):
    """C[m, n], added up from block(w, q, d, s, n, m, b) of each block b of K."""

    @cuda.jit
    def product(w, q, d, s, c):
        n, m = cuda.grid(2)
        if m >= c.shape[0] or n >= c.shape[1]:
            return
        total = float32(0)
        for b in range(d.shape[1]):
            total += block(w, q, d, s, n, m, b)
        c[m, n] = total

    return product


@cuda.jit(device=True)
def q4_0(w, q, d, s, n, m, b):
    """18 bytes: f16 d, 16 bytes of nibbles; byte j holds elements j and j + 16."""
    at, dots = b * 18, int32(0)
    for j in range(16):
        byte = int32(w[n, at + 2 + j])
        dots += (byte & 15) * int32(q[m, b * 32 + j])
        dots += (byte >> 4) * int32(q[m, b * 32 + 16 + j])
    return half(w, n, at) * (d[m, b] * float32(dots) - float32(8) * s[m, b])


@cuda.jit(device=True)
def q5_0(w, q, d, s, n, m, b):
    """22 bytes: f16 d, 4 bytes of fifth bits, 16 bytes of nibbles."""
    at, dots = b * 22, int32(0)
    fifth = fifth_bits(w, n, at + 2)
    for j in range(16):
        byte = int32(w[n, at + 6 + j])
        low = (byte & 15) | (int32(fifth >> uint32(j)) & 1) << 4
        high = (byte >> 4) | (int32(fifth >> uint32(j + 16)) & 1) << 4
        dots += low * int32(q[m, b * 32 + j]) + high * int32(q[m, b * 32 + 16 + j])
    return half(w, n, at) * (d[m, b] * float32(dots) - float32(16) * s[m, b])
