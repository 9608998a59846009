"""Device code that several steps use. Each component is taught by the step its docstring names.

unpack/                 weights of a block or of a fragment-packed tile, in registers
activations/            the passes that round or quantize A, and the layouts they write
shared_stage.py         a stage of int8 operands in shared memory, and who copies what
warp_tile.py            the tile of a warp on int8 tensor cores: fragments, products, scales
stream_k.py             the stream-K scheduler
stream_k_tiles.py       tile heuristics of step 10
split_k_reduction.py    partial sums and an arrival counter
epilogue/               from accumulators to C: mma.sync, wgmma
ring.py                 an mbarrier ring between a producer and consumers
stage_copies.py         the copies of a stage: boxes by tensor map, weights by bulk copies
wgmma_products.py       64 K of a tile by wgmma, float16 or bfloat16
wgmma_tiles.py          tile heuristics of the wgmma steps
decode_*.py, bulk_*.py  decode: tile heuristics, products, activations, reduction

Constants that were measured say so; all of them were measured on an H200.
"""
