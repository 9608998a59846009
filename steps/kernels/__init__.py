"""Device code that several steps use. Each component is taught by the step its docstring names.

step
1-17    unpack/                 weights of a block or of a fragment-packed tile, in registers
2-15    activations/            the passes that round or quantize A, and the layouts they write
8       shared_stage.py         a stage of int8 operands in shared memory, and how threads copy them
8       warp_tile.py            the tile of a warp on int8 tensor cores: fragments, products, scales
10      stream_k.py             the stream-K scheduler
10      stream_k_tiles.py       tile heuristics of step 10
10      split_k_reduction.py    partial sums and an arrival counter
11      row_tiles.py            a stage of row-major A, swizzled, and packed tiles
11      mma_tiles.py            tile heuristics of step 11
7-14    epilogue/               from accumulators to C: mma.sync, wgmma
12      wgmma_products.py       64 K of a tile by wgmma, float16 or bfloat16
13      ring.py                 an mbarrier ring between a producer and consumers
13      stage_copies.py         the copies of a stage: boxes by tensor map, weights by bulk copies
14      wgmma_tiles.py          tile heuristics of steps 13 to 15
17      decode/                 decode: which tiles a warp reads, products, A, the final sum

Constants that were measured say so; all of them were measured on an H200.
"""
