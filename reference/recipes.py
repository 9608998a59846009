"""Whether the activations that a kernel multiplied are the recipe's: Q8_1, int8, 16-bit floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.limits import FLOAT32_ROUNDOFF
from reference.operands import Q81, Bfloats, Halves, Tokens

Array = np.ndarray[Any, np.dtype[Any]]


def complaint(
    used: Q81 | Halves | Bfloats | Tokens, a: Array, exact: bool = False, rows: Array | None = None
) -> str | None:
    """None if these are what their recipe makes of a[M, K], else a sentence.

    Float16 and bfloat16 are to be the recipe's bit for bit: a product with a power of two is exact,
    and the rounding is the same everywhere. Codes of Q8_1 and int8 may differ from the reference by
    one, in 1e-4 of the values (a GPU divides differently at ties); d by 1e-6, in Q8_1 or by its
    rounding to f16; s by the same from either of its two definitions, the same one throughout. In
    the exact case nothing may differ. `rows` are the tokens these are, if not all of them: what the
    sentence calls them.
    """

    def said(wrong: Array, what: str, got: Array, wanted: Array, more: str = "") -> str:
        """How many are wrong, and the first of them, or the one that is most so."""
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        m, *k = (int(i) for i in at)
        place = ", ".join(map(str, (m if rows is None else rows[m], *k)))
        return (
            f"{np.count_nonzero(wrong)} of {wrong.size} {what} ({place}): got {got[at]:.9g}, "
            f"expected {wanted[at]:.9g}{more}"
        )

    right = type(used).of_values(a)
    if isinstance(used, Halves | Bfloats):
        for name, got, wanted in zip(used.DTYPES, used.arrays, right.arrays, strict=True):
            if (wrong := ~(got == wanted)).any():
                what = f"{used.KIND} activations ({name}) differ from the recipe, the first at"
                return said(wrong, what, got, wanted)
        return None

    for name, array in zip(used.DTYPES, used.arrays, strict=True):
        if not np.isfinite(array).all():
            what = f"{used.KIND} fields {name} are not finite, the first at"
            return said(~np.isfinite(array), what, array, getattr(right, name))
    q, d = right.arrays[0], right.arrays[1].astype(np.float64)
    off = np.abs(used.q.astype(np.int32) - q)
    allowed = 0 if exact else max(1, int(1e-4 * off.size))
    if (off > 1).any() or np.count_nonzero(off) > allowed:
        what = f"{used.KIND} codes differ from the recipe, the most at"
        return said(off, what, used.q, q)
    slack, floor = 0.0 if exact else 1e-6, 0.0
    if isinstance(used, Q81) and not exact:  # rounding to f16: relative, and below its normal range
        slack, floor = slack + 2.0**-11 * (1 + 2.0**-10), 2.0**-25
    if (wrong := ~(np.abs(used.d - d) <= slack * d + floor)).any():
        return said(wrong, f"{used.KIND} scales d are wrong, the first at", used.d, d)
    if isinstance(used, Tokens):
        return None

    x = a.astype(np.float64).reshape(*d.shape, -1)
    sums = {
        "d * sum(q)": d * used.q.reshape(x.shape).sum(axis=-1, dtype=np.int64),
        "sum of values": x.sum(axis=-1),
    }
    floor += (0.0 if exact else 32 * FLOAT32_ROUNDOFF) * np.abs(x).sum(axis=-1)
    misses = {name: ~(np.abs(used.s - s) <= slack * np.abs(s) + floor) for name, s in sums.items()}
    if all(miss.any() for miss in misses.values()):
        name = min(misses, key=lambda key: np.count_nonzero(misses[key]))
        what = "Q8_1 sums s are wrong, the first at block"
        return said(misses[name], what, used.s, sums[name], f" ({name})")
    return None
