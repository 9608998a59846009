"""The instruction vocabulary: what kernels use above plain Numba, for every machine under one name.

    from steps.instructions import dp4a, load_u32x4              names used inside kernels
    from steps.instructions.simulator import simulate            run a kernel on the CPU, checked
    from steps.instructions.compile import machine_code          compile one without a GPU

Each instruction is PTX (or an LLVM vector access) on the GPU and NumPy in the simulator. Memory
operands are always (array, index), the index counting elements of that array taken as flat.
"""

from . import _numpy_shim  # noqa: F401 - first: see there
from .arithmetic import (
    as_bits,
    as_float,
    dp4a,
    dp4a_us,
    float_to_half,
    floats_to_halves,
    half_to_float,
    hfma2,
    hmul2,
    prmt,
)
from .async_copy import (
    cp_async_4,
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
)
from .launch_order import let_next_start, wait_for_previous
from .memory import (
    address,
    fence,
    load_f32,
    load_f32x2,
    load_f32x4,
    load_u16,
    load_u32,
    load_u32x2,
    load_u32x4,
    store_f32,
    store_f32x2,
    store_f32x4,
    store_u16,
    store_u32,
    store_u32x2,
    store_u32x4,
)
from .tensor_core import (
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k8_tf32,
    mma_m16n8k16_f16,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
)
from .warp import shfl, shfl_down, shfl_up, shfl_xor

__all__ = [
    "address",
    "as_bits",
    "as_float",
    "cp_async_4",
    "cp_async_16",
    "cp_async_16_zfill",
    "cp_async_commit",
    "cp_async_wait",
    "dp4a",
    "dp4a_us",
    "fence",
    "float_to_half",
    "floats_to_halves",
    "half_to_float",
    "hfma2",
    "hmul2",
    "ldmatrix_x2",
    "ldmatrix_x2_trans",
    "ldmatrix_x4",
    "ldmatrix_x4_trans",
    "let_next_start",
    "load_f32",
    "load_f32x2",
    "load_f32x4",
    "load_u16",
    "load_u32",
    "load_u32x2",
    "load_u32x4",
    "mma_m16n8k8_tf32",
    "mma_m16n8k16_f16",
    "mma_m16n8k32_s8",
    "mma_m16n8k32_u8",
    "prmt",
    "shfl",
    "shfl_down",
    "shfl_up",
    "shfl_xor",
    "store_f32",
    "store_f32x2",
    "store_f32x4",
    "store_u16",
    "store_u32",
    "store_u32x2",
    "store_u32x4",
    "wait_for_previous",
]
