"""What known bugs make of a problem: the museum's, and those that beginners make first.

Each suspect computes, in float64, the C of a kernel with one mistake. A wrong result that equals it
names the mistake. The museum's kernels (`steps.learn.pitfalls`) take one format each; these work on
every format and both families, and a test holds them against the museum.

A product, block by block of 32 along K:

    C[m, n] = sum over blocks of  d[n] * sum(code[n] * x[m]) + z[n] * s[m]

x are the activations (d * q of Q8_1, or A itself), s their sum in the block, z the offset of the
weights (-8 d in Q4_0, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from qformats import BLOCK, Format, format_of
from reference import Q81, Bfloats, Halves, Problem, Tokens

Array = np.ndarray[Any, np.dtype[Any]]
HALF: Final = BLOCK // 2
SHIFTS: Final = (*range(-8, 0), *range(1, 9))
"""Rows between the right one and a wrong one: fragments of tensor cores have eight."""


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
        """None where a kernel multiplies other weights than those of 32-element blocks."""
        fmt = format_of(problem.blocks)
        if fmt.elements != BLOCK or isinstance(operands, Tokens):
            return None
        blocks = problem.blocks
        code = fmt.levels(blocks).reshape(*blocks.shape, BLOCK).astype(np.float64)
        d, z = fmt.scale(blocks).astype(np.float64), fmt.offset(blocks).astype(np.float64)
        d, z = d.reshape(blocks.shape), z.reshape(blocks.shape)
        if isinstance(operands, Q81):
            q = operands.q.reshape(problem.m, -1, BLOCK).astype(np.float64)
            da = operands.d.astype(np.float64)
            x = q * da[..., None]
            return cls(fmt, code, d, z, x, operands.s.astype(np.float64), q, da)
        values = problem.a if operands is None else operands.values()
        x = values.reshape(problem.m, -1, BLOCK).astype(np.float64)
        return cls(fmt, code, d, z, x, x.sum(axis=2))

    def centred(self) -> Terms:
        """The same product with signed codes, as kernels have them that take 8 or 16 off each code
        of 4 or 5 bits: the offset is then what is left of it."""
        if self.fmt.bits not in (4, 5):
            return self
        centre = 1 << self.fmt.bits - 1
        return replace(self, code=self.code - centre, z=self.z + centre * self.d)

    def product(
        self,
        code: Array | None = None,
        d: Array | None = None,
        z: Array | None = None,
        x: Array | None = None,
        s: Array | None = None,
    ) -> Array:
        """C[M, N], some operands replaced."""
        return self.by_block(code, d, z, x, s).sum(axis=2)

    def size(self) -> Array:
        """The magnitudes of all terms, summed [M, N]: what roundings are relative to."""
        return self.product(*map(np.abs, (self.code, self.d, self.z, self.x, self.s)))

    def by_block(
        self,
        code: Array | None = None,
        d: Array | None = None,
        z: Array | None = None,
        x: Array | None = None,
        s: Array | None = None,
    ) -> Array:
        """What each block adds to C, [M, N, B]."""
        code, d, z = _or(code, self.code), _or(d, self.d), _or(z, self.z)
        x, s = _or(x, self.x), _or(s, self.s)
        dots = np.einsum("nbj,mbj->mnb", code, x)
        result: Array = d[None] * dots + z[None] * s[:, None]
        return result


def _or(given: Array | None, own: Array) -> Array:
    return own if given is None else given


@dataclass(frozen=True, slots=True)
class Suspect:
    """A mistake. `says` completes "this is what a kernel computes that ..."; `pitfall` is its
    number in the museum; `computes` may give nothing where a problem cannot show it."""

    cause: str
    says: str
    computes: Callable[[Terms], Iterator[Array]]
    pitfall: int | None = None


def _once(make: Callable[[Terms], Array | None]) -> Callable[[Terms], Iterator[Array]]:
    def computes(t: Terms) -> Iterator[Array]:
        found = make(t)
        if found is not None:
            yield found

    return computes


def _reordered(order: Array) -> Callable[[Terms], Array | None]:
    """Element j of the weights meets activation order[j] of its block."""

    def make(t: Terms) -> Array | None:
        return t.product(x=t.x[..., order])

    return make


def _of_nibbles(make: Callable[[Terms], Array | None]) -> Callable[[Terms], Iterator[Array]]:
    return _once(lambda t: make(t) if t.fmt.bits in (4, 5) else None)


def _interleaved(t: Terms) -> Array | None:
    if t.fmt.bits != 5:
        return None
    code = t.code.astype(int)
    fifth = code >> 4
    read = np.empty_like(fifth)
    # bit k of qh belongs to element k; element j takes bit 2j, element j + 16 bit 2j + 1
    read[..., :HALF], read[..., HALF:] = fifth[..., 0::2], fifth[..., 1::2]
    return t.product(code=((code & 15) | read << 4).astype(np.float64))


def _unsigned(t: Terms) -> Iterator[Array]:
    """All of them, or one half of a block."""
    if t.q is None or t.da is None:
        return
    for part in (slice(0, BLOCK), slice(0, HALF), slice(HALF, BLOCK)):
        q = t.q.copy()
        q[..., part] %= 256
        yield t.product(x=q * t.da[..., None])


def _without_element(t: Terms) -> Iterator[Array]:
    whole = t.product()
    for j in (BLOCK - 1, 0):
        yield whole - (t.d[None] * np.einsum("nb,mb->mnb", t.code[..., j], t.x[..., j])).sum(2)
        weight = t.d * t.code[..., j] + t.z
        yield whole - np.einsum("nb,mb->mn", weight, t.x[..., j])


def _part_of_block(t: Terms) -> Iterator[Array]:
    """Halves of it, or the last or first elements alone, where a sum is begun anew."""
    ends = (slice(-n, None) for n in (8, 4, 2, 1)), (slice(0, n) for n in (8, 4, 2, 1))
    for part in (slice(0, HALF), slice(HALF, BLOCK), *ends[0], *ends[1]):
        yield t.product(code=t.code[..., part], x=t.x[..., part])
        yield t.product(code=t.code[..., part], x=t.x[..., part], s=t.x[..., part].sum(2))


def _other_rows(t: Terms) -> Iterator[Array]:
    """Codes of one row with the scales of another."""
    n, m = np.arange(t.d.shape[0]), np.arange(t.x.shape[0])
    for rows in (0 * n, *((n + shift) % len(n) for shift in SHIFTS)):
        yield t.product(code=t.code[rows])
        yield t.product(d=t.d[rows], z=t.z[rows])
        yield t.product(d=t.d[rows])
    if t.q is None or t.da is None:
        return
    for rows in (0 * m, *((m + shift) % len(m) for shift in SHIFTS)):
        yield t.product(x=t.q[rows] * t.da[..., None])
        yield t.product(x=t.q * t.da[rows][..., None])
        yield t.product(x=t.q * t.da[rows][..., None], s=t.s[rows])


def _other_blocks(t: Terms) -> Iterator[Array]:
    """Codes of one block of K with the scales of another."""
    b = np.arange(t.d.shape[1])
    for blocks in (0 * b, b % 2, np.maximum(b - 1, 0), np.minimum(b + 1, len(b) - 1)):
        yield t.product(code=t.code[:, blocks])
        yield t.product(d=t.d[:, blocks], z=t.z[:, blocks])
        if t.q is not None and t.da is not None:
            yield t.product(x=t.q[:, blocks] * t.da[..., None])
            yield t.product(x=t.q * t.da[:, blocks][..., None])
            yield t.product(x=t.q * t.da[:, blocks][..., None], s=t.s[:, blocks])


def _blocks(pick: Callable[[Array], Array]) -> Callable[[Terms], Iterator[Array]]:
    """Some blocks of K alone."""
    return _once(lambda t: pick(t.by_block()) if t.d.shape[1] > 1 else None)


Places = Callable[[Array, Array, int, int], tuple[Array, ...]]
"""(row, block, rows, blocks of a row) -> blocks that a kernel might read for it, counted from the
first of the matrix."""


def _weights_from(places: Places) -> Callable[[Terms], Iterator[Array]]:
    def computes(t: Terms) -> Iterator[Array]:
        rows, blocks = t.d.shape
        for place in places(np.arange(rows)[:, None], np.arange(blocks), rows, blocks):
            at = np.broadcast_to(place, t.d.shape) % t.d.size
            yield t.product(*(_flat(part)[at] for part in (t.code, t.d, t.z)))

    return computes


def _activations_from(places: Places) -> Callable[[Terms], Iterator[Array]]:
    def computes(t: Terms) -> Iterator[Array]:
        rows, blocks = t.s.shape
        for place in places(np.arange(rows)[:, None], np.arange(blocks), rows, blocks):
            at = np.broadcast_to(place, t.s.shape) % t.s.size
            yield t.product(x=_flat(t.x)[at], s=_flat(t.s)[at])

    return computes


def _flat(array: Array) -> Array:
    """Of all blocks of a matrix in a row."""
    return array.reshape(-1, *array.shape[2:])


def _by_row_of_the_other(t: Terms) -> Iterator[Array]:
    """C[m, n] from row m of W."""
    rows = np.arange(t.x.shape[0]) % t.d.shape[0]
    own = np.diagonal(t.product(t.code[rows], t.d[rows], t.z[rows]))
    yield np.broadcast_to(own[:, None], (t.x.shape[0], t.d.shape[0]))


def _exchanged(t: Terms) -> Iterator[Array]:
    if t.q is not None and t.da is not None:
        yield t.product(s=t.da)
        yield t.product(x=t.q * t.s[..., None])


_J: Final = np.arange(BLOCK)
_WORD: Final = _J % HALF // 4

SUSPECTS: Final = (
    Suspect(
        "no compensation",
        "leaves out the offset of the weights, in W4A8 the compensation offset * s",
        _once(lambda t: t.product(z=0 * t.z)),
        1,
    ),
    Suspect(
        "compensated twice",
        "takes the offset of the weights into account twice",
        _once(lambda t: t.product(z=2 * t.z)),
        2,
    ),
    Suspect(
        "wrong words",
        "multiplies the nibbles of word i with activations of words 2i and 2i + 1; they belong to "
        "words i and i + 4",
        _of_nibbles(_reordered(_J % 4 + 8 * _WORD + 4 * (_J // HALF))),
        3,
    ),
    Suspect(
        "fifth bits interleaved",
        "takes fifth bits 2j and 2j + 1 for the codes of byte j; they are bits j and j + 16",
        _once(_interleaved),
        4,
    ),
    Suspect(
        "adjacent pairs",
        "takes the nibbles of byte j for elements 2j and 2j + 1; they are elements j and j + 16",
        _of_nibbles(_reordered(2 * (_J % HALF) + _J // HALF)),
        6,
    ),
    Suspect(
        "nibbles swapped",
        "takes the high nibbles for elements 0 to 15 and the low ones for 16 to 31; it is the "
        "other way round",
        _of_nibbles(_reordered((_J + HALF) % BLOCK)),
    ),
    Suspect(
        "activations unsigned",
        "reads int8 activations as unsigned bytes: each negative one gains 256",
        _unsigned,
        8,
    ),
    Suspect(
        "weights unsigned",
        "reads the int8 weights as unsigned bytes: each negative one gains 256",
        _once(lambda t: t.product(code=t.code % 256) if t.fmt.bits == 8 else None),
    ),
    Suspect(
        "no fifth bits",
        "leaves out the fifth bits: every code of 16 or more is 16 too small",
        _once(lambda t: t.product(code=t.code % 16) if t.fmt.bits == 5 else None),
    ),
    Suspect(
        "part of a block",
        "adds up a part of each block alone, 16 of its 32 elements or fewer",
        _part_of_block,
    ),
    Suspect(
        "one element short",
        "leaves one element of each block out: a loop over 31 of 32",
        _without_element,
    ),
    Suspect(
        "last block alone",
        "keeps only the last block of K: it sets the sum where it should add to it",
        _blocks(lambda c: c[..., -1]),
    ),
    Suspect(
        "first block alone",
        "multiplies the first block of K alone",
        _blocks(lambda c: c[..., 0]),
    ),
    Suspect(
        "first block again and again",
        "reads the first block of K again and again: its place does not advance with b",
        _blocks(lambda c: c[..., 0] * c.shape[2]),
    ),
    Suspect(
        "a block short",
        "leaves the last block of K out",
        _blocks(lambda c: c[..., :-1].sum(2)),
    ),
    Suspect(
        "first block left out",
        "leaves the first block of K out",
        _blocks(lambda c: c[..., 1:].sum(2)),
    ),
    Suspect(
        "weights of one block",
        "takes the weights of the first block of a row for all blocks of it",
        _once(lambda t: t.product(*(_all_of_first(part) for part in (t.code, t.d, t.z)))),
    ),
    Suspect(
        "activations of one block",
        "takes the activations of the first block of a row for all blocks of it",
        _once(lambda t: t.product(x=_all_of_first(t.x), s=_all_of_first(t.s))),
    ),
    Suspect(
        "scale of one block",
        "takes the scale of the first block of a row for all blocks of it",
        _once(lambda t: t.product(d=_all_of_first(t.d), z=_all_of_first(t.z))),
    ),
    Suspect(
        "one row of weights",
        "reads the first row of W for every output: its place does not depend on n",
        _once(lambda t: t.product(t.code[:1], t.d[:1], t.z[:1]) + 0 * t.product()),
    ),
    Suspect(
        "one row of activations",
        "reads the first row of A for every output: its place does not depend on m",
        _once(lambda t: t.product(x=t.x[:1], s=t.s[:1]) + 0 * t.product()),
    ),
    Suspect(
        "weights of a wrong block",
        "finds block b of row n of W in a wrong place: n * blocks_k + b blocks lie before it",
        _weights_from(lambda n, b, rows, blocks: (n + b, b * rows + n, n * blocks, n * rows + b)),
    ),
    Suspect(
        "activations of a wrong block",
        "finds block b of row m of A in a wrong place: m * blocks_k + b blocks lie before it",
        _activations_from(lambda m, b, rows, blocks: (m + b, b * rows + m, m * blocks)),
    ),
    Suspect(
        "weights of row m",
        "reads row m of W where it should read row n",
        _by_row_of_the_other,
    ),
    Suspect(
        "scales exchanged",
        "takes the scale da of the activations for their sum s, or the other way round",
        _exchanged,
    ),
    Suspect(
        "no scale of the weights",
        "forgets the scale d of the weights",
        _once(lambda t: t.product(d=np.ones_like(t.d))),
    ),
    Suspect(
        "no scale of the activations",
        "forgets the scale da of the activations",
        _once(lambda t: None if t.q is None else t.product(x=t.q)),
    ),
    Suspect(
        "compensation without the activations",
        "adds the offset of the weights itself, and not the offset times s",
        _once(lambda t: t.product(s=np.ones_like(t.s))),
    ),
    Suspect(
        "offset without the activation",
        "adds the offset of a weight beside the product; the activation multiplies both, scale "
        "times code and offset",
        _once(lambda t: t.product(s=np.full_like(t.s, BLOCK))),
    ),
    Suspect(
        "compensation of codes",
        "scales the sum s of the activations once more: s holds their scale already",
        _once(lambda t: None if t.da is None else t.product(s=t.s * t.da)),
    ),
    Suspect(
        "offset subtracted",
        "subtracts the offset; it is to be added, and is negative itself in Q4_0 and Q5_0",
        _once(lambda t: t.product(z=-t.z)),
    ),
    Suspect(
        "scale times offset",
        "multiplies the offset by the scale too; the offset is in units of the weights",
        _once(lambda t: t.product(z=t.z * t.d)),
    ),
    Suspect(
        "scales of another row",
        "multiplies the codes of one row with the scales of another",
        _other_rows,
    ),
    Suspect(
        "scales of another block",
        "multiplies the codes of one block of K with the scales of another",
        _other_blocks,
    ),
    Suspect("zero", "adds nothing up: every output is 0", _once(lambda t: 0 * t.product())),
)
"""The likelier one first: where two give the same values, the first is named."""


def _all_of_first(array: Array) -> Array:
    return np.broadcast_to(array[:, :1], array.shape)
