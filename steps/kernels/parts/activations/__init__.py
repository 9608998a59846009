"""Activation passes: A rounded to float16, or quantized to int8, in the layouts that kernels read.

taught by
step 1     layouts.py    what a kernel may read A as, and the launch that makes it
step 11    rows.py       rows rounded to float16; from step 15 on quantized to int8
step 14    beside.py     of many bfloat16 rows most, by the product itself, beside its tiles
step 11    sources.py    how passes read A of any dtype
step 11    gated.py      silu(gate) * up, as the float16 rows of a product

The pass that makes Q8_1 is a lesson's own: `steps.blocks.q8_1`.
"""
