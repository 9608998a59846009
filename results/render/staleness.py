"""Which records of a run are no facts about the code of this tree."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from results.record import ROOT
from results.record.provenance import called_hash, source_hash
from results.record.schema import AsCalled, Environment, Run
from results.record.store import ranked

Keys = Collection[tuple[Any, ...]]
"""The keys of the records whose code has changed since they were measured."""

STALE: Final = "(stale)"
STALE_NOTE: Final = f"{STALE}: the code has changed since; `make bench` measures it again."


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU of a run, as the choice of a step asks for it."""

    name: str
    cc: tuple[int, int]
    sms: int


def stale_keys(run: Run, root: Path = ROOT) -> frozenset[tuple[Any, ...]]:
    """The keys of the records that are no facts about the code of this tree. A call is none either
    where another step would be chosen today."""
    of_row = cache(lambda step, name: source_hash(step, name, root))
    of_call = cache(lambda api, step: called_hash(api, step, root))
    rows = {
        row.key
        for row in run.rows
        if row.source_hash is None or row.source_hash != of_row(row.step, row.name)
    }
    calls = {
        one.key
        for one in run.as_called
        if one.source_hash is None
        or one.source_hash != of_call(one.api, one.step)
        or _chosen(one, run.env) not in (None, one.step)
    }
    return frozenset(rows | calls)


def _chosen(one: AsCalled, env: Environment) -> int | None:
    """The step that such a call would choose today; None for a GPU that is not known."""
    from results.measure.as_called import Way  # brings Numba: only where there are calls

    if not (env.gpu and env.cc and env.sms):
        return None
    way = Way(one.api, one.accuracy, one.dtype, one.format)
    return way.choice((one.M, one.N, one.K), Gpu(env.gpu, env.cc, env.sms)).kernel.number


@dataclass(frozen=True, slots=True)
class Measured:
    """A GPU's run, and what of it is stale."""

    path: Path
    run: Run
    stale: Keys


def measured(root: Path = ROOT) -> list[Measured]:
    """The run of every GPU, first the one that the README and the charts show."""
    found = ranked(root / "results")
    return [Measured(path, run, stale_keys(run, root)) for path, run in found]
