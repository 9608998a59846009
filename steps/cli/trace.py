"""The command `trace`: what a warp of a step loads and stores, lane by lane. It needs no GPU."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from results.render import table
from results.render.markup import templates
from results.render.table import Column, dims
from steps.checks.cases import require_depth
from steps.checks.select import UsageError
from steps.cli import exercises
from steps.cli.arguments import home_shapes_of, machines, refusing
from steps.cli.report import shape_text
from steps.learn.trace import traced
from steps.learn.trace.picture import LEGEND, picture
from steps.registry import path_of
from steps.simulator.trace import BULK, Instruction, first_warps

WIDEST: Final = 44  # characters of a source line in the table
MOST_NUMBERS: Final = 1 << 28  # of A, W and C


def trace(args: Namespace) -> int:
    """A table of memory instructions, and a page with a picture of each."""
    work = exercises.work_of(args)
    machines("simulator")
    home = home_shapes_of(args, work.step)[0]
    size = home if args.k else traced.size_of(work, home)
    require_depth(work.format, size[2])
    m, n, k = size
    if (numbers := m * k + n * k + m * n) > MOST_NUMBERS:
        raise UsageError(
            f"M*K + N*K + M*N = {numbers} numbers are too many, of which one block is run: use at "
            f"most {MOST_NUMBERS}"
        )
    warps = None if args.warp is None else (args.warp,)
    with refusing(ValueError):
        found = traced.trace(work, size, dtype=args.dtype, warps=warps)
    own = args.file or path_of(work.step)
    shown = _at(args.line, own.name, first_warps(found.instructions))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    what = (
        f"{found.kernel} ({work.scheme}) at {dims(found.size)}: a grid of {dims(found.grid)} "
        f"blocks of {dims(found.block)} threads, of which the simulator ran one block."
    )
    page = templates().get_template("trace.html.jinja")
    title = f"Memory accesses of step {work.step.number}, {work.format.upper()}"
    pictures = [picture(each, f"request-{i}") for i, each in enumerate(shown)]
    html = page.render(title=title, what=what, legend=LEGEND, pictures=pictures)
    args.out.write_text(html, encoding="utf-8")
    notes = (
        "Counts of one warp and as the source has them; sect/req: sectors of 32 bytes per request.",
        f"wrote {args.out}, with a picture of each",
    )
    title = f"{found.kernel} ({work}) at {shape_text(size)}, one block of {dims(found.grid)}"
    table.show(
        table.of_records(COLUMNS, shown, title, notes, lambda one: "bad" if one.conflicts else "")
    )
    return 0


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


def _source(each: Instruction) -> str:
    text = each.place.text
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _conflicts(each: Instruction) -> str:
    has_banks = each.space == "shared" and each.kind != BULK
    return str(each.conflicts) if has_banks else table.ABSENT


def _sectors(each: Instruction) -> str:
    return f"{each.sectors_per_request:.4g}" if each.space == "global" else table.ABSENT


COLUMNS: Final = (
    Column("line", lambda each: str(each.place.line)),
    Column("source", _source, words=True),
    Column("warp", lambda each: str(each.warp)),
    Column("kind", lambda each: each.kind, words=True),
    Column("array", lambda each: each.array, words=True),
    Column("space", lambda each: each.space, words=True),
    Column("bytes", lambda each: str(each.size)),
    Column("requests", lambda each: str(each.requests)),
    Column("sect/req", _sectors),
    Column("conflicts", _conflicts),
)
