"""The gate of a feed-forward block: silu(gate) * up, for the product that comes next.

The pass of `steps.kernels.parts.activations.gated` for any dtype on either side, as a launch that
overlaps: with one token its fourteen thread blocks lie beside those of the product before them,
which are at their end, and the product after them is already resident.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from numba import cuda, int32, int64

from steps.contract import Launch, ceil_div, dtype_name
from steps.instructions import griddepcontrol_launch_dependents, griddepcontrol_wait
from steps.kernels.between.eight import EIGHT, OF_DTYPE
from steps.kernels.parts.activations.gated import silu_times

THREADS: Final = 128


@cache
def kernel(of_y: str, of_x: str) -> Any:
    """The kernel for these dtypes of y and x."""
    load, store = OF_DTYPE[of_y].load, OF_DTYPE[of_x].store

    @cuda.jit(launch_bounds=(THREADS, 1))
    def swiglu(y, x):
        """x[M, K] = silu(gate) * up of y[M, 2 K], K gates and then K ups, computed in float32. K is
        a multiple of 8; both begin at a multiple of 16 bytes."""
        griddepcontrol_launch_dependents()
        width = int32(x.shape[1])
        m = int64(cuda.blockIdx.x)
        k = int32((cuda.blockIdx.y * THREADS + cuda.threadIdx.x) * EIGHT)
        griddepcontrol_wait()
        if k < width:
            gate = load(y, m * (2 * width) + k)
            up = load(y, m * (2 * width) + width + k)
            g0, g1 = silu_times(gate[0], up[0]), silu_times(gate[1], up[1])
            g2, g3 = silu_times(gate[2], up[2]), silu_times(gate[3], up[3])
            g4, g5 = silu_times(gate[4], up[4]), silu_times(gate[5], up[5])
            g6, g7 = silu_times(gate[6], up[6]), silu_times(gate[7], up[7])
            store(x, m * width + k, (g0, g1, g2, g3, g4, g5, g6, g7))

    return swiglu


def launch(y: Any, x: Any) -> Launch:
    """x = silu(gate) * up of y = [gate, up], see the kernel."""
    m, width = x.shape
    grid = m, ceil_div(width, THREADS * EIGHT)
    return Launch(kernel(dtype_name(y), dtype_name(x)), grid, (THREADS,), (y, x), overlap=True)
