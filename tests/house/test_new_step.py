"""Adding a step is adding one file: a copy of a real step gets the next number in a copy of the
tree, and nothing else changes.

A second new file is the same step without its compensation: the checks must find it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from steps.registry import ladder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TREE = ("qformats", "reference", "results", "steps", "tests")
FILES = ("README.md", "Makefile", "pyproject.toml")
COPIED = ladder()[1]
NEW = ladder()[-1].number + 1
WRONG = NEW + 1


def copy_of_step(number: int, name: str) -> str:
    """The text of a real step under another number and name, as somebody begins a new one."""
    text = (ROOT / "steps" / f"{COPIED.name}.py").read_text(encoding="utf-8")
    for old, new in (
        (f'"""Step {COPIED.number}: ', f'"""Step {number}: '),
        (f"number={COPIED.number},", f"number={number},"),
        (f'name="{COPIED.name}"', f'name="{name}"'),
        ("    chosen_untuned=True,\n", ""),  # a new step has not been measured
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def without_compensation(text: str) -> str:
    wrong, count = re.subn(
        r"\n( +)acc \+= (scale.*) \+ offset\(w, at\) \* s\n", r"\n\1acc += \2\n", text
    )
    assert count == 1
    return wrong


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with one more step."""
    home = tmp_path_factory.mktemp("house")
    for name in TREE:
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, home)
    name = f"step{NEW:02d}_one_more"
    (home / "steps" / f"{name}.py").write_text(copy_of_step(NEW, name), encoding="utf-8")
    return home


@pytest.fixture
def workshop(house: Path, tmp_path: Path) -> Path:
    """A copy of the house's packages, to put more into."""
    for name in TREE[:4]:
        shutil.copytree(house / name, tmp_path / name)
    return tmp_path


def ran(house: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python ...` in the house."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=house,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# --- a right one ----------------------------------------------------------------------------------


def test_it_is_listed_checked_and_compared_with_its_parent(house: Path) -> None:
    done = ran(house, "-m", "steps", "list", "--json")
    listed = {step["number"]: step for step in json.loads(done.stdout)}
    assert list(listed) == [*(step.number for step in ladder()), NEW]
    assert listed[NEW]["parents"] == dict(COPIED.parents)
    assert listed[NEW]["homes"] == [list(shape) for shape in COPIED.home_shapes]
    assert NEW in listed[COPIED.parents["A8"]]["read_next"]
    command = ("check", str(NEW), "--quick", "--format", "q4_0", "--machine", "simulator")
    done = ran(house, "-m", "steps", *command)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^ *{NEW}  W4A8 +q4_0 .* ok, \d+ cases$", done.stdout, re.MULTILINE)
    done = ran(house, "-m", "steps", "diff", str(NEW))
    assert done.returncode == 0, done.stderr
    assert f"+++ steps/step{NEW:02d}_one_more.py" in done.stdout


def test_it_has_the_form_of_a_lesson_and_breaks_no_rule_of_the_house(house: Path) -> None:
    tests = ["tests/steps/test_step_contract.py", "tests/steps/test_registry.py", "tests/house"]
    quiet = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not every"]
    its_own = f"step{NEW} or test_registry or test_pages or circle"  # of others nothing has changed
    done = ran(house, "-m", "pytest", *quiet, "-k", its_own, *tests)
    assert done.returncode == 0, done.stdout[-3000:]


def test_what_is_generated_does_not_drift(house: Path) -> None:
    """It was not measured, so no table and no chart of the runs has it. Rows of code that changed
    after it was measured are stale with it and without."""
    before, after = (ran(home, "-m", "results", "check") for home in (ROOT, house))
    assert (after.returncode, after.stdout) == (before.returncode, before.stdout)
    assert after.stderr == before.stderr


CHOOSE = """
from types import SimpleNamespace
from qformats import WEIGHT_FORMATS
from steps.product.choice import choose
from steps.product.choice import Request

for cc in ((7, 5), (8, 6), (9, 0), (12, 0)):
    gpu = SimpleNamespace(name="GPU of nobody", cc=cc, sms=40)
    for m in (1, 16, 512):
        for name in WEIGHT_FORMATS:
            print(choose(Request(name, m, 4096, 4096), gpu).kernel.number)
"""


def test_gemm_does_not_choose_it_before_it_was_measured(workshop: Path) -> None:
    for table in (workshop / "results").glob("*/tuning.json"):
        table.unlink()
    done = ran(workshop, "-c", CHOOSE)
    assert done.returncode == 0, done.stderr
    chosen = set(map(int, done.stdout.split()))
    assert chosen
    assert NEW not in chosen

    file = workshop / "steps" / f"step{NEW:02d}_one_more.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.rstrip().removesuffix(")") + "    chosen_untuned=True,\n)\n", "utf-8")
    done = ran(workshop, "-c", CHOOSE)
    assert str(NEW) in done.stdout.split(), "a step that says so may be chosen"


# --- wrong ones -----------------------------------------------------------------------------------


def test_a_wrong_step_fails_the_command_with_a_reason(workshop: Path) -> None:
    name = f"step{WRONG:02d}_wrong"
    text = without_compensation(copy_of_step(WRONG, name))
    (workshop / "steps" / f"{name}.py").write_text(text, encoding="utf-8")
    command = ("check", str(WRONG), "--machine", "simulator", "--dist", "golden")
    done = ran(workshop, "-m", "steps", *command, "--json")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["ok"] is False
    failed = [one for one in data["checks"] if not one["ok"]]
    assert {one["format"] for one in failed} == {"q4_0", "q4_1", "q5_0", "q5_1"}, (
        "q8_0 has no offset"
    )
    (sentence,) = failed[0]["failures"]
    assert "got 125" in sentence, "the value of this very bug on the golden case"

    table = ran(workshop, "-m", "steps", *command)
    assert "FAILED 1 of 1 case" in table.stdout
    assert sentence in table.stderr
    assert "Traceback" not in table.stderr


def test_a_file_whose_name_and_step_disagree_is_an_error(workshop: Path) -> None:
    first = ladder()[0].name
    shutil.copy(workshop / "steps" / f"{first}.py", workshop / "steps" / "step42_odd.py")
    done = ran(workshop, "-m", "steps", "list")
    assert done.returncode == 2
    assert f"step42_odd.py defines step 1 named '{first}'" in done.stderr
    assert "Traceback" not in done.stderr
