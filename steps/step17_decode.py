"""Step 17: decode - a handful of tokens, where all that counts is how fast the weights arrive.

What is new
    A thread block has a few *row tiles* of W (16 rows, as an mma has), and its warps share K. Each
    warp streams its weights through a ring of *slots*, stages in shared memory that no other warp
    touches. A slot holds two packed tiles: a *pair* of row tiles, the same 128 K. A warp issues the
    copies of its first slots before anything else, and refills a slot as soon as it has multiplied
    it. No barrier of the thread block stops the stream: warps meet once, when their sums are added
    up. A warp in time:

        slot 0   [...copy...][multiply][.....copy...........][multiply][.....copy
        slot 1    [...copy............][multiply][.....copy...........][multiply][..
        A          [..copy..]
        slot 2      [...copy....................][multiply][.....copy...........][multiply]

    A comes to shared memory in one of three ways (`Place` in kernels.decode.tiles): all of the
    warp's part is copied once and *kept*; or its next 128 K lie *in slots*, beside the weights they
    meet; or the warp has *quantized* it itself, where A is float32 and has four tokens at most.
    Family A16 multiplies A of 16 bits as it is: one LOP3 makes a float16 of a code, such as 1024 +
    code, and the scale of a block multiplies its sum. Family A8 multiplies Q8_1 with the integer
    mma. Device functions of the kernel, and the files of kernels.decode that have them:

        own_part, start, advance   the packed tiles that a warp reads, in order   tiles
        places, multiply, finish   two packed tiles times 128 K of A              product
        copy; load, quantize       A to shared memory                             copies
        store_sums, write          sums of all warps, added up, to C              final_sum
Why it should help
    33 MB of Q4_0 at 4.2 TB/s take 7.9 us, and that is all. In step 16 a warp waits for its loads
    half of the time; here copies are always in flight. For a packed tile of 2048 weights a warp
    issues some 125 instructions, half of what an SM could while the tile arrives. With a start, an
    end and 28 KB of A for each thread block expect 10.4 us: 1.1 times step 16, 27 times step 2.
What it costs
    Every thread block copies all of A: 28 KB of float16 beside 260 KB of weights. Rings take so
    much shared memory that a block has an SM to itself. At most 16 tokens a thread block.
Machine code
    LDGSTS of weights before the first of A, HMMA or IMMA, and no BAR.SYNC in the loop.
Prerequisites
    Steps 7 (mma, packed tiles), 8 (ldmatrix) and 9 (cp.async). The kernel is
    steps/kernels/decode/cp_async.py. Taught here: kernels.decode.tiles and product. The other
    files of the table can wait.
"""

from steps.contract import Step
from steps.kernels.decode.cp_async import KERNEL

STEP = Step.of(
    KERNEL,
    name="step17_decode",
    branch="decode",
    parents={"A8": 16, "A16": 16},
    diff_from=7,
    contains={
        "A8": ("IMMA", "LDGSTS.E.BYPASS.128", "LDGDEPBAR"),
        "A16": ("HMMA.16816.F32", "LDGSTS.E.BYPASS.128", "LDGDEPBAR"),
    },
    forbids={"A8": ("HMMA", "LDL", "STL"), "A16": ("IMMA", "LDL", "STL")},
)
