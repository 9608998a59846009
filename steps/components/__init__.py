"""Device code that several steps use. Each component is taught by the step its docstring names.

unpack/                 weights of a block or of a fragment-packed tile, in registers
activations/            the passes that round or quantize A, and the layouts they write
stream_k.py             the stream-K scheduler
split_k_reduction.py    partial sums and an arrival counter
epilogue/               from accumulators to C: mma.sync, wgmma
wgmma_tiles.py          tile heuristics of the wgmma steps
decode_*.py, bulk_*.py  decode: tile heuristics, products, activations, reduction

Constants that were measured say so; all of them were measured on an H200.
"""
