"""What becomes of a gate and its up at the end of a product.

    silu       gate / (1 + e^-gate) * up
    clamped    gpt-oss: gate up to 7, up from -7 to 7, gate / (1 + e^(-1.702 gate)) * (up + 1)

A matrix of gates and ups has them in turn, 16 rows of gates and then the same 16 of ups
(`steps.product.experts.gates_and_ups`). So an mma's two row tiles of a pair leave a gate and its up
in the same lane.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import cuda, float32

from steps.instructions.approximate import exp2, reciprocal
from steps.kernels.parts.activations.gated import silu_times

ALPHA: Final = 1.702
LIMIT: Final = 7.0
_EXPONENT: Final = float32(ALPHA * math.log2(math.e))


@cuda.jit(device=True, forceinline=True)
def clamped_times(gate, up):
    """A NaN stays: comparisons with it are false."""
    gate = float32(LIMIT) if gate > float32(LIMIT) else gate
    up = float32(LIMIT) if up > float32(LIMIT) else up
    up = float32(-LIMIT) if up < float32(-LIMIT) else up
    return gate * reciprocal(float32(1) + exp2(-_EXPONENT * gate)) * (up + float32(1))


GATE_OF: Final = {"silu": silu_times, "clamped": clamped_times}
"""Device functions (gate, up) -> value, by name."""


def gated(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The same in float64, of arrays."""
    gate, up = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    alpha = 1.0
    if name == "clamped":
        alpha, gate, up = ALPHA, np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT) + 1
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-alpha * gate)) * up
