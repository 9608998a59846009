"""ggml's quantized blocks: their bytes, their values, and their pictures.

    from qformats import FORMATS, quantize, dequantize
    blocks = quantize(w, "q4_0")      # float32[N, K] -> block_q4_0[N, K // 32]
    w_again = dequantize(blocks)      # float32[N, K]

`python -m qformats draw q5_1` shows a block bit by bit. `WEIGHT_FORMATS` are what every step takes,
`FILE_FORMATS` the others that GGUF files hold. All of it needs NumPy only; `gguf_file`, which
nothing here imports, also needs gguf.

    blocks.py      the bytes of a block, as NumPy dtypes
    format.py      the contract of a format
    codec.py       formats whose levels are linear in the code; quantize, dequantize
    codebook.py    MXFP4, IQ4_NL, IQ4_XS, NVFP4, Q1_0, TQ2_0, whose codes index a table
    kquants.py     the K-quants
    draw.py        pictures of blocks
    gguf_file.py   the tensors of a GGUF file, memory-mapped
    terminal.py    what files say, as a terminal may show it
    storage.py     what kernels read of each format
    repack/        blocks rearranged for kernels
    threads.py     rows on several cores

The device code that unpacks blocks is in `steps.blocks` and `steps.kernels.parts.weights`.
"""

from qformats.blocks import BLOCK, SUPER, block_q8_1
from qformats.codec import (
    FILE_FORMATS,
    FORMATS,
    WEIGHT_FORMATS,
    Format,
    dequantize,
    format_named,
    format_of,
    quantize,
)

__all__ = [
    "BLOCK",
    "FILE_FORMATS",
    "FORMATS",
    "SUPER",
    "WEIGHT_FORMATS",
    "Format",
    "block_q8_1",
    "dequantize",
    "format_named",
    "format_of",
    "quantize",
]
