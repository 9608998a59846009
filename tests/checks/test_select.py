"""Which works are asked for, what they are compared with, and the cases of each."""

from __future__ import annotations

import pytest

from reference import DEEP_CHECK_SHAPE
from steps.checks.cases import DISTRIBUTION_CYCLE, ORDERS, cases
from steps.checks.select import UsageError, select, with_parents
from steps.registry import find, kernel_of, kernels, ladder


def test_a_scheme_selects_family_and_bits() -> None:
    works = select(ladder(), wanted="W4A8")
    assert {work.family for work in works} == {"A8"}
    assert {work.format for work in works} == {"q4_0", "q4_1"}
    assert {work.step.number for work in works} == {2, 3, 4, 5} | {
        step.number for step in (*ladder(), *kernels()) if step.number > 5 and "A8" in step.families
    }


def test_works_come_with_their_parents() -> None:
    works = with_parents(select((find(4),), ["q5_0"]))
    assert [(w.step.number, w.family) for w in works] == [(3, "A8"), (4, "A8")]


def test_works_and_their_parents_are_ordered_by_step_family_and_format() -> None:
    works = select((kernel_of(17),), ["q4_0", "q4_1"])
    found = [(w.step.number, w.family, w.format) for w in with_parents(works[::-1])]
    own = [(17, family, name) for family in ("A16", "A8") for name in ("q4_0", "q4_1")]
    assert found[-4:] == own
    assert {number for number, *_ in found[:-4]} == {16}


def test_a_parent_of_another_family_is_taken_in_its_own() -> None:
    (step,) = (one for one in ladder() if one.name.endswith("wgmma_int8"))
    works = with_parents(select((step,), ["q4_0"]))
    assert [(w.step.number, w.family) for w in works] == [
        (step.parents["A8"], "A16"),
        (step.number, "A8"),
    ]


def test_a_parent_that_this_gpu_cannot_run_is_left_out() -> None:
    step = next(one for one in ladder() if one.min_cc == (8, 0))
    works = with_parents(select((step,), ["q4_0"]), (7, 5))
    parent = find(next(iter(step.parents.values())))
    assert {w.step.number for w in works} == {step.number, parent.number}
    child = next(one for one in ladder() if step.number in one.parents.values())
    works = with_parents(select((child,), ["q4_0"]), (7, 5))
    assert {w.step.number for w in works} == {child.number}


def test_works_write_c_in_the_dtype_asked_for_and_so_do_parents() -> None:
    works = select(ladder(), ["q4_0"], output="float16")
    assert {work.step.number for work in works} == {
        step.number for step in ladder() if "float16" in kernel_of(step.number).outputs
    }
    eleven = select((find(11),), ["q4_0"], output="bfloat16")
    assert [work.step for work in eleven] == [kernel_of(11)], "its lesson writes float16"
    assert select((find(11),), ["q4_0"])[0].step is find(11)
    assert with_parents(eleven, output="bfloat16") == eleven, "step 9 writes float32"
    assert len(with_parents(eleven)) == 2
    with pytest.raises(UsageError, match="step 9 writes C as float32, not bfloat16"):
        select((find(9),), output="bfloat16")


@pytest.mark.parametrize("simulated", [True, False])
def test_quick_checks_of_all_formats_cover_all_shapes(simulated: bool) -> None:
    whole = {case.shape for case in cases("q4_0", simulated=simulated)}
    quick = [cases(name, simulated=simulated, quick=True) for name in ("q4_0", "q4_1", "q5_0")]
    assert {case.shape for each in quick for case in each} == whole
    for each in quick:
        assert [case.distribution for case in each[:2]] == ["golden", "extreme"]


def test_cases_go_round_distributions_and_orders() -> None:
    regular = cases("q4_0", simulated=True)[2:]
    assert {case.distribution for case in regular} == set(DISTRIBUTION_CYCLE)
    assert {case.order for case in regular} == set(ORDERS)
    deep = cases("q4_k", simulated=False, step=find(15))[0]
    assert (deep.distribution, deep.shape) == ("extreme", (4, 4, 132096))
    fixed = cases("q4_0", simulated=True, distribution="llm", order=7, seed=3)
    assert {case.distribution for case in fixed} == {"llm"}
    assert {case.order for case in fixed} == {7}
    assert fixed[0].seed == 3


def test_a_kernel_of_few_tokens_has_a_deeper_k_in_the_simulator() -> None:
    """Its warps share K, and each has a ring of its own."""
    for step, depth in ((find(14), 1312), (find(17), 4256), (kernel_of(18), 4256)):
        shapes = [case.shape for case in cases("q4_0", simulated=True, step=step)]
        assert max(k for _, _, k in shapes) == depth, step.name
    assert DEEP_CHECK_SHAPE in [case.shape for case in cases("q4_0", simulated=False)]
