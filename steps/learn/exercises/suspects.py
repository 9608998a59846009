"""What known bugs make of a problem: the museum's, and those that beginners make first.

`suspected` computes, in float64, the C of kernels with one mistake each. A wrong result that equals
one of them names the mistake. The museum's kernels (`steps.learn.pitfalls`) take one format each;
these work on every format and both families, and a test holds them against the museum.

A product, block by block of 32 along K:

    C[m, n] = sum over blocks of  d[n] * sum(code[n] * x[m]) + z[n] * s[m]

x are the activations (d * q of Q8_1, or A itself), s their sum in the block, z the offset of the
weights (-8 d in Q4_0, ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from qformats import BLOCK, Format, format_of
from reference import Q81, Bfloats, Halves, Problem, Tokens

Array = np.ndarray[Any, np.dtype[Any]]
HALF: Final = BLOCK // 2
NEAR: Final = 8  # rows that are confused with each other: those of a thread or a fragment


@dataclass(frozen=True)
class Terms:
    """The operands of a product by blocks, float64: code[N, B, 32], d[N, B], z[N, B], x[M, B, 32],
    s[M, B]; of Q8_1 also the codes q[M, B, 32] and their scales da[M, B]."""

    fmt: Format
    code: Array
    d: Array
    z: Array
    x: Array
    s: Array
    q: Array | None = None
    da: Array | None = None

    @classmethod
    def of(cls, problem: Problem, operands: Q81 | Halves | Bfloats | Tokens | None) -> Terms | None:
        """None where a kernel multiplies other weights than those of 32-element blocks, or each row
        of A by an expert's."""
        fmt = format_of(problem.blocks)
        if problem.ids is not None or fmt.elements != BLOCK or isinstance(operands, Tokens):
            return None
        blocks = problem.blocks
        code = fmt.levels(blocks).reshape(*blocks.shape, BLOCK).astype(np.float64)
        d, z = fmt.scale(blocks).astype(np.float64), fmt.offset(blocks).astype(np.float64)
        weights = fmt, code, d.reshape(blocks.shape), z.reshape(blocks.shape)
        if isinstance(operands, Q81):
            q = operands.q.reshape(problem.m, -1, BLOCK).astype(np.float64)
            da = operands.d.astype(np.float64)
            return cls(*weights, q * da[..., None], operands.s.astype(np.float64), q, da)
        values = problem.a if operands is None else operands.values()
        x = values.reshape(problem.m, -1, BLOCK).astype(np.float64)
        return cls(*weights, x, x.sum(axis=2))

    def centred(self) -> Terms:
        """The same product with signed codes, as kernels have them that take 8 or 16 off each code
        of 4 or 5 bits: the offset is then what is left of it."""
        if self.fmt.bits not in (4, 5):
            return self
        centre = 1 << self.fmt.bits - 1
        return replace(self, code=self.code - centre, z=self.z + centre * self.d)

    def by_block(self, **changes: Any) -> Array:
        """What each block adds to C, [M, N, B], some operands replaced."""
        t = replace(self, **changes)
        dots = np.einsum("nbj,mbj->mnb", t.code, t.x)
        added: Array = t.d[None] * dots + t.z[None] * t.s[:, None]
        return added

    def product(self, **changes: Any) -> Array:
        """C[M, N], some operands replaced."""
        return self.by_block(**changes).sum(axis=2)

    def size(self) -> Array:
        """The magnitudes of all terms, summed [M, N]: what roundings are relative to."""
        operands = "code", "d", "z", "x", "s"
        return self.product(**{name: np.abs(getattr(self, name)) for name in operands})


SAYS: Final[Mapping[str, str]] = {
    "offset of another format": (
        "takes -8 or -16 times the scale for the offset, as in Q4_0 or Q5_0 (or takes 8 or 16 off "
        "the codes and adds no offset)"
    ),
    "no compensation": (
        "leaves out the offset of the weights, in W4A8 the compensation offset * s"
    ),
    "compensated twice": "takes the offset of the weights into account twice",
    "wrong words": (
        "multiplies the nibbles of word i with activations of words 2i and 2i + 1; they belong to "
        "words i and i + 4"
    ),
    "fifth bits interleaved": (
        "takes fifth bits 2j and 2j + 1 for the codes of byte j; they are bits j and j + 16"
    ),
    "adjacent pairs": (
        "takes the nibbles of byte j for elements 2j and 2j + 1; they are elements j and j + 16"
    ),
    "activations unsigned": "reads int8 activations as unsigned bytes: each negative one gains 256",
    "weights unsigned": "reads the int8 weights as unsigned bytes: each negative one gains 256",
    "no fifth bits": "leaves out the fifth bits: every code of 16 or more is 16 too small",
    "part of a block": "adds up a part of each block alone, 16 of its 32 elements or fewer",
    "last block alone": (
        "keeps only the last block of K: it sets the sum where it should add to it"
    ),
    "a block short": "leaves the last block of K out",
    "weights of one block": "takes the weights of the first block of a row for all blocks of it",
    "activations of one block": (
        "takes the activations of the first block of a row for all blocks of it"
    ),
    "one row of weights": (
        "reads the first row of W for every output: its place does not depend on n"
    ),
    "one row of activations": (
        "reads the first row of A for every output: its place does not depend on m"
    ),
    "weights of row m": "reads row m of W where it should read row n",
    "weights of another row": "multiplies the codes of a row of W near by, with the right scale",
    "scale of another row": "takes scale and offset of a row of W near by, with the right codes",
    "activations of another row": "multiplies the codes of a token near by, with the right scale",
    "scale of another token": "takes scale and sum of a token near by, with the right codes",
    "scales exchanged": (
        "takes the scale da of the activations for their sum s, or the other way round"
    ),
    "no scale of the weights": "forgets the scale d of the weights",
    "no scale of the activations": "forgets the scale da of the activations",
    "compensation of codes": (
        "scales the sum s of the activations once more: s holds their scale already"
    ),
    "offset subtracted": (
        "subtracts the offset; it is to be added, and is negative itself in Q4_0 and Q5_0"
    ),
    "scale and offset exchanged": (
        "takes the offset of the weights for their scale, and their scale for the offset"
    ),
    "zero": (
        "adds nothing up, or scales it by 0, as the offset of centred codes is: every output is 0"
    ),
}
"""Cause -> what completes "this is what a kernel computes that ...". The likelier one first: where
two give the same values, the first is named."""

PITFALLS: Final[Mapping[str, int]] = {
    "no compensation": 1,
    "compensated twice": 2,
    "wrong words": 3,
    "fifth bits interleaved": 4,
    "adjacent pairs": 6,
    "activations unsigned": 8,
}
"""Their numbers in the museum."""


def suspected(t: Terms) -> Iterator[tuple[str, Array]]:
    """(cause, C) of each mistake that these operands can show, of some in several variants."""
    yield "zero", 0 * t.product()
    yield "no compensation", t.product(z=0 * t.z)
    yield "compensated twice", t.product(z=2 * t.z)
    yield "scale and offset exchanged", t.product(d=t.z, z=t.d)
    if t.fmt.name not in ("q4_0", "q5_0"):
        yield from (("offset of another format", t.product(z=-c * t.d)) for c in (8, 16))
    elif t.fmt.name == "q5_0":
        yield "offset of another format", t.product(z=-8 * t.d)
    yield "offset subtracted", t.product(z=-t.z)
    yield "no scale of the weights", t.product(d=np.ones_like(t.d))
    yield from _of_codes(t)
    yield from _of_blocks(t)
    yield from _of_places(t)
    yield from _of_neighbours(t)
    if t.q is not None and t.da is not None:
        yield "no scale of the activations", t.product(x=t.q)
        yield "compensation of codes", t.product(s=t.s * t.da)
        yield "scales exchanged", t.product(s=t.da)
        yield "scales exchanged", t.product(x=t.q * t.s[..., None])
        for part in (slice(0, BLOCK), slice(0, HALF), slice(HALF, BLOCK)):
            q = t.q.copy()
            q[..., part] %= 256
            yield "activations unsigned", t.product(x=q * t.da[..., None])


def _of_codes(t: Terms) -> Iterator[tuple[str, Array]]:
    """Within a block: elements left out, or codes and activations in wrong pairs."""
    j = np.arange(BLOCK)
    if t.fmt.bits in (4, 5):
        yield "wrong words", t.product(x=t.x[..., j % 4 + 8 * (j % HALF // 4) + 4 * (j // HALF)])
        yield "adjacent pairs", t.product(x=t.x[..., 2 * (j % HALF) + j // HALF])
    if t.fmt.bits == 5:
        fifth = t.code.astype(int) >> 4
        read = np.concatenate([fifth[..., 0::2], fifth[..., 1::2]], axis=-1)
        yield "fifth bits interleaved", t.product(code=t.code % 16 + 16 * read)
        yield "no fifth bits", t.product(code=t.code % 16)
    if t.fmt.bits == 8:
        yield "weights unsigned", t.product(code=t.code % 256)
    for n in (HALF, 8, 4, 2, 1):
        for part in (slice(0, n), slice(-n, None)):
            code, x = t.code[..., part], t.x[..., part]
            yield "part of a block", t.product(code=code, x=x)
            yield "part of a block", t.product(code=code, x=x, s=x.sum(axis=2))


def _of_blocks(t: Terms) -> Iterator[tuple[str, Array]]:
    """Along K: blocks left out, or taken for others."""
    if t.d.shape[1] == 1:
        return
    added, first = t.by_block(), np.zeros(t.d.shape[1], int)
    yield "last block alone", added[..., -1]
    yield "a block short", added[..., :-1].sum(axis=2)
    d, z = t.d[:, first], t.z[:, first]
    yield "weights of one block", t.product(code=t.code[:, first], d=d, z=z)
    yield "activations of one block", t.product(x=t.x[:, first], s=t.s[:, first])


def _of_places(t: Terms) -> Iterator[tuple[str, Array]]:
    """Rows of W or A that are read for all outputs, or for those of another row."""
    (rows, _), tokens = t.d.shape, t.s.shape[0]

    def weights(n: Array) -> Array:
        return t.product(code=t.code[n], d=t.d[n], z=t.z[n])

    first = np.zeros(tokens, int)
    yield "one row of weights", weights(np.zeros(rows, int))
    yield "one row of activations", t.product(x=t.x[first], s=t.s[first])
    own = np.diagonal(weights(np.arange(tokens) % rows))
    yield "weights of row m", np.broadcast_to(own[:, None], (tokens, rows))


def _of_neighbours(t: Terms) -> Iterator[tuple[str, Array]]:
    """Rows of W, and of A, of which either the codes or the scales are those of another."""
    for shift in (*range(-NEAR, 0), *range(1, NEAR + 1)):

        def near(array: Array, shift: int = shift) -> Array:
            return np.roll(array, shift, axis=0)

        yield "weights of another row", t.product(code=near(t.code))
        yield "scale of another row", t.product(d=near(t.d), z=near(t.z))
        if t.q is not None and t.da is not None:
            x = near(t.q) * t.da[..., None]
            yield "activations of another row", t.product(x=x)
            yield "scale of another token", t.product(x=t.q * near(t.da)[..., None], s=near(t.s))
