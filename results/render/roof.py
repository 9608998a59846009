"""A step's place on the roofline: how fast it was, between what memory and arithmetic allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from results.record.schema import Limits, Row
from results.render.charts.roofline import intensity
from results.render.query import UNITS
from results.render.table import dims, number, percent

WIDE, HIGH = 440, 200
LEFT, RIGHT, TOP, BOTTOM = 34, WIDE - 10, 10, HIGH - 30


def roof(row: Row, others: Sequence[Row], limits: Limits) -> dict[str, Any] | None:
    """What `roof.svg.jinja` draws: the rows of all steps at their homes, this one among them, under
    the limits of the step, which are memory and its arithmetic unit. None where a limit or a figure
    was not measured."""
    bandwidth = max(limits.copy_tbps or 0.0, limits.read_tbps or 0.0)
    top = limits.tops.get(row.unit)
    if not bandwidth or not top or not (row.tflops and row.gbps):
        return None
    placed = [(intensity(each), each.tflops, each) for each in others if each.tflops and each.gbps]
    at = intensity(row)
    speeds = [row.tflops, *(speed for _, speed, _ in placed)]
    x = _scale([at, *(each for each, *_ in placed)], LEFT, RIGHT)
    y = _scale([*speeds, top * 2 / 3], BOTTOM, TOP)
    return {
        "row": row,
        "says": f"{dims(row.shape)}: {number(at)} operations a byte, {number(row.tflops)} TFLOPS, "
        f"{percent(row.limit_share)} of its limit",
        "told": f"{number(row.tflops)} TFLOPS, {percent(row.limit_share)}",
        "marks": [
            (x(each), y(speed), f"step {other.step}: {number(speed)} TFLOPS")
            for each, speed, other in placed
            if other.step != row.step
        ],
        "own": (x(at), y(row.tflops)),
        "reach": y(min(at * bandwidth, top)),
        "ridge": (x(top / bandwidth), y(top)),
        "low": (x(min(speeds) / 3 / bandwidth), y(min(speeds) / 3)),
        "unit": f"{UNITS.get(row.unit, row.unit)}, {number(top)}",
        "bandwidth": f"{bandwidth:.2f} TB/s: the slope",
        "box": (WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM),
    }


def _scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """Logarithmic, with room at either end."""
    low, high = min(values) / 3, max(values) * 3
    across = math.log(high / low)
    return lambda value: start + (end - start) * math.log(value / low) / across
