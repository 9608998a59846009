"""Tensor maps among the parameters of a launch, as the driver encodes them.

Only the driver can encode the 16 words of a map, and they differ for each address of the matrix.
It is called through `ctypes`, with arguments laid out once. That takes the host 3 us, or 12 us
between the layers of a model; cuda.bindings lays the arguments out at each call and wraps the
result, which takes 17 us. A model's matrices come back to the same few addresses, so the words for
the last `ADDRESSES` addresses are kept.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache, lru_cache
from typing import Any, Final

from cuda.bindings.driver import CUresult

from steps.instructions.tensor_map import MAP_WORDS, TensorMap, require_map_place

_DATA_TYPES: Final = {1: 0, 2: 6}
"""CUtensorMapDataType by bytes of a number: UINT8 and FLOAT16. A copy moves the bits, whatever they
say."""
_NOT_INTERLEAVED: Final = 0
_SWIZZLE_128B: Final = 3
_L2_PROMOTION_256B: Final = 3  # what the L2 loads from memory at once
_ZEROS_BEYOND: Final = 0  # the matrix, not NaN
_ALIGNMENT: Final = 64  # bytes; the driver writes a map to no other place

ADDRESSES: Final = 64
"""Encoded maps that a launch keeps, of 128 bytes each."""


@cache
def driver_library() -> ctypes.CDLL:
    """The library of the CUDA driver. It lets other threads run while a call is made. OSError where
    no driver is installed."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@cache
def driver_function() -> Any:
    """cuTensorMapEncodeTiled."""
    function = driver_library().cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 4,
    )
    return function


class EncodedMap:
    """The words of a tensor map among the parameters of a launch, all zero until `put`."""

    __slots__ = ("_address", "_encoded", "_words")

    def __init__(self, source: TensorMap, words: int) -> None:
        """words: the host address of the map among the parameters of the launch."""
        (m, k), (tokens, wide) = source.array.shape, source.box
        extents = (ctypes.c_uint64 * 2)(k, m)
        row_bytes = (ctypes.c_uint64 * 1)(source.item_bytes * k)
        box = (ctypes.c_uint32 * 2)(wide, tokens)
        every_element = (ctypes.c_uint32 * 2)(1, 1)
        kind, facts = _DATA_TYPES[source.item_bytes], (extents, row_bytes, box, every_element)
        modes = (_NOT_INTERLEAVED, _SWIZZLE_128B, _L2_PROMOTION_256B, _ZEROS_BEYOND)
        room = (ctypes.c_uint64 * (MAP_WORDS + _ALIGNMENT // 8))()

        def encoded(address: int) -> bytes:
            require_map_place(address)
            place = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
            if error := driver_function()(place, kind, 2, address, *facts, *modes):
                raise RuntimeError(
                    f"a tensor map is not possible on this GPU: {CUresult(error).name} for a "
                    f"matrix at {address:#x}"
                )
            return ctypes.string_at(place, 8 * MAP_WORDS)

        self._encoded = lru_cache(ADDRESSES)(encoded)
        self._words = words
        self._address: int | None = None

    def put(self, address: int) -> None:
        """Make it the map of the matrix at an address. The thread has a context.

        ValueError where the hardware takes no matrix; the map is then as it was.
        """
        if address != self._address:
            known = self._encoded(address)
            ctypes.memmove(self._words, known, len(known))
            self._address = address
