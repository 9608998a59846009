"""ggml's quantized blocks: their bytes, their values, and their pictures.

    from qformats import FORMATS, quantize, dequantize
    blocks = quantize(w, "q4_0")      # float32[N, K] -> block_q4_0[N, K // 32]
    w_again = dequantize(blocks)      # float32[N, K]

`python -m qformats draw q5_1` shows a block bit by bit. `WEIGHT_FORMATS` are what kernels take,
`FILE_FORMATS` the others that GGUF files hold. `qformats.repack` rearranges blocks for kernels, and
`qformats.storage` says what kernels read of each format. All of it needs NumPy only;
`qformats.gguf_file`, which nothing here imports, also needs gguf. The device code that unpacks
blocks is in `steps.kernels.parts.weights`.
"""

from qformats.blocks import (
    BLOCK,
    SUPER,
    block_iq4_nl,
    block_mxfp4,
    block_q2_k,
    block_q3_k,
    block_q4_0,
    block_q4_1,
    block_q4_k,
    block_q5_0,
    block_q5_1,
    block_q5_k,
    block_q6_k,
    block_q8_0,
    block_q8_1,
)
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
    "block_iq4_nl",
    "block_mxfp4",
    "block_q2_k",
    "block_q3_k",
    "block_q4_0",
    "block_q4_1",
    "block_q4_k",
    "block_q5_0",
    "block_q5_1",
    "block_q5_k",
    "block_q6_k",
    "block_q8_0",
    "block_q8_1",
    "dequantize",
    "format_named",
    "format_of",
    "quantize",
]
