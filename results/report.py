"""The README's ladder table: a pure function of one run's JSON and of the sources in this tree.

It stands between two markers and is never edited by hand; `make docs-check` fails when it drifts:

    <!-- ladder:begin -->
    <!-- ladder:end -->

    python -m results.report            # rewrite the table in README.md
    python -m results.report --check    # exit 1 and say what drifted, in the table and the charts
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from results import charts
from results.charts import dims, formats, main_shape, number, peer_us, rungs, timed
from results.record import ROOT, Row, Run, headline, read, stale_steps

BEGIN: Final = "<!-- ladder:begin -->"
END: Final = "<!-- ladder:end -->"
README: Final = ROOT / "README.md"
ABSENT: Final = "-"
STALE: Final = "(stale)"
NOTHING: Final = (
    "Nothing is measured yet: `make bench` on a machine with a CUDA GPU, then `make charts`."
)


def cell(value: float | None) -> str:
    return ABSENT if value is None else number(value)


def span(values: Iterable[float | None]) -> str:
    """ "2.1-2.4x" over the formats, "2.1x" where they agree, "-" where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    low, high = map(number, _ends(known))
    return f"{low}x" if low == high else f"{low}-{high}x"


def percent(shares: Sequence[float]) -> str:
    """ "12-15 %"; below one per cent with a digit after the point."""
    if not shares:
        return ABSENT
    low, high = (f"{100 * x:.0f}" if x >= 0.0095 else f"{100 * x:.1f}" for x in _ends(shares))
    return f"{low} %" if low == high else f"{low}-{high} %"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def ladder_table(run: Run, source: str, stale: frozenset[int] = frozenset()) -> str:
    """The ladder at the main shape: a line per rung with its TFLOPS per format, then the peers.

    `source` is the run's file as the README links it. Rows of `stale` steps are marked.
    """
    shape = main_shape(timed(run))
    if shape is None:
        return NOTHING
    rows = [row for row in run.rows if row.shape == shape]
    names = formats(rows)
    head = ["Step", "Idea", "Activations", *names, "x parent", "x step 1", "of its limit"]
    lines = [
        f"Kernel TFLOPS (2 M N K / time) at {dims(shape)} on an {run.env.where}, "
        f"measured in [{Path(source).name}]({source}).",
        "",
        "| " + " | ".join(head) + " |",
        "|--:|:--|:--|" + "--:|" * (len(names) + 3),
    ]
    for step, family in rungs(rows):
        own = {r.format: r for r in rows if (r.step, r.family) == (step, family)}
        good = [row for row in own.values() if row.status == "ok"]
        title = next(iter(own.values())).title or next(iter(own.values())).name
        mark = f" {STALE}" if step in stale else ""
        shares = [r.limit_share for r in good if r.limit_share is not None]
        cells = [
            f"{step}{mark}",
            title,
            family,
            *(_tflops(own.get(name)) for name in names),
            span(row.x_parent for row in good),
            span(row.x_step1 for row in good),
            percent(shares),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [_peer_line(run, peer, names, shape) for peer in charts.peers_of(run)]
    notes = []
    if llama_cpp := [p for p in run.peers if p.peer == "ggml" and p.shape == shape]:
        here = [peer for peer in llama_cpp if peer.same_run]
        where = "of this run" if len(here) == len(llama_cpp) else "partly of this run"
        notes.append(
            "llama.cpp: its time from float32 to float32 on the same GPU model, "
            f"activation quantization included, {where if here else 'not of this run'}."
        )
    if any(p.peer == "cublas_fp16" and p.shape == shape for p in run.peers):
        notes.append("cuBLAS: kernel only, both operands already float16.")
    if any(step in stale for step, _ in rungs(rows)):
        notes.append(f"{STALE}: the step's code has changed since; `make bench` measures it again.")
    if notes:
        lines += ["", " ".join(notes)]
    return "\n".join(lines)


def _tflops(row: Row | None) -> str:
    if row is None or row.status == "unsupported":
        return ABSENT
    return cell(row.tflops) if row.status == "ok" else "failed"


def _peer_line(run: Run, peer: str, names: Sequence[str], shape: tuple[int, int, int]) -> str:
    m, n, k = shape
    times = [peer_us(run, peer, name, shape) for name in names]
    cells = [ABSENT if us is None else number(2 * m * n * k / us * 1e-6) for us in times]
    return "| | " + " | ".join([charts.peer_label(peer), "", *cells, "", "", ""]) + " |"


def section(run_path: Path | None, root: Path = ROOT) -> str:
    """What belongs between the markers, for a run's file (None: nothing measured yet)."""
    if run_path is None:
        return NOTHING
    run = read(run_path)
    path = run_path.resolve()
    source = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    return ladder_table(run, source.as_posix(), stale_steps(run, root))


def split(text: str) -> tuple[str, str, str]:
    """(before, between, after) the markers; ValueError unless there is one of each, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"needs one {BEGIN} and after it one {END}")
    before, rest = text.split(BEGIN)
    between, after = rest.split(END)
    return before, between, after


def rewrite(readme: Path = README, run: Path | None = None, root: Path = ROOT) -> bool:
    """Put the table of `run` (default: the headline) into the README; whether that changed it."""
    text = readme.read_text(encoding="utf-8")
    try:
        before, _, after = split(text)
    except ValueError as error:
        raise ValueError(f"{readme.name} {error}") from None
    table = section(run or headline(root / "results"), root)
    new = f"{before}{BEGIN}\n{table}\n{END}{after}"
    if new != text:
        readme.write_text(new, encoding="utf-8")
    return new != text


def check(readme: Path = README, run: Path | None = None, root: Path = ROOT) -> list[str]:
    """What docs-check has to say of the README's table: one sentence per line that drifted."""
    if not readme.exists():
        return [f"{readme.name} does not exist"]
    try:
        _, between, _ = split(readme.read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"{readme.name} {error}"]
    have = between.strip("\n").split("\n")
    want = section(run or headline(root / "results"), root).split("\n")
    cure = "`python -m results.report` rewrites the table"
    if len(have) != len(want):
        return [
            f"{readme.name}: the table has {len(have)} lines, the run gives {len(want)}; {cure}"
        ]
    return [
        f"{readme.name}: {old!r} should be {new!r}; {cure}"
        for old, new in zip(have, want, strict=True)
        if old != new
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", nargs="?", type=Path, help="a run's JSON (default: the largest)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on a drift")
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(arguments)
    if options.check:
        found = check(options.readme, options.run) + charts.drifts(run=options.run)
        for sentence in found:
            print(sentence, file=sys.stderr)
        return 1 if found else 0
    changed = rewrite(options.readme, options.run)
    print(f"{options.readme.name} {'rewritten' if changed else 'was up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
