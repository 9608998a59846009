"""From accumulators to C: partial sums of K added up, scales taken back, edges respected.

taught by
step 8     bias.py         a layer's bias, added before C is rounded
step 7     write.py        sums of mma.sync straight to float32 C
step 11    mma.py          sums of mma.sync through shared memory, split-K, C of any dtype
step 12    half_tile.py    sums of a warpgroup to C; 16 bits pass through shared memory, transposed
step 14    sums_to_c.py    the same while the ring is full: an area for each warpgroup
step 14    wgmma.py        the end of a tile that several blocks share
"""
