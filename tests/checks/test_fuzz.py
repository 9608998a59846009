"""The fuzzer: a short run, the cases that it once found, and that it finds what is made wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS
from reference import (
    Q81,
    Bfloats,
    Halves,
    Problem,
    Tokens,
    bound,
    check,
    same_operands,
)
from steps import ladder
from steps.checks import fuzz
from steps.checks.fuzz import Products
from steps.checks.fuzz_cases import (
    DATA,
    DEEP,
    GPU_OUTPUTS,
    GPU_VALUES,
    GPU_WEIGHTS,
    ROWS,
    SIMULATED_LIMIT,
    VIA,
    WEIGHTS,
    FuzzCase,
    GivenProblem,
    cases,
)
from steps.checks.select import UsageError
from steps.checks.verify import GUARD, multiply, operands, prepare, result
from steps.contract import FLOATS, Kernel
from steps.driver.machines import Simulator
from steps.kernels.parts.activations.layouts import inputs
from steps.product.choice import of_gemm
from steps.registry import find, kernel_of, kernels

KERNELS = [kernel_of(step.number) for step in ladder() if of_gemm(step)]
DRAWN = list(islice(cases(18, KERNELS, None), 12))


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
    """Every step in each family, of one dtype of A, and the next of another."""
    return [
        pytest.param(
            *(step, family, a),
            id=f"step{step.number:02d}-{family}-{a}",
            marks=() if i == step.number % len(reads) else pytest.mark.every,
        )
        for step in KERNELS
        for family in step.families
        for reads in [tuple(inputs(step, family))]
        for i, a in enumerate(reads)
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


@pytest.mark.parametrize("cc", [None, (9, 0)], ids=["simulator", "gpu"])
def test_a_line_holds_all_of_a_case(cc: Any) -> None:
    for case in islice(cases(3, KERNELS, cc, 4), 400):
        assert FuzzCase.parse(str(case)) == case


def test_tokens_whose_sums_come_near_the_end_of_float16_are_left_out() -> None:
    """One of three here has sums below an eighth of it: that one is judged, and by itself."""
    line = "step=12 family=A16 format=q5_0 m=3 n=96 k=192 a=float16 c=float16 data=integer seed=1"
    assert fuzz.complaints(FuzzCase.parse(f"{line} w=455779"), Simulator()) == []


@pytest.mark.parametrize("cc", [None, (9, 0)], ids=["simulator", "gpu"])
def test_what_is_drawn_stays_in_bounds(cc: Any) -> None:
    """And is all that can be drawn."""
    drawn = list(islice(cases(5, KERNELS, cc, 4), 4000))
    for case in drawn:
        m, n, k = case.m, case.n, case.k
        assert min(m, n) >= 1
        assert k % FORMATS[case.format].elements == 0
        assert case.kernel.supports(case.format, case.family, cc, case.c) is None
        assert case.a in inputs(case.kernel, case.family)
        assert case.as_drawn or case.data != "integer"
        assert case.via == "step" or not case.lesson
        if k == DEEP:
            assert m <= 4
            assert n <= 8
            assert cc or case.kernel.accuracy == "fast"
        elif cc is None:
            assert m * n * k <= SIMULATED_LIMIT
            assert (case.offset, case.stream) == (0, 0)
        else:
            assert (m <= 600, n <= 5000, k <= 16384) == (True, True, True)
            assert (n * k <= GPU_WEIGHTS, m * k <= GPU_VALUES) == (True, True)
            assert m * n <= GPU_OUTPUTS
    for i in range(0, len(drawn), 4):
        assert len({(one.w, one.n, one.k, one.data, one.weights) for one in drawn[i : i + 4]}) == 1
        assert len({one.seed for one in drawn[i : i + 4]}) == 4
    assert {kind for case in drawn for kind in case.kinds} == set(ROWS)
    assert {case.step for case in drawn if not case.lesson} == {one.number for one in KERNELS}
    assert {case.step for case in drawn if case.lesson} == {one.number for one in kernels()}
    assert {case.via for case in drawn} == set(VIA if cc else VIA[:3])
    assert {case.data for case in drawn} == set(DATA)
    assert {case.weights for case in drawn} == set(WEIGHTS)
    assert {case.format for case in drawn} == {f for one in KERNELS for f in one.formats}
    assert {case.a for case in drawn} == {case.c for case in drawn} == set(FLOATS)
    assert any(case.m == 1 for case in drawn)
    assert any(case.k == DEEP for case in drawn)


def test_a_lesson_multiplies_where_it_is_asked_for() -> None:
    case = FuzzCase(17, "A16", "q4_0", 3, 9, 64, "float16", "float16", lesson=1)
    assert case.kernel is find(17)
    assert replace(case, lesson=0).kernel is kernel_of(17) is not find(17)
    assert not fuzz.complaints(case, Simulator())


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
        (
            "step=9 family=A8 format=q4_0 m=1 n=1 k=32 lesson=1 via=gemm",
            "via=gemm is none of step",
        ),
    ],
)
def test_a_line_of_no_case_is_refused(line: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        FuzzCase.parse(line)
    assert why in str(refused.value)


fuzz_multiply = fuzz.multiply


def _changed(at: Any, to: float) -> Any:
    """`multiply`, with wrong outputs."""

    def multiply(prepared: Any, machine: Any) -> np.ndarray:
        c = np.array(fuzz_multiply(prepared, machine))
        c[at] = to if to else c[at] * np.float32(1.01)
        return c

    return multiply


@pytest.mark.parametrize(
    ("family", "a"), [("A16", "float32"), ("A16", "bfloat16"), ("A8", "float32")]
)
def test_one_output_a_little_beyond_its_bound_is_found(
    family: Any, a: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FuzzCase(17, family, "q4_1", 2, 5, 64, a, rows="ones,plain")
    weights = fuzz.Weights(case, Simulator())
    assert not fuzz.complaints(case, Simulator(), weights)

    def multiply(prepared: Any, machine: Any) -> np.ndarray:
        c = np.array(fuzz_multiply(prepared, machine))
        used, given = operands(prepared, machine), case.problem().a
        same, size = same_operands(given if used is None else used, weights.blocks)
        kind = "f16_weights" if isinstance(used, Halves | Bfloats) else "f32"
        c[0, 3] = same[0, 3] + 1.01 * bound(family, case.k, size, kind)[0, 3]
        return c

    monkeypatch.setattr(fuzz, "multiply", multiply)
    found = " ".join(fuzz.complaints(case, Simulator(), weights))
    assert "ones rows are wrong: 1 of 5 outputs exceed the rounding bound" in found
    assert "the worst by 1.0" in found


def _spoiled(what: str) -> Any:
    """`multiply`, with memory that a kernel must not touch."""

    def multiply(prepared: Any, machine: Any) -> np.ndarray:
        fuzz_multiply(prepared, machine)
        array = {"weights": prepared.weights[0], "activations": prepared.a}.get(what)
        if array is None:
            prepared.guarded[GUARD - 1 if what == "before" else -GUARD] = 1
        else:
            array.reshape(-1).view(np.uint8)[-1] ^= 1
        return result(prepared, machine)

    return multiply


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("before", "RuntimeError: the kernel wrote outside C, 1 before its 10 floats"),
        ("after", "RuntimeError: the kernel wrote outside C, 0 after its 10 floats"),
        ("weights", "RuntimeError: step 1 changed its weights"),
        ("activations", "RuntimeError: step 1 changed its activations"),
    ],
)
def test_memory_that_must_not_change_is_watched(
    what: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FuzzCase(1, "A16", "q4_0", 2, 5, 32)
    monkeypatch.setattr(fuzz, "multiply", _spoiled(what))
    assert fuzz.judged(case, Simulator(), fuzz.Weights(case, Simulator())) == ([says], False)


@pytest.mark.parametrize("via", ["step", "gemm", "plan"])
def test_cases_that_share_weights_are_judged_as_alone(via: str) -> None:
    case = FuzzCase(16, "A8", "q5_0", 3, 9, 64, rows="nan,plain,large", via=via)
    weights = fuzz.Weights(case, Simulator())
    for one in (case, replace(case, m=1, seed=4), replace(case, rows="inf", m=2)):
        assert not fuzz.complaints(one, Simulator(), weights)


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
    weights = fuzz.Weights(case, Simulator())
    assert not fuzz.complaints(case, Simulator(), weights)
    monkeypatch.setattr(fuzz, "multiply", _changed(at, to))
    assert says in " ".join(fuzz.complaints(case, Simulator(), weights))


def test_other_bits_of_a_second_launch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter((0.0, 1e-7))

    def multiply(prepared: Any, machine: Any) -> np.ndarray:
        return np.array(fuzz_multiply(prepared, machine)) * np.float32(1 + next(made))

    monkeypatch.setattr(fuzz, "multiply", multiply)
    found = fuzz.complaints(FuzzCase(1, "A16", "q4_0", 2, 5, 32), Simulator())
    assert found == ["via step C has other bits, the first at (0, 0)"]


def test_other_bits_of_a_repeat_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "gemm", lambda *_, out, **__: out.fill(0))
    found = fuzz.complaints(FuzzCase(1, "A16", "q4_0", 2, 5, 32, via="gemm"), Simulator())
    assert found == ["via gemm C has other bits, the first at (0, 0)"]


def _far_off(case: FuzzCase, blocks: np.ndarray, given: Any, c: Any) -> list[str]:
    """What `fuzz` says of a row by which a case begins, and whose operands come to c [1, N]."""
    products = Products(blocks)
    answers = products.answers(None, given)._replace(same=c)
    judged = fuzz.Judged(case, case.problem(blocks), c, None, products)
    return judged._far_off(given.astype(np.float64), answers, np.array([0]))


@pytest.mark.parametrize(
    "line",
    [
        "step=13 family=A16 format=q8_0 m=2 n=4 k=128 rows=ones weights=most a=float32 c=float32 "
        "seed=833673 w=746439",  # sums of terms that are alike, and rounded alike
        "step=9 family=A8 format=q4_0 m=244 n=1 k=32 data=llm seed=28257 w=990604",  # an outlier
    ],
)
def test_right_products_that_were_called_wrong(line: str) -> None:
    assert fuzz.complaints(FuzzCase.parse(line), Simulator()) == []


def test_operands_that_are_far_off_are_found() -> None:
    """Scales that rounded A away: the product of what the kernel was given is right."""
    case = FuzzCase(5, "A8", "q4_0", 2, 5, 32, rows="small,plain")
    problem = case.problem()
    a = problem.a[:1]
    wanted = same_operands(a, problem.blocks)[0]
    assert not _far_off(case, problem.blocks, a, wanted * 1.001)
    (found,) = _far_off(case, problem.blocks, a, wanted * 0)
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
    given = problem.a.copy()
    given[0, 5] = 150  # rounding the others comes to 5 % of the energy of all
    wanted = same_operands(given, problem.blocks)[0]
    c = same_operands(Tokens.of_values(given), problem.blocks)[0]
    case = FuzzCase(15, "A8", "q4_0", 1, 64, 16384)
    assert not _far_off(case, problem.blocks, given, c)
    far = c + 0.3 * float(np.mean(wanted**2)) ** 0.5
    assert "row 0 (plain) is off by" in _far_off(case, problem.blocks, given, far)[0]


def test_outputs_of_weights_that_are_alike_are_one() -> None:
    """So 31 of them may be off by as much as one."""
    line = "step=15 family=A8 format=q5_1 m=35 n=31 k=3008 a=bfloat16 data=llm weights=most"
    case = FuzzCase.parse(f"{line} seed=474691 w=603202")
    problem = case.problem()
    given, blocks = problem.a, problem.blocks
    wanted = same_operands(given, blocks)[0]
    c = same_operands(Tokens.of_values(given), blocks)[0]
    for m in range(case.m):
        one = np.s_[m : m + 1]
        assert not _far_off(case, blocks, given[one], c[one])
    off = wanted[:1] + 8 * float(np.abs(c - wanted).max())
    (found,) = _far_off(case, blocks, given[:1], off)
    assert found.startswith("row 0 (plain) is off by ")


def test_blocks_of_a_row_of_ones_are_rounded_alike() -> None:
    """A scale and a sum of float16 part by up to 2^-11 each, in all blocks by the same."""
    case = FuzzCase(2, "A8", "q4_1", 1, 64, 6176, rows="ones")
    blocks = Problem(1, 64, 6176, "q4_1", "normal", 5).blocks
    given = np.full((1, 6176), -0.37, np.float32)
    wanted = same_operands(given, blocks)[0]
    c = same_operands(Q81.of_blocks(FORMATS["q8_1"].quantize(given)), blocks)[0]
    assert not _far_off(case, blocks, given, c)
    plain = FuzzCase(2, "A8", "q4_1", 1, 64, 6176)
    assert _far_off(plain, blocks, given, c), "and such rows alone"
    (found,) = _far_off(case, blocks, given, c + 4 * (c - wanted))
    assert found.startswith("row 0 (ones) is off by ")
