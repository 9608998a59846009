"""What is said of a kernel that is right in the simulator: the compiler's word, and advice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steps.learn.exercises.check import Report, check, lines
from steps.learn.exercises.text import Exercise, make, solutions
from steps.registry import find

pytestmark = pytest.mark.usefixtures("golden_alone")


def checked(folder: Path, number: int, changes: dict[str, str]) -> Report:
    """Of an exercise that is filled in rightly but for these changes."""
    text = make(find(number), tuple(solutions(number)))
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / f"{find(number).name}.py"
    path.write_text(text, encoding="utf-8")
    return check(Exercise.read(path))


def test_what_numba_refuses_is_wrong(tmp_path: Path) -> None:
    report = checked(tmp_path, 1, {"acc += a[m": "acc += ord(str(m)[0]) * 0 + a[m"})
    said = "\n".join(lines(report))
    assert (report.ok, report.wrong.cause, report.hole) == (False, "compile", 3), said
    assert "right in the simulator, but it does not compile: there is no str(int64)" in said
    assert len(said.splitlines()) <= 5


def test_what_numba_trips_over_is_wrong(tmp_path: Path) -> None:
    """Of its own assertions, which say no line, the hole is found by compiling each alone."""
    report = checked(tmp_path, 1, {"acc += a[m": "acc += sorted((3, 1))[1] * 0 + a[m"})
    said = "\n".join(lines(report))
    assert (report.ok, report.wrong.cause, report.hole) == (False, "compile", 3), said
    assert "Numba cannot compile it: Implementation function" in said
    assert "Each TODO is right by itself" not in said


def test_machine_code_that_could_be_better(tmp_path: Path) -> None:
    """0.0 is a float64 in Numba, and so is all that is added to it."""
    changes = {"acc = float32(0)": "acc = 0.0", '"I2F", "FFMA")}': '"I2F", "IDP")}'}
    report = checked(tmp_path, 1, changes)
    assert report.ok
    wide, lacking = report.advice
    assert "float64 in the machine code of family A16: 0.0 in line 50 is a float64" in wide
    assert lacking == "no IDP in the machine code of family A16, by which the step is known"


@pytest.mark.usefixtures("not_compiled")
def test_idle_thread_blocks_are_advice(tmp_path: Path) -> None:
    report = checked(tmp_path, 1, {"ceil_div(shape.n, BLOCK_N)": "16 * ceil_div(shape.n, BLOCK_N)"})
    assert report.ok
    (said,) = report.advice
    assert "has 131072 thread blocks at M=512 N=4096 K=4096, that of the step 8192" in said


def test_without_a_compiler_the_check_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("nvdisasm was not found:\n pip install it")

    monkeypatch.setattr("steps.learn.exercises.advice.machine_code", missing)
    report = checked(tmp_path, 1, {})
    assert report.ok
    assert report.advice == ("not compiled here: nvdisasm was not found: pip install it",)


@pytest.mark.usefixtures("not_compiled")
def test_more_traffic_than_the_steps_is_advice(tmp_path: Path) -> None:
    """Lanes along the rows of A, and rows of a tile that begin in one bank."""
    changes = {
        "ROW_F32: Final = BLOCK + 1": "ROW_F32: Final = BLOCK",
        "if m0 + ty < c.shape[0]:\n                x = a[m0 + ty, b * BLOCK + tx]": (
            "if m0 + tx < c.shape[0]:\n                x = a[m0 + tx, b * BLOCK + ty]"
        ),
        "tile_a[ty, tx] = x": "tile_a[tx, ty] = x",
    }
    report = checked(tmp_path, 3, changes)
    assert report.ok
    sectors, conflicts = report.advice
    assert lines(report)[1] == f"  advice: {sectors}"
    first = r"the first warp has \d+ "
    assert re.match(rf"{first}sectors of global memory in family A16, that of the step ", sectors)
    assert re.match(rf"{first}bank conflicts in family A16, that of the step 0: ", conflicts)
    assert "x = a[m0 + tx, b * BLOCK + ty]" in sectors
    assert "acc += tile_a[ty, j] * tile_w[tx, j]" in conflicts
