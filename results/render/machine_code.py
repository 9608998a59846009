"""A step's machine code for its section of the page: in figures, and beside its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from results.render.markup import Code, trimmed
from results.render.query import MAIN_FORMAT
from results.render.table import dims
from steps.compile.compiler import machine_code, signature_of, source_lines
from steps.contract import Size, Step, Work, scheme
from steps.product.choice import Choice

HOPPER: Final = (9, 0)  # from here on a launch compiles for the architecture's own instructions
LISTED: Final = 8  # opcodes shown of a step, besides those it promises


@dataclass(frozen=True, slots=True)
class Compiled:
    """A step's kernel as the offline compiler makes it, in words, and its listing."""

    told: str
    lines: list[tuple[int | None, str]] = field(default_factory=list)  # see `source_lines`


Compiler = Callable[[Step, Size, "tuple[int, int] | None"], "Compiled | str"]


def main_work(step: Step) -> Work:
    """What a page shows of a step: its last family, in the main format."""
    name = MAIN_FORMAT if MAIN_FORMAT in step.formats else step.formats[0]
    return Work(step, step.families[-1], name)


def compiled(step: Step, shape: Size, cc: tuple[int, int] | None) -> Compiled | str:
    """The step's machine code for a GPU of that compute capability, or the oldest it runs on where
    that is none; a sentence where it cannot be had."""
    work = main_work(step)
    name, family = work.format, work.family
    if cc is None or step.supports(name, family, cc) is not None:
        cc = step.min_cc
    arch = f"sm_{cc[0]}{cc[1]}" + ("a" if cc >= HOPPER else "")
    launch = Choice.of_work(work, shape).launches()[-1]
    try:
        code = machine_code(launch.kernel, signature_of(launch.args), arch, line_info=True)
    except (ValueError, RuntimeError) as error:
        return f"No machine code on this computer: {error}"
    promises = tuple(p for each in step.contains.get(family, ()) for p in each.split("|"))
    shown = [
        f"{opcode} {count}"
        for i, (opcode, count) in enumerate(code.instructions.most_common())
        if i < LISTED or opcode.startswith(promises)
    ]
    return Compiled(
        f"{scheme(name, family)}, {name.upper()}, {dims(shape)}, compiled for {arch} while this "
        f"page was made: {code.registers} registers a thread, {code.stack_bytes} bytes of stack, "
        f"{code.spill_store_bytes + code.spill_load_bytes} bytes of spills, "
        f"{code.shared_bytes + launch.shared_bytes} bytes of shared memory a block; a grid of "
        f"{dims(launch.grid)} blocks of {dims(launch.block)} threads; "
        f"{sum(code.instructions.values())} instructions in the listing, of these most often, or "
        f"promised above: {', '.join(shown)}.",
        source_lines(code.sass),
    )


def beside(
    code: Sequence[Code], listing: Sequence[tuple[int | None, str]]
) -> tuple[list[tuple[Code, int]], list[tuple[int, list[str]]]]:
    """(the lines of a file from the first that has instructions to the last, each with how many
    instructions it has; neighbouring instructions of one line with its number, 0 where the
    compiler does not say)."""
    of_line = Counter(line for line, _ in listing if line)
    if not of_line:
        return [], []
    first, last = min(of_line), max(of_line)
    own = [each for each in code if first <= each.number <= last]
    return (
        [(each, of_line[each.number]) for each in trimmed(own)],
        [
            (line, [text for _, text in run])
            for line, run in groupby(listing, key=lambda each: each[0] or 0)
        ],
    )
