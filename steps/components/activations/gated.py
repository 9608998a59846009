"""The pass before a product of silu(gate) * up, the feed-forward input of a Llama block.

Without it a kernel would read gates and ups and write x, and a pass would read x and write it in
order. This kernel reads and writes each once. It is the pass of `reorder`, which step 11 teaches.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import cuda, float32, uint16, uint32

from steps.components.activations.reorder import order_kernel
from steps.instructions import floats_to_halves, half_to_float, load_u32x4
from steps.instructions.define import ptx

LOG2_E: Final = float32(math.log2(math.e))


@ptx("ex2.approx.ftz.f32 $0, $1;", returns=float32, takes=(float32,))
def exp2(x):
    """2^x, off by 2^-22 of itself at most (PTX ISA, ex2). MUFU.EX2."""
    with np.errstate(over="ignore", under="ignore"):
        return np.exp2(np.float32(x))


@ptx("rcp.approx.ftz.f32 $0, $1;", returns=float32, takes=(float32,))
def reciprocal(x):
    """1 / x, off by one last place at most (PTX ISA, rcp). MUFU.RCP."""
    with np.errstate(divide="ignore"):
        return np.float32(1) / np.float32(x)


@cuda.jit(device=True, forceinline=True)
def silu_times(gate, up):
    """gate / (1 + e^-gate) * up."""
    return gate * reciprocal(float32(1) + exp2(-LOG2_E * gate)) * up


@cuda.jit(device=True, forceinline=True)
def two_gated(gates, ups):
    """The same of two float16 in a word each, rounded to float16."""
    low = silu_times(half_to_float(uint16(gates)), half_to_float(uint16(ups)))
    high = silu_times(half_to_float(uint16(gates >> 16)), half_to_float(uint16(ups >> 16)))
    return uint32(floats_to_halves(low, high))


@cuda.jit(device=True, forceinline=True)
def eight_gated(gates, ups):
    first, second = two_gated(gates[0], ups[0]), two_gated(gates[1], ups[1])
    return first, second, two_gated(gates[2], ups[2]), two_gated(gates[3], ups[3])


@cuda.jit(device=True, forceinline=True)
def sixteen_gated(a, offset):
    """Of 16 gates from `offset` on, and ups as many columns further as there are of either."""
    beside = offset + a.shape[1] // 2
    gates, more_gates = load_u32x4(a, offset), load_u32x4(a, offset + 8)
    ups, more_ups = load_u32x4(a, beside), load_u32x4(a, beside + 8)
    return eight_gated(gates, ups), eight_gated(more_gates, more_ups)


gated_to_chunks: Final = order_kernel(sixteen_gated, 2)
"""Of float16 [M, 2 K], K gates and then K ups, at a multiple of 16 bytes: silu(gate) * up, computed
in float32 and rounded to float16, in order; all token_scales[M] are 1."""
