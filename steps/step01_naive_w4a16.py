"""Step 1: naive W4A16 - one thread computes one element of C.

What is new
    Nothing yet; every later step is read against this one. A thread walks along K, turns each
    stored code into a float (value = d * code + z) and multiplies it with a float32 activation.
Why it should help
    It does not: it is the floor. Napkin: half a warp has 16 different rows of W, so one byte load
    costs 16 passes of the L1 cache, and A costs 2 more. 18 cycles for 32 multiply-adds is 1.8 a
    cycle and SM, where the FMA units could do 128: 132 SM x 1.9 GHz x 1.8 x 2 = 0.9 TFLOPS.
What it costs
    Nothing: no shared memory, no barrier, no repacked weights.
Machine code
    LDG.E.U8 (bytes, one at a time; .S8 in Q8_0); I2F and two FFMA for every element.
Prerequisites
    A block of 32 weights (`python -m qformats draw q4_0`); threads, blocks and grids of CUDA.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, float32

from qformats import Format
from qformats.repack import KNOWN, as_bytes
from steps.blocks.elements import device_elements
from steps.contract import Family, Launch, Shape, Step, ceil_div, plain_rows

BLOCK_M: Final = 16  # a thread block owns a 16 x 16 tile of C:
BLOCK_N: Final = 16  # half a warp writes 64 neighbouring bytes of a row


@cache
def kernel(fmt: Format) -> Any:
    fields = device_elements(fmt.name)
    level, scale, offset = fields.level, fields.scale, fields.offset
    block_bytes, elements, group = fmt.block_bytes, fmt.elements, fmt.group

    @cuda.jit
    def w4a16_naive(w, a, c):
        """c[M, N] = a[M, K] @ dequantize(w)[N, K]^T; w holds the blocks of row n in a row."""
        # --- which output is this thread's: feature n along x, token m along y? The grid has whole
        # tiles, so at the edges of C some threads have none. A row of A has blocks_k blocks
        n, m = cuda.grid(2)  # x is the fast axis: let it run along n, so that stores coalesce
        if m >= c.shape[0] or n >= c.shape[1]:
            return
        blocks_k = a.shape[1] // elements
        acc = float32(0)
        for b in range(blocks_k):
            # --- the byte of w at which block b of row n begins
            at = (n * blocks_k + b) * block_bytes
            for g in range(elements // group):  # one of 32, but in K-quants several share a block
                # --- multiply elements g * group to (g + 1) * group of the block: a weight is
                # scale * level + offset
                d, z = scale(w, at, g), offset(w, at, g)
                for j in range(g * group, (g + 1) * group):
                    acc += a[m, b * elements + j] * (d * float32(level(w, at, j)) + z)

        # --- store the sum
        c[m, n] = acc

    return w4a16_naive


def launch(
    fmt: Format, family: Family, shape: Shape, weights: tuple, activations: tuple, out: Any
) -> Launch:
    # --- the grid: how many thread blocks cover C along N and along M
    grid = (ceil_div(shape.n, BLOCK_N), ceil_div(shape.m, BLOCK_M))
    return Launch(kernel(fmt), grid, (BLOCK_N, BLOCK_M), (*weights, *activations, out))


STEP = Step(
    number=1,
    name="step01_naive_w4a16",
    title="naive W4A16: one thread, one output",
    branch="cuda_cores",
    families=("A16",),
    unit={"A16": "fp32"},
    pack=as_bytes,
    activations={"A16": plain_rows},
    launch=launch,
    idea=("cuda.grid", "level"),
    formats=KNOWN,
    contains={"A16": ("LDG.E.U8|LDG.E.S8", "I2F", "FFMA")},
    forbids={"A16": ("STS", "BAR", "IDP", "IMMA", "HMMA")},
    chosen_untuned=True,
)
