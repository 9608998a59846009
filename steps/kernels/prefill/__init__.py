"""Products of many tokens: kernels of mma.sync and wgmma, their tiles and rings.

taught by
step 10   mma_int8.py            KERNEL: int8 tensor cores, stream-K
step 11   mma_float16.py         KERNEL: float16 tensor cores, split-K where tiles are few
step 13   wgmma_specialized.py   KERNEL: wgmma, a tile a thread block, a producer and consumers
step 14   wgmma_float16.py       KERNEL: wgmma, persistent blocks
step 15   wgmma_int8.py          KERNEL: int8 wgmma on requantized weights ("fast")
step 8    shared_stage.py        a stage of int8 operands in shared memory, and its copies
step 8    warp_tile.py           the tile of a warp: fragments, products, scales
step 10   stream_k_tiles.py      tile heuristics of mma_int8
step 11   row_tiles.py           a stage of row-major A, swizzled, and packed tiles
step 11   mma_tiles.py           tile heuristics of mma_float16
step 12   wgmma_products.py      64 K of a tile by wgmma
step 13   ring.py                an mbarrier ring between a producer and consumers
step 13   stage_copies.py        the copies of a stage: boxes by tensor map, weights by bulk copies
step 14   wgmma_tiles.py         tile heuristics of the wgmma kernels
"""
