"""Quantize and dequantize: one class per format, bit for bit what ggml's reference C does.

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

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

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

Floats = NDArray[np.float32]
Blocks = NDArray[np.void]
Bytes = NDArray[np.uint8]
Sum = Literal["codes", "values"]

F16_MAX: Final = 65504.0
HALF: Final = BLOCK // 2
RUN: Final = 1024  # blocks worked on at once: 128 KiB of float32, which stays in a core's L2

# The float32 just below one half. trunc(|y| + this) is roundf(|y|), half away from zero, for every
# |y| < 2^23; with 0.5 itself, y = 0.49999997 would round up to 1.
_BELOW_HALF: Final = np.nextafter(np.float32(0.5), np.float32(0))


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Consecutive blocks on their way through a quantizer."""

    x: Floats  # float32[32, n]: row j is element j of each block
    blocks: Blocks  # structured[n], to be filled
    name: str  # format
    first: int  # number of the run's first block in the whole array
    shape: tuple[int, ...]  # shape of the whole array of blocks

    def place(self, i: int) -> str:
        """Which block the i-th of this run is, for a message: "5", or "(2, 5)" in a matrix."""
        index = tuple(int(k) for k in np.unravel_index(self.first + i, self.shape))
        return str(index[0] if len(index) == 1 else index)

    def extremes(self) -> tuple[Floats, Floats]:
        """Lowest and highest value of each block, float32[n] each; ValueError on NaN or inf."""
        low: Floats = self.x.min(axis=0)
        high: Floats = self.x.max(axis=0)
        finite = np.isfinite(low) & np.isfinite(high)  # min and max both hand NaN on
        if not finite.all():
            i = int(np.argmin(finite))
            j = int(np.argmin(np.isfinite(self.x[:, i])))
            raise ValueError(
                f"x is {self.x[j, i]} at element {j} of block {self.place(i)}; "
                f"{self.name} holds finite values only"
            )
        return low, high

    def store(self, field: str, value: Floats) -> None:
        """Round `value`, float32[n], to float16 and store it; ValueError where that overflows."""
        half = value.astype(np.float16)
        fits = np.isfinite(half)
        if not fits.all():
            i = int(np.argmin(fits))
            raise ValueError(
                f"{self.name} needs {field} = {value[i]:.6g} for block {self.place(i)}, beyond "
                f"float16's limit of {F16_MAX:.0f}; scale the data down first"
            )
        self.blocks[field] = half


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
class Format(ABC):
    """A block format: what its bytes are, and how 32 float32 values become them and come back.

    `name` is "q4_0"; `bits` are the bits of one code; `dtype` is the NumPy dtype of one block.
    For every format, and exactly in float32,  value = scale * code + offset.

    Instances hold no data; two of the same class are equal. Use those in `FORMATS`.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    dtype: ClassVar[BlockDtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.dtype.itemsize

    def quantize(self, x: Floats) -> Blocks:
        """Blocks, structured[..., K//32], of x, C-contiguous float32[..., K] with K % 32 == 0.

        Raises TypeError on a wrong dtype; ValueError on a wrong shape or layout, on NaN or inf,
        and where a scale (d, m or s) would not fit a float16, |value| > 65504 after rounding.
        """
        return self._quantize(x)

    def dequantize(self, blocks: Blocks) -> Floats:
        """Values, float32[..., K], of blocks, structured[..., K//32] (any strides).

        A d or m that is inf or NaN in the blocks is passed on, as ggml does.
        """
        flat = self._flat(blocks)
        x = np.empty((flat.size, BLOCK), np.float32)
        with np.errstate(all="ignore"):
            for first in range(0, flat.size, RUN):
                self._decode(flat[first : first + RUN], x[first : first + RUN])
        return x.reshape(*blocks.shape[:-1], -1)

    def codes(self, blocks: Blocks) -> NDArray[np.int32]:
        """The stored codes in element order, int32[..., K]: 0..15, 0..31 or -128..127."""
        codes = self._unpack(self._flat(blocks)).astype(np.int32)
        return codes.reshape(*blocks.shape[:-1], -1)

    def scale(self, blocks: Blocks) -> Floats:
        """d of each block, float32[..., K//32]."""
        self._require(blocks)
        return self._widened(blocks, "d")

    def offset(self, blocks: Blocks) -> Floats:
        """What is added to scale * code, float32[..., K//32]: -8 d, -16 d, m or 0."""
        self._require(blocks)
        with np.errstate(all="ignore"):
            return self._offset(blocks)

    # --- what a format writes ---

    @abstractmethod
    def _encode(self, run: _Run, s: Sum) -> None:
        """Fill run.blocks from run.x."""

    @abstractmethod
    def _unpack(self, blocks: Blocks) -> NDArray[Any]:
        """The codes of structured[n] in element order, uint8 or int8 [n, 32]."""

    @abstractmethod
    def _decode(self, blocks: Blocks, x: Floats) -> None:
        """Write the values of structured[n] to x, float32[n, 32]."""

    @abstractmethod
    def _offset(self, blocks: Blocks) -> Floats: ...

    # --- what all share ---

    def _quantize(self, x: Floats, s: Sum = "codes") -> Blocks:
        _require_floats(x, self.name)
        rows = x.reshape(-1, BLOCK)
        shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
        blocks: Blocks = np.empty(len(rows), self.dtype)
        with np.errstate(all="ignore"):
            for first in range(0, len(rows), RUN):
                stop = min(first + RUN, len(rows))
                columns = np.ascontiguousarray(rows[first:stop].T)
                self._encode(_Run(columns, blocks[first:stop], self.name, first, shape), s)
        return blocks.reshape(shape)

    def _require(self, blocks: Blocks) -> None:
        """TypeError or ValueError where `blocks` is not a non-empty array of this format."""
        if not isinstance(blocks, np.ndarray) or blocks.dtype != self.dtype:
            what = blocks.dtype if isinstance(blocks, np.ndarray) else type(blocks).__name__
            raise TypeError(
                f"{self.name} takes an array of {self.block_bytes}-byte block_{self.name}, "
                f"not {what}"
            )
        if blocks.ndim < 1 or blocks.size == 0:
            raise ValueError(
                f"blocks of shape {blocks.shape} hold nothing; pass [..., K//32] of them"
            )

    def _flat(self, blocks: Blocks) -> Blocks:
        self._require(blocks)
        return blocks.reshape(-1)

    @staticmethod
    def _widened(blocks: Blocks, field: str) -> Floats:
        widened: Floats = blocks[field].astype(np.float32)
        return widened


@dataclass(frozen=True, slots=True)
class _Nibbles(Format):
    """Codes in the halves of 16 bytes, with the fifth bits, if any, in a 32-bit word apart."""

    def _pack(self, codes: Bytes, blocks: Blocks) -> None:
        """Store codes, uint8[32, n]: element j goes to a low nibble, element j+16 to a high one."""
        qs = codes[HALF:] << 4
        qs |= codes[:HALF] & 15
        blocks["qs"] = qs.T
        if self.bits == 5:
            blocks["qh"] = np.packbits(codes >> 4, axis=0, bitorder="little").T

    def _unpack(self, blocks: Blocks) -> Bytes:
        qs = blocks["qs"]
        codes = np.empty((len(blocks), BLOCK), np.uint8)
        np.bitwise_and(qs, 15, out=codes[:, :HALF])
        np.right_shift(qs, 4, out=codes[:, HALF:])
        if self.bits == 5:
            codes |= np.unpackbits(blocks["qh"], axis=1, bitorder="little") << 4
        return codes


@dataclass(frozen=True, slots=True)
class _Symmetric(_Nibbles):
    """value = (code - zero) d, with zero = 2^(bits-1).

    The element of largest magnitude, the first of them, is mapped to code 0 with its sign: d is
    that element over -zero, so d may be negative, and the other side reaches only zero - 1.
    """

    @property
    def zero(self) -> int:
        """The code of value 0: 8 or 16."""
        return 1 << (self.bits - 1)

    def _encode(self, run: _Run, s: Sum) -> None:
        low, high = run.extremes()
        extreme: Floats = np.where(high > -low, high, low)
        tied = np.flatnonzero(
            (high == -low) & (high > 0)
        )  # both signs reach it: the first one counts
        if tied.size:
            columns = run.x[:, tied]
            extreme[tied] = columns[np.abs(columns).argmax(axis=0), np.arange(tied.size)]
        extreme += np.float32(0)  # ggml's scan starts from +0, so that an all-zero block has d = -0
        d: Floats = extreme / np.float32(-self.zero)
        run.store("d", d)
        inverse = _inverse(d)
        y = run.x * inverse
        y += np.float32(self.zero + 0.5)
        codes = _truncated(y, inverse, np.uint8)
        self._pack(np.minimum(codes, 2 * self.zero - 1, out=codes), run.blocks)

    def _decode(self, blocks: Blocks, x: Floats) -> None:
        np.subtract(self._unpack(blocks), np.float32(self.zero), out=x)
        x *= self._widened(blocks, "d")[:, None]

    def _offset(self, blocks: Blocks) -> Floats:
        return np.float32(-self.zero) * self._widened(blocks, "d")


@dataclass(frozen=True, slots=True)
class _Affine(_Nibbles):
    """value = code d + m: code 0 is the block's minimum, the largest code its maximum."""

    def _encode(self, run: _Run, s: Sum) -> None:
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
        y = run.x - low
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

    def _round(self, run: _Run) -> tuple[Floats, NDArray[np.int8]]:
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


@dataclass(frozen=True, slots=True)
class Q5_1(_Affine):
    """24 bytes: f16 d, m; u8 qh[4]; u8 qs[16].  value = q d + m,  q = 0..31."""

    name = "q5_1"
    bits = 5
    dtype = block_q5_1


@dataclass(frozen=True, slots=True)
class Q8_0(_Signed):
    """34 bytes: f16 d; i8 qs[32].  value = q d,  q = -127..127."""

    name = "q8_0"
    bits = 8
    dtype = block_q8_0

    def _encode(self, run: _Run, s: Sum) -> None:
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
        """As `Format.quantize`; `s` chooses the definition of the block's sum."""
        if s not in ("codes", "values"):
            raise ValueError(f's is "codes" or "values", not {s!r}')
        return self._quantize(x, s)

    def _encode(self, run: _Run, s: Sum) -> None:
        d, codes = self._round(run)
        if s == "codes":
            run.store("s", codes.sum(axis=0, dtype=np.int32).astype(np.float32) * d)
            return
        total = run.x
        while len(total) > 1:
            total = total[: len(total) // 2] + total[len(total) // 2 :]
        run.store("s", total[0])


FORMATS: Final[dict[str, Format]] = {
    fmt.name: fmt for fmt in (Q4_0(), Q4_1(), Q5_0(), Q5_1(), Q8_0(), Q8_1())
}
WEIGHT_FORMATS: Final = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")


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
    """Blocks of x in the named format: `FORMATS[name].quantize(x)`."""
    return format_named(name).quantize(x)


def dequantize(blocks: Blocks) -> Floats:
    """Values of blocks, whose dtype says the format: float32[..., K] of structured[..., K//32]."""
    return format_of(blocks).dequantize(blocks)


def _require_floats(x: Floats, name: str) -> None:
    """TypeError or ValueError where x is not C-contiguous float32[..., K], K % 32 == 0, K > 0."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"x is a {type(x).__name__}; {name} quantizes a NumPy array of float32")
    if x.dtype != np.float32:
        raise TypeError(f"x is {x.dtype}; {name} quantizes float32: pass x.astype(np.float32)")
    if x.ndim < 1:
        raise ValueError(
            f"x has no dimensions; {name} quantizes [..., K] with K a multiple of {BLOCK}"
        )
    if x.size == 0:
        raise ValueError(f"x of shape {x.shape} is empty; {name} needs at least {BLOCK} values")
    if x.shape[-1] % BLOCK:
        raise ValueError(
            f"K = {x.shape[-1]} is not a multiple of {BLOCK}, the elements of a {name} block: "
            f"pad K to {-(-x.shape[-1] // BLOCK) * BLOCK}"
        )
    if not x.flags.c_contiguous:
        raise ValueError(
            f"x of shape {x.shape} has strides {x.strides}, which is not C-contiguous: "
            f"pass np.ascontiguousarray(x)"
        )
