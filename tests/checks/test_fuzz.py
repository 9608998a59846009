"""The fuzzer: a short run, the cases that it once found, and that it finds what is made wrong."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS
from reference import Q81, Problem, Tokens, both_tokens, check, same_operands_a8, same_operands_a16
from steps import ladder
from steps.checks import fuzz
from steps.checks.fuzz_cases import FuzzCase, GivenProblem, cases
from steps.checks.select import UsageError
from steps.checks.verify import multiply, operands, prepare
from steps.contract import Kernel
from steps.driver.machines import Simulator
from steps.kernels.parts.activations.layouts import inputs
from steps.registry import find, kernel_of

KERNELS = [kernel_of(step.number) for step in ladder()]
DRAWN = list(islice(cases(18, KERNELS, None, 1), 12))


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: f"step{case.step:02d}-{case.seed}")
def test_a_short_run(case: FuzzCase) -> None:
    assert not fuzz.complaints(case, Simulator(case.order))


FOUND = [
    "step=2 family=A8 format=q4_0 m=2 n=5 k=64 rows=large,plain via=graph",
    "step=3 family=A8 format=q4_0 m=2 n=5 k=64 rows=small,plain",
    "step=4 family=A8 format=q4_1 m=2 n=5 k=64 rows=large,nan via=plan",
    "step=15 family=A8 format=q4_0 m=1 n=1 k=160000 rows=ones weights=most",
    "step=7 family=A8 format=q4_1 m=2 n=17 k=64 rows=large,plain",
    "step=8 family=A8 format=q4_1 m=2 n=17 k=64 rows=large,plain",
    "step=17 family=A8 format=q4_1 m=2 n=17 k=64 rows=large,ones",
    "step=18 family=A8 format=q4_0 m=2 n=17 k=64 rows=large,plain",
    "step=18 family=A16 format=q8_0 m=2 n=17 k=64 a=bfloat16 rows=large,plain",
    "step=11 family=A16 format=q5_k m=2 n=17 k=256 rows=ones,plain",
    "step=13 family=A16 format=q4_k m=2 n=17 k=256 rows=ones,plain",
    "step=1 family=A16 format=q8_0 m=1 n=2 k=4096 rows=ones weights=most",  # all rounded alike
]


@pytest.mark.parametrize("line", FOUND)
def test_what_it_has_found_is_right_now(line: str) -> None:
    assert not fuzz.complaints(FuzzCase.parse(line), Simulator())


def _reading() -> list[Any]:
    return [
        pytest.param(
            *(step, family, a),
            id=f"step{step.number:02d}-{family}-{a}",
            marks=() if a == "float32" else pytest.mark.slow,
        )
        for step in KERNELS
        for family in step.families
        for a in inputs(step, family)
    ]


@pytest.mark.parametrize(("step", "family", "a"), _reading())
def test_a_nan_or_infinity_spoils_its_own_row(step: Kernel, family: Any, a: str) -> None:
    """In every step, of every dtype of A; and no other row."""
    c = step.outputs[0]
    case = FuzzCase(step.number, family, "q4_1", 3, 17, 64, a, c, rows="nan,plain,inf")
    assert not fuzz.complaints(case, Simulator())


@pytest.mark.parametrize(
    ("number", "family"),
    [
        pytest.param(step.number, family, id=f"step{step.number:02d}-{family}")
        for step in KERNELS
        for family in step.families
        if "bfloat16" in step.outputs
    ],
)
def test_sums_times_a_scale_of_1e35_may_not_overflow(number: int, family: Any) -> None:
    """C is 1e36 at most, and the sums times their tokens' scales alone would be beyond 1e38."""
    largest = 1e38 if family == "A16" else 1e36
    a = np.linspace(0.5, 1, 512, dtype=np.float32) * np.array([[largest], [1]], np.float32)
    blocks = FORMATS["q4_0"].quantize(np.full((16, 512), 1e-4, np.float32))
    machine = Simulator()
    prepared = prepare(kernel_of(number), family, "q4_0", a, blocks, machine, dtype="bfloat16")
    c = np.array(multiply(prepared, machine))
    used = operands(prepared, machine)
    found = check(c, GivenProblem(a, blocks, "float32"), family, used)
    assert found.worst_bound_ratio <= 1, found.verdict


def test_a_line_holds_all_of_a_case() -> None:
    for cc in (None, (9, 0)):
        for case in islice(cases(3, KERNELS, cc, 4), 100):
            assert FuzzCase.parse(str(case)) == case


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("step=1 family=A16", "lacks format, m, n, k"),
        ("step=1 colour=red", "'colour=red' is none of step=, family="),
        ("step=one family=A16 format=q4_0 m=1 n=1 k=32", "'step=one' is not a whole number"),
        ("step=99 family=A16 format=q4_0 m=1 n=1 k=32", "99"),
        ("step=1 family=A8 format=q4_0 m=1 n=1 k=32", "step 1 is of family A16, not A8"),
        ("step=1 family=A16 format=q4_0 m=1 n=1 k=33", "K=33 is not a multiple of 32"),
        ("step=1 family=A16 format=q4_0 m=1 n=1 k=32 rows=odd", "rows=odd is none of plain, nan"),
        ("step=1 family=A16 format=q4_0 m=1 n=1 k=32 via=air", "via=air is none of step, gemm"),
    ],
)
def test_a_line_of_no_case_is_refused(line: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        FuzzCase.parse(line)
    assert why in str(refused.value)


def _changed(at: Any, to: float) -> Any:
    """`multiply`, with wrong outputs."""

    def multiply(prepared: Any, machine: Any) -> np.ndarray:
        c = np.array(fuzz_multiply(prepared, machine))
        c[at] = to if to else c[at] * np.float32(1.01)
        return c

    return multiply


fuzz_multiply = fuzz.multiply


@pytest.mark.parametrize(
    ("rows", "at", "to", "says"),
    [
        ("nan,plain", 0, 1.0, "5 of 5 outputs of rows with nan hide it, the first at (0, 0)"),
        ("nan,plain", (1, 2), np.nan, "plain rows are not finite, the first at (1, 2): got nan"),
        ("large,plain", (0, 1), np.inf, "large rows are not finite, the first at (0, 1): got inf"),
        ("ones,plain", (0, 3), 0.0, "ones rows are wrong"),
        ("plain", (1, 3), 0.0, "wrong"),
        ("zeros,plain", (0, 3), 1.0, "zeros rows are wrong"),
    ],
)
def test_wrong_rows_are_found(
    rows: str, at: Any, to: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FuzzCase(1, "A16", "q4_0", 2, 5, 32, rows=rows)
    assert not fuzz.complaints(case, Simulator())
    monkeypatch.setattr(fuzz, "multiply", _changed(at, to))
    assert says in " ".join(fuzz.complaints(case, Simulator()))


def test_other_bits_of_a_repeat_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "gemm", lambda *_, out, **__: out.fill(0))
    found = fuzz.complaints(FuzzCase(1, "A16", "q4_0", 2, 5, 32, via="gemm"), Simulator())
    assert found == ["via gemm C has other bits, the first at (0, 0)"]


def test_operands_that_are_far_off_are_found() -> None:
    """Scales that rounded A away: the product of what the kernel was given is right."""
    case = FuzzCase(3, "A8", "q4_0", 2, 5, 32, rows="small,plain")
    problem = case.problem()
    x = problem.a[:1].astype(np.float64)
    wanted = fuzz.same_operands_a16(x, problem.blocks)
    rows = np.array([0])
    step = find(5)
    assert not fuzz._far_off(case, step, problem.blocks, x, wanted * 1.001, wanted, rows)
    (found,) = fuzz._far_off(case, step, problem.blocks, x, wanted * 0, wanted, rows)
    assert found.startswith("row 0 (small) is off by ")


def test_what_ought_to_be_refused_is_found_where_it_is_not(monkeypatch: Any) -> None:
    monkeypatch.setattr(fuzz, "pack", lambda *_, **__: None)
    monkeypatch.setattr(fuzz, "gemm", lambda *_, **__: None)
    case = FuzzCase(15, "A8", "q4_0", 1, 1, 132128)
    assert fuzz.complaints(case, Simulator()) == [
        f"{name} does not refuse it, as it must for 132128 and 132096" for name in ("gemm", "pack")
    ]


def test_a_token_with_an_outlier_may_lose_what_its_step_costs() -> None:
    """An int8 step follows the largest value of a token."""
    problem = Problem(1, 64, 16384, "q4_0", "normal", 3)
    x = problem.a.astype(np.float64)
    x[0, 5] = 150  # rounding the others comes to 5 % of the energy of all
    given = x.astype(np.float32)
    wanted = same_operands_a16(given.astype(np.float64), problem.blocks)
    c = both_tokens(Tokens.of_values(given), problem.blocks)[0]
    case = FuzzCase(15, "A8", "q4_0", 1, 64, 16384)
    rest = problem.blocks, given.astype(np.float64), c, wanted, np.array([0])
    assert not fuzz._far_off(case, kernel_of(15), *rest)
    energy = float(np.mean(wanted**2)) ** 0.5
    far = (*rest[:2], c + 0.3 * energy, *rest[3:])
    assert "row 0 (plain) is off by" in fuzz._far_off(case, kernel_of(15), *far)[0]


def test_blocks_of_a_row_of_ones_are_rounded_alike() -> None:
    """A scale and a sum of float16 part by up to 2^-11 each, in all blocks by the same."""
    case = FuzzCase(2, "A8", "q4_1", 1, 64, 6176, rows="ones")
    blocks = Problem(1, 64, 6176, "q4_1", "normal", 5).blocks
    given = np.full((1, 6176), -0.37, np.float32)
    x, step, rows = given.astype(np.float64), find(2), np.array([0])
    wanted = same_operands_a16(x, blocks)
    c = same_operands_a8(Q81.of_blocks(FORMATS["q8_1"].quantize(given)), blocks)
    assert not fuzz._far_off(case, step, blocks, x, c, wanted, rows)
    plain = FuzzCase(2, "A8", "q4_1", 1, 64, 6176)
    assert fuzz._far_off(plain, step, blocks, x, c, wanted, rows), "and such rows alone"
    (found,) = fuzz._far_off(case, step, blocks, x, c + 4 * (c - wanted), wanted, rows)
    assert found.startswith("row 0 (ones) is off by ")
