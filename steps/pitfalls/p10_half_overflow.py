"""ggml's 36-byte Q8_1 block keeps d and s in f16, which ends at 65504. s is a sum of 32 values:
with activations in the thousands it overflows to infinity, and infinity times an offset is
infinity, or NaN where two of them meet. d follows at |x| > 127 * 65504. Nothing happens on
ordinary data; models with a few very large channels have turned into NaN this way. The cure:
where the layout is our own, s and d are float32."""

from __future__ import annotations

import numpy as np

from reference import Q81
from steps.pitfalls.exhibit import SHAPE, Array, Loud, Pitfall, product
from steps.pitfalls.right import w4a8


def in_half(a: Array) -> Q81:
    """Q8_1 of float32[M, K] with d and s squeezed through f16 and no look at their range."""
    q81 = Q81.of_values(a)
    with np.errstate(over="ignore"):
        d, s = (x.astype(np.float16).astype(np.float32) for x in (q81.d, q81.s))
    return Q81(q81.q, d, s)


PITFALL = Pitfall(
    number=10,
    title="f16 overflow of s or d",
    story=__doc__,
    format="q4_0",
    wrong=product(w4a8),
    right=product(w4a8),
    golden=141.0,  # right: s = -8 fits
    problems=(Loud(*SHAPE, "q4_0", "normal"),),
    activations=in_half,
    caught_by=("nan", "activations"),
)
