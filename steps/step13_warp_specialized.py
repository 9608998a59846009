"""Step 13: warp specialization - some warps only load, the others only multiply.

What is new
    In step 12 every warp issues copies, waits for everybody's at a barrier, and multiplies. Here
    one *producer* thread issues all copies, into a ring of up to eight shared-memory stages, and
    two *consumer* warpgroups multiply. Each stage has two *mbarriers*, words of shared memory that
    count arrivals and bytes: `full` completes (*) when the stage's copies have arrived, `empty`
    when all consumers are done with it. Producer and consumers meet nowhere else. With four stages:

        stage        0     1     2     3     0         1            2
        producer    [load][load][load][load][load]wait[load] wait  [load] wait ...
        full              *     *     *     *     *         *            *
        consumer 0        [multiply 0 ][multiply 1 ][multiply 2 ][multiply 3 ] ...
        consumer 1          [multiply 0 ][multiply 1 ][multiply 2 ][multiply 3 ] ...
        empty                            *            *            *            *

    A copy is one instruction for kilobytes. The weights of a stage lie in one piece of memory: one
    bulk copy. The tokens are two boxes of 64 K, which the copy engine cuts out of row-major A by a
    tensor map: it computes addresses, swizzles, and writes zeros beyond the edges of A.

        a stage of 128 K    box of K 0..63      bm tokens x 128 bytes, swizzled    tensor_copy
                            box of K 64..127    the same                           tensor_copy
                            weights             8 fragment-packed tiles            bulk_copy

    Consumers need registers for sums and weights, the producer needs almost none: `setmaxnreg`
    moves them. A block begins with 168 a thread. The producer's warpgroup keeps 40 of them, and
    each consumer's gets 232.
Why it should help
    In step 12 a thread issues 11 copies of 16 bytes a stage, 50 of its 226 instructions, and at
    each stage's barrier the tensor cores run dry for some 480 cycles. Here a warp of a consumer
    issues 160, and its next stage has arrived: five stages ahead are 5000 cycles, and the L2
    answers in 1500. (512,4096,4096) is one tile of 128 x 128 for each SM, 32 stages of 1024 cycles:
    19 us at 1.75 GHz. To that come 15 %, as two warps of a scheduler do not hide each other's
    latencies, 5 us for both ends of the tile and 3 us between launches: expect 30.5 us, 1.2x.
What it costs
    A block takes all registers and most of the shared memory of an SM, so nothing hides the
    beginning and the end of its tile. 128 of its 384 threads never multiply.
Machine code
    UTMALDG (tensor_copy), UBLKCP (bulk_copy) and SYNCS (mbarriers) instead of LDGSTS; HGMMA in a
    loop without loads from global memory; USETMAXREG in both roles.
Prerequisites
    Step 12 (wgmma, descriptors, the end of a tile). The kernel is
    steps/kernels/prefill/wgmma_specialized.py; kernels.prefill.wgmma_products has step 12's
    `multiply`, with the loads of weights apart. steps/instructions/tensor_map.py has the picture of
    a box. Taught here: kernels.prefill.ring (mbarriers, and why one bit of parity is enough).
"""

from steps.contract import Step
from steps.kernels.prefill.wgmma_specialized import KERNEL

STEP = Step.of(
    KERNEL,
    name="step13_warp_specialized",
    branch="float16",
    parents={"A16": 12},
    contains={"A16": ("HGMMA", "UTMALDG", "UBLKCP", "SYNCS", "USETMAXREG")},
    forbids={"A16": ("IMMA", "HMMA", "LDGSTS", "LDSM")},
)
