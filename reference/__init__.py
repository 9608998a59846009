"""What is right: reproducible problems, float64 products, and a check that says what is wrong.

Nothing here knows of kernels or GPUs; it imports numpy and `qformats` only.

    problem = Problem(m=17, n=40, k=96, format="q5_1", distribution="normal")
    c = ...                                       # somebody's answer, float32[M, N]
    verdict = check(c, problem, "A8", q81)        # ok, both errors, the worst element, one sentence
"""

from reference.check import Check, Limits, Reference, bound, check, limits, nmse
from reference.problem import (
    BENCH_SHAPES,
    CHECK_SHAPES,
    DISTRIBUTIONS,
    GOLDEN,
    GPU_CHECK_SHAPES,
    Golden,
    PrequantizedProblem,
    Problem,
)
from reference.product import (
    Q81,
    Halves,
    SummedTokens,
    Tokens,
    both_tokens,
    magnitude_a8,
    magnitude_a16,
    magnitude_half,
    same_operands_a8,
    same_operands_a16,
    sample,
    unquantized,
)

__all__ = [
    "BENCH_SHAPES",
    "CHECK_SHAPES",
    "DISTRIBUTIONS",
    "GOLDEN",
    "GPU_CHECK_SHAPES",
    "Q81",
    "Check",
    "PrequantizedProblem",
    "Golden",
    "Halves",
    "Limits",
    "Problem",
    "Reference",
    "SummedTokens",
    "Tokens",
    "both_tokens",
    "bound",
    "check",
    "limits",
    "magnitude_a8",
    "magnitude_a16",
    "magnitude_half",
    "nmse",
    "same_operands_a8",
    "same_operands_a16",
    "sample",
    "unquantized",
]
