"""A step as text: its difference from its parent, and its machine code. Neither needs a GPU."""

from __future__ import annotations

import difflib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Final

from results.render import text as table
from results.render.lesson import imported, parent_of, without
from results.render.text import Column, Line, Table
from steps.api.dry_run import launches
from steps.checks.works import UsageError, require_depth
from steps.cli.run import named, one_work, shape_of
from steps.contract import Step
from steps.registry import source

_COLOURS: Final = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}


def diff(args: Namespace) -> int:
    """The step's file against its parent's: the lesson, line by line. What it imports from there is
    no different, and left out."""
    steps = named(args.steps)
    if len(steps) != 1:
        raise UsageError("name one step, such as 5")
    step = steps[0]
    number = args.against if args.against is not None else _parent(step)
    parent = named([str(number)])[0]
    taken = imported(step, parent)
    if taken:
        print(f"{step.name} imports these from {parent.name}: {', '.join(sorted(taken))}")
    before = source(parent)
    lines = difflib.unified_diff(
        [before[i] for i in without(before, taken)],
        source(step),
        f"steps/{parent.name}.py",
        f"steps/{step.name}.py",
        n=args.lines,
    )
    for line in _coloured(lines) if _colours_wanted() else lines:
        print(line, end="")
    return 0


def _parent(step: Step) -> int:
    """The same, where there has to be one."""
    number = parent_of(step)
    if number is None:
        raise UsageError(f"step {step.number} has no parent: it is where the ladder begins")
    return number


def _colours_wanted() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _coloured(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        colour = _COLOURS.get(line[:1])
        yield f"{colour}{line.rstrip()}\x1b[0m\n" if colour else line


# --- machine code ---------------------------------------------------------------------------------


def ptx(args: Namespace) -> int:
    """What Numba and libNVVM make of the kernel, before ptxas."""
    return _print_code(args, "ptx")


def sass(args: Namespace) -> int:
    """What the GPU executes."""
    return _print_code(args, "sass")


def _print_code(args: Namespace, kind: str) -> int:
    from steps.api.compile import machine_code, signature_of

    work = one_work(args)
    shape = shape_of(args)
    require_depth(work.format, shape[2])
    before, own = launches(work, shape)
    launch = before[0] if args.activations and before else own
    if args.activations and not before:
        raise UsageError(f"{work} reads its activations as they are: there is no pass to show")
    try:
        code = machine_code(launch.kernel, signature_of(launch.args), args.arch)
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from None
    text = code.ptx if kind == "ptx" else code.sass
    facts = {
        "kernel": code.name,
        "step": work.step.number,
        "scheme": work.scheme,
        "format": work.format,
        "arch": code.arch,
        "shape": list(shape),
        "grid": list(launch.grid),
        "block": list(launch.block),
        "registers": code.registers,
        "stack_bytes": code.stack_bytes,
        "spill_store_bytes": code.spill_store_bytes,
        "spill_load_bytes": code.spill_load_bytes,
        "static_shared_bytes": code.shared_bytes,
        "dynamic_shared_bytes": launch.shared_bytes,
        "instructions": dict(code.instructions.most_common()),
    }
    if args.json:
        print(json.dumps(facts | {kind: text}, indent=1))
        return 0
    m, n, k = shape
    print(f"{code.name} for {code.arch}: {work}, launched at M={m} N={n} K={k} as")
    print(f"  grid {_extent(launch.grid)} of blocks {_extent(launch.block)}")
    print(
        f"  {code.registers} registers, {code.stack_bytes} bytes of stack, spills "
        f"{code.spill_store_bytes} + {code.spill_load_bytes} bytes, shared memory "
        f"{code.shared_bytes} static + {launch.shared_bytes} dynamic bytes"
    )
    for warning in code.warnings:
        print(f"  ptxas: {warning}")
    print()
    table.show(_histogram(code.instructions))
    if not args.summary:
        print()
        print(text.rstrip())
    return 0


def _extent(extent: tuple[int, ...]) -> str:
    return " x ".join(map(str, extent))


def _histogram(instructions: Any) -> Table:
    """Opcodes by how often they stand in the listing (not by how often they run)."""
    lines = tuple(Line((opcode, str(count))) for opcode, count in instructions.most_common())
    total = sum(instructions.values())
    return Table(
        (Column("SASS opcode", words=True), Column("in the listing")),
        (*lines, Line(("all", str(total)))),
    )
