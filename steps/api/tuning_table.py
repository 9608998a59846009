"""Which step is fastest at which shape on which GPU: a small table, and `make tune`, its maker.

The table is `results/<gpu>/tuning.json`: for each format, (N, K) and M the time of every step that
was tried, from float32 A to float32 C. Between its entries `Tuning.entry` says which one counts:

* of the (N, K) the nearest, by |log2 N/N'| + |log2 K/K'|, as time grows with their product;
* of the M the next one upwards, not the nearest: tiles are multiplied whole, so 17 tokens cost what
  32 do and not what 16 do. Above the last one, the last.

A step that is in the table and not in the ladder is passed over.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from qformats import FORMATS
from results.measure.protocol import Budget, Packed, Stopwatch, measure_step
from results.record import schema as record
from results.record.schema import Environment, Run
from results.render import text as show
from steps.checks.works import UsageError
from steps.contract import Family, Shape

if TYPE_CHECKING:
    from steps.contract import Work

SCHEMA: Final = 1
RESULTS: Final = record.ROOT / "results"
TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""The M at which steps are tuned."""

FAR: Final = 4.0
"""A step this many times slower than the best is not sampled: the first look is its time."""

FIRST_LOOK: Final = 20
"""Launches of a first look, so that the start of a graph (6 us) is not taken for a kernel's time;
one if it takes a millisecond."""

SAMPLED: Final = 4096
"""Outputs of each step compared with the float64 product before it is timed, and after."""

BUDGET: Final = Budget(
    kernel_seconds=0.03,
    total_seconds=0.03,
    activation_seconds=0.005,
    warm_seconds=0.005,
    settled_samples=5,
    relative_error=0.01,
)
"""Steps that differ by one per cent are equally good: less time than a record takes."""


class TuningError(ValueError):
    """A file that is not a table; the text names it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One product and the microseconds that steps took for it: {"7 A8": 30.1, "10 A8": 9.2}."""

    format: str
    n: int
    k: int
    m: int
    times: Mapping[str, float]

    def us(self, step: int, family: str) -> float | None:
        """The time of a step, None where it was not measured."""
        return self.times.get(f"{step} {family}")

    @property
    def highest(self) -> int:
        """The highest step that was measured, 0 without any."""
        return max((int(work.split()[0]) for work in self.times), default=0)

    @property
    def where(self) -> str:
        return f"M={self.m} N={self.n} K={self.k}"


@dataclass(frozen=True, slots=True)
class Tuning:
    """The table of one GPU."""

    env: Environment
    entries: tuple[Entry, ...]

    @property
    def gpu(self) -> str:
        return self.env.gpu or "an unknown GPU"

    def entry(self, format_name: str, m: int, n: int, k: int) -> Entry | None:
        """The entry that counts for a product (see above); None where the format has none."""
        own = [entry for entry in self.entries if entry.format == format_name]
        if not own:
            return None

        def far(size: tuple[int, int]) -> tuple[float, tuple[int, int]]:
            return abs(math.log2(n / size[0])) + abs(math.log2(k / size[1])), size

        size = min({(entry.n, entry.k) for entry in own}, key=far)
        near = sorted((entry for entry in own if (entry.n, entry.k) == size), key=lambda e: e.m)
        return next((entry for entry in near if entry.m >= m), near[-1])


# --- reading and writing --------------------------------------------------------------------------


def nearest(
    tables: Iterable[Tuning], gpu: str, cc: tuple[int, int], sms: int | None
) -> Tuning | None:
    """The table of this GPU, else the one of the same compute capability whose number of
    multiprocessors is nearest; None where there is none."""
    alike = [table for table in tables if table.gpu == gpu or table.env.cc == cc]

    def far(table: Tuning) -> tuple[bool, float, str]:
        ratio = abs(math.log2((table.env.sms or 1) / (sms or 1)))
        return table.gpu != gpu, ratio, table.gpu

    return min(alike, key=far, default=None)


@lru_cache(maxsize=4)
def known(root: Path = RESULTS) -> tuple[Tuning, ...]:
    """Every table under root, read once."""
    return tuple(read(path) for path in sorted(root.glob("*/tuning.json")))


def read(path: Path) -> Tuning:
    """TuningError, with the file's name, for what is not a table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise TuningError(f"schema is {data['schema']!r}, this version reads {SCHEMA}")
        entries = tuple(_entry(row) for row in data["rows"])
        env = record.from_json(
            json.dumps({"schema": 1, "env": data["env"], "rows": [], "peers": []})
        ).env
    except (ValueError, TypeError, KeyError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise TuningError(f"{path} is not a tuning table ({what}): run make tune again") from None
    return Tuning(env, entries)


def _entry(row: Mapping[str, Any]) -> Entry:
    times = {str(work): float(us) for work, us in row["us"].items()}
    entry = Entry(str(row["format"]), int(row["N"]), int(row["K"]), int(row["M"]), times)
    if min(entry.n, entry.k, entry.m, *times.values()) <= 0:
        raise ValueError(f"a size or a time that is not positive at {entry.where}")
    return entry


def to_json(table: Tuning) -> str:
    """The file's text: entries by format, N, K and M, one a line, so that two can be compared."""

    def by_step(work: str) -> tuple[int, str]:
        number, family = work.split()
        return int(number), family

    def line(entry: Entry) -> str:
        times = {
            work: float(f"{entry.times[work]:.4g}") for work in sorted(entry.times, key=by_step)
        }
        row = {"format": entry.format, "N": entry.n, "K": entry.k, "M": entry.m, "us": times}
        return json.dumps(row)

    env = json.loads(record.to_json(Run(env=table.env)))["env"]
    head = json.dumps(env, indent=2).replace("\n", "\n ")
    ordered = sorted(table.entries, key=lambda e: (e.format, e.n, e.k, e.m))
    rows = ",\n".join("  " + line(entry) for entry in ordered)
    return f'{{\n "schema": {SCHEMA},\n "env": {head},\n "rows": [\n{rows}\n ]\n}}\n'


def write(table: Tuning, root: Path = RESULTS) -> Path:
    """Write the table of its GPU, keeping what an older one has beside it; but not an entry whose
    highest step is below the highest of its format: that says nothing of who is fastest there."""
    path = root / record.slug(table.env.gpu) / "tuning.json"
    fresh = {(e.format, e.n, e.k, e.m): e for e in table.entries}
    if path.exists():
        for old in read(path).entries:
            key = (old.format, old.n, old.k, old.m)
            new = fresh.get(key)
            fresh[key] = replace(old, times={**old.times, **(new.times if new else {})})
    highest: dict[str, int] = {}
    for entry in fresh.values():
        highest[entry.format] = max(entry.highest, highest.get(entry.format, 0))
    fresh = {key: entry for key, entry in fresh.items() if entry.highest == highest[entry.format]}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(to_json(replace(table, entries=tuple(fresh.values()))), encoding="utf-8")
    unfinished.replace(path)
    known.cache_clear()
    return path


def entries_of(run: Run) -> tuple[Entry, ...]:
    """What a bench measured, as entries: its rows whose C is float32."""
    found: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for row in run.rows:
        if row.status == "ok" and row.total_us and row.output == "float32":
            times = found.setdefault((row.format, row.N, row.K, row.M), {})
            times[f"{row.step} {row.family}"] = row.total_us
    return tuple(Entry(*key, times) for key, times in found.items())


def _take_over(path: Path) -> int:
    run = record.read(path)
    table = Tuning(run.env, entries_of(run))
    if not table.entries:
        raise UsageError(f"{path} has no row with a time")
    print(f"wrote {write(table)}")
    return 0


# --- measuring ------------------------------------------------------------------------------------


def tune(args: Namespace) -> int:
    """The command: times the steps on this GPU and writes its table; 1 if one was wrong. With
    `--run` nothing is timed: a bench has measured the same."""
    if args.run:
        return _take_over(args.run)
    from reference import BENCH_SHAPES
    from results.measure.protocol import GpuStopwatch
    from steps.api.parallel_compile import compile_ahead
    from steps.checks.works import select
    from steps.cli import run

    _, machine, _ = run.machines("gpu")
    gpu: Any = machine(0)
    names = run.formats_of(args.format)
    tokens = (args.m,) if args.m else TOKENS
    sizes = list(dict.fromkeys((n, k) for _, n, k in BENCH_SHAPES))
    if args.n or args.k:
        sizes = [run.shape_of(args)[1:]]
    works = select(run.named(args.steps), names, args.scheme, gpu.cc)
    env, stopwatch = record.environment(), GpuStopwatch()
    found: list[Entry] = []
    wrong: list[str] = []
    path: Path | None = None
    compile_ahead(
        ((work, (m, n, k), "float32") for work in works for n, k in sizes for m in tokens),
        gpu,
        lambda sentence: print(sentence, file=sys.stderr),
    )
    with show.progress(len(names) * len(sizes) * len(tokens)) as report:
        for name in names:
            own = [work for work in works if work.format == name]
            for n, k in sizes:
                for entry, failures in _entries(gpu, stopwatch, own, n, k, tokens, report):
                    found += [entry] if entry.times else []
                    wrong += failures
                if found:  # a table that is cut short is a table all the same
                    path = write(Tuning(record.finished(env), tuple(found)))
    show.show(_fastest(gpu.name, found))
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    print(f"wrote {path}" if path else "nothing was measured")
    return 1 if wrong or path is None else 0


def _entries(
    gpu: Any,
    stopwatch: Stopwatch,
    works: Sequence[Work],
    n: int,
    k: int,
    tokens: Sequence[int],
    report: Callable[[str], None],
) -> Iterator[tuple[Entry, list[str]]]:
    """The entry of each M, and what was wrong with a step, for works of one format.

    The steps go from the highest down, so that the best is soon known and the far slower ones are
    not sampled.
    """
    from reference import Check, Problem, check
    from results.measure.bench import FirstTokens
    from steps.checks.works import fatal

    name = works[0].format
    whole = Problem(max(tokens), n, k, name)
    packed: dict[Any, Packed] = {}
    for m in tokens:
        report(f"{name} at M={m} N={n} K={k}")
        problem = FirstTokens(m, n, k, name, of=whole)
        a = gpu.array(problem.a)
        entry, failures = Entry(name, n, k, m, {}), []
        for work in works[::-1]:
            if work.step.pack not in packed:
                packed[work.step.pack] = Packed(tuple(work.step.pack(whole.blocks)), 0.0)

            def judged(c: np.ndarray, q81: Any, family: Family = work.family) -> Check:
                return check(c, problem, family, q81, limit=SAMPLED)  # noqa: B023 - used at once

            try:
                us, why = _time(gpu, stopwatch, work, a, n, packed[work.step.pack], judged, entry)
            except Exception as error:
                if fatal(error):
                    raise
                us, why = None, f"{type(error).__name__}: {error}"
            if us is None:
                failures.append(f"{work} at {entry.where}: {why}")
            else:
                times = {**entry.times, f"{work.step.number} {work.family}": us}
                entry = replace(entry, times=times)
        yield entry, failures


def _time(
    gpu: Any,
    stopwatch: Stopwatch,
    work: Work,
    a: Any,
    n: int,
    packed: Packed,
    judged: Callable[[np.ndarray, Any], Any],
    entry: Entry,
) -> tuple[float | None, str | None]:
    """(microseconds from float32 A to float32 C, None) or (None, why there is no time)."""
    step, fmt, shape = work.step, FORMATS[work.format], Shape(entry.m, n, entry.k)
    weights = tuple(gpu.array(array) for array in packed.arrays)
    activations = step.activations(work.family, a, gpu)
    out = gpu.empty((shape.m, shape.n), np.float32)
    own = step.prepare(gpu, fmt, work.family, shape, weights, activations.arrays, out)
    look = (*activations.launches, own)
    replay = stopwatch.capture(look)
    us = min(replay.seconds() for _ in range(2)) * 1e6
    if us < 1e3:
        us = stopwatch.capture(look * FIRST_LOOK).seconds() * 1e6 / FIRST_LOOK
    if entry.times and us > FAR * min(entry.times.values()):
        return us, None
    row = measure_step(
        step,
        work.family,
        work.format,
        a,
        n,
        machine=gpu,
        stopwatch=stopwatch,
        packed=packed,
        check=judged,
        budget=BUDGET,
    )
    return (row.total_us, None) if row.status == "ok" else (None, row.why)


def _fastest(gpu: str, entries: Sequence[Entry]) -> show.Table:
    """The fastest step of each entry, one line a format, N and K."""
    tokens = sorted({entry.m for entry in entries})
    lines = []
    for name, n, k in dict.fromkeys((entry.format, entry.n, entry.k) for entry in entries):
        best = {
            entry.m: min(entry.times, key=lambda work: entry.times[work])
            for entry in entries
            if (entry.format, entry.n, entry.k) == (name, n, k)
        }
        cells = (name, str(n), str(k), *(best.get(m, show.ABSENT) for m in tokens))
        lines.append(show.Line(cells))
    columns = [show.Column("format", words=True), show.Column("N"), show.Column("K")]
    columns += [show.Column(f"M={m}") for m in tokens]
    return show.Table(tuple(columns), tuple(lines), f"The fastest step and family on {gpu}")
