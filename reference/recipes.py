"""Whether the activations that a kernel multiplied are the recipe's: Q8_1, int8, 16-bit floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.limits import FLOAT32_ROUNDOFF
from reference.operands import Q81, Bfloats, Halves, Tokens

Array = np.ndarray[Any, np.dtype[Any]]


def check_activations(
    q81: Q81, a: Array, exact: bool = False, rows: Array | None = None
) -> str | None:
    """None if q81 is a[M, K] in Q8_1, else a sentence.

    Codes may differ from the reference by one, in 1e-4 of the values (a GPU divides differently at
    ties); d by 1e-6, or by its rounding to f16; s by the same from either of its two definitions,
    the same one throughout. In the exact case nothing may differ. `rows` are the tokens these are,
    if not all of them: what the sentence calls them.
    """

    def at(where: Array) -> tuple[int, int, str]:
        """The first place marked: its indices, and its name."""
        i, j = np.unravel_index(int(np.argmax(where)), where.shape)
        return int(i), int(j), f"({i if rows is None else rows[i]}, {j})"

    for name in ("d", "s"):
        array = getattr(q81, name)
        if not np.isfinite(array).all():
            m, b, place = at(~np.isfinite(array))
            return (
                f"{np.count_nonzero(~np.isfinite(array))} of {array.size} Q8_1 fields {name} are "
                f"not finite, the first at block {place}: {array[m, b]}"
            )
    right = Q81.of_values(a)
    off = np.abs(q81.q.astype(np.int32) - right.q)
    allowed = 0 if exact else max(1, int(1e-4 * off.size))
    if (off > 1).any() or np.count_nonzero(off) > allowed:
        m, k, place = at(off)
        return (
            f"{np.count_nonzero(off)} of {off.size} Q8_1 codes differ from the recipe, the most at "
            f"{place}: got {q81.q[m, k]}, expected {right.q[m, k]}"
        )
    half, tiny = 2.0**-11, 2.0**-25  # rounding to f16: relative, and below its normal range
    slack = 0.0 if exact else half * (1 + 2.0**-10) + 1e-6
    floor = 0.0 if exact else tiny
    d = right.d.astype(np.float64)
    wrong = ~(np.abs(q81.d - d) <= slack * d + floor)
    if wrong.any():
        m, b, place = at(wrong)
        return (
            f"{np.count_nonzero(wrong)} of {wrong.size} Q8_1 scales d are wrong, the first at "
            f"block {place}: got {q81.d[m, b]:.9g}, expected {d[m, b]:.9g}"
        )
    x = a.astype(np.float64).reshape(*d.shape, -1)
    sums = {
        "d * sum(q)": d * q81.q.reshape(x.shape).sum(axis=-1, dtype=np.int64),
        "sum of values": x.sum(axis=-1),
    }
    rounding = 0.0 if exact else 32 * FLOAT32_ROUNDOFF
    misses = {
        name: ~(np.abs(q81.s - s) <= slack * np.abs(s) + rounding * np.abs(x).sum(axis=-1) + floor)
        for name, s in sums.items()
    }
    if all(miss.any() for miss in misses.values()):
        name = min(misses, key=lambda key: np.count_nonzero(misses[key]))
        m, b, place = at(misses[name])
        return (
            f"{np.count_nonzero(misses[name])} of {d.size} Q8_1 sums s are wrong, the first at "
            f"block {place}: got {q81.s[m, b]:.9g}, expected {sums[name][m, b]:.9g} ({name})"
        )
    return None


def check_tokens(
    tokens: Tokens, a: Array, exact: bool = False, rows: Array | None = None
) -> str | None:
    """None if these are a[M, K] in int8, one scale a token, else a sentence; as `check_activations`
    it lets 1e-4 of the codes differ by one, and d by 1e-6, nothing in the exact case. Sums of codes
    must be those of these very codes."""
    right = Tokens.of_values(a)
    d = right.d.astype(np.float64)
    wrong = ~(np.abs(tokens.d - d) <= (0.0 if exact else 1e-6) * d)
    if wrong.any():
        m = int(np.argmax(wrong))
        return (
            f"{np.count_nonzero(wrong)} of {wrong.size} scales of tokens are wrong, the first of "
            f"token {m if rows is None else rows[m]}: got {tokens.d[m]:.9g}, expected {d[m]:.9g}"
        )
    off = np.abs(tokens.q.astype(np.int32) - right.q)
    allowed = 0 if exact else max(1, int(1e-4 * off.size))
    if (off > 1).any() or np.count_nonzero(off) > allowed:
        m, k = (int(i) for i in np.unravel_index(int(np.argmax(off)), off.shape))
        return (
            f"{np.count_nonzero(off)} of {off.size} int8 activations differ from the recipe, the "
            f"most at ({m if rows is None else rows[m]}, {k}): got {tokens.q[m, k]}, expected "
            f"{right.q[m, k]}"
        )
    return None


def check_rounded(rounded: Halves | Bfloats, a: Array, rows: Array | None = None) -> str | None:
    """None if these are a[M, K] in float16 or bfloat16, bit for bit, else a sentence; `rows` as
    above.

    A product with a power of two is exact, and the rounding is the same everywhere.
    """
    right, halves = type(rounded).of_values(a), isinstance(rounded, Halves)
    kind = "float16" if halves else "bfloat16"
    for name in ("factor", "h") if halves else ("b",):
        got, wanted = getattr(rounded, name), getattr(right, name)
        wrong = ~(got == wanted)
        if wrong.any():
            m, *k = (int(i) for i in np.argwhere(wrong)[0])
            place = ", ".join(map(str, (m if rows is None else rows[m], *k)))
            return (
                f"{np.count_nonzero(wrong)} of {wrong.size} {kind} activations ({name}) differ "
                f"from the recipe, the first at ({place}): got {got[(m, *k)]:.9g}, expected "
                f"{wanted[(m, *k)]:.9g}"
            )
    return None
