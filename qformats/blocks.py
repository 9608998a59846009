"""The bytes of a block: ggml's formats as NumPy structured dtypes.

Layouts are those of ggml's `ggml-common.h`. In the formats that kernels take, of 32 elements, a
float16 scale `d` comes first; the `_1` formats add a float16 (`m`, the minimum, or `s`, a sum);
five-bit formats add `qh`, the fifth bits; `qs` ends the block. Blocks lie back to back with no
padding, so most of them are only 2-byte aligned in an array (mxfp4 not even that): `alignment` says
what a field can promise.

    bytes 0       2       4       6       8                                24        34 36
    q4_0  | d     | qs[16]  ............ 18
    q4_1  | d     | m     | qs[16]  ............ 20
    q5_0  | d     | qh[4]         | qs[16]  ............ 22
    q5_1  | d     | m     | qh[4]         | qs[16]  ............ 24
    q8_0  | d     | qs[32]  ................................................ 34
    q8_1  | d     | s     | qs[32]  ................................................ 36

Two more hold 32 elements, mxfp4 (17 bytes: `e`, an exponent, and `qs`) and iq4_nl (18 bytes, fields
as in q4_0). The K-quants hold 256, with `scales` of groups of 16 or 32 elements, and put `d` first
or last; so do iq4_xs and tq2_0. q1_0 holds 128 and nvfp4 64: `python -m qformats draw q4_k`.
"""

from __future__ import annotations

from math import gcd
from typing import Any, Final

import numpy as np

BLOCK: Final = 32  # elements sharing one scale
SUPER: Final = 256  # elements of a K-quant's block, in groups with scales of their own

BlockDtype = np.dtype[np.void]

_D: Final = ("d", "<f2")  # scale
_E: Final = ("e", "u1")  # scale, as an exponent of two
_M: Final = ("m", "<f2")  # minimum
_S: Final = ("s", "<f2")  # d * sum of the codes, or the sum of the values
_QH: Final = ("qh", "u1", (4,))  # bit j of the little-endian word is the fifth bit of element j
_NIBBLES: Final = ("qs", "u1", (16,))  # byte j: element j in bits 3..0, element j+16 in bits 7..4
_BYTES: Final = ("qs", "i1", (32,))  # byte j: element j
# As _NIBBLES, but each is an index of a table, or 128 bits. The title, NumPy's second name of a
# field, is there to tell 18 bytes of iq4_nl and q1_0 from q4_0's: a format is known by its dtype.
_INDICES: Final = (("indices", "qs"), "u1", (16,))
_BITS: Final = (("bits", "qs"), "u1", (16,))

block_q4_0: Final[BlockDtype] = np.dtype([_D, _NIBBLES])
block_q4_1: Final[BlockDtype] = np.dtype([_D, _M, _NIBBLES])
block_q5_0: Final[BlockDtype] = np.dtype([_D, _QH, _NIBBLES])
block_q5_1: Final[BlockDtype] = np.dtype([_D, _M, _QH, _NIBBLES])
block_q8_0: Final[BlockDtype] = np.dtype([_D, _BYTES])
block_q8_1: Final[BlockDtype] = np.dtype([_D, _S, _BYTES])
block_mxfp4: Final[BlockDtype] = np.dtype([_E, _INDICES])
block_iq4_nl: Final[BlockDtype] = np.dtype([_D, _INDICES])

_DMIN: Final = ("dmin", "<f2")  # scale of the minima
_SIXES: Final = ("scales", "u1", (12,))  # of 6 bits each, some of them in two places

block_q2_k: Final[BlockDtype] = np.dtype([("scales", "u1", (16,)), ("qs", "u1", (64,)), _D, _DMIN])
block_q3_k: Final[BlockDtype] = np.dtype([("hmask", "u1", (32,)), ("qs", "u1", (64,)), _SIXES, _D])
block_q4_k: Final[BlockDtype] = np.dtype([_D, _DMIN, _SIXES, ("qs", "u1", (128,))])
block_q5_k: Final[BlockDtype] = np.dtype(
    [_D, _DMIN, _SIXES, ("qh", "u1", (32,)), ("qs", "u1", (128,))]
)
block_q6_k: Final[BlockDtype] = np.dtype(
    [("ql", "u1", (128,)), ("qh", "u1", (64,)), ("scales", "i1", (16,)), _D]
)

block_iq4_xs: Final[BlockDtype] = np.dtype(
    [_D, ("scales_h", "u1", (2,)), ("scales_l", "u1", (4,)), ("qs", "u1", (128,))]
)
block_nvfp4: Final[BlockDtype] = np.dtype([("d", "u1", (4,)), ("qs", "u1", (32,))])
block_q1_0: Final[BlockDtype] = np.dtype([_D, _BITS])
block_tq2_0: Final[BlockDtype] = np.dtype([("qs", "u1", (64,)), _D])


def offsets(dtype: BlockDtype) -> dict[str, int]:
    """The byte at which each field of a block begins, in memory order."""
    fields: Any = dtype.fields
    return {name: fields[name][1] for name in dtype.names or ()}


def alignment(dtype: BlockDtype, field: str) -> int:
    """Bytes of the widest load that is aligned at `field` in *every* block of an array: 1 to 16.

    It divides both the field's offset and the block's size; the array itself is taken to start at
    an address aligned for anything.
    """
    common = gcd(offsets(dtype)[field], dtype.itemsize)
    return common & -common
