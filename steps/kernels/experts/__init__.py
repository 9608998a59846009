"""Mixtures of experts: one launch multiplies every token by the experts that its router chose.

contract.py     what the two kernels take and hand over
few.py          few tokens: the stream of weights of step 18, each expert's found through ids
gates.py        silu(gate) * up, and the clamped gate of gpt-oss, at the end of a product
weighted.py     the weighted sum over a token's experts
"""
