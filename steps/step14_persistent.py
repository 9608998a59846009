"""Step 14: persistent blocks - a block stays on its SM, tile after tile, and loads never stop.

What is new
    In step 13, between two tiles of an SM, a block ends and another begins: barriers are made, the
    first copies are waited for, C is written, and the tensor cores idle. Here one block an SM takes
    tile after tile. That makes room for four changes, each of a few lines:

    1. The ring never drains: the producers go on to the next tile while consumers write C.
    2. Consumers are *staggered*, by two stages: while one ends a tile the others still multiply.
    3. The *stream-K* scheduler of step 10 shares out the tiles that would leave SMs idle.
    4. *Programmatic launch*: a block lets the next launch begin (griddepcontrol_launch_dependents)
       and waits for the one before (griddepcontrol_wait) as late as it can. Weights do not depend
       on that one, so they have a producer of their own, which does not wait at all.

        producers       [tile 0             ][tile 1             ][tile 2
        warpgroup 0        [multiply 0         ][C][multiply 1         ][C]
        warpgroup 1           [multiply 0         ][C][multiply 1         ][C]
        tensor cores       ##########################################################

    Tiles grow to 256 features, 128 a warpgroup: two *accumulator halves* of 64. They need 25 bytes
    a cycle from the L2 instead of 41. Tiles of 192, of three warpgroups, fill some N better.
Why it should help
    With 128 tokens step 13 has too few tiles of 128 x 128 for 132 SMs, and takes tiles of 32
    tokens, which unpack every weight four times. Here four blocks share a tile: expect 12.1 us at
    (128,4096,4096), 1.3x, and 2x at K=14336. Elsewhere less is left: 2 % at (512,4096,4096), one
    tile an SM, by change 4; 4 % at (4096,4096,4096), where step 13's tensor cores are 87 % busy.
What it costs
    Scratch memory for partial sums. The last bits of C depend on the number of SMs.
Machine code
    As step 13; STSM at the end of a tile of float16, ACQBULK where the launch before is waited for.
Prerequisites
    Steps 13 (ring, producer, consumers) and 10 (kernels.parts.stream_k). The kernel is
    steps/kernels/prefill/wgmma_float16.py; kernels.prefill.stage_copies has step 13's copies for
    wider tiles. Taught here: kernels.parts.epilogue.wgmma (shared tiles to C).
"""

from steps.contract import Step
from steps.kernels.prefill.wgmma_float16 import KERNEL

STEP = Step.of(
    KERNEL,
    name="step14_persistent",
    branch="float16",
    parents={"A16": 13},
    homes=((128, 4096, 4096), (128, 4096, 14336)),  # where whole tiles leave SMs idle
    contains={"A16": ("HGMMA", "UTMALDG", "UBLKCP", "SYNCS", "USETMAXREG", "ACQBULK")},
    forbids={"A16": ("IMMA", "HMMA", "LDGSTS", "LDSM")},
)
