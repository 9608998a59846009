"""ggml's 36-byte Q8_1 block stores d and s as float16, whose largest value is 65504. s is a sum of
32 values: activations in the thousands overflow it to infinity. Infinity times an offset is
infinity, and two of them can make NaN. d overflows at |x| > 127 * 65504. Ordinary data never does
this; models with a few very large channels have turned into NaN this way. Cure: our own layouts
store s and d as float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from reference import Q81, Problem
from steps.learn.pitfalls.exhibit import RIGHT, SHAPE, Array, Pitfall


@dataclass(frozen=True)
class LargeActivations(Problem):
    """A problem whose activations are 2^14 times larger: the sums of a block overflow float16."""

    @cached_property
    def a(self) -> Array:
        large: Array = super().a * np.float32(2**14)
        large.setflags(write=False)
        return large


def in_half(a: Array) -> Q81:
    """Q8_1 of float32[M, K] with d and s rounded to float16, without a look at their range."""
    q81 = Q81.of_values(a)
    with np.errstate(over="ignore"):
        d, s = (x.astype(np.float16).astype(np.float32) for x in (q81.d, q81.s))
    return Q81(q81.q, d, s)


PITFALL = Pitfall(
    number=10,
    title="float16 overflow of s or d",
    story=__doc__,
    wrong=RIGHT["q4_0"],
    golden=141.0,  # right: s = -8 fits
    problems=(LargeActivations(*SHAPE, "q4_0", "normal"),),
    activations=in_half,
    caught_by=("nan", "activations"),
)
