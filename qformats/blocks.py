"""The bytes of a block: ggml's 32-element formats as NumPy structured dtypes.

Layouts are those of ggml's `ggml-common.h`. In every format a float16 scale `d` comes first; the
`_1` formats add a float16 (`m`, the minimum, or `s`, a sum); five-bit formats add `qh`, the fifth
bits; `qs` ends the block. Blocks lie back to back with no padding, so most of them are only 2-byte
aligned in an array: `alignment` says what a field can promise.

    bytes 0       2       4       6       8                                24        34 36
    q4_0  | d     | qs[16]  ............ 18
    q4_1  | d     | m     | qs[16]  ............ 20
    q5_0  | d     | qh[4]         | qs[16]  ............ 22
    q5_1  | d     | m     | qh[4]         | qs[16]  ............ 24
    q8_0  | d     | qs[32]  ................................................ 34
    q8_1  | d     | s     | qs[32]  ................................................ 36
"""

from __future__ import annotations

from math import gcd
from typing import Final

import numpy as np

BLOCK: Final = 32  # elements sharing one scale

BlockDtype = np.dtype[np.void]

_D: Final = ("d", "<f2")  # scale
_M: Final = ("m", "<f2")  # minimum
_S: Final = ("s", "<f2")  # d * sum of the codes, or the sum of the values
_QH: Final = ("qh", "u1", (4,))  # bit j of the little-endian word is the fifth bit of element j
_NIBBLES: Final = ("qs", "u1", (16,))  # byte j: element j in bits 3..0, element j+16 in bits 7..4
_BYTES: Final = ("qs", "i1", (32,))  # byte j: element j

block_q4_0: Final[BlockDtype] = np.dtype([_D, _NIBBLES])
block_q4_1: Final[BlockDtype] = np.dtype([_D, _M, _NIBBLES])
block_q5_0: Final[BlockDtype] = np.dtype([_D, _QH, _NIBBLES])
block_q5_1: Final[BlockDtype] = np.dtype([_D, _M, _QH, _NIBBLES])
block_q8_0: Final[BlockDtype] = np.dtype([_D, _BYTES])
block_q8_1: Final[BlockDtype] = np.dtype([_D, _S, _BYTES])

# What ggml's static_asserts and structs say, written out by hand: total bytes, then field offsets.
_LAYOUTS: Final[dict[str, tuple[BlockDtype, int, dict[str, int]]]] = {
    "q4_0": (block_q4_0, 18, {"d": 0, "qs": 2}),
    "q4_1": (block_q4_1, 20, {"d": 0, "m": 2, "qs": 4}),
    "q5_0": (block_q5_0, 22, {"d": 0, "qh": 2, "qs": 6}),
    "q5_1": (block_q5_1, 24, {"d": 0, "m": 2, "qh": 4, "qs": 8}),
    "q8_0": (block_q8_0, 34, {"d": 0, "qs": 2}),
    "q8_1": (block_q8_1, 36, {"d": 0, "s": 2, "qs": 4}),
}


def offsets(dtype: BlockDtype) -> dict[str, int]:
    """The byte at which each field of a block begins, in memory order."""
    if dtype.fields is None:
        raise TypeError(f"{dtype} has no fields; a block dtype is expected")
    return {name: dtype.fields[name][1] for name in dtype.names or ()}


def alignment(dtype: BlockDtype, field: str) -> int:
    """Bytes of the widest load that is aligned at `field` in *every* block of an array: 2, 4 or 8.

    It divides both the field's offset and the block's size; the array itself is taken to start at
    an address aligned for anything.
    """
    common = gcd(offsets(dtype)[field], dtype.itemsize)
    return common & -common


def verify_layout(name: str, dtype: BlockDtype, size: int, at: dict[str, int]) -> None:
    """Raise ImportError where a dtype is not the block that ggml defines.

    A plain `assert` would vanish under `python -O`, and every kernel rests on these numbers.
    """
    if dtype.itemsize != size or offsets(dtype) != at:
        raise ImportError(
            f"block_{name} has {dtype.itemsize} bytes with fields at {offsets(dtype)}; "
            f"ggml's has {size} bytes with fields at {at}"
        )


for _name, (_dtype, _size, _at) in _LAYOUTS.items():
    verify_layout(_name, _dtype, _size, _at)
