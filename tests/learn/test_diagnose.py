"""Wrong holes: the message names the cause, and the hole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qformats import WEIGHT_FORMATS
from reference import GOLDEN, Q81, Problem
from reference import check as check_of
from steps.checks.cases import Case
from steps.learn.exercises.check import check, lines
from steps.learn.exercises.diagnose import TELLING, diagnose, region
from steps.learn.exercises.suspects import PITFALLS, SAYS, Terms, suspected
from steps.learn.exercises.text import solutions
from steps.learn.exercises.trial import Diagnosis, File, Subject, Trial, attempt
from steps.learn.pitfalls.exhibit import SHAPE, pitfalls
from steps.registry import find
from tests.learn.mistakes import MISTAKES, Mistake


def mistake(one: Mistake) -> pytest.param:
    """`make test QUICK=1` runs those of the first two steps."""
    return pytest.param(one, id=one.id, marks=() if one.step <= 2 else pytest.mark.slow)


@pytest.mark.parametrize("one", [mistake(each) for each in MISTAKES])
def test_a_mistake_is_named(one: Mistake, tmp_path: Path) -> None:
    """The other holes are filled too where that takes no time: then this one is found to be the
    wrong one."""
    exercise = one.written(tmp_path, *(solutions(one.step) if one.step <= 2 else ()))
    report = check(exercise)
    said = "\n".join(lines(report))
    assert report.wrong is not None
    assert (report.wrong.cause, report.hole) == (one.cause, one.hole), said
    assert one.says in said
    assert report.suspected == (one.hole,)
    first = exercise.code_line(one.hole)
    assert f"{exercise.path.name}:{first}" in said, "where to look"


# --- suspects against the museum ------------------------------------------------------------------


@pytest.mark.parametrize("cause", PITFALLS)
def test_a_suspect_computes_what_the_museums_kernel_computes(cause: str) -> None:
    pitfall = next(each for each in pitfalls() if each.number == PITFALLS[cause])
    golden, random = GOLDEN[pitfall.format], Problem(*SHAPE, pitfall.format, "normal")
    terms = Terms.of(Problem(1, 1, 32, pitfall.format, "golden"), golden.q81)
    assert made(terms)[cause][0].item() == pitfall.golden
    q81 = Q81.of_values(random.a)
    ours, wrong = made(Terms.of(random, q81))[cause][0], pitfall.wrong(random.blocks, q81)
    np.testing.assert_allclose(ours, wrong, rtol=1e-4, atol=1e-4 * np.abs(wrong).max())


def made(terms: Terms) -> dict[str, list[np.ndarray]]:
    """Cause -> what each of its variants computes."""
    found = defaultdict(list)
    for cause, c in suspected(terms):
        found[cause].append(c)
    return found


def test_every_pitfall_of_values_is_suspected() -> None:
    values = {each.number for each in pitfalls() if {"exact", "bound"} <= set(each.caught_by)}
    stored = {11, 12}  # outputs that nobody stores to are told without computing
    assert set(PITFALLS.values()) == values - stored


def test_the_telling_problem_shows_every_suspect() -> None:
    """What it computes there is not right, unless the format has no such mistake."""
    seen = set()
    for name in WEIGHT_FORMATS:
        problem = Problem(*TELLING.shape, name, TELLING.distribution, TELLING.seed)
        terms = Terms.of(problem, Q81.of_values(problem.a))
        for cause, variants in made(terms).items():
            shown = not all(np.allclose(each, terms.product()) for each in variants)
            assert shown or name == "q8_0", (cause, name)  # which has no offset
            seen |= {cause} if shown else set()
    assert seen == set(SAYS)


# --- where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        (slice(None), slice(None), "all 20 outputs"),
        (slice(None), slice(3, None), "every column from 3 on"),
        (slice(2, None), slice(None), "every row from 2 on"),
        (slice(None), slice(1, 2), "column 1"),
        (slice(0, 2), slice(None), "rows 0 to 1"),
        (slice(1, 2), slice(2, 4), "row 1, columns 2 to 3"),
        ([0, 2], slice(None), "rows 0, 2"),
    ],
)
def test_regions_in_words(rows: object, columns: object, words: str) -> None:
    bad = np.zeros((4, 5), bool)
    bad[rows, columns] = True
    assert region(bad) == words
    bad[0, 0] = False
    if words.startswith("all"):
        assert region(bad) == "19 outputs in rows 0 to 3, columns 0 to 4"


def changed(how: Callable[[np.ndarray], np.ndarray]) -> Diagnosis:
    """What is said of the right values of five by five outputs, but for this change."""
    subject = Subject("A16", "q4_0", Case((5, 5, 64), "normal", 1))
    right, problem = attempt(find(1), subject, Path("step01.py")), subject.problem_for(find(1))
    c = how(right.result.expected)
    wrong = replace(right.result, c=c, found=check_of(c.astype(np.float32), problem, "A16"))
    assert not wrong.found.ok
    file = File(Path("step01.py"), {})
    return diagnose(Trial(subject, wrong), find(1), find(1), file, lambda case: right)


@pytest.mark.parametrize(
    ("how", "cause", "says"),
    [
        (lambda c: -c, "factor", "is -1 times what it should be: a sign is wrong."),
        (lambda c: 2 * c, "factor", "is 2 times what it should be: something is added 2 times."),
        (lambda c: 0.3 * c, "factor", "a scale is missing, there twice, or another one"),
        (lambda c: c.T, "transposed", "C[m, n] holds what belongs to C[n, m]"),
        (lambda c: c[:, ::-1], "wrong place", "C[0, 0] what belongs to C[0, 4]"),
        (lambda c: c + 3e-3 * c.max(), "rounding", "of the largest output. Each output is near"),
        (lambda c: c * 50 + 7, "wrong value", "No known mistake gives these values."),
    ],
)
def test_values_say_what_became_of_them(how: object, cause: str, says: str) -> None:
    diagnosis = changed(how)
    assert diagnosis.cause == cause, diagnosis.sentences
    assert says in diagnosis.sentences[1]
