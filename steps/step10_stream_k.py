"""Step 10: stream_k - every thread block multiplies the same share, whatever the shape.

What is new
    The tiles of C, each with its steps along K, are laid end to end, and every block takes an equal
    range of that line. A range may begin and end within a tile. Then several blocks are
    *contributors* to the tile: each stores its partial sums and counts itself at the tile's
    counter, and the last to arrive adds up all of them. Five blocks, four tiles of 16 steps:

                   tile 0          tile 1          tile 2          tile 3
        steps |---------------|---------------|---------------|---------------|
        block 0000000000000111111111111122222222222223333333333333444444444444
        added up by last of 0, 1    last of 1, 2    last of 2, 3    last of 3, 4

    It adds in the order of K, whoever was last: the same bits in every run. No block waits.
Why it should help
    With 128 tokens and 4096 features step 9 has 64 tiles for the 264 blocks that 132 SMs hold: half
    of the SMs are idle, the others have one block each. Here 256 blocks share them. At K = 14336
    that is 28 steps of 2840 cycles, at K = 4096, in smaller tiles, 16 of 1580; and 11000 or 6000
    cycles for partial sums, 6000 for both ends. Predicted: 54 us where step 9 takes 109, 2.0x, and
    20.7 where it takes 33.7, 1.6x. With 512 tokens 256 whole tiles keep 97 % of 264 blocks busy.
What it costs
    Scratch memory for two tiles a block, which its range begins and ends in; traffic to the L2.
Machine code
    As step 9, and a fence (MEMBAR) and an atomic (ATOMG) for the counter.
Prerequisites
    Step 9. The kernel is steps/kernels/prefill/mma_int8.py. Taught here: kernels.parts.stream_k
    (which block does what) and kernels.parts.split_k_reduction (the counter). griddepcontrol_wait
    returns when the launch before this one, the activation pass, has ended
    (steps/instructions/memory.py). Weights do not depend on it, so they are copied before.
"""

from steps.contract import Step
from steps.kernels.prefill.mma_int8 import KERNEL

STEP = Step.of(
    KERNEL,
    name="step10_stream_k",
    branch="int8",
    parents={"A8": 9},
    homes=((128, 4096, 4096), (128, 4096, 14336)),  # where whole tiles leave SMs idle
    contains={"A8": ("IMMA", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "BAR.SYNC", "MEMBAR")},
    forbids={"A8": ("IDP",)},
)
