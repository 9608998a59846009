"""The tree of steps: parents, what a diff compares with, and what to read next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steps import registry
from steps.checks.select import branches
from steps.contract import Step
from steps.registry import find, following, ladder, parent_of


def test_the_first_step_alone_has_no_parent() -> None:
    assert [step.number for step in ladder() if parent_of(step) is None] == [1]
    assert all(parent_of(step) for step in ladder()[1:])


def test_every_branch_is_climbed() -> None:
    assert {step.branch for step in ladder()} == set(branches())


@pytest.mark.parametrize("step", ladder(), ids=lambda step: step.name)
def test_following_leads_from_a_step_to_its_children(step: Step) -> None:
    after = following(step)
    assert all(one.number > step.number for one in after)
    children = [one.number for one in ladder() if parent_of(one) == step.number]
    if children:
        assert [one.number for one in after] == children
    elif step is ladder()[-1]:
        assert after == ()
    else:
        higher = [one.number for one in ladder() if one.number > step.number]
        assert [one.number for one in after] == higher[:1]


def test_every_step_is_reached_by_reading_on() -> None:
    seen, todo = set(), [1]
    while todo:
        number = todo.pop()
        if number not in seen:
            seen.add(number)
            todo += [one.number for one in following(find(number))]
    assert seen == {step.number for step in ladder()}


def test_an_unknown_number_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"there is no step 99: the ladder has steps 1 to "):
        find(99)


def test_a_step_is_its_file() -> None:
    assert "".join(registry.source(find(1))).startswith('"""Step 1: ')
    assert registry.label_of(find(1)) == "steps/step01_naive_w4a16.py"
    assert registry.label_of(registry.kernel_of(14)) == "steps/kernels/prefill/wgmma_float16.py"
    assert registry.lesson_of(registry.kernel_of(14)) is find(14)


def test_a_step_of_ones_own_is_found_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    own = replace(find(1), number=101, name="step101_own")
    assert registry.register(own) is find(101) is own
    again = replace(own, title="again")
    registry.register(again)
    assert find(101) is again
    assert again not in registry.ladder()
    with pytest.raises(ValueError, match="7 is the number of a step of the ladder: choose one"):
        registry.register(replace(own, number=7))
