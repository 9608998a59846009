"""Step 15: int8 wgmma - one scale a row, one scale a token, one integer sum over all of K.

What is new
    Int8 tensor cores multiply twice as fast as float16 ones. But products of codes add up as
    integers only while scales stay the same: one for each 32 K costs three instructions a sum (step
    7). So both operands are *requantized* to one scale a row or token: one integer sum is left.

        row n      codes and block scales, 128 K a stage      as in step 14
                   int8 = round(weight / row_scale)           HFMA2, PRMT: in registers
        token m    int8 = round(a / token_scale)              by a pass; 128 K a stage are one box
        c[m, n]    row_scales[n] * token_scales[m] * sum over all k of int8 * int8

    One float16 multiply-add takes a code times d / row_scale and adds a magic constant. That rounds
    to an integer; the low byte is the int8 (kernels.parts.weights.int8 has the picture). Q8_0 and
    file formats are requantized when they are packed. The rest is step 14's kernel, but for a
    tile's second accumulator half: it has tokens 128 to 255 of the same features.
Why it should help
    128 x 128 outputs and 128 K are 512 cycles of the tensor cores. PRMTs wait until the product
    before has read the registers that they write: 90 more. Meanwhile the two warps of a scheduler
    issue 2 x 152 instructions (5 bits: 2 x 183), one in two cycles: 608 cycles (732). So 32 stages
    at (512,4096,4096), and 2.2 us for the launch and both ends, are 14 us at 1.65 GHz: 1.7x. In
    tiles of 128 x 256 products of 1024 cycles hide the unpacking: 1.9x at M=4096.
What it costs
    Exactness: on normal data requantizing adds an NMSE of 8.5e-5 to the 7.3e-3 of Q4_0. Int8 tokens
    add as much, or 3.2e-3 where a few channels are 20 times the others. It is used only when asked
    for, gemm(..., accuracy="fast"). int32 holds a sum of up to 132096 K.
Machine code
    IGMMA between HFMA2, LOP3 and PRMT, with no wait but WARPGROUP.DEPBAR; no I2FP before the end.
Prerequisites
    Step 14: its kernel with other operands, steps/kernels/prefill/wgmma_int8.py. Taught here:
    kernels.parts.weights.int8.
"""

from steps.contract import Step
from steps.kernels.prefill.wgmma_int8 import KERNEL

STEP = Step.of(
    KERNEL,
    name="step15_wgmma_int8",
    branch="float16",
    parents={"A8": 14},
    contains={"A8": ("IGMMA", "UTMALDG", "UBLKCP", "SYNCS", "USETMAXREG", "ACQBULK")},
    forbids={"A8": ("IMMA", "HMMA", "HGMMA", "LDGSTS", "LDSM")},
)
