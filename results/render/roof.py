"""A step's place on the roofline: how fast it was, between what memory and arithmetic allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from results.record.schema import Limits, Row
from results.render.charts.roofline import intensity
from results.render.query import UNITS
from results.render.table import dims, number, percent

WIDE, HIGH = 440, 200
LEFT, RIGHT, TOP, BELOW = 34, 10, 10, 30


def roof(row: Row, others: Sequence[Row], limits: Limits, identity: str) -> Markup:
    """The rows of all steps at their homes, this one among them, under the limits of the step:
    memory and its arithmetic unit. Nothing where a limit or a figure was not measured."""
    bandwidth = max(limits.copy_tbps or 0.0, limits.read_tbps or 0.0)
    unit = row.unit
    top = limits.tops.get(unit)
    placed = [each for each in (*others, row) if each.tflops and each.gbps]
    if not bandwidth or not top or not (row.tflops and row.gbps):
        return Markup()
    x0, x1 = min(map(intensity, placed)) / 3, max(map(intensity, placed)) * 3
    y0 = min(each.tflops or 1.0 for each in placed) / 3
    y1 = max(top, *(each.tflops or 1.0 for each in placed)) * 2
    x, y = _scale(x0, x1, LEFT, WIDE - RIGHT), _scale(y0, y1, HIGH - BELOW, TOP)
    ridge = min(max(top / bandwidth, x0), x1)
    low = max(x0, y0 / bandwidth)
    at = intensity(row)
    reach = min(at * bandwidth, top)
    says = (
        f"{dims(row.shape)}: {number(at)} operations a byte, {number(row.tflops)} TFLOPS, "
        f"{percent(row.limit_share)} of its limit"
    )
    marks = Markup().join(
        Markup(
            '<circle cx="{:.1f}" cy="{:.1f}" r="3"><title>step {}: {} TFLOPS</title></circle>'
        ).format(x(intensity(each)), y(each.tflops or 1.0), each.step, number(each.tflops or 0.0))
        for each in others
        if each.tflops and each.gbps and each.step != row.step
    )
    return Markup(
        '<svg class="roof" role="img" viewBox="0 0 {wide} {high}" style="--drawn:{wide}px" '
        'aria-labelledby="{id}-title {id}-text"><title id="{id}-title">Step {step} on the roofline'
        '</title><desc id="{id}-text">{says}</desc>'
        '<path class="axis" d="M{left} {top}V{bottom}H{right}"/>'
        '<path class="limit" d="M{lx:.1f} {ly:.1f}L{rx:.1f} {ry:.1f}H{right}"/>'
        '<text x="{right}" y="{unit_y:.1f}" text-anchor="end">{unit}, {roof}</text>'
        '<text x="{right}" y="{axis_y}" text-anchor="end">operations per byte, log</text>'
        '<text x="{left}" y="{axis_y}">{bandwidth:.2f} TB/s: the slope</text>'
        '{marks}<path class="lost" d="M{px:.1f} {py:.1f}V{reach:.1f}"/>'
        '<circle class="own" cx="{px:.1f}" cy="{py:.1f}" r="5"/>'
        '<text class="own" x="{tx:.1f}" y="{ty:.1f}" text-anchor="{anchor}">{tflops}</text></svg>'
    ).format(
        wide=WIDE,
        high=HIGH,
        id=identity,
        step=row.step,
        says=says,
        left=LEFT,
        right=WIDE - RIGHT,
        top=TOP,
        bottom=HIGH - BELOW,
        lx=x(low),
        ly=y(low * bandwidth),
        rx=x(ridge),
        ry=y(min(ridge * bandwidth, top)),
        unit_y=y(top) - 5,
        unit=UNITS.get(unit, unit),
        roof=number(top),
        axis_y=HIGH - BELOW + 16,
        bandwidth=bandwidth,
        marks=marks,
        px=x(at),
        py=y(row.tflops),
        reach=y(reach),
        tx=x(at) + (-9 if x(at) > WIDE / 2 else 9),
        ty=y(row.tflops) + 4,
        anchor="end" if x(at) > WIDE / 2 else "start",
        tflops=f"{number(row.tflops)} TFLOPS, {percent(row.limit_share)}",
    )


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Logarithmic."""
    across = math.log(high / low)
    return lambda value: start + (end - start) * math.log(value / low) / across
