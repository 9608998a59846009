"""The same small exact kernels on a real GPU: the hardware against the expectation of the twins."""

from typing import Any

import numpy as np
import pytest

from steps.instructions import TensorMap
from tests.instructions import hopper_cases, instruction_cases

CASES = instruction_cases.CASES + hopper_cases.CASES

pytestmark = pytest.mark.gpu


def on_the_gpu(x: Any) -> Any:
    from numba import cuda

    if isinstance(x, TensorMap):
        return TensorMap(cuda.to_device(x.array), x.box)
    return cuda.to_device(x) if isinstance(x, np.ndarray) else x


def dimensions(extent: int | tuple) -> tuple:
    return extent if isinstance(extent, tuple) else (extent,)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_hardware_equals_numpy(case, seed):
    from numba import cuda

    from steps.contract import Launch
    from steps.driver.launcher import load

    cc = cuda.get_current_device().compute_capability
    oldest = int(case.oldest[3]), int(case.oldest[4])
    if cc < oldest or (case.oldest.endswith("a") and cc != oldest):
        pytest.skip(f"needs {case.oldest}; this GPU is sm_{cc[0]}{cc[1]}")
    inputs, expected = case.prepare(seed)
    outputs = [cuda.to_device(np.full_like(x, 90)) for x in expected]
    args = (*map(on_the_gpu, inputs), *outputs)
    load(Launch(case.kernel, dimensions(case.grid), dimensions(case.block), args))()
    cuda.synchronize()
    for got, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(got.copy_to_host(), wanted)


def test_more_than_48_kb_of_dynamic_shared_memory():
    from numba import cuda, int32

    from steps.contract import Launch
    from steps.driver.launcher import load

    @cuda.jit
    def far(out):
        stage = cuda.shared.array(0, int32)
        t = cuda.threadIdx.x
        stage[15 * 1024 + t] = t
        cuda.syncthreads()
        out[t] = stage[15 * 1024 + 31 - t]

    out = cuda.to_device(np.zeros(32, np.int32))
    load(Launch(far, (1,), (32,), (out,), shared_bytes=64 * 1024))()
    np.testing.assert_array_equal(out.copy_to_host(), np.arange(32)[::-1])


def test_offline_code_is_what_is_launched():
    """Compiled offline for this GPU, a kernel has the registers that it has when launched."""
    from numba import cuda

    from steps.compile.compiler import machine_code, signature_of

    case = next(case for case in CASES if case.name == "dp4a")
    inputs, expected = case.prepare(seed=0)
    signature = signature_of((*inputs, *expected))
    major, minor = cuda.get_current_device().compute_capability
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    offline = machine_code(case.kernel, signature, arch)
    case.kernel.compile(signature)
    assert case.kernel.overloads[signature].regs_per_thread == offline.registers
