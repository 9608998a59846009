"""A block of Q4_0 has 18 bytes and its codes begin at byte 2, so addresses are only known to be
even. A 4-byte load there works on any CPU, which gets 141 and reports nothing, and in any test that
runs on one. A GPU stops at the first block with error 716, misaligned address. Use two 2-byte
loads, or a layout that stores the codes apart. Q4_1, Q5_1 and Q8_1 have blocks of 20, 24 and 36
bytes, which allow 4-byte loads."""

from __future__ import annotations

from numba import cuda, float32, int32, uint32

from steps.instructions import load_u16, load_u32
from steps.learn.pitfalls.exhibit import Pitfall, product
from steps.learn.pitfalls.right import half, kernel


@cuda.jit(device=True)
def word_b4(w, at):
    return load_u32(w, at)


@cuda.jit(device=True)
def word_b2(w, at):
    return uint32(load_u16(w, at)) | uint32(load_u16(w, at + 2)) << uint32(16)


def block(word):
    """The product of a block of Q4_0 whose codes are loaded by word(w, at), at from the first byte
    of w."""

    @cuda.jit(device=True)
    def of_words(w, q, d, s, n, m, b):
        at, dots = b * 18, int32(0)
        for i in range(4):
            four = word(w, n * w.shape[1] + at + 2 + 4 * i)  # <- address % 4 == 2
            for t in range(4):
                byte = int32(four >> uint32(8 * t)) & 255
                dots += (byte & 15) * int32(q[m, b * 32 + 4 * i + t])
                dots += (byte >> 4) * int32(q[m, b * 32 + 16 + 4 * i + t])
        return half(w, n, at) * (d[m, b] * float32(dots) - float32(8) * s[m, b])

    return of_words


wrong, right = kernel(block(word_b4)), kernel(block(word_b2))


PITFALL = Pitfall(
    number=7,
    title="4-byte loads at 2-byte alignment",
    story=__doc__,
    wrong=product(wrong),
    right=product(right),
    golden=float("nan"),  # it stops before it writes
    caught_by=("misaligned",),
)
