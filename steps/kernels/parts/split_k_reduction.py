"""Partial sums and an arrival counter: blocks that share a tile of C, and the last adds them up.

A block stores its partial sums, makes them visible to others (`fence`), and counts itself at the
tile's counter. The value before tells how many came earlier. The block that finds all others there
adds up all partial sums, in the order of K, so the result has the same bits in every run. The
counter is set back to zero, as the next launch must find it. No block waits for another.

Step 10 teaches this; the ends of steps 11, 14 and 15 use these functions too.

`poll_and_count_arrival` is inlined by Numba, as if it stood in the kernel: LLVM simplifies a
function before it inlines it, and the code that came of this was longer.
"""

from __future__ import annotations

from numba import cuda, int32

from steps.instructions import fence


@cuda.jit(device=True, forceinline=True)
def count_block_arrival(arrived, counter, before, t):
    """For all threads of a block, which have stored its partial sums: before[0], shared int32, is
    the number of blocks that arrived earlier. The last of them sets the counter back itself."""
    fence()
    cuda.syncthreads()
    if t == 0:
        before[0] = cuda.atomic.add(arrived, counter, 1)
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def poll_and_count_arrival(arrived, counter, others, polls):
    """For one thread, behind a fence: how many arrived earlier. The last to arrive sets the counter
    back.

    The thread asks up to `polls` times whether all `others` are there before it counts itself. So
    blocks that finish together can each be the last at a counter of their own.
    """
    earlier = cuda.atomic.add(arrived, counter, 0 if polls > 0 else 1)
    while polls > 0 and earlier < others:
        polls = int32(polls - 1)
        earlier = cuda.atomic.add(arrived, counter, 0 if polls > 0 else 1)
    if earlier == others:
        arrived[counter] = 0
    return earlier
