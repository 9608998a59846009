"""Tensor maps among the parameters of a launch, as the driver encodes them.

The driver alone knows what the 16 words of a map say; of a matrix at another address they are
others. It is called through `ctypes`, on numbers laid out once: that takes the host 2 us, and
cuda.bindings, which lays them out at each call, 17 us.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
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


@cache
def driver_function() -> Any:
    """cuTensorMapEncodeTiled."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    function = library.cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
        *[ctypes.c_void_p] * 4,
        *[ctypes.c_int] * 4,
    )
    return function


class EncodedMap:
    """The words of a tensor map among the parameters of a launch, all zero until `put`."""

    __slots__ = ("_address", "_data_type", "_facts", "_map", "_room", "_words")

    def __init__(self, source: TensorMap, words: int) -> None:
        """words: where the map is among the parameters, an address of this process."""
        (m, k), (tokens, wide) = source.array.shape, source.box
        extents = (ctypes.c_uint64 * 2)(k, m)
        row_bytes = (ctypes.c_uint64 * 1)(source.item_bytes * k)
        box = (ctypes.c_uint32 * 2)(wide, tokens)
        every_element = (ctypes.c_uint32 * 2)(1, 1)
        self._data_type = _DATA_TYPES[source.item_bytes]
        self._facts = (extents, row_bytes, box, every_element)
        self._room = (ctypes.c_uint64 * (MAP_WORDS + _ALIGNMENT // 8))()
        self._map = -(-ctypes.addressof(self._room) // _ALIGNMENT) * _ALIGNMENT
        self._words = words
        self._address: int | None = None

    def put(self, address: int) -> None:
        """Encode the map anew, if the matrix was at another address. The thread has a context.

        ValueError where the hardware takes no matrix; the map is then as it was.
        """
        if address == self._address:
            return
        require_map_place(address)
        error = driver_function()(
            self._map,
            self._data_type,
            2,
            address,
            *self._facts,
            _NOT_INTERLEAVED,
            _SWIZZLE_128B,
            _L2_PROMOTION_256B,
            _ZEROS_BEYOND,
        )
        if error:
            raise RuntimeError(
                f"a tensor map is not possible on this GPU: {CUresult(error).name} for a matrix at "
                f"{address:#x}"
            )
        ctypes.memmove(self._words, self._map, 8 * MAP_WORDS)
        self._address = address
