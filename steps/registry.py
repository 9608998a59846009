"""Finds the steps, every module `steps/stepNN_<idea>.py` that defines `STEP`, and the engineered
kernels that callers launch."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Final

from steps.contract import Kernel, Step

_MODULE = re.compile(r"step(\d\d)_\w+\.py")


@cache
def ladder() -> tuple[Step, ...]:
    """Every step, in the order of its number. A file whose name and STEP disagree is an error."""
    steps = []
    for path in sorted(Path(__file__).parent.glob("step[0-9][0-9]_*.py")):
        match = _MODULE.fullmatch(path.name)
        step = importlib.import_module(f"steps.{path.stem}").STEP
        if match is None or step.number != int(match[1]) or step.name != path.stem:
            raise ImportError(
                f"{path.name} defines step {step.number} named {step.name!r}: give the file and "
                "its STEP the same number and name"
            )
        steps.append(step)
    return tuple(steps)


KERNELS: Final = (
    *("prefill.mma_int8", "prefill.mma_float16", "prefill.wgmma_specialized"),
    *("prefill.wgmma_float16", "prefill.wgmma_int8", "decode.cp_async", "decode.bulk"),
)
"""The modules of `steps.kernels` that define a `KERNEL`. `gemm` chooses among these."""


@cache
def kernels() -> tuple[Kernel, ...]:
    """Every engineered kernel, in the order of the lessons that teach them."""
    found = (importlib.import_module(f"steps.kernels.{name}").KERNEL for name in KERNELS)
    return tuple(sorted(found, key=lambda one: one.number))


def kernel_of(number: int) -> Kernel:
    """What a caller gets who names a step: the engineered kernel that it teaches, else the step
    itself. ValueError for a number that no step has."""
    step = find(number)
    return next((one for one in kernels() if one.number == number), step)


def lesson_of(kernel: Kernel) -> Step:
    """The step that teaches a kernel; a step is its own."""
    return kernel if isinstance(kernel, Step) else find(kernel.number)


_registered: dict[int, Step] = {}


def register(step: Step) -> Step:
    """Make a step that is in no file here known by its number: `gemm(a, w, step=101)` and `find`
    take it. Registering a number again replaces its step. It is no rung of `ladder()`.

    ValueError for a number of the ladder.
    """
    if any(one.number == step.number for one in ladder()):
        raise ValueError(
            f"{step.number} is the number of a step of the ladder: choose one from "
            f"{ladder()[-1].number + 1} on"
        )
    _registered[step.number] = step
    return step


def find(number: int) -> Step:
    """The step of that number, of the ladder or registered; ValueError names the ladder's."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"step is {number!r}: it must be the number of a step")
    for step in (*ladder(), *_registered.values()):
        if step.number == number:
            return step
    first, *_, last = (step.number for step in ladder())
    raise ValueError(f"there is no step {number}: the ladder has steps {first} to {last}")


def parent_of(step: Step) -> int | None:
    """The step that it is compared with, in the family that continues the ladder."""
    return step.parents.get(step.families[-1])


def following(step: Step) -> tuple[Step, ...]:
    """The steps to read next: its children in the tree; for a leaf the next in number, if any."""
    children = tuple(one for one in ladder() if parent_of(one) == step.number)
    return children or tuple(one for one in ladder() if one.number > step.number)[:1]


def path_of(step: Kernel) -> Path:
    """The file that has its kernel: its own, or that of an engineered kernel."""
    return Path(sys.modules[step.launch.__module__].__file__ or "")


def label_of(step: Kernel) -> str:
    """That file as diffs name it: "steps/kernels/prefill/mma_float16.py"."""
    path = path_of(step)
    home = Path(__file__).parents[1]
    return path.relative_to(home).as_posix() if path.is_relative_to(home) else path.name


def source(step: Kernel) -> list[str]:
    """The lines of the file that has its kernel."""
    return path_of(step).read_text(encoding="utf-8").splitlines(keepends=True)
