"""From accumulators to C: partial sums of K added up, scales taken back, edges respected.

taught by
step 8     bias.py         a layer's bias, added before C is rounded
step 11    mma.py          sums of mma.sync to C: straight (step 7), or through shared memory
step 12    half_tile.py    sums of a warpgroup to C; 16 bits pass through shared memory, transposed
step 14    wgmma.py        the same while the ring is full; the end of a tile that blocks share
"""
