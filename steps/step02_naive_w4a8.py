"""Step 2: naive W4A8 - the same walk, in integers.

What is new
    Activations arrive as Q8_1 blocks (int8 codes qa, scale da, sum s). Inside a block the dot
    product is integer, and the scales come in once for 32 elements instead of once for each:
        block = d * da * sum(code * qa) + z * s            the last term is the *compensation*
    It stands in for the -8, the -16 or the minimum that the codes leave out (Q4_0: z = -8 d).
Why it should help
    An activation is a byte, so one 4-byte load brings four: A's part of the L1 passes drops from 2
    in 18 to next to nothing. Per element one integer multiply-add replaces a conversion and two
    FMAs. The gathers of W stay: expect a tenth in Q8_0. In the other formats a byte holds two
    codes, and one load brings both: 2x in 4 bits; less in 5, whose fifth bits lie elsewhere.
What it costs
    A pass that quantizes A (timed apart) and its error: NMSE about 3e-5 on normal data, a hundredth
    of what 4-bit weights cost already.
Machine code
    IMAD where step 1 had FFMA; I2F and FFMA once a block. (In Q8_0 ptxas packs four byte products
    into an IDP.4A by itself: the hardware dot product that step 4 will do without.)
Prerequisites
    Step 1. The Q8_1 pass (steps.blocks.q8_1), which this step teaches.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32, int8, int32

from qformats import BLOCK, Format
from qformats.repack import as_bytes
from steps.blocks.codes import b4, device_format
from steps.blocks.q8_1 import BLOCK_Q8_1, q8_1_blocks
from steps.contract import Family, Launch, Shape, Step, ceil_div
from steps.instructions import half_to_float, load_u16

BLOCK_M: Final = 16  # a thread block owns a 16 x 16 tile of C, as in step 1
BLOCK_N: Final = 16
HALF: Final = BLOCK // 2  # byte j of a nibble format holds elements j and j + 16
QA: Final = 4  # a Q8_1 block: f16 d at byte 0, f16 s at byte 2, then the 32 codes


@cache
def kernel(fmt: Format) -> Any:
    fields = device_format(fmt.name)
    codes, scale, offset = fields.codes, fields.scale, fields.offset
    block_bytes = fmt.block_bytes

    @cuda.jit
    def w4a8_naive(w, a, c, blocks_k):
        """c[M, N] = a @ dequantize(w)[N, K]^T; a holds the Q8_1 blocks of row m in a row."""
        n, m = cuda.grid(2)
        if m >= c.shape[0] or n >= c.shape[1]:
            return
        acc = float32(0)
        for b in range(blocks_k):
            # --- the bytes at which block b of row n of W and of row m of A begin
            at = (n * blocks_k + b) * block_bytes
            at_a = (m * blocks_k + b) * BLOCK_Q8_1

            # --- the integer sum of the block: four activations a word, with two codes a byte of W
            total = int32(0)
            for i in range(0, HALF, 4):
                low = b4(a, at_a + QA + i)  # four activations; aligned, as a Q8_1 block is 36 bytes
                high = b4(a, at_a + QA + HALF + i)
                for j in range(4):  # elements i + j and i + j + 16: the two nibbles of one byte
                    x, y = int8(low >> (8 * j)), int8(high >> (8 * j))
                    q, r = codes(w, at, i + j)
                    total = int32(total + q * int32(x) + r * int32(y))

            # --- scale the sum and add the compensation: offset * s
            da, s = half_to_float(load_u16(a, at_a)), half_to_float(load_u16(a, at_a + 2))
            acc += scale(w, at) * da * float32(total) + offset(w, at) * s
        c[m, n] = acc

    return w4a8_naive


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    grid = (ceil_div(shape.n, BLOCK_N), ceil_div(shape.m, BLOCK_M))
    args = (*weights, *activations, out, shape.k // BLOCK)
    return Launch(kernel(fmt), grid, (BLOCK_N, BLOCK_M), args)


STEP = Step(
    number=2,
    name="step02_naive_w4a8",
    title="naive W4A8: integer dot product, compensation",
    branch="cuda_cores",
    families=("A8",),
    parents={"A8": 1},
    unit={"A8": "int32"},
    pack=as_bytes,
    activations={"A8": q8_1_blocks},
    launch=launch,
    idea=("codes", "offset"),
    contains={"A8": ("LDG.E.U8|LDG.E.S8", "IMAD", "I2F", "FFMA")},
    forbids={"A8": ("STS", "BAR", "IMMA", "HMMA")},
    chosen_untuned=True,
)
