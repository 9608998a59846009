"""The Makefile: every target documented, the right set-up, and options passed on."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from steps.cli import main

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """make, without the variables of a make that runs these tests: they are in the environment."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("QUICK", "ALL", "TORCH")
    }
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=inherited | {"MAKEFLAGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def targets() -> set[str]:
    """The names a user may give, as the rules define them."""
    found = re.findall(r"^([a-z][a-z%-]*):(?!=)", MAKEFILE, re.MULTILINE)
    return {name.replace("%", "N") for name in found}


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python that prints its arguments."""
    program = tmp_path_factory.mktemp("bin") / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\nprintf "\\n"\n')
    program.chmod(0o755)
    return program


def runs(echo: Path, *arguments: str, **environment: str) -> list[list[str]]:
    """The commands of a target: what python gets, word by word."""
    done = make("VENV=system", f"PYTHON={echo}", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return [line.split("\0") for line in done.stdout.split("\0\n")[:-1]]


def test_help_is_the_default_and_lists_every_target() -> None:
    done = make()
    assert done.returncode == 0
    listed = set(re.findall(r"^  ([\w-]+) +\S", done.stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert phony
    assert listed == targets() == {*phony[1].replace("\\\n", " ").split(), "stepN"}


TYPED = {
    **dict.fromkeys(
        ("STEP", "M", "N", "K", "SEED", "SECONDS", "COUNT", "LINE", "WARP", "GPUS", "JOBS"), "7"
    ),
    **{"TOKENS": "8", "TEMPERATURE": "0.5", "TOP_P": "0.9", "IDS": "1,2"},
    **{"DTYPE": "float16", "ARCH": "sm_80", "TOOL": "memcheck", "ONLY": "home", "ACCURACY": "fast"},
    "DIST": "llm",
}
"""What a variable may hold whose command looks at it; others hold their own names."""


def test_every_command_knows_what_it_is_given(echo: Path) -> None:
    """With every variable that the Makefile passes on; each is passed on by some target."""
    text = re.sub(r"(?m)^#.*", "", MAKEFILE)
    passed = set(re.findall(r"\b([A-Z][A-Z_]*):([a-z-]+)", text))
    quoted = re.search(r"^VALUES := ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert quoted
    assert set(quoted[1].replace("\\", "").split()) - dict(passed).keys() == {"STEP", "GPU"}
    values = {name: TYPED.get(name, name) for name in ["STEP", *sorted(dict(passed))]}
    given = [f"{name}={value}" for name, value in values.items()]
    arrived = set()
    for target in sorted(targets()):
        for command in runs(echo, target.replace("stepN", "step7"), *given):
            if command[:2] == ["-m", "steps"]:
                args, others = main._parser().parse_known_args(command[2:])
                assert (args.command, others) == (command[2], [])
                arrived |= {pair for pair in passed if f"--{pair[1]}" in command}
    assert arrived == passed
    (command,) = runs(echo, "decoder", "GGUF=a.gguf", "BENCH=1", "TOKENS=8", "IDS=1,2", "EXPERTS=1")
    assert command[2:] == [
        "decoder",
        "a.gguf",
        "--tokens",
        "8",
        "--ids",
        "1,2",
        "--check",
        "--bench",
        "--experts",
    ]


VALUE = """it's 5$ or $HOME, "b" \\ `c` #d  two; exit 3 $(shell exit)
of two lines"""


def test_a_value_arrives_as_it_was_typed(echo: Path) -> None:
    """From make's command line and from the environment; of what has no name of its own too."""
    for target, name, before in (
        ("chat", "PROMPT", ["chat", "--prompt"]),
        ("quality", "GGUF", ["quality"]),
        ("check", "STEP", ["check"]),
        ("bench", "FILE", ["bench", "--file"]),
        ("sanitize", "TOOL", ["sanitize", "--tool"]),
        ("report", "OUT", ["page", "--out"]),
    ):
        (command,) = runs(echo, target, f"{name}={VALUE}")
        assert command[2:] == [*before, VALUE]
    (command,) = runs(echo, "results", "M=8", f"FORMAT={VALUE}")
    assert command[1:] == ["results", "M=8", f"FORMAT={VALUE}"]
    (command,) = runs(echo, "step4;'ls")
    assert command[2:] == ["run", "4;'ls"]
    (command,) = runs(echo, "decoder", PROMPT=VALUE)
    assert command[2:] == ["decoder", "--prompt", VALUE]


def test_an_empty_value_is_refused(echo: Path) -> None:
    """And not taken for a name that is left out, which would check all steps."""
    for target, name in (("check", "FILE"), ("sass", "STEP"), ("chat", "GGUF")):
        done = make(target, f"{name}=", "VENV=system", f"PYTHON={echo}")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"*** {name}= is empty: give it a value, or leave it out.  Stop." in done.stderr
        assert done.stderr.count("\n") == 1
    assert runs(echo, "check", FILE="") == [["-m", "steps", "check"]], (
        "of the environment it may be"
    )


def test_which_tests_run(echo: Path) -> None:
    for typed, left_out in (([], " and not every"), (["QUICK=1"], " and not slow and not every")):
        together, alone = runs(echo, "test", *typed)
        assert together[-1] == f"not alone{left_out}"
        assert alone[-1] == f"alone{left_out}"
    together, alone = runs(echo, "test", "ALL=1")
    assert (together[-1], alone[-1]) == ("not alone", "alone")


def test_every_test_runs_with_torch_or_without(echo: Path) -> None:
    """And what runs with torch is what imports it; none is skipped where it is missing."""
    without, _ = runs(echo, "test")
    installed, with_torch, alone = runs(echo, "test", "TORCH=1")
    chosen = [word for word in with_torch if word.startswith("tests/")]
    assert [word for word in without if word.startswith("--ignore=")] == [
        f"--ignore={word}" for word in chosen
    ]
    assert set(chosen) < set(alone)
    assert all(f'"{name}"' in installed[1] for name in ("torch", "tokenizers", "transformers"))
    left_out = re.search(
        r"^collect_ignore = .* else (\[.*\])$", (TESTS / "conftest.py").read_text(), re.M
    )
    assert left_out
    assert [f"tests/{one}" for one in ast.literal_eval(left_out[1])] == chosen
    needs = re.compile(r"^import (torch|tokenizers|transformers)\b", re.MULTILINE)
    for path in TESTS.rglob("test_*.py"):
        with_it = any(path.is_relative_to(ROOT / one) for one in chosen)
        assert with_it or not needs.search(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("target", ["diff", "ptx", "sass", "trace", "profile"])
def test_a_target_that_needs_a_step_asks_for_it(target: str) -> None:
    done = make(target, "VENV=system", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert f"name a step: make {target} STEP=4" in done.stderr


def test_a_step_through_make() -> None:
    done = make("diff", "STEP=2", "VENV=system", f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--- steps/step01_naive_w4a16.py")
    assert make("step99", "VENV=system", f"PYTHON={sys.executable}").returncode != 0


# --- the set-up -----------------------------------------------------------------------------------


class Folder:
    """A folder with the Makefile and a python that records what pip is asked for."""

    def __init__(self, path: Path, version: str = "3.12", cuda: str | None = None) -> None:
        self.path = path
        self.bin = path / "bin"
        self.bin.mkdir()
        shutil.copy(ROOT / "Makefile", path)
        shutil.copy(ROOT / "pyproject.toml", path)
        self.program("venv-python", self.python(version))
        self.program("python3", self.python(version))
        if cuda:
            self.program("nvidia-smi", f"echo '| Driver Version: 1.2  CUDA Version: {cuda}     |'")

    def program(self, name: str, text: str) -> None:
        file = self.bin / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    def python(self, version: str) -> str:
        old = "1" if tuple(map(int, version.split("."))) < (3, 11) else "0"
        return f"""
case "$1 $2" in
    "-c import sys; sys.exit"*) exit {old} ;;
    "--version "*) echo "Python {version}" ;;
    "-m venv") mkdir -p "$3/bin" && cp {self.bin}/venv-python "$3/bin/python" ;;
    "-m pip") echo installed >> {self.path}/log ;;
    "-c "*) exec {sys.executable} "$@" ;;
    *) echo "ran $*" ;;
esac"""

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", "--no-print-directory", *arguments],
            cwd=self.path,
            env={"PATH": f"{self.bin}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def installs(self) -> int:
        log = self.path / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    @property
    def asked(self) -> list[str]:
        return (self.path / ".venv" / "requirements.txt").read_text().splitlines()


def extra(name: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: list[str] = project["optional-dependencies"][name]
    return found


def test_the_first_target_sets_up_and_the_next_does_not(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    first = folder.make("list")
    assert first.returncode == 0, first.stderr
    assert "ran -m steps list" in first.stdout
    assert "CUDA 13 wheels" in first.stderr
    assert folder.installs == 1
    assert set(extra("cu13")) | set(extra("test")) < set(folder.asked)
    second = folder.make("list")
    assert (second.returncode, second.stderr, folder.installs) == (0, "", 1)

    assert folder.make("setup", "TORCH=1").returncode == 0
    assert folder.make("list").stderr == ""
    assert folder.installs == 2, "beside the other"
    asked = (tmp_path / ".venv-torch" / "requirements.txt").read_text().splitlines()
    assert sorted(asked) == sorted([*folder.asked, *extra("test-torch")])

    project = tmp_path / "pyproject.toml"
    os.utime(project, (project.stat().st_mtime + 3600, project.stat().st_mtime + 3600))
    folder.make("list")
    assert folder.installs == 3, "a changed pyproject.toml installs again"


@pytest.mark.parametrize(
    ("driver", "asked", "wheels"),
    [("12.4", [], "cu12"), ("13.0", [], "cu13"), ("13.0", ["CUDA=12"], "cu12")],
)
def test_the_driver_decides_the_wheels_or_who_asks(
    tmp_path: Path, driver: str, asked: list[str], wheels: str
) -> None:
    folder = Folder(tmp_path, cuda=driver)
    assert folder.make("setup", *asked).returncode == 0
    assert set(extra(wheels)) < set(folder.asked)


def test_an_old_python_is_refused_with_a_sentence(tmp_path: Path) -> None:
    done = Folder(tmp_path, version="3.9").make("list")
    assert done.returncode != 0
    assert "Python 3.11 or later is needed; python3 is Python 3.9" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_system_environment_installs_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    done = folder.make("list", "VENV=system")
    assert "ran -m steps list" in done.stdout
    assert folder.installs == 0
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    for target in ("lint", "docs-check", "test", "TORCH=1"):
        assert re.search(rf"\b{target}\b", text)
    subprocess.run(["bash", "-n", str(script)], check=True)
