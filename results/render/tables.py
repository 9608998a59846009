"""The README's tables: pure functions of one run's JSON and of the sources in this tree.

Each stands between two markers and is never edited by hand; `make docs-check` fails when it drifts:

    <!-- headline:begin -->     ours, llama.cpp and cuBLAS fp16, from one to 4096 tokens
    <!-- headline:end -->
    <!-- ladder:begin -->       TFLOPS of every rung at the main shape
    <!-- ladder:end -->
    <!-- peers:begin -->        the fastest step against llama.cpp and cuBLAS at every shape
    <!-- peers:end -->

    python -m results.render.tables            # rewrite the tables in README.md
    python -m results.render.tables --check    # exit 1 and say what drifted, in the tables and the charts
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from results.record import ROOT
from results.record.provenance import stale_steps
from results.record.schema import Peer, Row, Run
from results.record.store import headline, read
from results.render import charts
from results.render.charts import (
    Shape,
    dims,
    formats,
    main_shape,
    number,
    peer_at,
    peer_us,
    rungs,
    timed,
)

README: Final = ROOT / "README.md"
ABSENT: Final = "-"
STALE: Final = "(stale)"
STALE_NOTE: Final = f"{STALE}: the step's code has changed since; `make bench` measures it again."
ELSEWHERE: Final = "*"
FAST_NOTE: Final = (
    "fast: rounds the weights once more, to 8 bits a row, and is used only when asked for."
)
COARSE_NOTE: Final = (
    "coarse: makes weights of codes and small integers, which is less exact still, and is used "
    "only when asked for by that name."
)
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
    rows = [row for row in run.rows if row.shape == shape and row.output == "float32"]
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
        first = next(iter(own.values()))
        title = first.title or first.name
        title += "" if first.accuracy == "exact" else f" ({first.accuracy})"
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
    llama_cpp = [peer_at(run, "ggml", name, shape) for name in names]
    if known := [peer for peer in llama_cpp if peer]:
        notes.append(
            "llama.cpp: its time from float32 to float32, activation quantization included, "
            f"{provenance(known)}."
        )
    if any(p.peer == "cublas_fp16" and p.shape == shape for p in run.peers):
        notes.append(_cublas_note(run, {shape}))
    if any(row.accuracy == "fast" for row in rows):
        notes.append(FAST_NOTE)
    if any(row.accuracy == "coarse" for row in rows):
        notes.append(COARSE_NOTE)
    if any(step in stale for step, _ in rungs(rows)):
        notes.append(STALE_NOTE)
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


# ------------------------------------------------------------------------------------ the headline

HEADLINE: Final = (1, 16, 128, 512, 4096)
"""The M of the headline table."""

UNPAIRED: Final = "†"
OVERLAPPING: Final = "‡"


def headline_table(run: Run, source: str, stale: frozenset[int] = frozenset()) -> str:
    """The fastest exact step beside llama.cpp (totals) and beside cuBLAS fp16 (kernels, in duels
    where there are any), and the steps that are not exact in columns of their own."""
    every = timed(run)
    names = formats(every)
    shapes = sorted(
        (shape for shape in charts.shapes(every) if shape[0] in HEADLINE),
        key=lambda shape: shape[0],  # and by weights within
    )
    if not shapes:
        return NOTHING if not every else "Nothing was measured at the headline's M in this run."
    name = charts.MAIN_FORMAT if charts.MAIN_FORMAT in names else names[0]
    others = [each for each in names if each != name]
    fast = any(row.accuracy == "fast" for row in every)
    head = ["M", "N", "K", "ours", "llama.cpp", "x", "our kernel", "cuBLAS fp16", "x"]
    head += ["fast", "fast kernel"] if fast else []
    lines = [
        f"{name.upper()} on an {run.env.where}, measured in [{Path(source).name}]({source}); in "
        "brackets the range over all formats.",
        "",
        "| " + " | ".join(head) + " |",
        "|--:|--:|--:|:--|--:|:--|:--|--:|:--|" + (":--|:--|" if fast else ""),
    ]
    for shape in shapes:
        cells = [*map(str, shape), *_totals(run, name, others, shape, stale)]
        cells += _kernels(run, name, others, shape, "exact", stale)
        if fast:
            cells += [
                _fast_total(run, name, shape, stale),
                _fast_kernel(run, name, others, shape, stale),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", " ".join(_headline_notes(run, lines[4:], shapes, names))])


def _headline_notes(
    run: Run, lines: Sequence[str], shapes: Sequence[Shape], names: Sequence[str]
) -> list[str]:
    notes = [
        "Ours and llama.cpp: from float32 A to float32 C, activation pass included, weights from "
        "memory.",
        "Kernels: ours without its activation pass, cuBLAS with both operands already float16.",
    ]
    duels = [duel for duel in _duels(run) if duel.shape in shapes]
    if duels:
        notes.append(
            "They were timed in turn, round by round (`results/measure/ab.py`), under sustained load and "
            "in bursts; C is float16 where nothing else is said."
        )
    text = "\n".join(lines)
    if OVERLAPPING in text:
        notes.append(
            f"{OVERLAPPING}: ours may each begin under the one before (programmatic dependent "
            "launch), as a plan launches them; cuBLAS's follow one another."
        )
    if UNPAIRED in text:
        notes.append(f"{UNPAIRED}: not timed in turn; two medians, ours with a float32 C.")
    known = [p for s in shapes for n in names if (p := peer_at(run, "ggml", n, s))]
    if known:
        notes.append(f"llama.cpp's figures are {provenance(known)}.")
        if not all(p.same_run for p in known) and any(p.same_run for p in known):
            notes.append(f"{ELSEWHERE}: of the other run.")
    cublas = [p for s in shapes if (p := peer_at(run, "cublas_fp16", "f16", s))]
    if UNPAIRED in text and not all(p.same_run for p in cublas):
        notes.append(f"cuBLAS's of {UNPAIRED} are {provenance(cublas)}.")
    if any(row.accuracy == "fast" for row in run.rows):
        notes.append(FAST_NOTE)
    if STALE in text:
        notes.append(STALE_NOTE)
    return notes


def _fastest(run: Run, name: str, shape: Shape, accuracy: str, time: str) -> Row | None:
    """The row with the least `time` ("total_us", "kernel_us") of a format at a shape."""
    own = [
        row
        for row in timed(run)
        if (row.format, row.shape, row.accuracy) == (name, shape, accuracy) and getattr(row, time)
    ]
    return min(own, key=lambda row: float(getattr(row, time)), default=None)


def _times(value: float | None, others: Iterable[float | None]) -> str:
    """ "1.02x (1.00-1.04x)": of the format shown, and of all of them."""
    if value is None:
        return ABSENT
    known = [x for x in others if x is not None]
    around = f" ({span([value, *known])})" if known else ""
    return f"{number(value)}x{around}"


def _total_ratio(run: Run, name: str, shape: Shape, accuracy: str) -> float | None:
    peer, best = peer_at(run, "ggml", name, shape), _fastest(run, name, shape, accuracy, "total_us")
    return None if peer is None or best is None else peer.us / float(best.total_us or 0)


def _totals(
    run: Run, name: str, others: Sequence[str], shape: Shape, stale: frozenset[int]
) -> list[str]:
    """ "23.4 us (step 12)", llama.cpp's "89.8 us", "3.84x (3.51-3.84x)"."""
    best, peer = _fastest(run, name, shape, "exact", "total_us"), peer_at(run, "ggml", name, shape)
    mixed = any(p.peer == "ggml" and p.same_run for p in run.peers)
    mark = "" if peer is None or peer.same_run or not mixed else ELSEWHERE
    return [
        ABSENT if best is None else f"{_us(best.total_us)}{_step(best.step, stale)}",
        ABSENT if peer is None else _us(peer.us) + mark,
        _times(
            _total_ratio(run, name, shape, "exact"),
            (_total_ratio(run, other, shape, "exact") for other in others),
        ),
    ]


def _duels(run: Run) -> list[Duel]:
    return [duel for duel in run.duels if duel.status == "ok"]


def _duel(run: Run, name: str, shape: Shape, accuracy: str, pace: str) -> Duel | None:
    """The best of a format at a shape, to float16 or to float32, which is the harder of the two;
    of those where launches follow each other without overlap, if there are any."""
    own = [
        duel
        for duel in _duels(run)
        if (duel.format, duel.shape, duel.accuracy, duel.pace) == (name, shape, accuracy, pace)
        and duel.rival == "cublas_fp16"
    ]
    return max(own, key=lambda duel: (not duel.overlap, duel.x_rival or 0), default=None)


def _kernel_ratio(run: Run, name: str, shape: Shape, accuracy: str) -> float | None:
    """x cuBLAS: of the sustained duel, or of two medians where there is none."""
    if duel := _duel(run, name, shape, accuracy, "sustained"):
        return duel.x_rival
    best = _fastest(run, name, shape, accuracy, "kernel_us")
    us = peer_us(run, "cublas_fp16", "f16", shape)
    return None if best is None or us is None else us / float(best.kernel_us or 0)


def _kernels(
    run: Run,
    name: str,
    others: Sequence[str],
    shape: Shape,
    accuracy: str,
    stale: frozenset[int],
) -> list[str]:
    """ "27.6 us (step 12)", cuBLAS's "28.2 us", "1.02x (1.00-1.04x), burst 1.05x"."""
    ratio = _times(
        _kernel_ratio(run, name, shape, accuracy),
        (_kernel_ratio(run, other, shape, accuracy) for other in others),
    )
    duel = _duel(run, name, shape, accuracy, "sustained")
    if duel is not None:
        burst = next(
            (
                other.x_rival
                for other in _duels(run)
                if (other.key[:-2], other.overlap) == (duel.key[:-2], duel.overlap)
                and other.pace == "burst"
            ),
            None,
        )
        more = "" if burst is None else f", burst {number(burst)}x"
        wide = ", float32 C" if duel.output == "float32" else ""
        own = f"{_us(duel.us)}{wide}{_step(duel.step, stale)}"
        return [own, _us(duel.rival_us), ratio + more + (OVERLAPPING if duel.overlap else "")]
    best = _fastest(run, name, shape, accuracy, "kernel_us")
    us = peer_us(run, "cublas_fp16", "f16", shape)
    mark = "" if ratio == ABSENT else UNPAIRED
    return [
        ABSENT if best is None else f"{_us(best.kernel_us)}{_step(best.step, stale)}",
        _us(us),
        ratio + mark,
    ]


def _fast_total(run: Run, name: str, shape: Shape, stale: frozenset[int]) -> str:
    """ "21.0 us, 4.28x (step 13)": how many times as fast as llama.cpp."""
    best, ratio = (
        _fastest(run, name, shape, "fast", "total_us"),
        _total_ratio(run, name, shape, "fast"),
    )
    if best is None:
        return ABSENT
    more = "" if ratio is None else f", {number(ratio)}x"
    return f"{_us(best.total_us)}{more}{_step(best.step, stale)}"


def _fast_kernel(
    run: Run, name: str, others: Sequence[str], shape: Shape, stale: frozenset[int]
) -> str:
    """ "18.6 us, 1.53x (1.45-1.53x), burst 1.60x": how many times as fast as cuBLAS."""
    own, _, ratio = _kernels(run, name, others, shape, "fast", stale)
    us = own.partition(" (step")[0]
    return ABSENT if own == ABSENT else f"{us}, {ratio}" if ratio != ABSENT else us


def _us(us: float | None) -> str:
    return ABSENT if us is None else f"{number(us)} us"


# ------------------------------------------------------------------- against llama.cpp and cuBLAS

FEW_TOKENS: Final = 16
"""Up to this M products are decode: a table of times, with chains; above it with TFLOPS."""


def peers_table(run: Run, source: str, stale: frozenset[int] = frozenset()) -> str:
    """The fastest step in total time beside llama.cpp, where that has a figure, and cuBLAS."""
    every = [row for row in timed(run) if row.total_us is not None]
    names = formats(every)
    shapes = sorted(
        (
            shape
            for shape in charts.shapes(every)
            if any(peer_at(run, "ggml", name, shape) for name in names)
        ),
        key=lambda shape: shape[0],  # and by weights within
    )
    if not shapes:
        return NOTHING if not every else "llama.cpp has no figure at the shapes of this run."
    cublas = any(peer_at(run, "cublas_fp16", "f16", shape) for shape in shapes)
    head = ["M", "N", "K", *names, *(["cuBLAS fp16"] if cublas else [])]
    lines = [
        "llama.cpp's microseconds -> those of the fastest step, how many times as fast, and which "
        f"step, on an {run.env.where}, measured in [{Path(source).name}]({source}).",
    ]
    for decode in (True, False):
        part = [shape for shape in shapes if (shape[0] <= FEW_TOKENS) == decode]
        if not part:
            continue
        lines += ["", "| " + " | ".join(head) + " |"]
        lines += ["|--:|--:|--:|" + ":--|" * len(names) + ("--:|" if cublas else "")]
        for shape in part:
            cells = [*map(str, shape)]
            cells += [_against(run, every, name, shape, decode, stale) for name in names]
            if cublas:
                cells.append(_figure(peer_us(run, "cublas_fp16", "f16", shape), shape, decode))
            lines.append("| " + " | ".join(cells) + " |")
    known = [p for s in shapes for name in names if (p := peer_at(run, "ggml", name, s))]
    notes = [
        "Compared is the total: from float32 A to float32 C, activation pass included, weights "
        "from memory."
    ]
    if any(row.chain_us is not None and row.M <= FEW_TOKENS for row in every):
        notes.append(
            "Chain: the same when each launch may begin under the one before it (programmatic "
            "dependent launch)."
        )
    if any(row.accuracy == "fast" and row.M > FEW_TOKENS for row in every):
        notes.append(FAST_NOTE)
    notes.append(f"llama.cpp's figures are {provenance(known)}.")
    if not all(p.same_run for p in known) and any(p.same_run for p in known):
        notes.append(f"{ELSEWHERE}: of the other run.")
    if cublas:
        notes.append(_cublas_note(run, set(shapes)))
    if any(STALE in line for line in lines):
        notes.append(STALE_NOTE)
    return "\n".join([*lines, "", " ".join(notes)])


def _against(
    run: Run, rows: Sequence[Row], name: str, shape: Shape, decode: bool, stale: frozenset[int]
) -> str:
    """ "16.4 -> 10.4 us, 1.58x (step 10); chain 8.90 us, 1.84x": of the exact steps the fastest.
    For many tokens the fastest of the others follows."""
    own = [row for row in rows if row.format == name and row.shape == shape]
    exact = [row for row in own if row.accuracy == "exact"]
    best = min(exact, key=lambda row: row.total_us or 0, default=None)
    fast = min(
        (row for row in own if row.accuracy == "fast"),
        key=lambda row: row.total_us or 0,
        default=None,
    )
    peer = peer_at(run, "ggml", name, shape)
    if best is None or best.total_us is None:
        return ABSENT

    def cell_of(us: float, first: str) -> str:
        ratio = "" if peer is None else f", {number(peer.us / us)}x"
        return f"{first}{_figure(us, shape, decode)}{ratio}"

    mark = "" if peer is None or peer.same_run else ELSEWHERE
    mixed = any(p.peer == "ggml" and p.same_run for p in run.peers)
    before = "" if peer is None else f"{number(peer.us)}{mark if mixed else ''} -> "
    text = cell_of(best.total_us, before) + _step(best.step, stale)
    if decode and best.chain_us is not None:
        text += "; " + cell_of(best.chain_us, "chain ")
    if not decode and fast is not None and fast.total_us is not None:
        text += "; " + cell_of(fast.total_us, "fast ") + _step(fast.step, stale)
    return text


def _step(number: int, stale: frozenset[int]) -> str:
    """ " (step 9)", marked where its code has changed since."""
    return f" (step {number}{' ' + STALE if number in stale else ''})"


def _figure(us: float | None, shape: Shape, decode: bool) -> str:
    """ "10.4 us", for many tokens "66.1 us, 260 TFLOPS"."""
    if us is None:
        return ABSENT
    m, n, k = shape
    more = "" if decode else f", {number(2 * m * n * k / us * 1e-6)} TFLOPS"
    return f"{number(us)} us{more}"


def provenance(peers: Sequence[Peer]) -> str:
    """Where figures are from: "of the same run (llama-cpp-python 0.3.16)", or of which other."""

    def who(same_run: bool) -> str:
        sources = (p.source for p in peers if p.same_run == same_run)
        # the first words of a source name the software, its last ones the file of given figures
        short = [re.split(r"[;,] ", source)[0] for source in sources]
        return ", ".join(dict.fromkeys(short))

    here, given = who(True), who(False)
    there = f"of another run on the same GPU model ({given})"
    if here:
        return f"of the same run ({here})" + (f", some {there}" if given else "")
    return there


def _cublas_note(run: Run, shapes: Collection[tuple[int, int, int]]) -> str:
    """What cuBLAS's figures are, and that they are another run's, if so."""
    figures = [p for p in run.peers if p.peer == "cublas_fp16" and p.shape in shapes]
    elsewhere = "" if all(p.same_run for p in figures) else f", {provenance(figures)}"
    return f"cuBLAS: kernel only, both operands already float16{elsewhere}."


# --------------------------------------------------------------------------------------- the README

TABLES: Final = {"headline": headline_table, "ladder": ladder_table, "peers": peers_table}
"""Between the markers of each name stands what its function makes of the run."""


def section(name: str, run_path: Path | None, root: Path = ROOT) -> str:
    """What belongs between the markers, for a run's file (None: nothing measured yet)."""
    if run_path is None:
        return NOTHING
    run = read(run_path)
    path = run_path.resolve()
    source = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    return TABLES[name](run, source.as_posix(), stale_steps(run, root))


def split(text: str, name: str) -> tuple[str, str, str]:
    """(before, between, after) the markers; ValueError unless there is one of each, in order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"needs one {begin} and after it one {end}")
    before, rest = text.split(begin)
    between, after = rest.split(end)
    return before + begin, between, end + after


def rewrite(readme: Path = README, run: Path | None = None, root: Path = ROOT) -> bool:
    """Put the tables of `run` (default: the headline) into the README; whether that changed it."""
    text = new = readme.read_text(encoding="utf-8")
    run = run or headline(root / "results")
    for name in TABLES:
        try:
            before, _, after = split(new, name)
        except ValueError as error:
            raise ValueError(f"{readme.name} {error}") from None
        new = f"{before}\n{section(name, run, root)}\n{after}"
    if new != text:
        readme.write_text(new, encoding="utf-8")
    return new != text


def check(readme: Path = README, run: Path | None = None, root: Path = ROOT) -> list[str]:
    """What docs-check has to say of the README's tables: one sentence per line that drifted."""
    if not readme.exists():
        return [f"{readme.name} does not exist"]
    text, run = readme.read_text(encoding="utf-8"), run or headline(root / "results")
    cure = "`python -m results.render.tables` rewrites it"
    found: list[str] = []
    for name in TABLES:
        try:
            _, between, _ = split(text, name)
        except ValueError as error:
            found.append(f"{readme.name} {error}")
            continue
        have = between.strip("\n").split("\n")
        want = section(name, run, root).split("\n")
        if len(have) != len(want):
            found.append(
                f"{readme.name}: the {name} table has {len(have)} lines, the run gives "
                f"{len(want)}; {cure}"
            )
            continue
        found += [
            f"{readme.name}: {old!r} should be {new!r}; {cure}"
            for old, new in zip(have, want, strict=True)
            if old != new
        ]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = charts.parser_of("report", __doc__)
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
