"""What is right: reproducible problems, float64 products, and a check that says what is wrong.

Nothing here knows of kernels or GPUs; it imports NumPy and `qformats` only.

problem.py     inputs, reproducible from a seed; drawn.py, exact.py, golden.py make them
shapes.py      the shapes that are checked and measured
bfloat16.py    numbers that NumPy does not have
operands.py    activations as kernels multiply them; recipes.py checks them
product.py     float64 products and the magnitudes of their terms
sampling.py    the outputs of a large product that are compared
limits.py      rounding bounds, and limits of the NMSE
check.py       the verdict

    problem = Problem(m=17, n=40, k=96, format="q5_1", distribution="normal")
    c = ...                                       # somebody's answer, float32[M, N]
    verdict = check(c, problem, "A8", q81)        # ok, both errors, the worst element, one sentence
"""

from reference.bfloat16 import bfloat16_bits, bfloat16_values
from reference.check import Check, Reference, check
from reference.golden import GOLDEN, Golden
from reference.limits import Limits, bound, limits, nmse
from reference.operands import Q81, Bfloats, Halves, Tokens
from reference.problem import (
    DISTRIBUTIONS,
    INPUTS,
    OF_BLOCKS,
    ExpertsProblem,
    PrequantizedProblem,
    Problem,
)
from reference.product import same_operands, unquantized
from reference.sampling import sample
from reference.shapes import BENCH_SHAPES, CHECK_SHAPES, DEEP_CHECK_SHAPE, GPU_CHECK_SHAPES
