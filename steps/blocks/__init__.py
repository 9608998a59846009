"""How a block's bytes become numbers on the GPU: what lessons share.

taught by
step 1    elements.py    one element of any block, from ggml's own bytes
step 2    codes.py       codes, scale and offset of a block of a weight format
step 2    q8_1.py        the pass that quantizes A to Q8_1
step 7    integers.py    fragment-packed tiles as bytes: the operands of int8 tensor cores
step 11   halves.py      fragment-packed tiles as float16
step 19   experts.py     A and ids, of products of experts
step 21   chained.py     two matrices of a lesson that multiplies by both
"""
