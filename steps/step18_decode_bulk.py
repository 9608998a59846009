"""Step 18: decode on Hopper - bulk copies, and launches that overlap.

What is new
    For each slot of step 17's ring thirty-two lanes issue five copies each. Here one lane issues
    one bulk copy, and an mbarrier completes when it has arrived. A comes by a copy for each token.
    Weights do not depend on the launch before. So a thread block issues their copies as soon as it
    has an SM, and only then waits for that launch to end:

        make mbarriers | weights of slot 0 | wait for the launch before | A | other slots | product
                         one copy            griddepcontrol.wait          a copy each

    The first MMA needs A, and A's load queues behind every weight copy already issued, on any SM.
    So only one slot is filled before A, and a ring has few slots. All else is as in step 17.
Why it should help
    Between two launches of step 17 memory is idle: during the last sums, the start of new thread
    blocks, their first instructions and the latency of the first weights. Here the last two pass
    while other SMs still work. 33 MB at 4.1 TB/s take 8.1 us. With 0.8 us until A and the first
    weights are here, expect 8.9 us, 1.17 times faster.
What it costs
    Hopper or later.
Machine code
    UBLKCP of weights before ACQBULK, the wait; HMMA or IMMA; in the loop no barrier but SYNCS.
Prerequisites
    Steps 17, 13 (bulk copies, mbarriers) and 14 (launches that overlap). The kernel is
    steps/kernels/decode/bulk.py; kernels.decode.copies has the copies of A.
"""

from steps.contract import Step
from steps.kernels.decode.bulk import KERNEL

STEP = Step.of(
    KERNEL,
    name="step18_decode_bulk",
    branch="decode",
    parents={"A8": 17, "A16": 17},
    contains={"A8": ("IMMA", "UBLKCP", "SYNCS"), "A16": ("HMMA.16816.F32", "UBLKCP", "SYNCS")},
    forbids={"A8": ("HMMA", "LDGSTS", "LDL", "STL"), "A16": ("IMMA", "LDGSTS", "LDL", "STL")},
)
