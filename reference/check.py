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
    activations   the bits a step made of A, Q8_1, int8, float16 or bfloat16, against the recipe:
                  "same operands" trusts them

The two errors are always reported apart. `limits` says where each number comes from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from qformats import format_of
from reference.bfloat16 import bfloat16_values, rounded_to_bfloat16
from reference.drawn import REACH
from reference.golden import GOLDEN, Golden
from reference.limits import BFLOAT16_NMSE, bound, known_family, limits, nmse
from reference.operands import Q81, Bfloats, Halves, Tokens
from reference.problem import Problem
from reference.product import same_operands, unquantized
from reference.recipes import complaint
from reference.sampling import pieces, sample

Array = np.ndarray[Any, np.dtype[Any]]
Operands = Q81 | Halves | Bfloats | Tokens

MANY: Final = 192  # outputs whose squares come to half of what is expected, at least

SAMPLE_LIMIT: Final = 2**18  # outputs compared in full; larger results are sampled

_OUTPUTS: Final = {  # unit roundoff of C as it is written, and half of the smallest step
    np.dtype(np.float32): (0.0, 0.0),
    np.dtype(np.float16): (2.0**-11, 2.0**-25),
    np.dtype(np.uint16): (2.0**-8, 2.0**-134),  # bfloat16
}

_OPERANDS: Final = {Halves: "f16_weights", Bfloats: "f16_weights", Tokens: "int8"}
"""What `limits` calls them."""

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
    and all steps the unquantized one. `limit`: how many outputs to compare at most, see `sample`
    (the operands of those rows too); NaN and Inf are sought in all. `blocks`: the weights that were
    multiplied, if not those of the problem (a codec under test). `multiply`: makes what
    `reference.product.same_operands` does of operands, if that is not to.
    """

    def __init__(
        self,
        problem: Problem,
        limit: int = SAMPLE_LIMIT,
        blocks: Array | None = None,
        multiply: Callable[[Operands | Array], tuple[Array, Array]] | None = None,
    ) -> None:
        self.problem = problem
        self._multiply = multiply or self._by_weights
        self.rows, self.columns = sample(problem.m, problem.n, limit)
        self._parts = problem.by_weights(self.rows)
        self._blocks = blocks
        self._expected: dict[bytes, Expected] = {}

    @cached_property
    def blocks(self) -> tuple[Array, ...]:
        """The weights of the columns compared, of each part of `Problem.by_weights`."""
        given = (own.blocks if self._blocks is None else self._blocks for _, own in self._parts)
        return tuple(one[self.columns] for one in given)

    def _by_weights(self, used: Operands | Array) -> tuple[Array, Array]:
        """What `same_operands` makes of operands, for rows of each part with their own weights."""
        same = np.empty((self.rows.size, self.columns.size))
        size = np.empty_like(same)
        for (rows, _), blocks in zip(self._parts, self.blocks, strict=True):
            own = used[rows] if isinstance(used, np.ndarray) else used.rows(rows)
            same[rows], size[rows] = same_operands(own, blocks)
        return same, size

    @cached_property
    def meant(self) -> Array | None:
        """The unquantized product, float64[rows, columns]; None where the floats are not known."""
        if not self.problem.knows_floats:
            return None
        meant = np.empty((self.rows.size, self.columns.size))
        for rows, own in self._parts:
            meant[rows] = unquantized(self.problem.a[self.rows[rows]], own.w[self.columns])
        return meant

    @cached_property
    def nmse_weights(self) -> float:
        """The error of the dequantized weights, as `nmse` of all of them would have it."""
        error = energy = 0.0
        for (_, own), blocks in zip(self._parts, self.blocks, strict=True):
            layout = format_of(blocks)
            for part in pieces(self.columns.size, self.problem.k):
                w = own.w[self.columns[part]].astype(np.float64)
                energy += float(np.sum(w**2))
                w -= layout.dequantize(blocks[part])
                error += float(np.sum(w**2))
        if not math.isfinite(error):
            return math.inf
        return error / energy if energy else (math.inf if error else 0.0)

    def expected(self, operands: Operands | None, exact: bool) -> Expected:
        """What the Q8_1 bits of all tokens or their int8 (A8), their halves, bfloats or float32
        A (A16) give."""
        used = self.problem.a[self.rows] if operands is None else operands.rows(self.rows)
        arrays = (used,) if isinstance(used, np.ndarray) else used.arrays
        key = _digest(f"{type(used).__name__}, {exact}", *arrays)
        if key not in self._expected:
            self._expected[key] = self._work_out(used, exact)
        return self._expected[key]

    def _work_out(self, used: Operands | Array, exact: bool) -> Expected:
        wrong = None
        given = self.problem.distribution == "golden" and isinstance(used, Q81 | Tokens)
        if not isinstance(used, np.ndarray) and not given:
            wrong = complaint(used, self.problem.a[self.rows], exact, self.rows)
        return Expected(*self._multiply(used), wrong)


def _digest(what: str, *arrays: Array) -> bytes:
    digest = hashlib.blake2b(what.encode(), digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def check(
    c: Array,
    problem: Problem,
    family: str,
    activations: Operands | None = None,
    *,
    reference: Reference | None = None,
) -> Check:
    """Judge c float32, float16 or bfloat16 (uint16) [M, N] as the answer of a `family` step to
    `problem`.

    activations  A8: the Q8_1 bits the kernel multiplied, or `Tokens`, whose weights are then taken
                 to be requantized to int8 (one of the two is required). A16: None, or what it
                 really multiplied where that is not problem.a: `Halves` or `Bfloats`, whose weights
                 are then taken to be rounded to float16 or bfloat16 too
    reference    of this problem, where more than one answer is judged, or where the weights or the
                 number of outputs compared are others

    Bit equality is demanded of `Problem.exact`, and of the golden case when its own bits are given.
    TypeError or ValueError for what is no answer at all: wrong type, dtype, shape or family.
    """
    known_family(family)
    _require_answer(c, problem)
    _require_operands(activations, problem, family)
    operands = _OPERANDS.get(type(activations), "f32")
    golden = GOLDEN[problem.format] if problem.distribution == "golden" else None
    exact = problem.exact or (golden is not None and _golden_bits(golden, activations))

    if reference is None:
        reference = Reference(problem)
    elif reference.problem is not problem:
        raise ValueError(f"a reference of {reference.problem} cannot judge {problem}")
    rows, columns, dtype = reference.rows, reference.columns, c.dtype
    c = bfloat16_values(c) if dtype == np.uint16 else c
    part = c[np.ix_(rows, columns)].astype(np.float64)
    with np.errstate(invalid="ignore"):  # an infinite d or s is found below, not warned about
        wanted = reference.expected(activations, exact)
    same, size, meant = wanted.same, wanted.size, reference.meant
    # Weights of more than 127 quanta become int8 by a scale that is no power of two.
    exact = exact and (operands != "int8" or REACH.get(problem.format, 0) <= 127)
    if exact and dtype == np.float16:  # the one rounding that is left
        same = same.astype(np.float16).astype(np.float64)
    if exact and dtype == np.uint16:
        same = rounded_to_bfloat16(same.astype(np.float32)).astype(np.float64)
    allowed = limits(problem, family, operands, (rows.size, columns.size), size)
    if allowed.nmse_float and dtype == np.uint16:
        low, high = allowed.nmse_float
        allowed = replace(allowed, nmse_float=(low, high + BFLOAT16_NMSE))

    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(part - same)
        roundoff, least = _OUTPUTS[dtype]
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


def _require_answer(c: Array, problem: Problem) -> None:
    if not isinstance(c, np.ndarray) or c.dtype not in _OUTPUTS:
        found = getattr(c, "dtype", type(c).__name__)
        raise TypeError(f"C must be a float32, float16 or bfloat16 (uint16) array, got {found}")
    if c.shape != (problem.m, problem.n):
        raise ValueError(f"C must be of shape (M, N) = ({problem.m}, {problem.n}), got {c.shape}")


def _golden_bits(golden: Golden, used: Operands | None) -> bool:
    """Whether an A8 step multiplied the golden bits, or an A16 step did."""
    if isinstance(used, Tokens):
        right = Tokens.of_q81(golden.q81)
        return np.array_equal(used.q, right.q) and np.array_equal(used.d, right.d)
    return not isinstance(used, Q81) or golden.gave(used)


def _require_operands(used: Operands | None, problem: Problem, family: str) -> None:
    name, a8 = type(used).__name__, isinstance(used, Q81 | Tokens)
    if family == "A8" and not a8:
        raise TypeError(
            "an A8 result is checked against the Q8_1 bits it multiplied: pass "
            f"activations=Q81(q, d, s), got {name}"
        )
    if family == "A16" and used is not None and not isinstance(used, Halves | Bfloats):
        raise TypeError(f"an A16 result is checked against float activations, got {name}")
    if used is not None and (shape := used.arrays[0].shape) != (problem.m, problem.k):
        raise ValueError(
            f"{used.KIND} activations must be [M, K] = ({problem.m}, {problem.k}), got {shape}"
        )


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

    Its error is not near zero then: it follows what was expected of result^2, E, and that is at
    most 2.5 times size^2 / K where |a w| of normal numbers are averaged. Limits allow ten times the
    mean square of errors, or more: of E / 10 at least, it is as much as of E. So few outputs are
    compared with a fourth of size^2 / K, which is that. Of `MANY` outputs the mean of result^2 is
    more than E / 2 but once in e^12 (Laurent and Massart), and a sixteenth does.
    """
    share = 16 if size.size >= MANY else 4
    energy, result = float(np.sum(size**2)) / k, float(np.sum(same**2))
    if not math.isfinite(energy):
        return 1.0
    return max(1.0, energy / (share * result)) if result > 0 else math.inf


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def _range(limits: tuple[float, float]) -> str:
    return f"{limits[0]:.3g} ... {limits[1]:.3g}"
