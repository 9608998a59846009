"""Mixtures of experts: one launch multiplies every token by the experts that its router chose.

    contract.py     what the two kernels take and hand over
    few.py          few tokens: the stream of weights of step 18, each expert's found through ids
    grouping.py     which experts, and which tokens: a list that each thread block of few.py makes
    summed.py       a single token: the sum over its experts in the product
    routing.py      the rows of C in the order of their experts
    many.py         many tokens: one persistent wgmma launch over the tiles of all experts
    sorted_rows.py  A in the order of experts, rounded where it must be
    scatter.py      the end of its tiles: to rows of C anywhere
    gates.py        silu(gate) * up, and the clamped gate of gpt-oss, at the end of a product
    layer.py        a decoder's layer at one token, from attention to the next queries
    weighted.py     else the weighted sum over a token's experts

Lessons 19 and 20 teach the two kernels; results/worklog/experts.md and decoder.md have what was
predicted of each, and measured.
"""
