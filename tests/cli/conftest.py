"""A GPU that the command line believes in: the simulator under another name, and made-up times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from results.record.schema import Environment, Row, Run, with_ratios
from steps.api.machines import Simulator
from steps.checks.cases import Case
from steps.cli import run
from steps.contract import Size, Work


class PretendedGpu(Simulator):
    name = "Pretended GPU"
    cc = (9, 0)


def row(work: Work, shape: Size, output: str = "float32") -> Row:
    """A row as a measurement would make it: every step takes half the time of the one before."""
    m, n, k = shape
    return Row(
        step=work.step.number,
        name=work.step.name,
        parent=work.step.parents.get(work.family),
        scheme=work.scheme,
        format=work.format,
        M=m,
        N=n,
        K=k,
        branch=work.step.branch,
        home=shape in work.step.home_shapes,
        output=output,
        status="ok",
        kernel_us=1024.0 / 2**work.step.number,
        total_us=1024.0 / 2**work.step.number,
        x_cublas=0.5,
        limit_share=0.25,
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[Size, Sequence[Work]]]:
    """What each `run` of the test would measure: shape -> works."""
    asked: list[Mapping[Size, Sequence[Work]]] = []

    def noted(at: Mapping[Size, Sequence[Work]], *_: Any) -> Run:
        asked.append(at)
        rows = with_ratios([row(work, shape) for shape, works in at.items() for work in works])
        return Run(env=Environment(gpu=gpu.name), rows=rows)

    gpu = PretendedGpu()
    monkeypatch.setattr(run, "machines", lambda _: (gpu.name, lambda _: gpu, None))
    monkeypatch.setattr(run, "compile_ahead", lambda *_: 0)
    monkeypatch.setattr(run, "_measured", noted)
    some = (Case((1, 2, 32), "normal"), Case((3, 2, 32), "llm"))
    monkeypatch.setattr(run, "cases", lambda *args, **options: some)
    return asked
