"""What a block format is to everybody else: the contract of `Format`, and what its makers share.

The formats themselves are in `qformats.codec` (codes that are linear in the value),
`qformats.codebook` (codes that index a table) and `qformats.kquants` (256 elements a block).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qformats.blocks import BLOCK, BlockDtype
from qformats.threads import cores, in_parts

Floats = NDArray[np.float32]
Blocks = NDArray[np.void]
Bytes = NDArray[np.uint8]
Sum = Literal["codes", "values"]

F16_MAX: Final = 65504.0
HALF: Final = BLOCK // 2
RUN: Final = 1 << 14
"""Blocks of 32 worked on at once, 2 MiB of float32: threads wait for each other at each call of
NumPy, so that 16 of them took twice as long as one with runs of 1024, and a third of it with
these."""

PARTS: Final = (1 << 12, 2 * RUN)
"""The fewest and the most blocks that a thread takes at once. Small matrices are cut so that each
core has some."""


class Packed(NamedTuple):
    """Where `bits` bits of every code lie in a field: `run` neighbours share their bit positions.

    The first `run` bytes of the field hold the first 8 / bits * run elements: in their lowest bits
    the first `run` of those, in the next bits the `run` after them. With `run` 16 and 4 bits that
    is the interleave of half-blocks; with `run` 1 and 1 bit a plain bit field.
    """

    field: str
    bits: int
    run: int

    def unpack(self, packed: Bytes) -> Bytes:
        """These bits of each element, uint8[n, elements], of the field's bytes, uint8[n, b]."""
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]
        apart = packed.reshape(len(packed), -1, 1, self.run) >> shifts
        apart &= np.uint8((1 << self.bits) - 1)
        return apart.reshape(len(packed), -1)

    def place(self, element: int) -> tuple[int, int]:
        """(byte of the field, lowest bit) that hold these bits of an element."""
        turn, within = divmod(element, self.run * 8 // self.bits)
        shift, byte = divmod(within, self.run)
        return turn * self.run + byte, shift * self.bits


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive blocks on their way through a quantizer."""

    x: Floats  # float32[32, n]: row j is element j of each block; a copy, which may be changed
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

    def signed_extreme(self, low: Floats, high: Floats) -> Floats:
        """The element of largest magnitude of each block, float32[n], the first of them."""
        extreme: Floats = np.where(high > -low, high, low)
        tied = np.flatnonzero(
            (high == -low) & (high > 0)
        )  # both signs reach it: the first one counts
        if tied.size:
            columns = self.x[:, tied]
            extreme[tied] = columns[np.abs(columns).argmax(axis=0), np.arange(tied.size)]
        extreme += np.float32(0)  # ggml's scan starts from +0: the extreme of zeros is +0
        return extreme

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


@dataclass(frozen=True, slots=True)
class Format(ABC):
    """A block format: what its bytes are, and how float32 values become them and come back.

    `name` is "q4_0"; `bits` are the bits of one code; `dtype` is the NumPy dtype of one block;
    `elements` are the values a block holds; `group` of them in a row share a scale and an offset;
    `packed` says where their codes lie, lowest bits first. `written` is False where blocks are
    only read. For every format, and exactly in float32,  value = scale * level + offset,  where a
    level is the code itself, or what the format's table `codebook` holds for it.

    What takes blocks, structured[..., K//elements] of any strides, raises TypeError for another
    dtype and ValueError where there are none.

    Instances hold no data; two of the same class are equal. Use those in `FORMATS`.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    dtype: ClassVar[BlockDtype]
    packed: ClassVar[tuple[Packed, ...]]
    elements: ClassVar[int] = BLOCK
    group: ClassVar[int] = BLOCK
    codebook: ClassVar[tuple[int, ...] | None] = None
    written: ClassVar[bool] = True

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.dtype.itemsize

    def quantize(self, x: Floats) -> Blocks:
        """Blocks, structured[..., K//32], of x, C-contiguous float32[..., K] with K % 32 == 0.

        Raises TypeError on a wrong dtype; ValueError on a wrong shape or layout, on NaN or inf,
        where a scale (d, m or s) would not fit a float16, |value| > 65504 after rounding, and
        where the format is only read (`written`).
        """
        return self._quantize(x)

    def dequantize(self, blocks: Blocks) -> Floats:
        """Values, float32[..., K], of blocks.

        A scale or minimum that is inf or NaN in the blocks is passed on, as ggml does.
        """
        flat = self._flat(blocks)
        x = np.empty((flat.size, self.elements), np.float32)
        run = RUN * BLOCK // self.elements
        with np.errstate(all="ignore"):
            for first in range(0, flat.size, run):
                self._decode(flat[first : first + run], x[first : first + run])
        return x.reshape(*blocks.shape[:-1], -1)

    def codes(self, blocks: Blocks) -> NDArray[np.int32]:
        """The stored codes in element order, int32[..., K]: 0..2^bits - 1, or -128..127."""
        codes = self._unpack(self._flat(blocks)).astype(np.int32)
        return codes.reshape(*blocks.shape[:-1], -1)

    def levels(self, blocks: Blocks) -> NDArray[np.int32]:
        """What each code stands for in units of its scale, int32[..., K]: itself without a table.

        An integer product with other codes is one of these.
        """
        codes = self.codes(blocks)
        return codes if self.codebook is None else np.array(self.codebook, np.int32)[codes]

    def scale(self, blocks: Blocks) -> Floats:
        """What a level is multiplied by, float32[..., K//group]: d of each block of 32."""
        with np.errstate(all="ignore"):
            scale = self._scale(self._flat(blocks))
        return scale.reshape(*blocks.shape[:-1], -1)

    def offset(self, blocks: Blocks) -> Floats:
        """What is added to scale * level, float32[..., K//group]: -8 d, -16 d, m, 0, ..."""
        with np.errstate(all="ignore"):
            offset = self._offset(self._flat(blocks))
        return offset.reshape(*blocks.shape[:-1], -1)

    # --- what a format writes ---

    @abstractmethod
    def _encode(self, run: Run, s: Sum) -> None:
        """Fill run.blocks from run.x."""

    @abstractmethod
    def _unpack(self, blocks: Blocks) -> NDArray[Any]:
        """The codes of structured[n] in element order, uint8 or int8 [n, elements]."""

    @abstractmethod
    def _decode(self, blocks: Blocks, x: Floats) -> None:
        """Write the values of structured[n] to x, float32[n, elements]."""

    @abstractmethod
    def _offset(self, blocks: Blocks) -> Floats:
        """The offsets of structured[n], float32[n] or [n, elements // group]."""

    def _scale(self, blocks: Blocks) -> Floats:
        """The scales of structured[n], float32[n] or [n, elements // group]."""
        return self._widened(blocks, "d")

    # --- what all share ---

    def _quantize(self, x: Floats, s: Sum = "codes") -> Blocks:
        _require_floats(x, self.name)
        rows = x.reshape(-1, BLOCK)
        shape = (*x.shape[:-1], x.shape[-1] // BLOCK)
        blocks: Blocks = np.empty(len(rows), self.dtype)

        def encode(first: int, stop: int) -> None:
            with np.errstate(all="ignore"):
                for at in range(first, stop, RUN):
                    run = slice(at, min(at + RUN, stop))
                    columns = np.array(rows[run].T, order="C")
                    self._encode(Run(columns, blocks[run], self.name, at, shape), s)

        least, most = PARTS
        in_parts(encode, len(rows), max(least, min(most, -(-len(rows) // cores()))))
        return blocks.reshape(shape)

    def _require(self, blocks: Blocks) -> None:
        """TypeError or ValueError where `blocks` is not a non-empty array of this format."""
        if not is_numpy(blocks) or blocks.dtype != self.dtype:
            what = blocks.dtype if is_numpy(blocks) else type(blocks).__name__
            raise TypeError(
                f"{self.name} takes an array of {self.block_bytes}-byte block_{self.name}, "
                f"not {what}"
            )
        if blocks.ndim < 1 or blocks.size == 0:
            raise ValueError(
                f"blocks of shape {blocks.shape} hold nothing; pass [..., K//{self.elements}] "
                f"of them"
            )

    def _flat(self, blocks: Blocks) -> Blocks:
        self._require(blocks)
        return blocks.reshape(-1)

    @staticmethod
    def _widened(blocks: Blocks, field: str) -> Floats:
        widened: Floats = blocks[field].astype(np.float32)
        return widened


@dataclass(frozen=True, slots=True)
class ReadOnly(Format):
    """Read here, not written: codes whose bits lie in one or two fields of a larger block."""

    written = False

    def quantize(self, x: Floats) -> Blocks:
        """ValueError: these blocks are read, not written."""
        raise ValueError(
            f"{self.name} blocks are read here, not written: quantize to a format of 32 elements, "
            f"or make a file with llama.cpp's llama-quantize"
        )

    def _encode(self, run: Run, s: Sum) -> None:
        raise NotImplementedError  # quantize has refused

    def _unpack(self, blocks: Blocks) -> Bytes:
        codes, filled = np.zeros((len(blocks), self.elements), np.uint8), 0
        for packed in self.packed:
            codes |= packed.unpack(blocks[packed.field]) << filled
            filled += packed.bits
        return codes


@dataclass(frozen=True, slots=True)
class Nibbles(Format):
    """Codes in the halves of 16 bytes, with the fifth bits, if any, in a 32-bit word apart."""

    packed: ClassVar[tuple[Packed, ...]] = (Packed("qs", 4, HALF),)

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


def is_numpy(x: Any) -> bool:
    """Whether x is a NumPy array all of whose values count: none that is masked."""
    return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray)


def _require_floats(x: Floats, name: str) -> None:
    """TypeError or ValueError where x is not C-contiguous float32[..., K], K % 32 == 0, K > 0."""
    if not is_numpy(x):
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
