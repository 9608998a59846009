"""The command `trace`: what a warp of a step loads and stores, lane by lane. It needs no GPU."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results.render import table
from results.render.markup import templates
from results.render.table import Column, Line, Table, dims
from steps.checks.cases import require_depth
from steps.checks.select import UsageError
from steps.cli import exercises
from steps.cli.arguments import dtype_of, home_shapes_of, machines, one_work
from steps.cli.report import shape_text
from steps.learn.trace import traced
from steps.learn.trace.picture import LEGEND, picture
from steps.registry import path_of
from steps.simulator.trace import BULK, Instruction, first_warps

WIDEST = 44
"""Characters of a source line in the table."""


def trace(args: Namespace) -> int:
    """A table of memory instructions, and a page with a picture of each."""
    work = exercises.own_work(args) if args.file else one_work(args)
    machines("simulator")
    home = home_shapes_of(args, work.step)[0]
    size = home if args.k else traced.size_of(work, home)
    require_depth(work.format, size[2])
    try:
        found = traced.trace(
            work, size, dtype=dtype_of(args), warps=None if args.warp is None else (args.warp,)
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    own = args.file or path_of(work.step)
    shown = _at(args.line, own.name, first_warps(found.instructions))
    if args.json:
        facts = {"kernel": found.kernel, "shape": list(size), "grid": list(found.grid)}
        print(json.dumps(facts | {"instructions": [_as_json(each) for each in shown]}, indent=1))
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(_page(found, shown), encoding="utf-8")
    notes = (
        "Counts of one warp and as the source has them; sect/req: sectors of 32 bytes per request.",
        f"wrote {args.out}, with a picture of each",
    )
    title = f"{found.kernel} ({work}) at {shape_text(size)}, one block of {_extent(found.grid)}"
    table.show(_table(shown, title, notes))
    return 0


def _page(trace: traced.Trace, instructions: Sequence[Instruction]) -> str:
    """A document with the picture of each of these instructions."""
    what = (
        f"{trace.kernel} ({trace.work.scheme}) at {dims(trace.size)}: a grid of "
        f"{_extent(trace.grid)} blocks of {_extent(trace.block)} threads, of which the simulator "
        "ran one block."
    )
    return (
        templates()
        .get_template("trace.html.jinja")
        .render(
            title=f"Memory accesses of step {trace.work.step.number}, {trace.work.format.upper()}",
            what=what,
            legend=LEGEND,
            pictures=[picture(each, f"request-{i}") for i, each in enumerate(instructions)],
        )
    )


def _at(line: int | None, name: str, found: Sequence[Instruction]) -> list[Instruction]:
    """Those that a line of the kernel's file executes; UsageError where it executes none."""
    lines = [
        {site.line for site in each.way if Path(site.code.co_filename).name == name}
        for each in found
    ]
    if line is None:
        return list(found)
    chosen = [each for each, own in zip(found, lines, strict=True) if line in own]
    if not chosen:
        there = ", ".join(map(str, sorted(set().union(*lines))))
        raise UsageError(f"line {line} of {name} loads and stores nothing here; these do: {there}")
    return chosen


def _table(shown: Sequence[Instruction], title: str, notes: tuple[str, ...]) -> Table:
    columns = (
        Column("line"),
        Column("source", words=True),
        Column("warp"),
        Column("kind", words=True),
        Column("array", words=True),
        Column("space", words=True),
        Column("bytes"),
        Column("requests"),
        Column("sect/req"),
        Column("conflicts"),
    )
    return Table(columns, tuple(map(_line, shown)), title, notes)


def _line(each: Instruction) -> Line:
    source = each.place.text
    return Line(
        (
            str(each.place.line),
            source if len(source) <= WIDEST else source[: WIDEST - 3] + "...",
            str(each.warp),
            each.kind,
            each.array,
            each.space,
            str(each.size),
            str(each.requests),
            f"{each.sectors_per_request:.4g}" if each.space == "global" else table.ABSENT,
            str(each.conflicts) if _has_banks(each) else table.ABSENT,
        ),
        tone="bad" if each.conflicts else "",
    )


def _has_banks(each: Instruction) -> bool:
    return each.space == "shared" and each.kind != BULK


def _as_json(each: Instruction) -> dict[str, Any]:
    return {
        "way": [str(site) for site in reversed(each.way)],
        "warp": each.warp,
        "kind": each.kind,
        "array": each.array,
        "space": each.space,
        "bytes": each.size,
        "requests": each.requests,
        "sectors": each.sectors if each.space == "global" else None,
        "wavefronts": each.wavefronts if _has_banks(each) else None,
        "conflicts": each.conflicts if _has_banks(each) else None,
        "lanes": each.lanes,
    }


def _extent(extent: tuple[int, ...]) -> str:
    return " x ".join(map(str, extent))
