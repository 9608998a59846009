"""Products of few tokens: the kernels of steps 17 and 18, and what they share.

cp_async.py     KERNEL of step 17: cp.async rings, a ring for each warp
bulk.py         KERNEL of step 18: bulk copies, launches that overlap
tiles.py        the work of thread blocks and warps, the layout of shared memory, A's pass, and the
                packed tiles of a warp, one after the other
copies.py       A to shared memory, by cp.async or bulk copies, or quantized to Q8_1 on the way
product.py      packed tiles times 16-bit A and times Q8_1 A, with the scales of their blocks
one_token.py    the same times float16 A of one token, which chains of products take
final_sum.py    from the sums of warps to C
low_rank.py     step 18 with a low-rank term, of a LoRA, in the same launch
"""
