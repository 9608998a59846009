"""Unpacking weights in a kernel: codes and scales of every storage format, one file per idea.

step
1       elements.py          one element of any block, from ggml's own bytes
2       blocks.py            codes, scale and offset of a block of 32
7       codes.py             fragment-packed tiles: codes as bytes
11      halves.py            ... as float16 weights
11      bfloats.py           ... as bfloat16 weights
11      storage_formats.py   packed tiles of MXFP4 and of formats with a scale for 16 elements
15      int8.py              requantized to int8, by one float16 multiply-add
17      offset_numbers.py    codes as numbers with an offset, their scales left to the sums
"""
