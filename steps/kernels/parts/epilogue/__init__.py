"""From accumulators to C: partial sums of K added up, scales taken back, edges respected.

step
8       bias.py         a layer's bias, added before C is rounded
8-10    write.py        sums of mma.sync straight to float32 C, as in step 7's own kernel
11      mma.py          sums of mma.sync through shared memory, split-K partial sums, C of any dtype
12      half_tile.py    sums of a warpgroup to C; 16 bits pass through shared memory, transposed
14      sums_to_c.py    the same while the ring is full: an area for each warpgroup
14      wgmma.py        the end of a tile that several blocks share
"""
