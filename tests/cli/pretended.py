"""A GPU that the command line believes in: the simulator under another name, and made-up times."""

from __future__ import annotations

from results.record.schema import Row
from steps.contract import Size, Work
from steps.driver.machines import Simulator
from steps.registry import lesson_of


class PretendedGpu(Simulator):
    name = "Pretended GPU"
    cc = (9, 0)


def row(work: Work, shape: Size, output: str = "float32") -> Row:
    """A row as a measurement would make it: every step takes half the time of the one before."""
    m, n, k = shape
    return Row(
        step=work.step.number,
        name=work.step.name,
        parent=lesson_of(work.step).parents.get(work.family),
        scheme=work.scheme,
        format=work.format,
        M=m,
        N=n,
        K=k,
        branch=lesson_of(work.step).branch,
        home=shape in lesson_of(work.step).home_shapes,
        output=output,
        status="ok",
        kernel_us=1024.0 / 2**work.step.number,
        total_us=1024.0 / 2**work.step.number,
        x_cublas=0.5,
        limit_share=0.25,
    )
