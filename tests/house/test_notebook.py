"""The notebook runs from top to bottom, and shows what it shows in the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from results.measure import protocol
from steps.contract import Work
from steps.driver.machines import Simulator
from steps.product.choice import Choice
from steps.registry import find
from tests.results.fake_stopwatch import FakeStopwatch

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "steps" / "ladder.ipynb"
MOST_SECONDS = 180.0  # of processor time
RUN = """
import sys
import nbformat
from nbclient import NotebookClient

source, made, folder = sys.argv[1:]
notebook = nbformat.read(source, 4)
NotebookClient(notebook, timeout=120, resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, made)
"""


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def shown(cell: dict[str, Any]) -> str:
    return "".join("".join(one.get("text", one.get("traceback", ""))) for one in cell["outputs"])


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebook as the simulator runs it, in a process and folders of its own, from the folder
    that Jupyter runs it in: its own."""
    folder = tmp_path_factory.mktemp("notebook")
    made, before = folder / "executed.ipynb", os.times()
    own = {"CUDA_VISIBLE_DEVICES": "", "IPYTHONDIR": str(folder), "HOME": str(folder)}
    command = [sys.executable, "-c", RUN, str(NOTEBOOK), str(made), str(NOTEBOOK.parent)]
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    after = os.times()
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < MOST_SECONDS
    return made


def test_it_runs_and_shows_what_the_file_shows(executed: Path) -> None:
    pairs = zip(cells(NOTEBOOK, "code"), cells(executed, "code"), strict=True)
    for number, (in_file, now) in enumerate(pairs, start=1):
        what = f"cell {number}; run the notebook and save it"
        assert shown(now) == shown(in_file), what


def test_every_check_in_it_says_right(executed: Path) -> None:
    said = [line for cell in cells(executed, "code") for line in shown(cell).splitlines()]
    formats = [line for line in said if line.startswith(("q4_", "q5_", "q8_"))]
    steps = [line for line in said if line[:1].isdigit() and "  right  " in line]
    assert len(formats) == 5
    assert all(line.endswith(" right") for line in formats)
    assert [line[0] for line in steps] == list("123456")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (" + z", "", "differ in the exact case"),
        ("m + 1 if m + 1 < c.shape[0] else m", "m + 1", "outside"),
        ("        if other != m:\n            c[other", "        c[other", ""),
    ],
)
def test_what_it_says_of_breaking_the_step_is_true(old: str, new: str, says: str) -> None:
    source = next("".join(c["source"]) for c in cells(NOTEBOOK, "code") if "two_tokens" in str(c))
    check = next("".join(c["source"]) for c in cells(NOTEBOOK, "code") if "def checked" in str(c))
    assert source.count(old) == 1
    given: dict[str, Any] = {"Work": Work, "find": find, "machine": Simulator()}
    exec("register = lambda step: step\n" + check.partition("\n\n\nfor ")[0], given)
    exec(source.replace(old, new).partition("for name in mine")[0], given)
    found = given["checked"](given["mine"])
    assert says in found if says else found == "right", found


def test_its_own_step_is_compiled_for_a_t4() -> None:
    """A GPU that a reader may have for nothing: compute capability 7.5."""
    from steps.compile.compiler import machine_code, signature_of

    source = next("".join(c["source"]) for c in cells(NOTEBOOK, "code") if "two_tokens" in str(c))
    given: dict[str, Any] = {}
    exec(
        "from steps import find\nregister = lambda step: step\nchecked = lambda step, name: name\n"
        + source,
        given,
    )
    *_, launch = Choice.of_work(Work(given["mine"], "A16", "q4_0"), (4, 32, 64)).launches()
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_75")
    assert code.spill_store_bytes == code.spill_load_bytes == 0
    assert "LDG" in code.sass


def test_it_times_steps_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an invented clock: step 1 takes twice as long as step 2."""
    source = next("".join(c["source"]) for c in cells(NOTEBOOK, "code") if "def timed" in str(c))
    seconds = lambda launch: 2e-3 if launch.kernel.__name__ == "w4a16_naive" else 1e-3  # noqa: E731
    monkeypatch.setattr(protocol, "GpuStopwatch", lambda: FakeStopwatch(seconds))
    given: dict[str, Any] = {"Work": Work, "find": find, "machine": Simulator()}
    exec(source, given)
    assert given["timed"](find(2), find(1), (3, 5, 64)) == pytest.approx((1000, 2000))
