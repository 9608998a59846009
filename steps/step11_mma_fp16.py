"""Step 11: W4A16 on tensor cores - float16 weights made in registers, one sum over all of K.

What is new
    A weight becomes float16 in registers, its scale and offset included, and the tensor core adds
    up all of K in float32 by itself. The code needs no conversion: the bits of an integer n, read
    as a float16, are n * 2^-24. So a mask and one multiply-add make two weights of a word. Packed
    tiles hold d' = d / (2^-24 row_scale). row_scale is a power of two for each row: it brings d'
    into the range of float16 and multiplies the sums at the end. Q4_0, whose codes mean code - 8:

        a word of packed codes     |  k = 2t  |  2t + 8  |  2t + 1  |  2t + 9  |   bytes 0 to 3
        & 0x000F000F               |      code of 2t     |    code of 2t + 1   |   LOP3
        * d' - 8 * 2^-24 d'        |     weight of 2t    |   weight of 2t + 1  |   HFMA2: a0

    A is float16 as the caller has it. A stage has two *boxes* of A: 64 K of a token are a row of
    128 bytes, swizzled (kernels.prefill.row_tiles). Where A is bfloat16, weights are rounded once
    more.
    A warp has 64 x 64 outputs: a fragment of W serves eight mma, one of A four. Where tiles are
    small, half of the warps take one half of a stage's K, and thread blocks share K (split-K).
Why it should help
    Steps 7 to 10 pay three instructions for each sum every 32 K. Here a warp has 32 HMMA for 16 K,
    214 cycles of the tensor core, and 70 other instructions (5 bits: 95): a scheduler issues in
    half of its cycles. (512,4096,4096) are 256 tiles of 64 tokens, two an SM, which together take
    1715 cycles a stage, 54900 for K, if tensor cores never wait. Eight warps hide few latencies, so
    they will wait for 35 % of the time: 84500 cycles at 1.76 GHz are 48 us, 1.2x step 9.
    And nothing is lost but the rounding of A and W to float16: NMSE 3e-8, a thousandth of what Q8_1
    costs.
What it costs
    243 registers, eight warps an SM. A takes twice the bytes of Q8_1. C passes through shared
    memory, to be added up and stored in full lines. Blocks whose scale is far below the largest of
    their row lose precision (qformats.repack.tiles says how much).
Machine code
    HMMA.16816.F32, HFMA2, LOP3, LDSM and LDGSTS in the loop, and no I2FP, no FFMA.
Prerequisites
    Steps 8 (ldmatrix, fragments loaded ahead), 9 (ring of stages) and 10 (partial sums, arrival
    counter). The kernel is steps/kernels/prefill/mma_float16.py. Taught here:
    kernels.parts.weights.halves (weights) and kernels.prefill.row_tiles (a stage).
    Not needed to follow it: bfloat16 weights, which tile for which shape, and the end of a tile
    (kernels.parts.epilogue.mma: through shared memory to C, with the partial sums of step 10).
"""

from steps.contract import Step
from steps.kernels.prefill.mma_float16 import KERNEL

STEP = Step.of(
    KERNEL,
    name="step11_mma_fp16",
    branch="float16",
    parents={"A16": 9},
    contains={"A16": ("HMMA.16816.F32", "HFMA2", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "MEMBAR")},
    forbids={"A16": ("IMMA", "I2FP", "FFMA")},
)
