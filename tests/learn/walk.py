"""The walk of steps/learn/exercises/WALK.md, walked: what it types is done, what it prints is
compared.

A block of Python that begins with `# step 1, TODO 2` is written into that hole; a block of text
that begins with `$ make ...` is that command, and below it what it prints.

    .venv/bin/python -m tests.learn.walk      writes what the commands print into the page
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from steps.cli import main as cli
from steps.learn.exercises.progress import path_for
from steps.learn.exercises.text import Exercise
from steps.registry import find

PAGE: Final = Path(__file__).resolve().parents[2] / "steps" / "learn" / "exercises" / "WALK.md"
_BLOCK: Final = re.compile(r"^```(python|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"# step (\d+), TODO (\d+)\n(.*)", re.DOTALL)
_OPTIONS: Final = {"FILE": "--file", "HINT": "--hint", "SOLUTION": "--solution", "STEP": ""}


def walked(page: str) -> str:
    """The page with what its commands print now; it is walked in the current folder."""
    return _BLOCK.sub(lambda block: _performed(block[1], block[2]), page)


def _performed(kind: str, text: str) -> str:
    if kind == "python":
        code = _CODE.fullmatch(text)
        assert code, f"a block of code begins with `# step 1, TODO 2`, not with {text[:40]!r}"
        fill(int(code[1]), int(code[2]), code[3])
        return f"```python\n{text}```\n"
    command = text.partition("\n")[0]
    return f"```text\n{command}\n{printed(command)}```\n"


def fill(number: int, hole: int, code: str) -> None:
    """Write code into a hole of the exercise of a step, in place of what is there."""
    exercise = Exercise.read(path_for(find(number)))
    place = exercise.holes[hole]
    comments = [line for line in place.body if re.match(r" *#", line)]
    lines = exercise.lines
    body = textwrap.indent(code, place.indent).splitlines(keepends=True)
    lines[place.first : place.last - 1] = [*comments, *body]
    exercise.path.write_text("".join(lines), encoding="utf-8")


def printed(command: str) -> str:
    """What `$ make check FILE=... HINT=1` prints."""
    dollar, make, target, *settings = shlex.split(command)
    assert (dollar, make) == ("$", "make"), command
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main([target, *_arguments(settings)])
    return out.getvalue()


def _arguments(settings: list[str]) -> Iterator[str]:
    for name, _, value in (setting.partition("=") for setting in settings):
        option = _OPTIONS[name]
        if option:
            yield option
        if name in ("FILE", "STEP"):
            yield value


def without_seconds(page: str) -> str:
    """Seconds differ from one walk to the next."""
    return re.sub(r"in \d+\.\d s\b", "in - s", page)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        PAGE.write_text(walked(page), encoding="utf-8")


if __name__ == "__main__":
    main()
