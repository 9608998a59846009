"""A function that the special function unit approximates in one instruction (MUFU).

It takes and returns float32; subnormal numbers count as zero. The twin rounds the exact value, so
the GPU's result may differ from the simulator's in its last places. Two more are where they were
needed first: `exp2` and `reciprocal` of `steps.kernels.parts.activations.gated`.
"""

import numpy as np
from numba.cuda.types import float32

from steps.instructions.define import ptx


@ptx("rsqrt.approx.ftz.f32 $0, $1;", returns=float32, takes=(float32,))
def rsqrt(x):
    """1 / sqrt(x), off by 2^-22.9 of itself at most (PTX ISA, rsqrt). MUFU.RSQ."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.float32(1) / np.sqrt(np.float32(x))
