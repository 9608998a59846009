"""The verdict: is this C right, how wrong is it, where, and whose fault is it?

Seven layers look at a result, each of which misses what another sees:

    nan           not one NaN or Inf, anywhere: comparisons are false on NaN, so it is asked first
    exact         problems made of small integers: bit for bit, any order of summation
    bound         each element within an a-priori rounding bound: no element is averaged away
    nmse          the kernel's error as a whole, against the *same operands*: sharp where the bound
                  is wide (a product scaled by 1.001 has 1e-6, the limits are near 1e-11)
    float         the error against the unquantized product, which is the *format's*: a kernel that
                  agrees with a wrong codec is caught here
    weights       the codec alone: the dequantized weights, the sharpest sign of a wrong recipe
    activations   the bits a step made of A, Q8_1, int8 or float16, against the recipe: "same
                  operands" trusts them

The two errors are always reported apart. `limits` says where each number comes from.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from qformats import FORMATS, WEIGHT_FORMATS, format_of
from reference.problem import GOLDEN, Golden, Problem
from reference.product import (
    Q81,
    Halves,
    SummedTokens,
    Tokens,
    both_a8,
    both_tokens,
    magnitude_a16,
    magnitude_half,
    parts,
    same_operands_a16,
    same_operands_half,
    sample,
    unquantized,
)

Array = np.ndarray[Any, np.dtype[Any]]

FAMILIES: Final = ("A16", "A8")
SAMPLE_LIMIT: Final = 2**18  # outputs compared in full; larger results are sampled

# --- rounding -------------------------------------------------------------------------------------

_U32: Final = 2.0**-24  # unit roundoff of float32, round to nearest
# What one rounding of an operand costs, how many a term has of them, and what one of the
# accumulator costs. Tensor cores accumulate in float32 but may truncate: two roundings to nearest.
_OPERANDS: Final = {
    "f32": (0.0, 0, _U32),
    "f16": (2.0**-11, 2, 2 * _U32),
    "bf16": (2.0**-8, 2, 2 * _U32),
    "f16_weights": (2.0**-11, 1, 2 * _U32),  # A is given as it was rounded: `Halves`
    "int8": (0.0, 0, _U32),  # so are A and W: `Tokens`
    "integers": (0.0, 0, _U32),  # and here: `SummedTokens`
}
_INT8: Final = {"int8": "int8", "integers": "int8 and integer scales"}  # and what they are called
_OUTPUTS: Final = {  # unit roundoff of C as it is written, and half of the smallest step
    np.dtype(np.float32): (0.0, 0.0),
    np.dtype(np.float16): (2.0**-11, 2.0**-25),
}


def nmse(x: Array, ref: Array) -> float:
    """sum (x - ref)^2 / sum ref^2 in float64; 0 for 0 against 0, inf for anything else against 0.

    inf as well where either holds a NaN or Inf: no such thing may pass for a small error.
    """
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

    A8 of int8 ("int8", "integers"): one integer sum over all of K, exact; it becomes a float32 and
    is multiplied by the factor of its row and by that of its token: 3, and one to spare.
    """
    _known_family(family)
    if operands in _INT8:
        return 4
    return k + 4 if family == "A16" else 9 * (k // 32) + 4


def bound(family: str, k: int, magnitude: Array, operands: str = "f32") -> Array:
    """The largest |error| a right kernel can make in each output, float64 of magnitude's shape.

    With n roundings of unit u on every term (`roundings`), the computed sum is
    sum t_i (1 + e_i), |e_i| <= gamma_n = n u / (1 - n u)  (Higham, Accuracy and Stability of
    Numerical Algorithms, ch. 3-4), so |error| <= gamma_n * sum |t_i|, and sum |t_i| is `magnitude`
    (`magnitude_a16`, `magnitude_a8`).
    Operands rounded first (f16, bf16; A16 only) add their own two roundings, 2 v + v^2, or one for
    weights alone (f16_weights, whose magnitude is `magnitude_half`).

    It holds with certainty, whatever cancels, and is therefore wide: real errors grow like the root
    of n, not like n. That is what NMSE is for.
    """
    v, count, u = _rounding_units(operands)
    n = roundings(family, k, operands)
    gamma = n * u / (1 - n * u)
    return np.asarray(((1 + v) ** count * (1 + gamma) - 1) * magnitude)


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

# The same of weights with integer scales: rounding codes anew adds 2e-4 to 1.4e-3 (5 bits the most,
# whose integers are the smallest), and a half as much again where K is 14336.
INTEGER_NMSE: Final[dict[str, tuple[float, float]]] = {
    "uniform": (1.3e-5, 1.1e-3),
    "normal": (2.6e-5, 2.3e-3),
    "llm": (3e-5, 1.4e-2),
}

# What rounding scales and minima of K-quants to float16 adds (`qformats.storage`): 2^-22 of the
# energy of scale * code and of offset at most, up to 16 times that of the weights they come to.
SCALE_NMSE: Final = 16 * 2.0**-22

CLASSICAL: Final = 1e-2  # the acceptance of the classical ladder: NMSE < 1 % of the float product


@dataclass(frozen=True)
class Limits:
    """What is allowed, and why. A range is (low, high): too good is as suspicious as too bad.

    nmse_same_operands  the kernel's error
    nmse_float          the format's error, of the product; None where there are too few outputs
                        (or no quantization: "integer", "golden") for the figure to mean anything
    nmse_weights        the same of the weights themselves, None where there are too few of them
    reasons             one sentence for each of the three
    """

    nmse_same_operands: float
    nmse_float: tuple[float, float] | None
    nmse_weights: tuple[float, float] | None
    reasons: tuple[str, str, str]


def limits(
    problem: Problem,
    family: str,
    operands: str = "f32",
    outputs: tuple[int, int] | None = None,
) -> Limits:
    """The limits of one family on one problem, of which outputs = (rows, columns) are compared."""
    _known_family(family)
    rows, columns = outputs or (problem.m, problem.n)
    kernel, why_kernel = _kernel_limit(family, problem.k, operands, rows * columns)
    expected = WEIGHT_NMSE.get(problem.distribution, {}).get(problem.format)
    if not problem.knows_floats:
        why = "the weights came as blocks, and what these were quantized from is not known"
        return Limits(kernel, None, None, (why_kernel, why, why))
    drawn = problem.distribution in WEIGHT_NMSE and not FORMATS[problem.format].written
    if expected is None and not drawn:
        why = "the weights are made of blocks, so nothing was lost in quantizing them"
        return Limits(kernel, None, None, (why_kernel, why, why))

    # Ratios of two sums of squares of nearly normal numbers: relative deviation 2 / sqrt(count).
    # Five deviations, and 3 % for what the table's figures leave open. With outlier channels only
    # the columns of C are independent (one channel dominates every row alike).
    count = columns if problem.distribution == "llm" else rows * columns
    slack = 0.03 + 5 * 2 / math.sqrt(count)
    added, made = (0.0, 0.0), ""
    if family == "A8":
        table = {"int8": INT8_NMSE, "integers": INTEGER_NMSE}.get(operands, ACTIVATION_NMSE)
        added, made = table[problem.distribution], _INT8.get(operands, "Q8_1")
    product: tuple[float, float] | None = None
    why_float = f"{count} independent outputs are too few to tell a format by its error"
    if expected is None:  # blocks are what is meant
        why_weights = "the weights are made of blocks, so nothing was lost in quantizing them"
        if count >= 1024:
            product = (added[0] * (1 - slack), (SCALE_NMSE + added[1]) * (1 + slack))
            why_float = (
                f"scales and minima of {problem.format} may be rounded to float16: {SCALE_NMSE:.1e}"
                + (f", {made} adds up to {added[1]:.1e}" if made else "")
                + f"; {100 * slack:.0f} % for sampling"
            )
        return Limits(kernel, product, None, (why_kernel, why_float, why_weights))
    if count >= 1024:
        high = (expected + added[1]) * (1 + slack)
        classical = operands not in _INT8 and problem.format in WEIGHT_FORMATS
        most = CLASSICAL if classical else math.inf  # more is asked of no others
        product = ((expected + added[0]) * (1 - slack), min(high, most))
        why_float = (
            f"{problem.format} loses {expected:.2e} on {problem.distribution} data"
            + (f", {made} up to {added[1]:.1e} more" if made else "")
            + f"; {100 * slack:.0f} % for sampling"
            + ("; 1 % at most, the classical acceptance" if classical else "")
        )
    # Deviation of the weights' own NMSE, measured: 0.8 % of 2^16 weights (a block shares its d).
    weights: tuple[float, float] | None = None
    slack_w = 0.01 + 5 * 0.008 * math.sqrt(2**16 / (problem.k * columns))
    why_weights = f"{problem.k * columns} weights are too few to tell a recipe by its error"
    if slack_w <= 0.08:
        weights = (expected * (1 - slack_w), expected * (1 + slack_w))
        why_weights = f"ggml's recipe loses {expected:.2e}; {100 * slack_w:.1f} % for sampling"
    return Limits(kernel, product, weights, (why_kernel, why_float, why_weights))


def _kernel_limit(family: str, k: int, operands: str, outputs: int) -> tuple[float, str]:
    _rounding_units(operands)
    if operands in _INT8:
        return 9 * _U32**2, "exact integer sums, three roundings of each output: (3 u)^2 at most"
    if family == "A8":
        # int32 sums are exact; the float32 part was measured at 4e-15 ... 3e-13 for K up to 14336.
        return 1e-11, "exact integer sums, K/32 float32 ones: 3e-13 measured, with room for order"
    if operands == "f16_weights":
        # Once in e^12 is the mean of n squares of normal numbers more than 1 + 2 sqrt(12 / n) +
        # 24 / n times what is expected (Laurent and Massart, Annals of Statistics 28, lemma 1).
        few = 1 + 2 * math.sqrt(12 / outputs) + 24 / outputs
        return 3e-7 * few, f"weights rounded to f16, once: 3e-8 measured; {outputs} outputs"
    if operands == "f16":
        return 1e-6, "operands rounded to f16: 6e-8 ... 9e-8 measured"
    if operands == "bf16":
        return 2e-5, "operands rounded to bf16: 4e-6 ... 6e-6 measured"
    # A running sum after j of K terms has energy j/K of the result; each addition rounds it with
    # variance u^2 / 3: K u^2 / 6 in all. Up to 16 times that where scale and offset are summed
    # apart (unsigned codes have that much more energy than the weights they stand for).
    return 16 / 6 * (k + 4) * _U32**2, f"K={k} float32 roundings at random: 16 K u^2 / 6"


# --- the verdict ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """What `check` found.

    ok                  every layer that applies is satisfied
    failures            names of the layers that are not, in the order of the module's docstring
    reasons             what each of them says, in the same order
    nmse_same_operands  the kernel's error (inf if anything is NaN or Inf)
    nmse_float          the error against the unquantized product: the format's and the kernel's;
                        None where the weights came as blocks
    worst_bound_ratio   largest |error| / bound; a right kernel stays well below 1
    worst               (m, n) of that element, `got` and `expected` its value and what it should be
    compared            outputs compared with the reference (NaN is looked for in all M * N)
    verdict             one sentence
    """

    ok: bool
    failures: tuple[str, ...]
    reasons: tuple[str, ...]
    nmse_same_operands: float
    nmse_float: float | None
    worst_bound_ratio: float
    worst: tuple[int, int]
    got: float
    expected: float
    compared: int
    verdict: str

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class Expected:
    """What some operands give: C and `bound`'s magnitude float64[rows, columns], and what is wrong
    with the activations themselves, if anything."""

    same: Array
    size: Array
    complaint: str | None = None


class Reference:
    """The outputs of a problem that are compared, and what each of them should be.

    Nothing is worked out twice: steps that multiply the same Q8_1 bits share one float64 product,
    and all steps the unquantized one. The arguments are those of `check`.
    """

    def __init__(
        self, problem: Problem, limit: int = SAMPLE_LIMIT, blocks: Array | None = None
    ) -> None:
        self.problem = problem
        self.rows, self.columns = sample(problem.m, problem.n, limit)
        self._blocks = blocks
        self._expected: dict[bytes, Expected] = {}

    @cached_property
    def blocks(self) -> Array:
        """The weights of the columns compared."""
        return (self.problem.blocks if self._blocks is None else self._blocks)[self.columns]

    @cached_property
    def meant(self) -> Array | None:
        """The unquantized product, float64[rows, columns]; None where the floats are not known."""
        if not self.problem.knows_floats:
            return None
        return unquantized(self.problem.a[self.rows], self.problem.w[self.columns])

    @cached_property
    def nmse_weights(self) -> float:
        """The error of the dequantized weights, as `nmse` of all of them would have it."""
        layout, error, energy = format_of(self.blocks), 0.0, 0.0
        for part in parts(self.columns.size, self.problem.k):
            w = self.problem.w[self.columns[part]].astype(np.float64)
            energy += float(np.sum(w**2))
            w -= layout.dequantize(self.blocks[part])
            error += float(np.sum(w**2))
        if not math.isfinite(error):
            return math.inf
        return error / energy if energy else (math.inf if error else 0.0)

    def expected(self, given: Q81 | Halves | Tokens | None, a: Array, exact: bool) -> Expected:
        """What the Q8_1 bits of all tokens or their int8 (A8), their halves or float32 a[M, K]
        (A16) give."""
        if isinstance(given, Tokens):
            tokens = given.rows(self.rows)
            key = _digest(tokens.q, tokens.d, *_sums(tokens))
            if key not in self._expected:
                complaint = None
                if self.problem.distribution != "golden":
                    complaint = check_tokens(tokens, self.problem.a[self.rows], exact, self.rows)
                self._expected[key] = Expected(*both_tokens(tokens, self.blocks), complaint)
            return self._expected[key]
        if isinstance(given, Halves):
            halves = given.rows(self.rows)
            key = _digest(halves.h, halves.factor)
            if key not in self._expected:
                values = halves.values()
                self._expected[key] = Expected(
                    same_operands_half(values, self.blocks),
                    magnitude_half(values, self.blocks),
                    check_halves(halves, self.problem.a[self.rows], self.rows),
                )
            return self._expected[key]
        if given is None:
            a = a[self.rows]
            key = _digest(a)
            if key not in self._expected:
                same, size = same_operands_a16(a, self.blocks), magnitude_a16(a, self.blocks)
                self._expected[key] = Expected(same, size)
            return self._expected[key]
        q81 = given.rows(self.rows)
        key = _digest(q81.q, q81.d, q81.s, np.array(exact))
        if key not in self._expected:
            complaint = None
            if self.problem.distribution != "golden":
                complaint = check_activations(q81, self.problem.a[self.rows], exact, self.rows)
            self._expected[key] = Expected(*both_a8(q81, self.blocks), complaint)
        return self._expected[key]


def _digest(*arrays: Array) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def check(
    c: Array,
    problem: Problem,
    family: str,
    activations: Q81 | Halves | Tokens | Array | None = None,
    exact: bool | None = None,
    *,
    operands: str = "f32",
    blocks: Array | None = None,
    limit: int = SAMPLE_LIMIT,
    reference: Reference | None = None,
) -> Check:
    """Judge c float32 or float16[M, N] as the answer of a `family` step to `problem`.

    activations  A8: the Q8_1 bits the kernel multiplied, or `Tokens`, whose weights are then taken
                 to be requantized to int8 (one of the two is required). A16: None, or what it
                 really multiplied where that is not problem.a: float32[M, K], or `Halves`, whose
                 weights are then taken to be rounded to float16 too
    exact        demand bit equality; None means problem.exact, and holds for the golden case too
                 when its own bits are given
    operands     "f32", or what an A16 step rounds its operands to: "f16", "bf16" (not for `Halves`)
    blocks       the weights it multiplied, if not problem.blocks (a codec under test)
    limit        how many outputs to compare at most, see `sample` (the Q8_1 bits of those rows
                 too); NaN and Inf are sought in all
    reference    of this problem, blocks and limit, where more than one answer is judged

    TypeError or ValueError for what is no answer at all: wrong type, dtype, shape or family.
    """
    _known_family(family)
    _require_answer(c, problem)
    given, a = _given(activations, problem, family)
    if isinstance(given, Halves):
        operands = "f16_weights"
    if isinstance(given, Tokens):
        operands = "integers" if isinstance(given, SummedTokens) else "int8"
    if exact is None:
        golden = GOLDEN[problem.format] if problem.distribution == "golden" else None
        exact = problem.exact or (golden is not None and _golden_bits(golden, given))

    if reference is None:
        reference = Reference(problem, limit, blocks)
    elif reference.problem is not problem:
        raise ValueError(f"a reference of {reference.problem} cannot judge {problem}")
    rows, columns = reference.rows, reference.columns
    part = c[np.ix_(rows, columns)].astype(np.float64)
    with np.errstate(invalid="ignore"):  # an infinite d or s is found below, not warned about
        wanted = reference.expected(given, a, exact)
    same, size, meant = wanted.same, wanted.size, reference.meant
    if exact and c.dtype == np.float16:  # the one rounding that is left
        same = same.astype(np.float16).astype(np.float64)
    allowed = limits(problem, family, operands, (rows.size, columns.size))

    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(part - same)
        roundoff, least = _OUTPUTS[c.dtype]
        permitted = bound(family, problem.k, size, operands)
        permitted += roundoff * (np.abs(same) + permitted) + least
        ratio = np.where(error == 0, 0.0, error / permitted)
    ratio[~np.isfinite(part) | np.isnan(ratio)] = math.inf
    i, j = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    worst = (int(rows[i]), int(columns[j]))
    kernel_error = nmse(part, same)
    float_error = None if meant is None else nmse(part, meant)

    found: dict[str, str] = {}
    if not np.isfinite(c).all():
        found["nan"] = _not_finite(c)
    if exact and (part != same).any():
        found["exact"] = (
            f"{np.count_nonzero(part != same)} of {part.size} outputs differ in the exact case "
            f"({_region(part != same, rows, columns)})"
        )
    if (ratio > 1).any():
        found["bound"] = (
            f"{np.count_nonzero(ratio > 1)} of {part.size} outputs exceed the rounding bound "
            f"({_region(ratio > 1, rows, columns)}), the worst by {ratio[i, j]:.3g} times at "
            f"{worst}: got {part[i, j]:.9g}, expected {same[i, j]:.9g}"
        )
    tolerated = allowed.nmse_same_operands * _cancellation(size, same, problem.k)
    tolerated += 2 * roundoff**2  # that of C: 2^-22 by itself, and what both come to together
    if not kernel_error <= tolerated:
        found["nmse"] = (
            f"NMSE {kernel_error:.2e} against the same operands is above {tolerated:.2e}"
        )
    if (
        float_error is not None
        and allowed.nmse_float
        and not _within(float_error, allowed.nmse_float)
    ):
        found["float"] = (
            f"NMSE {float_error:.2e} against the float product is outside "
            f"{_range(allowed.nmse_float)}"
        )
    if allowed.nmse_weights and not _within(reference.nmse_weights, allowed.nmse_weights):
        found["weights"] = (
            f"NMSE {reference.nmse_weights:.2e} of the weights alone is outside "
            f"{_range(allowed.nmse_weights)}: this is not ggml's {problem.format}"
        )
    if wanted.complaint:
        found["activations"] = wanted.complaint

    if found:
        verdict = "wrong: " + "; ".join(found.values())
    else:
        verdict = (
            f"right: {part.size} of {c.size} outputs compared, "
            + ("all exact, " if exact else f"worst at {ratio[i, j]:.2g} of the rounding bound, ")
            + f"NMSE {kernel_error:.1e} against the same operands"
            + ("" if float_error is None else f", {float_error:.1e} against the float product")
        )
    return Check(
        ok=not found,
        failures=tuple(found),
        reasons=tuple(found.values()),
        nmse_same_operands=kernel_error,
        nmse_float=float_error,
        worst_bound_ratio=float(ratio[i, j]),
        worst=worst,
        got=float(part[i, j]),
        expected=float(same[i, j]),
        compared=part.size,
        verdict=verdict,
    )


def check_activations(
    q81: Q81, a: Array, exact: bool = False, rows: Array | None = None
) -> str | None:
    """None if q81 is a[M, K] in Q8_1, else a sentence.

    Codes may differ from the reference by one, in 1e-4 of the values (a GPU divides differently at
    ties); d by 1e-6, or by its rounding to f16; s by the same from either of its two definitions,
    the same one throughout. In the exact case nothing may differ. `rows` are the tokens these are,
    if not all of them: what the sentence calls them.
    """

    def at(where: Array) -> tuple[int, int, str]:
        """The first place marked: its indices, and its name."""
        i, j = np.unravel_index(int(np.argmax(where)), where.shape)
        return int(i), int(j), f"({i if rows is None else rows[i]}, {j})"

    for name in ("d", "s"):
        array = getattr(q81, name)
        if not np.isfinite(array).all():
            m, b, place = at(~np.isfinite(array))
            return (
                f"{np.count_nonzero(~np.isfinite(array))} of {array.size} Q8_1 fields {name} are "
                f"not finite, the first at block {place}: {array[m, b]}"
            )
    right = Q81.of_values(a)
    off = np.abs(q81.q.astype(np.int32) - right.q)
    allowed = 0 if exact else max(1, int(1e-4 * off.size))
    if (off > 1).any() or np.count_nonzero(off) > allowed:
        m, k, place = at(off)
        return (
            f"{np.count_nonzero(off)} of {off.size} Q8_1 codes differ from the recipe, the most at "
            f"{place}: got {q81.q[m, k]}, expected {right.q[m, k]}"
        )
    half, tiny = 2.0**-11, 2.0**-25  # rounding to f16: relative, and below its normal range
    slack = 0.0 if exact else half * (1 + 2.0**-10) + 1e-6
    floor = 0.0 if exact else tiny
    d = right.d.astype(np.float64)
    wrong = ~(np.abs(q81.d - d) <= slack * d + floor)
    if wrong.any():
        m, b, place = at(wrong)
        return (
            f"{np.count_nonzero(wrong)} of {wrong.size} Q8_1 scales d are wrong, the first at "
            f"block {place}: got {q81.d[m, b]:.9g}, expected {d[m, b]:.9g}"
        )
    x = a.astype(np.float64).reshape(*d.shape, -1)
    sums = {
        "d * sum(q)": d * q81.q.reshape(x.shape).sum(axis=-1, dtype=np.int64),
        "sum of values": x.sum(axis=-1),
    }
    rounding = 0.0 if exact else 32 * _U32
    misses = {
        name: ~(np.abs(q81.s - s) <= slack * np.abs(s) + rounding * np.abs(x).sum(axis=-1) + floor)
        for name, s in sums.items()
    }
    if all(miss.any() for miss in misses.values()):
        name = min(misses, key=lambda key: np.count_nonzero(misses[key]))
        m, b, place = at(misses[name])
        return (
            f"{np.count_nonzero(misses[name])} of {d.size} Q8_1 sums s are wrong, the first at "
            f"block {place}: got {q81.s[m, b]:.9g}, expected {sums[name][m, b]:.9g} ({name})"
        )
    return None


def check_tokens(
    tokens: Tokens, a: Array, exact: bool = False, rows: Array | None = None
) -> str | None:
    """None if these are a[M, K] in int8, one scale a token, else a sentence; as `check_activations`
    it lets 1e-4 of the codes differ by one, and d by 1e-6, nothing in the exact case. Sums of codes
    must be those of these very codes."""
    right = Tokens.of_values(a)
    d = right.d.astype(np.float64)
    wrong = ~(np.abs(tokens.d - d) <= (0.0 if exact else 1e-6) * d)
    if wrong.any():
        m = int(np.argmax(wrong))
        return (
            f"{np.count_nonzero(wrong)} of {wrong.size} scales of tokens are wrong, the first of "
            f"token {m if rows is None else rows[m]}: got {tokens.d[m]:.9g}, expected {d[m]:.9g}"
        )
    off = np.abs(tokens.q.astype(np.int32) - right.q)
    allowed = 0 if exact else max(1, int(1e-4 * off.size))
    if (off > 1).any() or np.count_nonzero(off) > allowed:
        m, k = (int(i) for i in np.unravel_index(int(np.argmax(off)), off.shape))
        return (
            f"{np.count_nonzero(off)} of {off.size} int8 activations differ from the recipe, the "
            f"most at ({m if rows is None else rows[m]}, {k}): got {tokens.q[m, k]}, expected "
            f"{right.q[m, k]}"
        )
    for s in _sums(tokens):
        sums = tokens.q.sum(axis=1, dtype=np.int64)
        if (s != sums).any():
            m = int(np.argmax(s != sums))
            return (
                f"{np.count_nonzero(s != sums)} of {sums.size} sums of tokens are wrong, the first "
                f"of token {m if rows is None else rows[m]}: got {s[m]:.9g}, expected {sums[m]}"
            )
    return None


def _sums(tokens: Tokens) -> tuple[Array, ...]:
    """(s,) of `SummedTokens`, nothing of others."""
    return (tokens.s,) if isinstance(tokens, SummedTokens) else ()


def check_halves(halves: Halves, a: Array, rows: Array | None = None) -> str | None:
    """None if these are a[M, K] in float16, bit for bit, else a sentence; `rows` as above.

    A product with a power of two is exact, and the rounding is the same everywhere.
    """
    right = Halves.of_values(a)
    for name in ("factor", "h"):
        got, wanted = getattr(halves, name), getattr(right, name)
        wrong = ~(got == wanted)
        if wrong.any():
            m, *k = (int(i) for i in np.argwhere(wrong)[0])
            place = ", ".join(map(str, (m if rows is None else rows[m], *k)))
            return (
                f"{np.count_nonzero(wrong)} of {wrong.size} float16 activations ({name}) differ "
                f"from the recipe, the first at ({place}): got {got[(m, *k)]:.9g}, expected "
                f"{wanted[(m, *k)]:.9g}"
            )
    return None


def _known_family(family: str) -> None:
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}: use one of {', '.join(FAMILIES)}")


def _rounding_units(operands: str) -> tuple[float, int, float]:
    if operands not in _OPERANDS:
        raise ValueError(f"unknown operands {operands!r}: use one of {', '.join(_OPERANDS)}")
    return _OPERANDS[operands]


def _require_answer(c: Array, problem: Problem) -> None:
    if not isinstance(c, np.ndarray) or c.dtype not in _OUTPUTS:
        found = getattr(c, "dtype", type(c).__name__)
        raise TypeError(f"C must be a float32 or float16 array, got {found}")
    if c.shape != (problem.m, problem.n):
        raise ValueError(f"C must be of shape (M, N) = ({problem.m}, {problem.n}), got {c.shape}")


def _golden_bits(golden: Golden, given: Q81 | Halves | Tokens | None) -> bool:
    """Whether an A8 step multiplied the golden bits, or an A16 step did."""
    if isinstance(given, Tokens):
        right = Tokens.of_q81(golden.q81)
        return np.array_equal(given.q, right.q) and np.array_equal(given.d, right.d)
    return not isinstance(given, Q81) or golden.gave(given)


def _given(
    activations: Q81 | Halves | Tokens | Array | None, problem: Problem, family: str
) -> tuple[Q81 | Halves | Tokens | None, Array]:
    """The operands the kernel was given: (q81, _) or (tokens, _) for A8, (halves, _) or (None, a)
    for A16."""
    if family == "A8":
        if not isinstance(activations, Q81 | Tokens):
            raise TypeError(
                "an A8 result is checked against the Q8_1 bits it multiplied: pass "
                f"activations=Q81(q, d, s), got {type(activations).__name__}"
            )
        if activations.q.shape != (problem.m, problem.k):
            kind = "Q8_1" if isinstance(activations, Q81) else "int8"
            raise ValueError(
                f"{kind} activations must be [M, K] = ({problem.m}, {problem.k}), "
                f"got {activations.q.shape}"
            )
        return activations, problem.a
    if isinstance(activations, Q81 | Tokens):
        name = type(activations).__name__
        raise TypeError(f"an A16 result is checked against float activations, got {name}")
    if isinstance(activations, Halves):
        if activations.h.shape != (problem.m, problem.k):
            raise ValueError(
                f"float16 activations must be [M, K] = ({problem.m}, {problem.k}), "
                f"got {activations.h.shape}"
            )
        return activations, problem.a
    if activations is None:
        return None, problem.a
    if activations.shape != (problem.m, problem.k):
        raise ValueError(
            f"activations must be [M, K] = ({problem.m}, {problem.k}), got {activations.shape}"
        )
    return None, activations


def _not_finite(c: Array) -> str:
    bad = ~np.isfinite(c)
    nans = int(np.count_nonzero(np.isnan(c)))
    count = int(np.count_nonzero(bad))
    m, n = np.unravel_index(int(np.argmax(bad)), c.shape)
    where = _region(bad, np.arange(c.shape[0]), np.arange(c.shape[1]))
    return (
        f"{count} of {c.size} outputs are not finite ({nans} NaN, {count - nans} Inf), "
        f"the first at ({m}, {n}), in {where}"
    )


def _region(bad: Array, rows: Array, columns: Array) -> str:
    """Where the marked elements lie, which often names the bug: a last row, a tile's edge."""
    r, c = rows[bad.any(axis=1)], columns[bad.any(axis=0)]
    return f"rows {r[0]}-{r[-1]}, columns {c[0]}-{c[-1]}"


def _cancellation(size: Array, same: Array, k: int) -> float:
    """How much to widen an NMSE limit because the outputs happen to cancel, >= 1.

    K terms of sum |t| = size and random signs add up to about size / sqrt(K); a limit on
    error / result assumes that. Over many outputs size^2 / K stays within 16 times result^2 (0.3 to
    14 measured over formats and distributions), but a single output may be near zero by chance.
    """
    energy, result = float(np.sum(size**2)) / k, float(np.sum(same**2))
    if not math.isfinite(energy):
        return 1.0
    return max(1.0, energy / (16 * result)) if result > 0 else math.inf


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def _range(limits: tuple[float, float]) -> str:
    return f"{limits[0]:.3g} ... {limits[1]:.3g}"
