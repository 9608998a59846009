"""The golden case: one block of weights against one of activations, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qformats import BLOCK
from reference.exact import pack_block
from reference.operands import Q81

Array = np.ndarray[Any, np.dtype[Any]]


def frozen(array: Array) -> Array:
    """The array, read-only from here on."""
    array.setflags(write=False)
    return array


@dataclass(frozen=True)
class Golden:
    """One block against one block, with the result worked out by hand.

    a        float32[1, 32], = q * d of the activation block
    blocks   structured[1, 1] of the weight format
    q81      the activation block as planes (q int8[1, 32], d and s float32[1, 1])
    value    what every kernel of either family must return, exactly

    Quantizing `a` anew does not give `q81` (its largest element is 8, so d would be 8 / 127): an
    A8 step is given these bits, an A16 step is given `a`.
    """

    format: str
    a: Array
    blocks: Array
    q81: Q81
    value: float

    def gave(self, q81: Q81) -> bool:
        """Whether these are the golden activation bits."""
        pairs = ((q81.q, self.q81.q), (q81.d, self.q81.d), (q81.s, self.q81.s))
        return all(np.array_equal(x, y) for x, y in pairs)


def _golden(name: str, codes: Array, value: float, m: float | None = None) -> Golden:
    q = np.arange(-16, 16, dtype=np.int8)
    d, s = np.float32(0.5), np.float32(-8.0)
    return Golden(
        format=name,
        a=frozen((q * d).astype(np.float32)[None]),
        blocks=frozen(
            pack_block(
                name,
                np.asarray(codes, dtype=np.int64)[None, None],
                np.full((1, 1), 0.25),
                None if m is None else np.full((1, 1), m),
            )
        ),
        q81=Q81(q[None], np.full((1, 1), d), np.full((1, 1), s)),
        value=value,
    )


_J: Final = np.arange(BLOCK)

_SAWTOOTH: Final = (_J + 1) // 2 % 16  # 0, 1, 1, 2, 2, ... 15, 15, 0

# Everywhere: activations d = 0.5, q = -16 ... 15, s = 0.5 * (-16) = -8; weights d = 0.25.
# A block is then  0.25 * 0.5 * sumi + offset * (-8)  with  sumi = sum of code[j] * (j - 16).
#   q4_0: codes 0,1,1,2,2,...,15,15,0  sumi = 1000;  offset = -8 * 0.25 = -2:   125 + 16 = 141
#   q4_1: the same codes, m = -1.5:                                             125 + 12 = 137
#   q5_0: code[j] = j, sumi = sum j^2 - 16 sum j = 10416 - 16 * 496 = 2480;
#         offset = -16 * 0.25 = -4:                                             310 + 32 = 342
#   q5_1: the same codes, m = -3:                                               310 + 24 = 334
#   q8_0: code[j] = 8 (j - 16), sumi = 8 * sum (j - 16)^2 = 8 * (1496 + 1240) = 21888:  2736
GOLDEN: Final[dict[str, Golden]] = {
    "q4_0": _golden("q4_0", _SAWTOOTH, 141.0),
    "q4_1": _golden("q4_1", _SAWTOOTH, 137.0, m=-1.5),
    "q5_0": _golden("q5_0", _J, 342.0),
    "q5_1": _golden("q5_1", _J, 334.0, m=-3.0),
    "q8_0": _golden("q8_0", 8 * (_J - 16), 2736.0),
}
