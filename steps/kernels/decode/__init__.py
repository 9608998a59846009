"""Products of few tokens, from the tiles of a warp to C. Step 17 teaches this, step 18 bulk copies.

cp_async.py       KERNEL of step 17: cp.async rings, a ring for each warp
bulk.py           KERNEL of step 18: bulk copies, launches that overlap
tiles.py          the work of thread blocks and warps, and where in shared memory things lie
activations.py    A as the kernel takes it: float16, Q8_1, or float32 that it quantizes itself
walk.py           the packed tiles of a warp, one after the other
copies.py         A to shared memory, by cp.async or bulk copies
quantize.py       float32 A to Q8_1 in shared memory, by the warp that multiplies it
block_scales.py   scales and minima of a packed tile as float32
product.py        what both products have in common: two row tiles, and the functions of a warp
product_a16.py    packed tiles times float16 A
product_a8.py     packed tiles times Q8_1 A
products.py       which product a variant has
final_sum.py      from the sums of warps to C
"""
