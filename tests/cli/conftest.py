"""`measured`: a test's runs happen on a pretended GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from results.measure.bench import Wanted
from results.record.schema import Environment, Run, with_ratios
from steps.checks.cases import Case
from steps.cli import run
from steps.contract import Size, Work
from tests.cli.pretended import PretendedGpu, row


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[Size, Sequence[Work]]]:
    """What each `run` of the test would measure: shape -> works."""
    asked: list[Mapping[Size, Sequence[Work]]] = []

    def noted(wanted: Sequence[Wanted], *_: Any) -> Run:
        at = {one.size: [] for one in wanted}
        for one in wanted:
            if one.work not in at[one.size]:  # in several dtypes
                at[one.size].append(one.work)
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
