"""Codes of a packed tile as numbers with an offset: one LOP3 makes two, and no arithmetic.

The float16 numbers from 1024 to 2047 are 1 apart, so their ten lowest bits are an integer:

    sign exponent significand                         bfloat16 has seven bits:
      0   11001   0000000000    1024                    0 01101110 0000000    128 * 2^-24
      0   11001   000000nnnn    1024 + n, n at bit 0    0 01101110 000nnnn    (128 + n) * 2^-24
      0   10101   00nnnn0000      64 + n, n at bit 4: from 64 to 127 float16 numbers are 1/16 apart

So (word & mask) ^ bits, one LOP3, picks two codes of a word and puts the number around them; codes
that are stored as two's complement have their highest bit flipped in the same instruction. All
these numbers are multiples of one unit, so sums of their products with A may share an accumulator.
What the offsets add is taken off again (`steps.kernels.decode.product`).

In float16 the unit is 1. In bfloat16 it is 2^-24, a factor that scales of packed tiles lack anyway
(`qformats.repack.HALF_SCALE`): A in bfloat16 may be as large as a float32, and sums of A times 128
could overflow. A code has to be at bit 0 there, which takes one shift more. A code of 8 bits is the
sum of two numbers: 128 + its lower four bits, and 2048 + 16 times the upper ones, in units.

Codes of MXFP4 are the highest and the lowest bits of numbers, and need no offset
(`steps.kernels.parts.weights.storage_formats`).

`steps.kernels.parts.weights.halves`, in contrast, multiplies each code with its scale. Here the
scale is left to the sum of a block, and nothing is rounded. Step 17 teaches this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from numba import cuda, uint32

from qformats.repack import HALF_SCALE
from qformats.storage import PackedFormat, storage_format_named
from steps.instructions import and_xor, hfma2_bf16, select_bits
from steps.kernels.parts.weights.codes import shifted
from steps.kernels.parts.weights.halves import FIFTH_BITS
from steps.kernels.parts.weights.storage_formats import E2M1_HALVES, SIGNS, e2m1_numbers

STEPS: Final = 4
"""Steps of 16 K in a half of a packed tile, the K of one mma."""

AROUND: Final = {
    "float16": {0: 0x6400, 3: 0x5800, 4: 0x5400, 5: 0x5000},
    "bfloat16": {0: 0x3700},
}
"""The bits of a number around a code that begins at this bit."""

UNIT: Final = {"float16": 1.0, "bfloat16": HALF_SCALE}
"""The number of a code of 1."""

OFFSET: Final = {0x6400: 1024, 0x5800: 128, 0x5400: 64, 0x5000: 32, 0x3700: 128, 0x3900: 2048}
"""What these numbers are without a code, in units."""

SIXTEEN_TIMES: Final = 0x3900
"""Around a code at bit 0 the bfloat16 number 2048 + 16 times the code, in units."""

E2M1_UNIT: Final = {"float16": 2.0**-15, "bfloat16": HALF_SCALE}
"""The numbers of a level of 1."""

TWO_TO_103: Final = 0x73007300
"""Bfloat16 twice: of 2^-127, a level of 1, it makes HALF_SCALE."""

ZERO: Final = {"q4_0": 8, "q5_0": 16, "q8_0": 128}
"""The code, taken as unsigned, of a weight of 0 in the formats that have no minimum."""


@dataclass(frozen=True, slots=True)
class OffsetNumbers:
    """How lanes make numbers of codes, two a register.

    terms : numbers that a code is the sum of
    fragments(words, step, term) -> (a0, a1, a2, a3)
        of `mma_m16n8k16_f16` or `_bf16`, for step 0 to 3 of 16 K of a half of a packed tile, whose
        words are those of `TileFormat.load`
    offsets[step][term]: of each of the four registers, by how many units its numbers exceed the
        levels that the scale multiplies
    unit  : the number of a code of 1
    """

    terms: int
    fragments: Any
    offsets: tuple[tuple[tuple[int, int, int, int], ...], ...]
    unit: float


def both(bits: int) -> int:
    """16 bits in both halves of a word."""
    return bits * 0x00010001


@cache
def offset_numbers(name: str, kind: str) -> OffsetNumbers:
    """The numbers of a storage format, "float16" or "bfloat16", for capture in a kernel factory."""
    stored, shift = storage_format_named(name), kind == "bfloat16"
    # the code of 0; and what is flipped in codes that are stored as two's complement
    zero = stored.zero if isinstance(stored, PackedFormat) else ZERO.get(name, 0)
    flip = 0 if stored.bits == 5 else zero
    if name == "e2m1":
        return _without_offset(kind)
    if stored.bits == 8 and shift:
        return _eight_bits_in_two(zero)
    found_at = {4: 4, 5: 3, 6: 4, 8: 0}[stored.bits]  # codes in high nibbles
    at = 0 if shift else found_at
    down = found_at - at
    low, high = AROUND[kind][0], AROUND[kind][at]
    low_bits, high_bits = both(low ^ flip), both(high ^ flip << at)

    @cuda.jit(device=True, forceinline=True)
    def codes_of_4(words, step, row, odd):
        """Codes in bytes 0 and 2 of a word, or 1 and 3: low nibbles, then high ones."""
        word = uint32(words[2 * (step >> 1) + row])
        if step & 1:
            return and_xor(word >> uint32(8 * odd + down), 0x000F000F << at, high_bits)
        return and_xor(word >> uint32(8 * odd), 0x000F000F, low_bits)

    @cuda.jit(device=True, forceinline=True)
    def codes_of_5(words, step, row, odd):
        """The same, and above low nibbles the highest bit, below high ones the lowest. Both lie
        side by side, so one shift serves them, as either nibble covers the other's bit."""
        number = 2 * (step >> 1) + row
        word, bits, up = uint32(words[number]), uint32(words[4]), -8 * odd - 2 * number
        if step & 1:
            lowest = and_xor(shifted(bits, up + at), FIFTH_BITS >> down, high_bits)
            return select_bits(0x00F000F0 >> down, word >> uint32(8 * odd + down), lowest)
        highest = and_xor(shifted(bits, up + 3), FIFTH_BITS, low_bits)
        return select_bits(0x000F000F, word >> uint32(8 * odd), highest)

    @cuda.jit(device=True, forceinline=True)
    def codes_of_6(words, step, row, odd):
        """A nibble, two bits up, and below it the lowest two."""
        word, two = uint32(words[2 * (step >> 1) + row]), uint32(words[4 + (step >> 1)])
        if step & 1:
            two = two >> uint32(8 * odd + 2 * row + down)
            two = and_xor(two, 0x00030003 << at, high_bits)
            return and_xor(shifted(word, 2 - 8 * odd - down), 0x003C003C << at, two)
        two = and_xor(two >> uint32(8 * odd + 2 * row), 0x00030003, low_bits)
        return and_xor(shifted(word, 2 - 8 * odd), 0x003C003C, two)

    @cuda.jit(device=True, forceinline=True)
    def codes_of_8(words, step, row, odd):
        return and_xor(uint32(words[2 * step + row]) >> uint32(8 * odd), 0x00FF00FF, low_bits)

    codes = {4: codes_of_4, 5: codes_of_5, 6: codes_of_6, 8: codes_of_8}[stored.bits]

    @cuda.jit(device=True, forceinline=True)
    def fragments(words, step, term):
        return (
            codes(words, step, 0, 0),
            codes(words, step, 1, 0),
            codes(words, step, 0, 1),
            codes(words, step, 1, 1),
        )

    of_steps = [OFFSET[high if step & 1 else low] + zero for step in range(STEPS)]
    return OffsetNumbers(1, fragments, tuple(((x, x, x, x),) for x in of_steps), UNIT[kind])


def _eight_bits_in_two(zero: int) -> OffsetNumbers:
    """Bfloat16 numbers of codes of 8 bits: of their lower four bits, then of the upper ones."""
    low, high = AROUND["bfloat16"][0], SIXTEEN_TIMES
    low_bits, high_bits = both(low), both(high ^ zero >> 4)

    @cuda.jit(device=True, forceinline=True)
    def four_bits(words, step, term, row, odd):
        word = uint32(words[2 * step + row]) >> uint32(8 * odd + 4 * term)
        return and_xor(word, 0x000F000F, high_bits if term else low_bits)

    @cuda.jit(device=True, forceinline=True)
    def fragments(words, step, term):
        return (
            four_bits(words, step, term, 0, 0),
            four_bits(words, step, term, 1, 0),
            four_bits(words, step, term, 0, 1),
            four_bits(words, step, term, 1, 1),
        )

    of_terms = tuple((x, x, x, x) for x in (OFFSET[low], OFFSET[high] + zero))
    return OffsetNumbers(2, fragments, (of_terms,) * STEPS, UNIT["bfloat16"])


def _without_offset(kind: str) -> OffsetNumbers:
    """MXFP4's codes. Bfloat16 numbers of them are too small for sums, and so are multiplied."""
    two = E2M1_HALVES if kind == "float16" else _larger(e2m1_numbers(6))

    @cuda.jit(device=True, forceinline=True)
    def fragments(words, step, term):
        g, h, second = words[2 * (step >> 1)], words[2 * (step >> 1) + 1], step & 1
        return two(g, second, 0), two(h, second, 0), two(g, second, 1), two(h, second, 1)

    none = ((0, 0, 0, 0),)
    return OffsetNumbers(1, fragments, (none,) * STEPS, E2M1_UNIT[kind])


def _larger(numbers: Any) -> Any:
    @cuda.jit(device=True, forceinline=True)
    def two(word, second, odd):
        return hfma2_bf16(numbers(word, second, odd), TWO_TO_103, SIGNS)

    return two
