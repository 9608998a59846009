"""Unpacking weights in a kernel: codes and scales of packed tiles, one file per idea.

taught by
step 7     codes.py             codes as bytes
step 11    halves.py            float16 weights
step 11    storage_formats.py   packed tiles of MXFP4 and of formats with a scale for 16 elements
step 15    int8.py              requantized to int8, by one float16 multiply-add
step 17    offset_numbers.py    codes as numbers with an offset, their scales left to the sums
"""
