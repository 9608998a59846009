"""The pictures of a launch as a page of their own, for `make trace`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from results.render.memory_picture import picture
from results.render.query import dims
from results.render.templates import templates
from results.render.traced import Trace
from steps.simulator.trace import Instruction

LEGEND: Final = (
    "One request of each memory instruction: lanes above, what they touch below, each lane in a "
    "colour of its own. Global memory comes in sectors of 32 bytes; gaps are sectors that are not "
    "touched. Shared memory has 32 banks, and a line for each cycle. Counts are of the source: a "
    "compiler may merge loads, or keep a value. Bytes are counted from where the array begins."
)


def page(trace: Trace, instructions: Sequence[Instruction]) -> str:
    """A document with the picture of each of these instructions."""
    threads = " x ".join(map(str, trace.block))
    grid = " x ".join(map(str, trace.grid))
    return (
        templates()
        .get_template("trace.html.jinja")
        .render(
            title=f"Memory accesses of step {trace.work.step.number}, {trace.work.format.upper()}",
            what=(
                f"{trace.kernel} ({trace.work.scheme}) at {dims(trace.size)}: a grid of {grid} "
                f"blocks of {threads} threads, of which the simulator ran one block."
            ),
            legend=LEGEND,
            pictures=[picture(each, f"request-{i}") for i, each in enumerate(instructions)],
        )
    )
