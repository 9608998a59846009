"""The ladder and its steps as text: `list`, `diff`, `ptx`, `sass`. None of them needs a GPU."""

from __future__ import annotations

import difflib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Final

from results.render import table
from results.render.table import Column
from steps.checks.cases import require_depth
from steps.checks.select import UsageError, branches
from steps.cli import exercises
from steps.cli.arguments import home_shapes_of, launches_of, one_step, refusing, require_compilable
from steps.cli.report import shape_text
from steps.contract import Step, scheme
from steps.learn.exercises.advice import refused
from steps.registry import following, label_of, ladder, parent_of, source

COLUMNS: Final = (
    Column("step", lambda step: str(step.number)),
    Column("idea", lambda step: step.title, words=True),
    Column("A", lambda step: " ".join(step.families), words=True),
    Column("parent", lambda step: str(parent_of(step) or table.ABSENT)),
    Column("branch", lambda step: step.branch, words=True),
    Column(
        "home shapes, MxNxK", lambda one: " ".join(map(shape_text, one.home_shapes)), words=True
    ),
    Column("GPU", lambda step: "{}.{}".format(*step.min_cc)),
    Column("accuracy", lambda step: step.accuracy, words=True),
)
_COLOURS: Final = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}


def list_steps(args: Namespace) -> int:
    """The ladder: every step with its branch, its home shapes and its parent."""
    steps = ladder()
    if args.json:
        print(json.dumps([_as_json(step) for step in steps], indent=1))
        return 0
    every = ", ".join(f"{name} ({branch.title})" for name, branch in branches().items())
    notes = (
        f"Branches: {every}. GPU: the lowest compute capability.",
        "make diff STEP=4 shows what step 4 changes in the step it grew from.",
    )
    table.show(table.of_records(COLUMNS, steps, notes=notes))
    return 0


def _as_json(step: Step) -> dict[str, Any]:
    return {
        "number": step.number,
        "name": step.name,
        "title": step.title,
        "branch": step.branch,
        "homes": [list(shape) for shape in step.home_shapes],
        "families": list(step.families),
        "schemes": [scheme(name, family) for family in step.families for name in step.formats],
        "parents": dict(step.parents),
        "read_next": [after.number for after in following(step)],
        "unit": dict(step.unit),
        "outputs": list(step.outputs),
        "accuracy": step.accuracy,
        "min_cc": list(step.min_cc),
        "formats": list(step.formats),
    }


def diff(args: Namespace) -> int:
    """The step's file against the one it grew from, or a file against its step."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for line in exercises.diff(args) if args.file else _between_steps(args):
        colour = _COLOURS.get(line[:1]) if coloured else None
        print(f"{colour}{line.rstrip()}\x1b[0m\n" if colour else line, end="")
    return 0


def _between_steps(args: Namespace) -> Iterator[str]:
    step = one_step(args.steps)
    number = args.against if args.against is not None else parent_of(step)
    if number is None:
        raise UsageError(f"step {step.number} has no parent: the ladder begins with it")
    base = one_step([str(number)])
    before, after = source(base), source(step)
    return difflib.unified_diff(before, after, label_of(base), label_of(step), n=args.lines)


# --- machine code ---------------------------------------------------------------------------------


def ptx(args: Namespace) -> int:
    """What Numba and libNVVM make of the kernel; ptxas has not seen it yet."""
    return _print_code(args, "ptx")


def sass(args: Namespace) -> int:
    """What the GPU executes."""
    return _print_code(args, "sass")


def _print_code(args: Namespace, kind: str) -> int:
    from steps.compile.compiler import capability, machine_code, signature_of

    work = exercises.work_of(args)
    if args.file and (no := refused(work.step, args.file)):
        raise UsageError(no.sentences[0])
    shape = home_shapes_of(args, work.step)[0]
    require_depth(work.format, shape[2])
    *before, own = launches_of(work, shape, args.dtype)
    if args.activations and not before:
        raise UsageError(f"{work} has no activation pass: its kernel reads A as it is")
    launch = before[0] if args.activations else own
    with refusing(ValueError, RuntimeError):
        capability(args.arch)
        require_compilable(args.arch)
        code = machine_code(launch.kernel, signature_of(launch.args), args.arch)
    text = code.ptx if kind == "ptx" else code.sass
    m, n, k = shape
    print(f"{code.name} for {code.arch}: {work}, launched at M={m} N={n} K={k} as")
    print(f"  grid {table.dims(launch.grid)} of blocks {table.dims(launch.block)}")
    print(
        f"  {code.registers} registers, {code.stack_bytes} bytes of stack, spills "
        f"{code.spill_store_bytes} + {code.spill_load_bytes} bytes, shared memory "
        f"{code.shared_bytes} static + {launch.shared_bytes} dynamic bytes"
    )
    for warning in code.warnings:
        print(f"  ptxas: {warning}")
    print()
    # how often the listing has them, and not how often they run
    counts = [*code.instructions.most_common(), ("all", code.instructions.total())]
    table.show(table.of_records(OPCODES, counts))
    if not args.summary:
        print()
        print(text.rstrip())
    return 0


OPCODES: Final = (
    Column("SASS opcode", lambda one: one[0], words=True),
    Column("in the listing", lambda one: str(one[1])),
)
