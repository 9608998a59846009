"""Times the steps at many M into `results/<gpu>/tuning.json`, by which `gemm` chooses.

All steps of one format and shape are in one loop of a bench (`results.measure.bench`), shorter than
those that are recorded, and what is kept is the totals: from float32 A to float32 C and, of steps
that read and write these, from float16 to float16 and from bfloat16 to bfloat16. A bench has timed
the first two already: `of_run` takes them from its run. The file is read by
`steps.product.tuning_table`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from results.measure.bench import Wanted, for_top, top_steps, wanted_in
from results.measure.protocol import Budget
from results.record.codec import plain
from results.record.provenance import remembered, source_hash
from results.record.schema import Environment, Row, Run
from results.record.store import slug
from steps.contract import Size, Work
from steps.product.tuning_table import NAME, RESULTS, SCHEMA, Entry, known, read, time_key
from steps.registry import find, kernel_of, ladder

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""The M at which steps are tuned."""

OF_A_RUN: Final = ("float32", "float16")
MEASURED: Final = (*OF_A_RUN, "bfloat16")
"""The dtypes of A and C that a table has times of, and those that a bench has timed everywhere."""

BUDGET: Final = Budget(
    replay_seconds=2e-3,
    warm_seconds=0.05,
    seconds=0.3,
    min_rounds=5,
    slow_seconds=0.02,
    slow_rounds=1,
    relative_error=0.01,
)
"""Steps that differ by one per cent are equally good, and one that is slow takes part in a single
round: less time than a record takes."""


def loops(
    works: Sequence[Work], sizes: Iterable[tuple[int, int]], tokens: Sequence[int] = TOKENS
) -> list[tuple[Size, tuple[Wanted, ...]]]:
    """Every format at every (N, K) and M."""
    return [
        (size, tuple(one for work in works if work.format == name for one in timed_of(work, size)))
        for n, k in sizes
        for name in dict.fromkeys(work.format for work in works)
        for size in ((m, n, k) for m in tokens)
    ]


def timed_of(work: Work, size: Size) -> list[Wanted]:
    """What is timed of a work: from a dtype to the same."""
    wanted = [wanted_in(work, size, name) for name in MEASURED if name in work.step.outputs]
    return [one for one in wanted if one.input == one.output]


def entries(rows: Iterable[Row]) -> list[Entry]:
    """The totals of the rows that are right, an entry for each format and shape."""
    found: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for row in rows:
        if row.status == "ok" and row.total_us and row.input == row.output:
            times = found.setdefault((row.format, row.N, row.K, row.M), {})
            times[time_key(row.step, row.family, row.input)] = row.total_us
    return [Entry(*at, dict(sorted(us.items(), key=_by_step))) for at, us in found.items()]


def _by_step(item: tuple[str, float]) -> tuple[int, str]:
    number, rest = item[0].split(maxsplit=1)
    return int(number), rest


def of_run(run: Run) -> list[Entry]:
    """The entries that a bench has measured already, with today's code: at each format, (N, K) and
    M at which it has all times that it has anywhere of kernels that are meant for so many tokens.
    With fewer of them one would be taken because nobody timed the others. Kernels are those of the
    highest steps, which a bench measures everywhere but at homes of lessons."""
    now, tops = remembered(source_hash), {step.number for step in top_steps(ladder(), run.env.cc)}
    found = entries(
        row
        for row in run.rows
        if row.step in tops and row.name == kernel_of(row.step).name and row.input in OF_A_RUN
        if row.source_hash == now(row.step, row.name)
    )
    measured: dict[str, set[str]] = {}
    for one in found:
        measured.setdefault(one.format, set()).update(one.times)

    def whole(one: Entry) -> bool:
        return {
            work for work in measured[one.format] if for_top(find(int(work.split()[0])), one.m)
        } <= one.times.keys()

    return [one for one in found if whole(one)]


# --- the file -------------------------------------------------------------------------------------


def to_json(env: Environment, entries: Sequence[Entry]) -> str:
    """The file's text: entries by format, N, K and M, one a line, so that two can be compared."""

    def line(entry: Entry) -> str:
        ordered = sorted(entry.times.items(), key=_by_step)
        times = {work: float(f"{us:.4g}") for work, us in ordered}
        row = {"format": entry.format, "N": entry.n, "K": entry.k, "M": entry.m, "us": times}
        return json.dumps(row)

    head = json.dumps(plain(asdict(env)), indent=2).replace("\n", "\n ")
    ordered = sorted(entries, key=lambda e: (e.format, e.n, e.k, e.m))
    rows = ",\n".join("  " + line(entry) for entry in ordered)
    return f'{{\n "schema": {SCHEMA},\n "env": {head},\n "rows": [\n{rows}\n ]\n}}\n'


def _is_for(number: int, m: int) -> bool:
    """Whether a step is meant for products of m tokens."""
    most = kernel_of(number).most_tokens
    return most is None or m <= most


def write(env: Environment, found: Sequence[Entry], root: Path = RESULTS) -> Path:
    """Write the table of this GPU, keeping what an older one has beside it; but not an entry that
    lacks the highest step of its format: that says nothing of who is fastest there. Steps for fewer
    tokens than the entry's do not count."""
    path = root / slug(env.gpu) / NAME
    fresh = {(e.format, e.n, e.k, e.m): e for e in found}
    if path.exists():
        for old in read(path).entries:
            at = (old.format, old.n, old.k, old.m)
            new = fresh.get(at)
            fresh[at] = replace(old, times={**old.times, **(new.times if new else {})})
    timed: dict[str, set[int]] = {}
    for entry in fresh.values():
        timed.setdefault(entry.format, set()).update(entry.steps)
    kept = [
        entry
        for entry in fresh.values()
        if max((one for one in timed[entry.format] if _is_for(one, entry.m)), default=0)
        in entry.steps
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(to_json(env, kept), encoding="utf-8")
    unfinished.replace(path)
    known.cache_clear()
    return path
