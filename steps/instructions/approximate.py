"""Functions that the special function unit approximates in one instruction (MUFU).

They take and return float32; subnormal numbers count as zero. The twins round the exact value, so
the GPU's results may differ from the simulator's in their last places.
"""

import numpy as np
from numba.cuda.types import float32

from steps.instructions.define import ptx


@ptx("rsqrt.approx.ftz.f32 $0, $1;", returns=float32, takes=(float32,))
def rsqrt(x):
    """1 / sqrt(x), off by 2^-22.9 of itself at most (PTX ISA, rsqrt). MUFU.RSQ."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.float32(1) / np.sqrt(np.float32(x))


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
