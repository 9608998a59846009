"""A GPU that the command line believes in: the simulator under another name, and made-up times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from results.record.schema import Row
from steps.contract import Size, Work
from steps.driver.machines import Simulator
from steps.registry import lesson_of


class PretendedGpu(Simulator):
    name = "Pretended GPU"
    cc = (9, 0)


def row(work: Work, shape: Size, **changes: Any) -> Row:
    """A row as a measurement would make it: every step takes half the time of the one before."""
    (m, n, k), lesson, us = shape, lesson_of(work.step), 1024.0 / 2**work.step.number
    made = Row(
        step=work.step.number,
        name=work.step.name,
        parent=lesson.parents.get(work.family),
        scheme=work.scheme,
        format=work.format,
        M=m,
        N=n,
        K=k,
        branch=lesson.branch,
        home=shape in lesson.home_shapes,
        status="ok",
        kernel_us=us,
        total_us=us,
        x_cublas=0.5,
        limit_share=0.25,
    )
    return replace(made, **changes)
