"""Activation passes: A rounded to float16, or quantized to Q8_1 or int8, in the steps' layouts.

step
1       layouts.py    what a step may read A as, and the launch that makes it; later steps add some
2       q8_1.py       float32 A to Q8_1; from step 5 on K-outermost, from step 7 on in MMA_ORDER
11      rows.py       rows rounded to float16; from step 15 on quantized to int8
11      sources.py    how passes read A of any dtype
11      gated.py      silu(gate) * up, as the float16 rows of a product
"""
