"""The classical acceptance: M=4, N=512, K=1024, every format within 1 % of the float product.

At the level of the formats, with NumPy: that kernels compute the product of their operands is what
all check shapes are for, of which on a GPU this is one.
"""

from __future__ import annotations

import pytest

from qformats import WEIGHT_FORMATS
from reference import GPU_CHECK_SHAPES, Q81, Problem, nmse, same_operands, unquantized

SHAPE = (4, 512, 1024)
CLASSICAL_LIMIT = 0.01
A8_WITHIN_A16 = 1e-4


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_the_formats_themselves(name: str, distribution: str) -> None:
    assert SHAPE in GPU_CHECK_SHAPES
    problem = Problem(*SHAPE, name, distribution)
    exact = unquantized(problem.a, problem.w)
    a16 = same_operands(problem.a, problem.blocks)[0]
    a8 = same_operands(Q81.of_values(problem.a), problem.blocks)[0]
    assert nmse(a16, exact) < CLASSICAL_LIMIT
    assert nmse(a8, exact) < CLASSICAL_LIMIT
    assert nmse(a8, a16) < A8_WITHIN_A16
