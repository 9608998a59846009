"""Times the steps at many M into `results/<gpu>/tuning.json`, by which `gemm` chooses.

Totals alone, from float32 A to float32 C and, of steps that read and write it, from float16 to
float16, of all steps at one format and shape in one loop. A step that a first look finds far slower
than the best does not take part: the first look is its time.
A bench has timed most of that already: `of_run` takes it from its run.
The file is read by `steps.product.tuning_table`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from reference import BENCH_SHAPES
from results.measure.bench import Wanted
from results.measure.loop import Contestant, round_robin
from results.measure.products import Data, Product, Shared, attempt
from results.measure.protocol import Budget, Stopwatch
from results.record.codec import plain
from results.record.provenance import remembered, source_hash
from results.record.schema import Environment, Run
from results.record.store import slug
from steps.contract import Size, Work
from steps.kernels.parts.activations.layouts import inputs
from steps.product.tuning_table import NAME, RESULTS, SCHEMA, Entry, known, read, time_key
from steps.registry import find

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""The M at which steps are tuned."""

MEASURED: Final = (("float32", "float32"), ("float16", "float16"))
"""The dtypes of A and C that a table has times of."""

FAR: Final = 4.0
"""A step this many times slower than the best does not take part in the loop."""

BUDGET: Final = Budget(
    replay_seconds=2e-3, warm_seconds=0.05, seconds=0.3, min_rounds=5, relative_error=0.01
)
"""Steps that differ by one per cent are equally good: less time than a record takes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The entry of one format and shape, and what was wrong with a step."""

    entry: Entry
    failures: tuple[str, ...] = ()


def entries(
    machine: Any,
    stopwatch: Stopwatch,
    works: Sequence[Work],
    sizes: Sequence[tuple[int, int]],
    tokens: Sequence[int] = TOKENS,
    budget: Budget = BUDGET,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Measured]:
    """Every format at every (N, K) and M."""
    for n, k in sizes:
        data = Data(max(tokens), n, k)
        data.prepare(works)
        for name in dict.fromkeys(work.format for work in works):
            own = [work for work in works if work.format == name]
            for m in tokens:
                report(f"{name} at M={m} N={n} K={k}")
                yield _entry(Shared(data, m, machine, stopwatch), own, budget)
            data.release()


def wanted_of(work: Work, size: Size) -> list[Wanted]:
    """What is timed of a work: from float32 to float32, and in float16 where the step can."""
    step = work.step
    half = "float16" in inputs(step, work.family) and "float16" in step.outputs
    return [Wanted(work, size), *([Wanted(work, size, "float16", "float16")] if half else [])]


def _entry(shared: Shared, works: Sequence[Work], budget: Budget) -> Measured:
    failures: list[str] = []
    m, n, k = shared.shape

    def tried(work: Work, input: str, act: Callable[[], Any]) -> Any:
        name = str(work) if input == "float32" else f"{work} in {input}"
        return attempt(act, failures.append, f"{name} at M={m} N={n} K={k}")

    def entered(wanted: Wanted) -> tuple[Product, Contestant]:
        one = Product(wanted.row(), wanted.work, shared)
        one.first_run()
        _require_right(one)
        return one, one.enter_total(budget)

    every = [wanted for work in works for wanted in wanted_of(work, shared.shape)]
    pairs = [pair for one in every if (pair := tried(one.work, one.input, partial(entered, one)))]
    best = min((total.once for _, total in pairs), default=0.0)
    near = [pair for pair in pairs if pair[1].once <= FAR * best]
    times = {key(one): total.once * 1e6 for one, total in pairs}
    round_robin(shared.stopwatch, [total for _, total in near], budget)
    shared.stopwatch.wait()
    shared.forget_bits()
    for one, total in near:
        times[key(one)] = total.timing.us
    for one, _ in near:
        before, name = len(failures), (one.work, one.row.input)
        tried(*name, one.last_run)
        tried(*name, partial(_require_right, one))
        if len(failures) > before:
            del times[key(one)]
    ordered = dict(sorted(times.items(), key=lambda item: _by_step(item[0])))
    return Measured(Entry(works[0].format, n, k, m, ordered), tuple(failures))


def _require_right(product: Product) -> None:
    found = product.check()
    if not found.ok:
        raise ValueError(found.verdict)


def key(one: Product) -> str:
    """What a product's time is called in the table: "7 A8", "14 A16 float16"."""
    return time_key(one.work.step.number, one.work.family, one.row.input)


def _by_step(name: str) -> tuple[int, str]:
    number, rest = name.split(maxsplit=1)
    return int(number), rest


def of_run(run: Run) -> list[Entry]:
    """The entries that a bench has measured already: the totals of its rows of today's code, at
    each format and (N, K) of which it has every M of a whole bench. With fewer of them a step that
    is best at one M would be taken where nobody timed it."""
    now = remembered(source_hash)
    found: dict[tuple[str, int, int], dict[int, dict[str, float]]] = {}
    for row in run.rows:
        if row.status != "ok" or row.source_hash != now(row.step):
            continue
        if row.total_us and (row.input, row.output) in MEASURED:
            times = found.setdefault((row.format, row.N, row.K), {}).setdefault(row.M, {})
            times[time_key(row.step, row.family, row.input)] = row.total_us
    entries = []
    for (name, n, k), by_m in found.items():
        whole = {size[0] for size in BENCH_SHAPES if size[1:] == (n, k)}
        if whole and whole <= by_m.keys():
            for m, times in sorted(by_m.items()):
                ordered = dict(sorted(times.items(), key=lambda item: _by_step(item[0])))
                entries.append(Entry(name, n, k, m, ordered))
    return entries


# --- the file -------------------------------------------------------------------------------------


def to_json(env: Environment, entries: Sequence[Entry]) -> str:
    """The file's text: entries by format, N, K and M, one a line, so that two can be compared."""

    def line(entry: Entry) -> str:
        times = {
            work: float(f"{entry.times[work]:.4g}") for work in sorted(entry.times, key=_by_step)
        }
        row = {"format": entry.format, "N": entry.n, "K": entry.k, "M": entry.m, "us": times}
        return json.dumps(row)

    head = json.dumps(plain(asdict(env)), indent=2).replace("\n", "\n ")
    ordered = sorted(entries, key=lambda e: (e.format, e.n, e.k, e.m))
    rows = ",\n".join("  " + line(entry) for entry in ordered)
    return f'{{\n "schema": {SCHEMA},\n "env": {head},\n "rows": [\n{rows}\n ]\n}}\n'


def _is_for(number: int, m: int) -> bool:
    """Whether a step is meant for products of m tokens."""
    most = find(number).most_tokens
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
