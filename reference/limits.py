"""How wrong a right kernel may be: rounding bounds of each element, and limits of the NMSE.

`bound` holds for every element with certainty. `limits` are of the error as a whole: the kernel's
against the same operands, and the format's against the unquantized product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qformats import BLOCK, FORMATS, WEIGHT_FORMATS
from qformats.storage import storage_format
from reference.problem import Problem

Array = np.ndarray[Any, np.dtype[Any]]

FAMILIES: Final = ("A16", "A8")

# --- rounding -------------------------------------------------------------------------------------

FLOAT32_ROUNDOFF: Final = 2.0**-24  # unit roundoff of float32, round to nearest

# What rounding a weight costs, and what one rounding of the accumulator does. Tensor cores
# accumulate in float32 but may truncate: two roundings to nearest.
_OPERANDS: Final = {
    "f32": (0.0, FLOAT32_ROUNDOFF),
    # A is rounded already: `Halves` and `Bfloats`
    "f16_weights": (2.0**-11, 2 * FLOAT32_ROUNDOFF),
    "int8": (0.0, FLOAT32_ROUNDOFF),  # so are A and W: `Tokens`
}


def nmse(x: Array, ref: Array) -> float:
    """sum (x - ref)^2 / sum ref^2 in float64; 0 for 0 against 0, inf for anything else against 0.

    x, ref: NumPy arrays of numbers of one shape; ValueError for two shapes, and for no elements.
    inf as well where either holds a NaN or Inf: no such thing may pass for a small error.
    """
    if x.shape != ref.shape or not x.size:  # NumPy would spread one of them over the other
        raise ValueError(
            f"x and ref must have one shape and an element at least, got {list(x.shape)} and "
            f"{list(ref.shape)}"
        )
    x, ref = x.astype(np.float64), ref.astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(ref).all()):
        return math.inf
    error, energy = float(np.sum((x - ref) ** 2)), float(np.sum(ref**2))
    if energy == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / energy


def roundings(family: str, k: int, operands: str = "f32") -> int:
    """How many float32 roundings any one term of an output goes through, at most.

    A sum of n terms, in *any* order or tree (split-K, lanes, atomics), passes each term through
    at most n - 1 additions; adding to a zero is exact.

    A16: K terms a * w. K - 1 additions, the product, the dequantization of w (scale * code is
    exact, 11 + 5 bits; adding the offset rounds once), the scale and the offset taken apart (two
    more products), and one to spare for the float64 reference: K + 4.

    A8: the integer sums are exact (a block stays below 2^24), so terms are made per block, or per
    packed word of four by a kernel that splits a block over lanes: 8 words and one compensation,
    9 terms a block. 9 K/32 - 1 additions, the product scale * da, its product with the sum, its
    rounding where s or a word is scaled apart, two to spare: 9 K/32 + 4.

    A8 of int8: one integer sum over all of K, exact; it becomes a float32 and
    is multiplied by the factor of its row and by that of its token: 3, and one to spare.
    """
    known_family(family)
    if operands == "int8":
        return 4
    return k + 4 if family == "A16" else 9 * (k // 32) + 4


def bound(family: str, k: int, magnitude: Array, operands: str = "f32") -> Array:
    """The largest |error| a right kernel can make in each output, float64 of magnitude's shape.

    family     "A16" or "A8"
    magnitude  float64[M, N], sum |t_i| of the terms of each output: that of `same_operands`
    operands   "f32"; "int8" for `Tokens`; "f16_weights" where weights are rounded first, with the
               magnitude of `Halves` or `Bfloats`

    With n roundings of unit u on every term (`roundings`), the computed sum is
    sum t_i (1 + e_i), |e_i| <= gamma_n = n u / (1 - n u)  (Higham, Accuracy and Stability of
    Numerical Algorithms, ch. 3-4), so |error| <= gamma_n * sum |t_i|. Weights rounded first (A16
    only) add their own rounding v.

    It holds with certainty, whatever cancels, and is therefore wide: real errors grow like the root
    of n, not like n. That is what NMSE is for. Raises ValueError for an unknown family or operands.
    """
    v, u = _rounding(operands)
    n = roundings(family, k, operands)
    gamma = n * u / (1 - n * u)
    return np.asarray(((1 + v) * (1 + gamma) - 1) * magnitude)


# --- limits ---------------------------------------------------------------------------------------

# NMSE of dequantized weights, 2^24 of them, ggml's recipes, measured here. It equals the expected
# NMSE of a product: the errors of W are independent of A. As a check by hand, Q8_0 rounds to a
# step of amax/127, all but the extreme: 31/32 E[amax^2] / (12 * 127^2 * variance), where uniform
# data has E[amax^2] = 32/34 and variance 1/3, so 1.413e-5.
WEIGHT_NMSE: Final[dict[str, dict[str, float]]] = {
    "uniform": {
        "q4_0": 4.227e-3,
        "q4_1": 3.684e-3,
        "q5_0": 9.734e-4,
        "q5_1": 8.628e-4,
        "q8_0": 1.417e-5,
        "mxfp4": 2.074e-2,
        "iq4_nl": 4.579e-3,
    },
    "normal": {
        "q4_0": 7.378e-3,
        "q4_1": 6.118e-3,
        "q5_0": 1.821e-3,
        "q5_1": 1.433e-3,
        "q8_0": 2.864e-5,
        "mxfp4": 1.321e-2,
        "iq4_nl": 6.189e-3,
    },
}
WEIGHT_NMSE["llm"] = WEIGHT_NMSE["normal"]  # only A has outliers

# The same of Q4_0 of which two of each four weights are kept: 2^24 weights.
PRUNED_NMSE: Final = {"uniform": 0.2064, "normal": 0.1416, "llm": 0.1416}

# What Q8_1 activations add to that, from the exact sum of codes up to llama.cpp's sum of raw values
# (which leaves s and the codes at odds, 4-6 times worse for the formats with an offset).
# "llm": an outlier sets d for its block, and the 31 others are rounded 20 times more coarsely. How
# much depends on the share of blocks with an outlier, so the range is wide.
ACTIVATION_NMSE: Final[dict[str, tuple[float, float]]] = {
    "uniform": (1.3e-5, 7e-5),
    "normal": (2.6e-5, 2.1e-4),
    "llm": (3e-5, 3e-3),
}

# What int8 with one scale for each token, and weights requantized to one scale a row, add to that:
# both scales follow the largest of K values (3 to 4.5 times their size), so that it is what Q8_1
# adds where K is a block, and more the longer K is: the upper ends are for 14336, with room. "llm":
# an outlier channel sets the scale of all of a token.
INT8_NMSE: Final[dict[str, tuple[float, float]]] = {
    "uniform": (1.3e-5, 8e-5),
    "normal": (2.6e-5, 3e-4),
    "llm": (3e-5, 1.2e-2),
}

# Where blocks themselves are drawn (K-quants) the largest weight of a row stands out more: 1.15e-4
# on uniform data at K = 16384. Of other data the table's room is enough.
INT8_OF_DRAWN_BLOCKS: Final = {"uniform": (1.3e-5, 1.2e-4)}

# What rounding scales and minima of K-quants to float16 adds (`qformats.storage`): 2^-22 of the
# energy of scale * code and of offset at most, up to 16 times that of the weights they come to.
SCALE_NMSE: Final = 16 * 2.0**-22

# What rounding C to bfloat16 adds at most: (2^-8)^2 / 3, if significands are near 1.
BFLOAT16_NMSE: Final = 2.0**-16 / 3

CLASSICAL: Final = 1e-2  # the acceptance of the classical ladder: NMSE < 1 % of the float product

FEWEST_OUTPUTS: Final = 1024  # independent outputs by whose error a format can be told


@dataclass(frozen=True)
class Limits:
    """What is allowed. A range is (low, high): too good is as suspicious as too bad.

    nmse_same_operands  the kernel's error
    nmse_float          the format's error, of the product; None where there are too few outputs
                        (or no quantization: `OF_BLOCKS`) for the figure to mean anything
    nmse_weights        the same of the weights themselves, None where there are too few of them
    """

    nmse_same_operands: float
    nmse_float: tuple[float, float] | None
    nmse_weights: tuple[float, float] | None


def limits(
    problem: Problem,
    family: str,
    operands: str = "f32",
    outputs: tuple[int, int] | None = None,
    size: Array | None = None,
) -> Limits:
    """The limits of one family on one problem, of which outputs = (rows, columns) are compared, by
    default all of [M, N]. `operands` as of `bound`; ValueError for an unknown family or operands.
    size: the magnitude of each output, as `bound` takes it, where they are not of one size.
    """
    known_family(family)
    rows, columns = outputs or (problem.m, problem.n)
    energies = np.ones(rows * columns) if size is None else size.ravel() ** 2
    kernel = _kernel_limit(family, problem, operands, _most_of_mean(energies))
    expected = WEIGHT_NMSE.get(problem.distribution, {}).get(problem.format)
    if problem.pruned:
        expected = PRUNED_NMSE.get(problem.distribution)
    drawn = problem.distribution in WEIGHT_NMSE and not FORMATS[problem.format].written
    if not problem.knows_floats or (expected is None and not drawn):
        return Limits(kernel, None, None)  # nothing is known to be lost in quantizing the weights

    # Ratios of two sums of squares of nearly normal numbers: relative deviation 2 / sqrt(count).
    # Five deviations, and 3 % for what the table's figures leave open. With outlier channels only
    # the columns of C are independent (one channel dominates every row alike).
    count = columns if problem.distribution == "llm" else rows * columns
    slack = 0.03 + 5 * 2 / math.sqrt(count)
    added = (0.0, 0.0)
    if family == "A8":
        added = (INT8_NMSE if operands == "int8" else ACTIVATION_NMSE)[problem.distribution]
    product: tuple[float, float] | None = None
    if expected is None:  # blocks are what is meant; only their scales may be rounded
        if operands == "int8":
            added = INT8_OF_DRAWN_BLOCKS.get(problem.distribution, added)
        if count >= FEWEST_OUTPUTS:
            product = (added[0] * (1 - slack), (SCALE_NMSE + added[1]) * (1 + slack))
        return Limits(kernel, product, None)
    if count >= FEWEST_OUTPUTS:
        classical = operands != "int8" and problem.format in WEIGHT_FORMATS and not problem.pruned
        most = CLASSICAL if classical else math.inf  # more is asked of no others
        high = min((expected + added[1]) * (1 + slack), most)
        product = ((expected + added[0]) * (1 - slack), high)
    # Deviation of the weights' own NMSE, measured: 0.8 % of 2^16 weights (a block shares its d).
    weights: tuple[float, float] | None = None
    slack_w = 0.01 + 5 * 0.008 * math.sqrt(2**16 / (problem.k * columns))
    if slack_w <= 0.08:
        weights = (expected * (1 - slack_w), expected * (1 + slack_w))
    return Limits(kernel, product, weights)


def _most_of_mean(energies: Array) -> float:
    """What a sum of squares of normal numbers of such energies may be times what is expected; it is
    more once in e^12 (Laurent and Massart, Annals of Statistics 28, lemma 1). Of n of one energy:
    1 + 2 sqrt(12 / n) + 24 / n. One that is much larger than the others counts alone.
    """
    largest = float(energies.max(initial=0))
    if not 0 < largest < math.inf:
        energies, largest = np.ones(energies.size), 1.0
    shares = energies / largest
    shares = shares / shares.sum()
    return 1 + 2 * math.sqrt(12 * float(shares @ shares)) + 24 * float(shares.max())


def _kernel_limit(family: str, problem: Problem, operands: str, few: float) -> float:
    """few: how much more than expected the outputs that are compared may lose, at most."""
    _rounding(operands)
    k = problem.k
    if operands == "int8":  # exact integer sums, three roundings of each output: (3 u)^2 at most
        return 9 * FLOAT32_ROUNDOFF**2
    if family == "A8":
        # int32 sums are exact; the float32 part was measured at 4e-15 ... 3e-13 for K up to 14336,
        # which leaves room for other orders. Sums of very many blocks may lose more, and so may few
        # outputs: as below, with blocks for terms.
        rounded = max(1e-11, 16 / 6 * (k / BLOCK) * FLOAT32_ROUNDOFF**2 * few)
        # Minima may be added by tensor cores, once in 128 K. These truncate: errors have one sign,
        # and their sum grows with K, not with its root. Measured: 4.6e-13 and 4.5e-12 at K = 4096
        # and 14336, a tenth of (u K / 128)^2. Twice that, and more where outputs are few.
        truncated = 2 * (k / 128 * FLOAT32_ROUNDOFF) ** 2 / 10 * few
        names = storage_format(FORMATS[problem.format]).dtype.names or ()
        return max(rounded, truncated) if "m" in names else rounded
    if operands == "f16_weights":  # rounded to float16, once: 3e-8 measured
        return 3e-7 * few
    # A running sum after j of K terms has energy j/K of the result; each addition rounds it with
    # variance u^2 / 3: K u^2 / 6 in all. Up to 16 times that where scale and offset are summed
    # apart (unsigned codes have that much more energy than the weights they stand for).
    return 16 / 6 * (k + 4) * FLOAT32_ROUNDOFF**2 * few


def known_family(family: str) -> None:
    """ValueError where a family is none of `FAMILIES`."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}: use one of {', '.join(FAMILIES)}")


def _rounding(operands: str) -> tuple[float, float]:
    if operands not in _OPERANDS:
        raise ValueError(f"unknown operands {operands!r}: use one of {', '.join(_OPERANDS)}")
    return _OPERANDS[operands]
