"""Every exercise, filled from its step: right; its text, and how it is read back."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from steps.learn.exercises.check import Asked, check, lines, loaded, subjects
from steps.learn.exercises.text import (
    Exercise,
    ExerciseError,
    make,
    names_made,
    numbers,
    outline,
    phases,
    solutions,
)
from steps.registry import find, source

COMPILED = 3
"""Steps up to this one are compiled too: `test_walk.py` has a right file of each."""

RINGS = (12, 17)
"""Those that stand for the others with stages: of many tokens, and of few."""


def of_step(number: int) -> pytest.param:
    slow = pytest.mark.slow if number in RINGS else pytest.mark.every
    return pytest.param(number, marks=() if number == 1 else slow)


def written(
    folder: Path, number: int, solved: tuple[int, ...], text: str | None = None
) -> Exercise:
    path = folder / f"{find(number).name}.py"
    path.write_text(make(find(number), solved) if text is None else text, encoding="utf-8")
    return Exercise.read(path)


KERNEL = """\
    # --- begin: set x,
    # which is read below
    x = 0

    y = 1
    # --- a loop with phases of its own
    for i in range(3):
        # --- load
        load(
            x
        )

        # a comment of what follows
        # --- add
        if y:
            x += 1
        else:
            y = 2
    # --- end
    z = x + y
    return z
"""


def test_a_phase_ends_where_the_next_begins_or_its_indentation_does() -> None:
    """A loop with phases of its own belongs to none, nor does a `return` behind a phase."""
    found = list(phases(KERNEL.splitlines(keepends=True)))
    assert [(one.number, one.text) for one in found] == [
        (1, "begin: set x, which is read below"),
        (2, "load"),
        (3, "add"),
        (4, "end"),
    ]
    assert ["".join(one.body).split() for one in found] == [
        ["x", "=", "0", "y", "=", "1"],
        ["load(", "x", ")"],
        ["if", "y:", "x", "+=", "1", "else:", "y", "=", "2"],
        ["z", "=", "x", "+", "y"],
    ]


def test_what_a_hole_makes_and_its_outline() -> None:
    assert names_made(1)[1] == ("acc", "blocks_k", "m", "n")
    assert names_made(3)[2] == ("acc",), "which the next turn of the loop adds to"
    assert outline(solutions(1)[3]) == (
        "d, z = (scale(w, at, g), offset(w, at, g))\nfor j in range(..., ...):\n    acc += ..."
    )


def test_there_are_enough() -> None:
    assert {*range(1, 10), 11, 12, 17} <= set(numbers())


@pytest.mark.parametrize("number", numbers())
def test_an_exercise_is_the_step_but_for_its_holes(number: int, tmp_path: Path) -> None:
    """Filled with the step's own lines it is the step again. Empty it can be imported, and says
    where to begin."""
    step = find(number)
    assert len(solutions(number)) >= 3
    full = make(step, tuple(solutions(number)))
    comments = {
        i + hole.first for hole in solutions(number).values() for i in range(hole.comment_lines)
    }
    own = [line for i, line in enumerate(source(step), start=1) if i not in comments]
    marks = re.compile(r" *# (end of )?TODO \d+\b|^ *#   \S")
    said = [line for line in full.splitlines(keepends=True) if not marks.match(line)]
    assert said == [line for line in own if not marks.match(line)]
    exercise = written(tmp_path, number, ())
    assert all(len(line) <= 101 for line in exercise.lines)
    solved, rows = exercise.composed(tuple(exercise.holes))
    assert solved == full
    assert len(rows) == len(full.splitlines())
    assert rows == sorted(rows)
    assert rows[-1] == len(exercise.lines)

    assert loaded(exercise).number == number
    assert exercise.unfilled == tuple(solutions(number))
    report = check(exercise)
    assert (report.ok, report.wrong, report.hole, report.cases) == (False, None, 1, 0)
    line = int(re.search(r"TODO 1 is not filled in yet \(\w+\.py:(\d+)\)", lines(report)[1])[1])
    assert exercise.lines[line - 1].strip() == "pass"


@pytest.mark.parametrize("number", [of_step(number) for number in numbers()])
def test_filled_from_the_step_it_is_right(
    number: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Those with rings in one format: that the steps before are right in the others is enough."""
    if number > COMPILED:
        request.getfixturevalue("not_compiled")
    asked = Asked(formats=("q4_0",)) if number in RINGS else Asked()
    report = check(written(tmp_path, number, tuple(solutions(number))), asked=asked)
    assert report.ok, "\n".join(lines(report))
    assert report.advice == ()
    assert lines(report)[0].startswith(f"right: {report.cases} problems in ")


# --- one hole after the other ---------------------------------------------------------------------


@pytest.mark.usefixtures("golden_alone", "not_compiled")
def test_each_hole_can_be_checked_as_soon_as_it_is_written(tmp_path: Path) -> None:
    for solved in ((1,), (2,), (1, 2, 3)):
        report = check(written(tmp_path, 1, solved))
        assert (report.ok, report.wrong) == (False, None)
        assert report.hole == min({1, 2, 3, 4, 5} - set(solved))
        said = f"right so far: TODO {', '.join(map(str, solved))} of 5;"
        assert lines(report)[0].startswith(said)


@pytest.mark.usefixtures("golden_alone", "not_compiled")
def test_two_wrong_holes_are_told_one_at_a_time(tmp_path: Path) -> None:
    text = make(find(1), (1, 2, 3, 4, 5)).replace(" + z)", ")").replace("= acc\n", "+= acc\n")
    report = check(written(tmp_path, 1, (), text))
    assert report.suspected == (3, 4)
    assert (report.hole, report.wrong.cause) == (3, "no compensation")
    assert "After it: TODO 4, wrong as well." in "\n".join(lines(report))


@pytest.mark.usefixtures("golden_alone", "not_compiled")
def test_a_file_without_its_marks_is_checked_as_a_whole(tmp_path: Path) -> None:
    text = "".join(source(find(1)))
    assert check(written(tmp_path, 1, (), text)).ok
    report = check(written(tmp_path, 1, (), text.replace(" + z)", ")")))
    assert (report.wrong.cause, report.hole) == ("no compensation", None)


# --- what Python and the kernel say ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "cause", "says"),
    [
        ("acc += a[m", "acc += (a[m", "syntax", "was never closed"),
        ("        c[m, n] = acc", "          c[m, n] = acc", "syntax", "indent"),
        ("c[m, n] = acc", "c[m, n] = akk", "name", "name 'akk' is not defined"),
        ("c[m, n] = acc", "c[m, n] = acc[0]", "error", "IndexError"),
        ("ceil_div(shape.m, BLOCK_M))", "ceil_div(shape.m))", "error", "missing 1 required"),
        ("c[m, n] = acc", "c[m, n] = acc; w[1] = 0", "operands changed", "changed its weights"),
    ],
)
def test_errors_come_with_the_line_of_the_file(
    old: str, new: str, cause: str, says: str, tmp_path: Path
) -> None:
    text = make(find(1), (1, 2, 3, 4, 5))
    assert text.count(old) == 1
    exercise = written(tmp_path, 1, (), text.replace(old, new))
    report = check(exercise)
    said = "\n".join(lines(report))
    assert report.wrong.cause == cause, said
    assert says in said
    if cause != "operands changed":
        assert new.strip() in exercise.lines[report.wrong.line - 1], said
    assert report.hole is not None
    assert report.hole == exercise.hole_at(report.wrong.line or exercise.code_line(4))


def test_a_loop_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steps.learn.exercises.trial.PATIENCE", 1.0)
    text = make(find(1), (3,))
    endless = text.replace("for b in range(blocks_k):", "b = 0\n        while b < blocks_k:")
    report = check(written(tmp_path, 1, (), endless))
    assert report.wrong.cause == "endless"
    assert "still running after 1 seconds" in report.wrong.sentences[0]


@pytest.mark.usefixtures("not_compiled")
def test_of_many_printed_lines_a_few_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = make(find(1), (1, 2, 3, 4, 5)).replace("c[m, n] = acc", "c[m, n] = acc; print(acc)")
    assert check(written(tmp_path, 1, (), text)).ok
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "141.0"
    assert len(said) == 13
    assert re.fullmatch(r"\.\.\. and \d{4} lines more that the kernel prints", said[-1])


@pytest.mark.usefixtures("not_compiled")
def test_a_check_of_one_format_takes_all_that_is_asked_of_the_first(tmp_path: Path) -> None:
    text = make(find(1), (1, 2, 3, 4, 5)).replace("(g * group, (g + 1) * group)", "(group)")
    exercise = written(tmp_path, 1, (), text)
    assert check(exercise, asked=Asked(formats=("q4_0",))).ok
    said = check(exercise, asked=Asked(formats=("q4_k",))).wrong.sentences
    assert "W4A16 q4_k, M=3 N=5 K=256" in said[0]
    assert said[1].startswith("A block of q4_k has 256 elements, and each 32 of them a scale")
    tried = [str(one) for one in subjects(find(4), Asked(formats=("q8_0",)))]
    assert len(tried) == 6
    assert any("codes and activations at their most" in one for one in tried)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0."),
        ("raise BaseException('mine')", "BaseException: mine."),
        ("while True: pass", "Endless: still running after 1 seconds."),
        ("x = " + 100_000 * "-" + "1", "Python cannot parse it"),
        ("x = 1\0", "null byte"),
    ],
)
def test_an_import_that_does_not_come_to_its_end_is_wrong(
    end: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steps.learn.exercises.load.PATIENCE", 1.0)
    report = check(written(tmp_path, 1, (), make(find(1), (1, 2, 3, 4, 5)) + end + "\n"))
    said = "\n".join(lines(report))
    assert not report.ok
    assert says in said
    assert len(said.splitlines()) == 2


def test_what_is_no_file_of_text_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "large.py").write_bytes(b"#" * (1 << 20) + b"\n")
    for name, says in (("fifo.py", "pipe or device"), ("", "is a folder"), ("large.py", "1048577")):
        with pytest.raises(ExerciseError, match=says):
            Exercise.read(tmp_path / name)
    marked = tmp_path / "marked.py"
    marked.write_text("\ufeff" + make(find(1)), encoding="utf-8")
    assert Exercise.read(marked).text == make(find(1)), "Notepad's UTF-8"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("# end of TODO 2", "", "has no end: put `# end of TODO 2` back"),
        ("# TODO 2: the byte", "# the byte", "ends TODO 2, which nothing begins"),
        ("    number=1,\n", "    number=one,\n", "has no `STEP = Step(number=...`"),
    ],
)
def test_lost_marks_are_refused_in_one_sentence(
    old: str, new: str, says: str, tmp_path: Path
) -> None:
    exercise = written(tmp_path, 1, (), make(find(1)).replace(old, new))
    with pytest.raises(ExerciseError, match=re.escape(says)):
        check(exercise)
