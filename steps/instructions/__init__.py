"""The instruction vocabulary: what kernels use above plain Numba, for every machine under one name.

    from steps.instructions import dp4a, load_u32x4              names used inside kernels
    from steps.simulator.launch import simulate                  run a kernel on the CPU, checked
    from steps.compile.compiler import machine_code              compile one without a GPU

Each instruction is PTX (or an LLVM vector access) on the GPU and NumPy in the simulator. Memory
operands are always (array, index), the index counting elements of that array taken as flat.

used from
step 1    arithmetic.py     packed bytes and halves, one register at a time
step 1    memory.py         loads and stores of 2 to 16 bytes; fences, launches that overlap
step 2    warp.py           shuffles; the index of a thread, read anew
step 7    tensor_core.py    mma.sync, ldmatrix, stmatrix
step 9    async_copy.py     cp.async
step 12   warpgroup.py      wgmma, named barriers, setmaxnreg
step 13   bulk_copy.py      bulk copies and mbarriers
step 13   tensor_map.py     boxes of a matrix by tensor map
          approximate.py    exp2, reciprocal, rsqrt: between products; not gathered here
          define.py         how an instruction is defined
"""

# ruff: noqa: F401 - gathered here for kernels

from steps.instructions.arithmetic import (
    and_xor,
    as_bits,
    as_float,
    dp4a,
    dp4a_us,
    float_to_half,
    floats_to_bfloats,
    floats_to_halves,
    half_to_float,
    hfma2,
    hfma2_bf16,
    high2half2,
    hmul2,
    low2half2,
    prmt,
    select_bits,
)
from steps.instructions.async_copy import (
    cp_async_4,
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
)
from steps.instructions.bulk_copy import (
    bulk_copy,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_proxy_async_global,
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
    mbarrier_wait_bounded,
    prefetch_l2,
)
from steps.instructions.memory import (
    address,
    fence,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_f32,
    load_f32x2,
    load_f32x4,
    load_u16,
    load_u32,
    load_u32_relaxed,
    load_u32_system,
    load_u32x2,
    load_u32x4,
    load_u32x4_once,
    load_u32x4_relaxed,
    load_u64x2_relaxed,
    store_f32,
    store_f32x2,
    store_f32x4,
    store_u16,
    store_u16_relaxed,
    store_u32,
    store_u32_relaxed,
    store_u32_system,
    store_u32x2,
    store_u32x4,
    store_u64_relaxed,
    trap,
)
from steps.instructions.tensor_core import (
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k8_tf32,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    mma_m16n8k32_s8,
    mma_m16n8k32_u8,
    movmatrix_trans,
    stmatrix_x4_trans,
)
from steps.instructions.tensor_map import (
    BOX_K,
    TensorMap,
    prefetch_tensor_map,
    tensor_copy,
    tensor_map_address,
)
from steps.instructions.warp import elect_one, shfl, shfl_up, shfl_xor, thread_index
from steps.instructions.warpgroup import (
    barrier_arrive,
    barrier_sync,
    matrix_descriptor,
    setmaxnreg_dec,
    setmaxnreg_inc,
    spread,
    swizzled_descriptor,
    wgmma_commit,
    wgmma_f16,
    wgmma_fence,
    wgmma_s8,
    wgmma_sparse_f16,
    wgmma_wait,
    zeros_f32,
    zeros_i32,
)
from steps.simulator import numpy_shim  # first: see there
