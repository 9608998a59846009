"""The library of the CUDA driver, for the two calls that are made again and again.

`cuda.bindings` lays the arguments of a call out anew each time and wraps what comes back; `ctypes`
takes addresses of what was laid out once.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache


@cache
def driver_library() -> ctypes.CDLL:
    """It lets other threads run while a call is made. OSError where no driver is installed."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
