"""The wheel: installed into an environment of its own, it multiplies from any folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"qformats", "reference", "results", "steps"}
RIGHT = """
from qformats import dequantize
from reference import nmse

right = a.astype(np.float64) @ dequantize(quantize(w, "q4_0")).T.astype(np.float64)
assert nmse(c, right) < 1e-4, "more than activations of 8 bits lose"
assert np.array_equal(machine.host(out), c)
"""
FACTS_OF_FILES = """
from results.record import environment, provenance, store
from steps.product import tuning_table

print(provenance.source_hash(1))
print(len(tuning_table.known()[0].entries))
print(len(store.read(store.headline()).rows))
print(environment.git_state(environ={}).sha)
"""


def run(command: Sequence[str | Path], folder: Path) -> str:
    """What a program prints; its errors are shown where it fails."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In its folder is a copy of the sources that it was built from. pip downloads nothing."""
    pytest.importorskip("hatchling")
    home = tmp_path_factory.mktemp("wheel")
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, home)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    run([*pip, "--no-build-isolation", "--wheel-dir", home, home], home)
    (made,) = home.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel, where the packages that the project
    needs are those of this environment."""
    home = tmp_path_factory.mktemp("user")
    run([sys.executable, "-m", "venv", "--without-pip", home], home)
    own = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", own, "install", "--no-deps", "--no-index"]
    run([*pip, wheel], home)
    (folder,) = (home / "lib").glob("python*/site-packages")
    # addsitedir, as numba-cuda is found through a .pth file of its own
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (folder / "these.pth").write_text(line, encoding="utf-8")
    return own


def test_the_wheel_holds_the_four_packages_and_no_more(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    for package in PACKAGES:
        for path in (wheel.parent / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(wheel.parent).as_posix() in names


def example() -> str:
    """The program of the README that needs NumPy alone."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, section = text.partition("\n## From NumPy, CuPy or Numba\n")
    (program,) = re.findall(r"(?m)\A\n((?: {4}.*\n|\n)+)", section)
    return textwrap.dedent(program)


def test_it_multiplies_from_another_folder(python: Path, tmp_path: Path) -> None:
    """In the simulator where there is no GPU: C is right, and a plan's has the same bits."""
    printed = run([python, "-c", f"{example()}\nprint(choice)\n{RIGHT}"], tmp_path)
    assert re.match(r"step \d+ .* for M=4 N=64 K=256", printed)


def test_imports_are_those_of_the_wheel(python: Path, tmp_path: Path) -> None:
    for name in sorted(PACKAGES):
        file = run([python, "-c", f"import {name}; print({name}.__file__)"], tmp_path)
        assert Path(file).is_relative_to(python.parents[1]), file


def test_its_files_are_found_where_it_is_installed(
    wheel: Path, python: Path, tmp_path: Path
) -> None:
    """The same hashes, tables and runs as in the sources, and no commit."""
    here = run([sys.executable, "-c", FACTS_OF_FILES], wheel.parent)
    assert run([python, "-c", FACTS_OF_FILES], tmp_path) == here
    assert here.endswith("None\n")


def test_its_command_line(wheel: Path, python: Path, tmp_path: Path) -> None:
    listed = json.loads(run([python, "-m", "steps", "list", "--json"], tmp_path))
    files = (wheel.parent / "steps").glob("step[0-9][0-9]_*.py")
    assert sorted(step["name"] for step in listed) == sorted(file.stem for file in files)
