"""The tables of README.md, and the check that all that is generated is that of the current runs.

Each table of the README stands between two markers and is never edited by hand:

    <!-- ladder:begin -->       a line per step at its home shape, in one format
    <!-- ladder:end -->
    <!-- called:begin -->       what a caller gets: tensor in to tensor out, beside the baselines
    <!-- called:end -->

    python -m results.render.tables            # rewrite them, and results/RESULTS.md
    python -m results.render.tables --check    # exit 1 and say what drifted, charts included
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from results.record import ROOT
from results.record.provenance import called_hash, source_hash
from results.record.schema import Run, Size
from results.record.store import headline, read
from results.render import charts
from results.render.arguments import NOTHING
from results.render.query import (
    ABSENT,
    BASELINES,
    CUBLAS,
    LLAMA_CPP,
    Rung,
    baseline,
    called,
    cell,
    dims,
    idea,
    ladder,
    main_format,
    percent,
    ratio,
    when,
)

Keys = Collection[tuple[Any, ...]]
"""The keys of the records whose code has changed since they were measured."""

STALE: Final = "(stale)"
STALE_NOTE: Final = f"{STALE}: the code has changed since; `make bench` measures it again."
CURE: Final = "run `make charts`"
CALLED: Final[tuple[Size, ...]] = (
    (1, 4096, 14336),
    (16, 4096, 14336),
    (128, 4096, 4096),
    (512, 4096, 4096),
    (512, 4096, 14336),
    (4096, 4096, 14336),
)
"""The sizes of the README's table: the weights of the two home shapes."""


def grid(head: Sequence[str], align: str, lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table. `align` has a letter per column: l or r."""
    rule = "|".join(":--" if side == "l" else "--:" for side in align)
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    return ["| " + " | ".join(head) + " |", f"|{rule}|", *rows]


def stale_keys(run: Run, root: Path = ROOT) -> frozenset[tuple[Any, ...]]:
    """The keys of the records that are no facts about the code of this tree."""
    of_step = cache(lambda step: source_hash(step, root))
    of_call = cache(lambda api, step: called_hash(api, step, root))
    rows = {
        row.key
        for row in run.rows
        if row.source_hash is None or row.source_hash != of_step(row.step)
    }
    calls = {
        one.key
        for one in run.as_called
        if one.source_hash is None or one.source_hash != of_call(one.api, one.step)
    }
    return frozenset(rows | calls)


# ------------------------------------------------------------------------------ the README's tables


def ladder_table(run: Run, source: str, stale: Keys = ()) -> str:
    """A line per step in one format at its home shape. `source` is the run's file as linked."""
    panels = ladder(run)
    if not panels:
        return NOTHING
    shown = [rung.row for panel in panels for rung in panel.rungs]
    lines = []
    for panel in panels:
        lines.append(["", f"**{panel.title}**, {dims(panel.home)}", "", "", "", ""])
        lines += [_rung(rung, stale) for rung in panel.rungs]
    head = ("step", "idea", "time (us)", "TFLOPS", "x parent", "of its limit")
    above = (
        f"{shown[0].format.upper()} on an {run.env.where}, {when(shown)} "
        f"([run]({source})). The kernel alone, at the M x N x K of its branch."
    )
    marked = [STALE_NOTE] if any(row.key in stale for row in shown) else []
    return "\n".join([above, *marked, "", *grid(head, "rlrrrr", lines)])


def _rung(rung: Rung, stale: Keys) -> list[str]:
    row = rung.row
    at = f", at {dims(row.shape)}" if rung.away else ""
    mark = f" {STALE}" if row.key in stale else ""
    return [
        f"[{row.step}](steps/{row.name}.py)",
        idea(row) + at + mark,
        cell(row.kernel_us) if row.status == "ok" else row.status,
        cell(row.tflops),
        ratio(row.x_parent) if row.x_parent else "",
        percent(row.limit_share),
    ]


def called_table(run: Run, source: str, stale: Keys = ()) -> str:
    """What a caller of QuantLinear gets, beside cuBLAS float16 and llama.cpp, in microseconds."""
    name = main_format(run.as_called)
    found = {
        (accuracy, size): one
        for accuracy in ("exact", "fast")
        for size in CALLED
        if (one := called(run, "QuantLinear", accuracy, "float16", size, name))
    }
    if not found:
        return NOTHING
    others = {size: baseline(run, LLAMA_CPP, name, size) for size in CALLED}
    lines = []
    for size in CALLED:
        exact, fast = found.get(("exact", size)), found.get(("fast", size))
        beside = exact or fast
        theirs = others[size]
        lines.append(
            [
                str(size[0]),
                f"{size[1]} x {size[2]}",
                *(
                    ABSENT if one is None else cell(one.us) + f" {STALE}" * (one.key in stale)
                    for one in (exact, fast)
                ),
                cell(beside.cublas_us if beside else None),
                cell(theirs.us if theirs else None),
            ]
        )
    above = (
        f"{name.upper()}, float16 in and out, in us, on an {run.env.where}, "
        f"{when(found.values())} ([run]({source}))."
    )
    known = [one for one in others.values() if one]
    if known:
        elsewhere = "" if all(one.same_run for one in known) else ", from another run"
        above += f" {BASELINES[LLAMA_CPP]}: float32 in and out{elsewhere}."
    notes = [STALE_NOTE] if any(one.key in stale for one in found.values()) else []
    head = ("tokens", "N x K", "this project", "fast", BASELINES[CUBLAS], BASELINES[LLAMA_CPP])
    return "\n".join([above, *notes, "", *grid(head, "rlrrrr", lines)])


TABLES: Final[dict[str, Callable[[Run, str, Keys], str]]] = {
    "ladder": ladder_table,
    "called": called_table,
}
"""Between the markers of each name stands what its function makes of the run."""


def readme_tables(root: Path = ROOT) -> dict[str, str]:
    """What belongs between the markers of each name, for the runs in `root`."""
    path = headline(root / "results")
    if path is None:
        return dict.fromkeys(TABLES, NOTHING)
    run = read(path)
    stale = stale_keys(run, root)
    return {name: make(run, link(path, root), stale) for name, make in TABLES.items()}


def link(path: Path, base: Path) -> str:
    """A file as a page in the folder `base` links it."""
    path = path.resolve()
    return (path.relative_to(base) if path.is_relative_to(base) else Path(path.name)).as_posix()


def split(text: str, name: str) -> tuple[str, str, str]:
    """(before, between, after) the markers; ValueError unless there is one of each, in order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"needs one {begin} and after it one {end}")
    before, rest = text.split(begin)
    between, after = rest.split(end)
    return before + begin, between, end + after


# --------------------------------------------------------------------------- writing and checking


def rewrite(root: Path = ROOT) -> list[Path]:
    """Bring README.md and results/RESULTS.md up to the runs in `root`; what changed."""
    from results.render import complete

    readme, results = root / "README.md", root / "results" / complete.NAME
    text = readme.read_text(encoding="utf-8")
    for name, table in readme_tables(root).items():
        try:
            before, _, after = split(text, name)
        except ValueError as error:
            raise ValueError(f"{readme.name} {error}") from None
        text = f"{before}\n{table}\n{after}"
    changed = []
    for file, now in ((readme, text), (results, complete.page(root))):
        if not file.exists() or file.read_text(encoding="utf-8") != now:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(now, encoding="utf-8")
            changed.append(file)
    return changed


def check(root: Path = ROOT) -> list[str]:
    """What drifted from the runs in `root`: a sentence for each table, page and chart."""
    from results.render import complete

    readme, results = root / "README.md", root / "results" / complete.NAME
    path = headline(root / "results")
    found = []
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        for name, table in readme_tables(root).items():
            found += _drift(text, name, table)
    else:
        found.append("README.md does not exist")
    if not results.exists():
        found.append(f"results/{complete.NAME} is missing: {CURE}")
    else:
        have, want = results.read_text(encoding="utf-8"), complete.page(root)
        found += _differ(f"results/{complete.NAME}", have, want)
    run = read(path) if path else None
    return found + charts.drifts(run, root / "results" / "charts")


def _drift(text: str, name: str, table: str) -> list[str]:
    try:
        _, between, _ = split(text, name)
    except ValueError as error:
        return [f"README.md {error}"]
    return _differ(f"README.md, the {name} table", between.strip("\n"), table)


def _differ(what: str, have: str, want: str) -> list[str]:
    """One sentence with the first line that differs, if one does."""
    if have == want:
        return []
    old, new = have.split("\n"), want.split("\n")
    pairs = [*zip(old, new, strict=False)]
    i = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    lines = [repr(part[i]) if i < len(part) else "nothing" for part in (old, new)]
    return [f"{what}: line {i + 1} is {lines[0]} and the run gives {lines[1]}; {CURE}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.render.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on a drift")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md")
    options = parser.parse_args(arguments)
    if headline(options.root / "results") is None:
        print(NOTHING)
    if not options.check:
        for path in rewrite(options.root):
            print(path)
        return 0
    found = check(options.root)
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
