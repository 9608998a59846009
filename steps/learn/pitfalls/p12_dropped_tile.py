"""The grid has M // TILE tiles, not ceil(M / TILE), so the last partial tile is never launched.
Every shape that is a multiple of the tile is right, and benchmark shapes are such multiples. C
keeps what it held there: NaN where it was filled so, plausible numbers of the last run where the
buffer is used again. Had C begun as zeros, only the bound and the NMSE (0.51) would say it."""

from __future__ import annotations

from steps.learn.pitfalls.exhibit import Pitfall, product
from steps.learn.pitfalls.right import kernel, q4_0

dropping = product(kernel(q4_0), floor=True)  # <- the kernel is right, the grid is not

PITFALL = Pitfall(
    number=12,
    title="last partial tile dropped",
    story=__doc__,
    wrong=dropping,
    golden=float("nan"),  # 1 x 1 is all partial tile
    caught_by=("golden value", "nan", "exact", "bound", "nmse"),
)
