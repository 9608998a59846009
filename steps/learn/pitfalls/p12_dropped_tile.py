"""The grid has M // TILE tiles, not ceil(M / TILE), so the last partial tile is never launched.
Every shape that is a multiple of the tile is right, and benchmark shapes are such multiples. C
keeps what it held there: NaN where it was filled so, plausible numbers of the last run where the
buffer is used again."""

from __future__ import annotations

import numpy as np

from reference import Q81, Problem, check
from steps.learn.pitfalls.exhibit import SHAPE, Pitfall, product
from steps.learn.pitfalls.right import kernel, q4_0

dropping = product(kernel(q4_0), floor=True)  # <- the kernel is right, the grid is not


def aside() -> str:
    """What the checks say where C began as zeros."""
    problem = Problem(*SHAPE, "q4_0", "normal")
    q81 = Q81.of_values(problem.a)
    verdict = check(np.nan_to_num(dropping(problem.blocks, q81)), problem, "A8", q81)
    return (
        f"Had C begun as zeros: NMSE {verdict.nmse_same_operands:.2g}, "
        f"caught by {' and '.join(verdict.failures)}."
    )


PITFALL = Pitfall(
    number=12,
    title="last partial tile dropped",
    story=__doc__,
    wrong=dropping,
    golden=float("nan"),  # 1 x 1 is all partial tile
    caught_by=("golden value", "nan", "exact", "bound", "nmse"),
    aside=aside,
)
