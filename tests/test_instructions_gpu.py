"""The same small exact kernels on a real GPU: the hardware against the expectation of the twins."""

import numpy as np
import pytest

from tests.instruction_cases import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_hardware_equals_numpy(case, seed):
    from numba import cuda

    cc = cuda.get_current_device().compute_capability
    if cc < (int(case.oldest[3]), int(case.oldest[4])):
        pytest.skip(f"needs {case.oldest}; this GPU is sm_{cc[0]}{cc[1]}")
    inputs, expected = case.prepare(seed)
    on_device = [cuda.to_device(x) if isinstance(x, np.ndarray) else x for x in inputs]
    outputs = [cuda.to_device(np.full_like(x, 90)) for x in expected]
    case.kernel[case.grid, case.block](*on_device, *outputs)
    for got, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(got.copy_to_host(), wanted)
