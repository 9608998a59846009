"""The kernel computes and never writes: a refactoring lost its last line. C keeps the NaN that it
was filled with, and the checker calls it right. It asked whether any error is *larger* than the
limit, and every comparison with NaN is false. Ask whether every error is *within* the limit, or
look for NaN first. Fill C with NaN, too: zeros, or the right result of the last run, would hide
the bug."""

from __future__ import annotations

from numba import cuda, float32

from steps.learn.pitfalls.exhibit import Pitfall, product
from steps.learn.pitfalls.right import q4_0


@cuda.jit
def wrong(w, q, d, s, c):
    n, m = cuda.grid(2)
    if m >= c.shape[0] or n >= c.shape[1]:
        return
    total = float32(0)
    for b in range(d.shape[1]):
        total += q4_0(w, q, d, s, n, m, b)
    # <- c[m, n] = total


PITFALL = Pitfall(
    number=11,
    title="a checker that NaN passes",
    story=__doc__,
    wrong=product(wrong),
    golden=float("nan"),
    caught_by=("golden value", "nan", "exact", "bound", "nmse"),
)
