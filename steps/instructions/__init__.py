"""The instruction vocabulary: what kernels use above plain Numba, each name as PTX on the GPU and as NumPy in the simulator.

`from steps.instructions import ...` names inside kernels; `steps.instructions.simulator.simulate` runs a kernel on the CPU,
`steps.instructions.compile.machine_code` compiles it without a GPU. Memory operands are (array, element index).
"""

from . import _numpy_shim  # noqa: F401 - first: see there
from .arithmetic import dp4a, dp4a_us, float_to_half, half_to_float, prmt
from .memory import (
    load_f32x2,
    load_f32x4,
    load_u16,
    load_u32,
    load_u32x2,
    load_u32x4,
    store_f32x2,
    store_f32x4,
    store_u16,
    store_u32,
    store_u32x2,
    store_u32x4,
)

__all__ = [
    "dp4a",
    "dp4a_us",
    "float_to_half",
    "half_to_float",
    "load_f32x2",
    "load_f32x4",
    "load_u16",
    "load_u32",
    "load_u32x2",
    "load_u32x4",
    "prmt",
    "store_f32x2",
    "store_f32x4",
    "store_u16",
    "store_u32",
    "store_u32x2",
    "store_u32x4",
]
