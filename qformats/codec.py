"""Quantize and dequantize: one class per format, bit for bit what ggml's reference C does.

Here are the formats whose codes are linear in the value, and the registry of all: `FORMATS`. Those
with a table are in `qformats.codebook`, the K-quants in `qformats.kquants`.

The recipes are those of `quantize_row_*_ref` and `dequantize_row_*` in ggml's `ggml-quants.c`.
Arithmetic is float32 at every step and never fused (a compiler that contracts `x*id + 8.5` into one
FMA moves about one block in 10^5; "no FMA" is this laboratory's definition, as in ggml's own x86
builds). The inverse scale `id` comes from the *unrounded* d; d, m and s are rounded to float16
(nearest even) only when stored.

Three places where C leaves the answer open, and the answer here:

* **A scale beyond float16.** ggml stores inf and decodes NaN. Here `quantize` raises ValueError
  when d, m or s rounds past 65504, naming the block, the value and the limit. Nothing is returned.
* **1/d overflows** (0 < |d| <= 2^-128). ggml then converts inf and NaN to an integer, which C
  leaves undefined; x86-64 gives 0. Here every code of such a block is 0. Its values are 0 whatever
  the codes, because d and m (which is then below 2^-100) are +-0 once stored.
* **NaN and inf in the input** are refused with ValueError.

Inside, a run of blocks is worked on *transposed*, float32[32, n]: element j of all blocks is one
contiguous row, so that minima, maxima and per-block scales are plain vector operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qformats.blocks import (
    BLOCK,
    BlockDtype,
    block_q4_0,
    block_q4_1,
    block_q5_0,
    block_q5_1,
    block_q8_0,
    block_q8_1,
)
from qformats.codebook import IQ4_NL, IQ4_XS, MXFP4, NVFP4, Q1_0, TQ2_0
from qformats.format import HALF, Blocks, Floats, Format, Nibbles, Packed, Run, Sum
from qformats.kquants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K

# The float32 just below one half. trunc(|y| + this) is roundf(|y|), half away from zero, for every
# |y| < 2^23; with 0.5 itself, y = 0.49999997 would round up to 1.
_BELOW_HALF: Final = np.nextafter(np.float32(0.5), np.float32(0))


def _inverse(d: Floats) -> Floats:
    """id = d ? 1/d : 0, in float32; inf where it overflows."""
    inverse: Floats = np.divide(np.float32(1), d)
    inverse[d == 0] = 0
    return inverse


def _truncated(y: Floats, inverse: Floats, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """The C cast of y, float32[32, n], to an integer: toward zero, and 0 where 1/d overflowed."""
    codes = y.astype(dtype)
    overflowed = np.isinf(inverse)
    if overflowed.any():
        codes[:, overflowed] = 0
    return codes


@dataclass(frozen=True, slots=True)
class _Symmetric(Nibbles):
    """value = (code - zero) d, with zero = 2^(bits-1).

    The element of largest magnitude, the first of them, is mapped to code 0 with its sign: d is
    that element over -zero, so d may be negative, and the other side reaches only zero - 1.
    """

    @property
    def zero(self) -> int:
        """The code of value 0: 8 or 16."""
        return 1 << (self.bits - 1)

    def _encode(self, run: Run, s: Sum) -> None:
        low, high = run.extremes()
        # The extreme of zeros is +0, so that an all-zero block has d = -0.
        d: Floats = run.signed_extreme(low, high) / np.float32(-self.zero)
        run.store("d", d)
        inverse = _inverse(d)
        y = run.x
        y *= inverse
        y += np.float32(self.zero + 0.5)
        codes = _truncated(y, inverse, np.uint8)
        self._pack(np.minimum(codes, 2 * self.zero - 1, out=codes), run.blocks)

    def _decode(self, blocks: Blocks, x: Floats) -> None:
        np.subtract(self._unpack(blocks), np.float32(self.zero), out=x)
        x *= self._widened(blocks, "d")[:, None]

    def _offset(self, blocks: Blocks) -> Floats:
        return np.float32(-self.zero) * self._widened(blocks, "d")


@dataclass(frozen=True, slots=True)
class _Affine(Nibbles):
    """value = code d + m: code 0 is the block's minimum, the largest code its maximum."""

    def _encode(self, run: Run, s: Sum) -> None:
        low, high = run.extremes()
        zero = np.flatnonzero(low == 0)  # m keeps the sign of the first zero, as ggml's scan does
        if zero.size:
            columns = run.x[:, zero]
            low[zero] = columns[(columns == 0).argmax(axis=0), np.arange(zero.size)]
        d = (high - low) / np.float32((1 << self.bits) - 1)
        d += np.float32(0)  # high may be -0 where ggml's scan has +0
        run.store("d", d)
        run.store("m", low)
        inverse = _inverse(d)
        y = run.x
        y -= low
        y *= inverse
        y += np.float32(0.5)
        # ggml clamps to 15 in q4_1 and not in q5_1; neither is ever reached, for y < 2^bits.
        self._pack(_truncated(y, inverse, np.uint8), run.blocks)

    def _decode(self, blocks: Blocks, x: Floats) -> None:
        np.multiply(self._unpack(blocks), self._widened(blocks, "d")[:, None], out=x)
        x += self._widened(blocks, "m")[:, None]

    def _offset(self, blocks: Blocks) -> Floats:
        return self._widened(blocks, "m")


@dataclass(frozen=True, slots=True)
class _Signed(Format):
    """value = code d: 32 signed bytes in element order, d = max|x| / 127, codes -127..127."""

    packed = (Packed("qs", 8, BLOCK),)

    def _round(self, run: Run) -> tuple[Floats, NDArray[np.int8]]:
        """Store d and qs; return d, float32[n] unrounded, and the codes, int8[32, n]."""
        low, high = run.extremes()
        d = np.maximum(high, -low)
        d += np.float32(0)  # no -0
        d /= np.float32(127)
        run.store("d", d)
        inverse = _inverse(d)
        y = run.x * inverse
        y += np.copysign(_BELOW_HALF, y)
        codes = _truncated(y, inverse, np.int8)
        run.blocks["qs"] = codes.T
        return d, codes

    def _unpack(self, blocks: Blocks) -> NDArray[np.int8]:
        codes: NDArray[np.int8] = blocks["qs"]
        return codes

    def _decode(self, blocks: Blocks, x: Floats) -> None:
        np.multiply(blocks["qs"], self._widened(blocks, "d")[:, None], out=x)

    def _offset(self, blocks: Blocks) -> Floats:
        return np.zeros(blocks.shape, np.float32)


@dataclass(frozen=True, slots=True)
class Q4_0(_Symmetric):
    """18 bytes: f16 d; u8 qs[16].  value = (q - 8) d,  q = 0..15."""

    name = "q4_0"
    bits = 4
    dtype = block_q4_0


@dataclass(frozen=True, slots=True)
class Q4_1(_Affine):
    """20 bytes: f16 d, m; u8 qs[16].  value = q d + m,  q = 0..15."""

    name = "q4_1"
    bits = 4
    dtype = block_q4_1


@dataclass(frozen=True, slots=True)
class Q5_0(_Symmetric):
    """22 bytes: f16 d; u8 qh[4]; u8 qs[16].  value = (q - 16) d,  q = 0..31."""

    name = "q5_0"
    bits = 5
    dtype = block_q5_0
    packed = (Packed("qs", 4, HALF), Packed("qh", 1, 1))


@dataclass(frozen=True, slots=True)
class Q5_1(_Affine):
    """24 bytes: f16 d, m; u8 qh[4]; u8 qs[16].  value = q d + m,  q = 0..31."""

    name = "q5_1"
    bits = 5
    dtype = block_q5_1
    packed = (Packed("qs", 4, HALF), Packed("qh", 1, 1))


@dataclass(frozen=True, slots=True)
class Q8_0(_Signed):
    """34 bytes: f16 d; i8 qs[32].  value = q d,  q = -127..127."""

    name = "q8_0"
    bits = 8
    dtype = block_q8_0

    def _encode(self, run: Run, s: Sum) -> None:
        self._round(run)


@dataclass(frozen=True, slots=True)
class Q8_1(_Signed):
    """36 bytes: f16 d, s; i8 qs[32].  value = q d,  q = -127..127. Activations only.

    s serves a weight format with an offset: the block's share of a dot product is
    scale * d * sum(code * q) + offset * s. Two definitions of it are in use:

    * `s="codes"`: d * sum(q) with the unrounded d, ggml's reference (and bit-exact to it);
    * `s="values"`: the sum of the 32 raw values, as llama.cpp does on CUDA, in float32 and in the
      order of a warp's butterfly (elements 16 apart first, then 8, 4, 2, 1). It leaves a q4_1 or
      q5_1 product 4 to 6 times less accurate: s then belongs to other activations than q does.
    """

    name = "q8_1"
    bits = 8
    dtype = block_q8_1

    def quantize(self, x: Floats, s: Sum = "codes") -> Blocks:
        """As `Format.quantize`; `s` chooses the definition of the block's sum, ValueError where it
        is neither of the two."""
        if s not in ("codes", "values"):
            raise ValueError(f's is "codes" or "values", not {s!r}')
        return self._quantize(x, s)

    def _encode(self, run: Run, s: Sum) -> None:
        d, codes = self._round(run)
        if s == "codes":
            run.store("s", codes.sum(axis=0, dtype=np.int32).astype(np.float32) * d)
            return
        total = run.x
        while len(total) > 1:
            total = total[: len(total) // 2] + total[len(total) // 2 :]
        run.store("s", total[0])


FORMATS: Final[dict[str, Format]] = {
    fmt.name: fmt
    for fmt in (
        *(Q4_0(), Q4_1(), Q5_0(), Q5_1(), Q8_0(), Q8_1()),
        *(MXFP4(), IQ4_NL()),
        *(Q2_K(), Q3_K(), Q4_K(), Q5_K(), Q6_K()),
        *(IQ4_XS(), NVFP4(), Q1_0(), TQ2_0()),
    )
}
WEIGHT_FORMATS: Final = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")  # which every kernel takes
FILE_FORMATS: Final = (
    *("mxfp4", "iq4_nl", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_xs", "nvfp4", "q1_0", "tq2_0"),
)
"""Those that files also come in: taken by the kernels that `steps.contract.Step.formats` names."""


def format_named(name: str) -> Format:
    """The format called `name`; ValueError with the names there are."""
    fmt = FORMATS.get(name) if isinstance(name, str) else None
    if fmt is None:
        raise ValueError(f"no format is called {name!r}; there are {', '.join(FORMATS)}")
    return fmt


def format_of(blocks: Blocks | BlockDtype) -> Format:
    """The format of an array of blocks or of a block dtype; TypeError where there is none."""
    dtype = blocks if isinstance(blocks, np.dtype) else getattr(blocks, "dtype", None)
    for fmt in FORMATS.values():
        if fmt.dtype == dtype:
            return fmt
    what = type(blocks).__name__ if dtype is None else f"dtype {dtype}"
    raise TypeError(f"{what} is no block format; blocks come from quantize(x, name)")


def quantize(x: Floats, name: str) -> Blocks:
    """Blocks of x in the named format, bit for bit as ggml's reference makes them.

    x       : float32 [..., K], C-contiguous, K a multiple of 32; finite values.
    name    : one of `FORMATS` that is written: not a K-quant.

    Returns structured[..., K//32] of the format's dtype. Raises what `Format.quantize` does, and
    ValueError for an unknown name.
    """
    return format_named(name).quantize(x)


def dequantize(blocks: Blocks) -> Floats:
    """Values, float32[..., K], of blocks, structured[..., K//32] or, of K-quants, [..., K//256].

    The blocks' dtype says which format they are of. Raises TypeError where it is none, ValueError
    where there are no blocks.
    """
    return format_of(blocks).dequantize(blocks)
