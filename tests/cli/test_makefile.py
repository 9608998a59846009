"""The Makefile: every target documented, the right set-up, and options passed on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """make, without the variables of a make that runs these tests: they are in the environment."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("QUICK", "ALL")}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=inherited | {"MAKEFLAGS": ""} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def would_run(*arguments: str) -> str:
    """The commands of a target, not run; with the interpreter named python, and no set-up."""
    done = make("--dry-run", "VENV=system", "PYTHON=python", *arguments)
    assert done.returncode == 0, done.stderr
    return re.sub(r"\s+", " ", done.stdout.replace("\\\n", " ")).strip()


def targets() -> set[str]:
    """The names a user may give, as the rules define them."""
    found = re.findall(r"^([a-z][a-z%-]*):(?!=)", MAKEFILE, re.MULTILINE)
    return {name.replace("%", "N") for name in found}


def test_help_is_the_default_and_lists_every_target() -> None:
    done = make()
    assert done.returncode == 0
    listed = set(re.findall(r"^  ([\w-]+) +\S", done.stdout, re.MULTILINE))
    assert listed == targets()
    assert len(listed) > 15


def test_every_target_but_the_pattern_is_phony() -> None:
    phony = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert phony
    assert set(phony[1].replace("\\\n", " ").split()) == targets() - {"stepN"}


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["step4"], "python -m steps run 4"),
        (
            ["step12", "FORMAT=q4_0", "M=3", "N=5", "K=64", "SCHEME=W4A8", "DIST=llm"],
            "python -m steps run 12 --format 'q4_0' --scheme 'W4A8' --m '3' --n '5' --k '64' "
            "--dist 'llm'",
        ),
        (["ladder", "LONG=1"], "python -m steps ladder --long"),
        (["check", "LONG=1", "STEP=2"], "python -m steps check 2 --long"),
        (["fuzz", "SECONDS=9", "SEED=3"], "python -m steps fuzz --seconds '9' --seed '3'"),
        (["fuzz", "STEP=2", "CASE=step=2 m=1"], "python -m steps fuzz 2 --case 'step=2 m=1'"),
        (
            ["step12", "GGUF=a model.gguf", "TENSOR=blk.0.ffn_up.weight", "M=512"],
            "python -m steps run 12 --m '512' --gguf 'a model.gguf' --tensor 'blk.0.ffn_up.weight'",
        ),
        (["check", "STEP=3", "GGUF=m.gguf", "TENSOR=w"], "check 3 --gguf 'm.gguf' --tensor 'w'"),
        (["check", "STEP=12", "DTYPE=float16"], "python -m steps check 12 --dtype 'float16'"),
        (["sass", "STEP=12", "DTYPE=bfloat16"], "--arch 'sm_90a' --dtype 'bfloat16'"),
        (["profile", "STEP=12", "DTYPE=float16"], "steps profile 12 --dtype 'float16'"),
        (["counters", "STEP=12"], "python -m steps counters 12"),
        (["tune", "RUN=results/a/run.json"], "steps tune --run 'results/a/run.json'"),
        (["gpu-tests", "SECONDS=90"], "python -m steps gpu-tests --seconds '90'"),
        (["sanitize", "DTYPE=float16"], "python -m steps sanitize --dtype 'float16'"),
        (["diff", "STEP=5"], "python -m steps diff 5"),
        (["exercise", "STEP=5", "OUT=mine.py"], "python -m steps exercise 5 --out 'mine.py'"),
        (["exercises"], "python -m steps exercises"),
        (["check", "FILE=a file.py", "HINT=1"], "python -m steps check --file 'a file.py' --hint"),
        (["check", "FILE=mine.py", "SOLUTION=1"], "steps check --file 'mine.py' --solution"),
        (["bench", "FILE=mine.py", "M=3"], "python -m steps bench --file 'mine.py' --m '3'"),
        (["sass", "FILE=mine.py"], "python -m steps sass --file 'mine.py' --arch 'sm_90a'"),
        (["diff", "FILE=mine.py"], "python -m steps diff --file 'mine.py'"),
        (["sass", "STEP=4", "ARCH=sm_80"], "python -m steps sass 4 --arch 'sm_80'"),
        (["ptx", "STEP=4"], "python -m steps ptx 4 --arch 'sm_90a'"),
        (["trace", "STEP=3"], "python -m steps trace 3"),
        (
            ["trace", "STEP=3", "FORMAT=q5_1", "LINE=114", "WARP=4", "OUT=t.html"],
            "steps trace 3 --format 'q5_1' --line '114' --warp '4' --out 't.html'",
        ),
        (["sanitize"], "python -m steps sanitize"),
        (
            ["sanitize", "STEP=4", "TOOL=memcheck racecheck"],
            "python -m steps sanitize 4 --tool memcheck racecheck",
        ),
        (["test"], "loadgroup --no-loadscope-reorder -m 'not alone and not every'"),
        (["test"], "python -m pytest -m 'alone and not every'"),
        (["test", "QUICK=1"], "no-loadscope-reorder -m 'not alone and not slow and not every'"),
        (["test", "QUICK=1"], "python -m pytest -m 'alone and not slow and not every'"),
        (["test", "ALL=1"], "loadgroup --no-loadscope-reorder -m 'not alone'"),
        (["test", "ALL=1"], "python -m pytest -m 'alone'"),
        (["report"], "python -m results.render.page"),
        (["report", "OUT=there.html"], "python -m results.render.page --out 'there.html'"),
        (
            ["decoder", "GGUF=model.gguf", "IDS=1,2", "TOKENS=8"],
            "python -m steps.cli.decoder 'model.gguf' --ids '1,2' --tokens '8'",
        ),
        (
            [
                "chat",
                "GGUF=model.gguf",
                "PROMPT=What's up?",
                "TEMPERATURE=0.7",
                "TOP_P=0.9",
                "SEED=3",
            ],
            "python -m steps.cli.decoder 'model.gguf' --chat --prompt \"$PROMPT\" "
            "--temperature '0.7' --top-p '0.9' --seed '3'",
        ),
        (["chat", "GPUS=2"], "python -m steps.cli.decoder --chat --gpus '2'"),
        (
            ["decoder", "BENCH=1", "GPUS=2"],
            "python -m steps.cli.decoder --check --bench --gpus '2'",
        ),
        (
            ["quality", "GGUF=model.gguf", "TEXT=a.txt", "LLAMA_CPP=1", "OUT=there.json"],
            "python -m steps.cli.decoder 'model.gguf' --quality --text 'a.txt' --against-llama-cpp "
            "--json 'there.json'",
        ),
        (["chat", "SYSTEM=Be brief.", "REFERENCE=1"], '--chat --system "$SYSTEM" --reference'),
        (
            ["decoder", "BENCH=1", "OUT=there.json"],
            "python -m steps.cli.decoder --check --bench --json 'there.json'",
        ),
        (["warm", "GGUF=model.gguf"], "python -m steps warm --gguf 'model.gguf'"),
        (["warm", "N=64", "K=256", "DTYPE=float16"], "warm --n '64' --k '256' --dtype 'float16'"),
        (["cache"], "python -m steps cache"),
        (["cache", "CLEAR=1"], "python -m steps cache --clear"),
        (["docs-check"], "python -m results.render.tables --check"),
    ],
)
def test_what_a_target_runs(arguments: list[str], command: str) -> None:
    assert command in would_run(*arguments)


@pytest.mark.parametrize("target", ["diff", "ptx", "sass", "trace", "profile"])
def test_a_target_that_needs_a_step_asks_for_it(target: str) -> None:
    done = make(target, "VENV=system", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert f"name a step: make {target} STEP=4" in done.stderr


def test_a_step_through_make() -> None:
    done = make("diff", "STEP=2", "VENV=system", f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--- steps/step01_naive_w4a16.py")


def test_a_failing_command_fails_the_target() -> None:
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

    project = tmp_path / "pyproject.toml"
    os.utime(project, (project.stat().st_mtime + 3600, project.stat().st_mtime + 3600))
    folder.make("list")
    assert folder.installs == 2, "a changed pyproject.toml installs again"


@pytest.mark.parametrize(
    ("driver", "wheels"), [("12.4", "cu12"), ("13.0", "cu13"), ("13.2", "cu13")]
)
def test_the_driver_decides_the_wheels(tmp_path: Path, driver: str, wheels: str) -> None:
    folder = Folder(tmp_path, cuda=driver)
    assert folder.make("setup").returncode == 0
    assert set(extra(wheels)) < set(folder.asked)


def test_cuda_can_be_chosen(tmp_path: Path) -> None:
    folder = Folder(tmp_path, cuda="13.0")
    assert folder.make("setup", "CUDA=12").returncode == 0
    assert set(extra("cu12")) < set(folder.asked)


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
    for target in ("lint", "docs-check", "test"):
        assert re.search(rf"\b{target}\b", text)
    subprocess.run(["bash", "-n", str(script)], check=True)
