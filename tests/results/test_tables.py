"""The README's table: generated between markers, found out when a digit drifts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from results.record import schema as record
from results.record.schema import Environment, Run
from results.render import tables as report
from tests.results.synthetic_run import FORMATS, make_run

README = "# Title\n\n<!-- headline:begin -->\n<!-- headline:end -->\n\nbefore\n\n"
README += "<!-- ladder:begin -->\n<!-- ladder:end -->\n\nbetween\n\n"
README += "<!-- peers:begin -->\n<!-- peers:end -->\n\nafter\n"


@pytest.fixture
def tree(tmp_path):
    """A project folder with a README, one run, and no step sources."""
    (tmp_path / "README.md").write_text(README)
    record.write(make_run(), tmp_path / "results")
    return tmp_path


def rewritten(tree) -> str:
    assert report.rewrite(tree / "README.md", root=tree)
    return (tree / "README.md").read_text()


def test_rewrite_touches_only_what_is_between_the_markers_and_is_idempotent(tree):
    text = rewritten(tree)
    assert text.startswith("# Title\n\n<!-- headline:begin -->\nQ4_0 on an NVIDIA H200 @ 700 W, ")
    assert "<!-- headline:end -->\n\nbefore\n\n<!-- ladder:begin -->\nKernel TFLOPS" in text
    assert "<!-- ladder:end -->\n\nbetween\n\n<!-- peers:begin -->\nllama.cpp's" in text
    assert text.endswith("<!-- peers:end -->\n\nafter\n")
    assert not report.rewrite(tree / "README.md", root=tree)
    assert report.check(tree / "README.md", root=tree) == []


def test_the_table_says_where_from_and_holds_every_rung_and_format(tree):
    text = rewritten(tree)
    assert "NVIDIA H200 @ 700 W" in text
    assert "(results/nvidia-h200/2026-01-02-0123abcd.json)" in text
    assert "M=512, N=4096, K=4096" in text
    assert all(f"| {name} " in text for name in FORMATS)
    ladder, peers = text.split("before")[1].split("between")
    lines = [line for line in ladder.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 16 + 2
    lines = [line for line in peers.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 * 1 + 17  # llama.cpp has no figure at one of the 18 shapes
    assert "llama.cpp (total)" in text
    assert "cuBLAS fp16 (kernel)" in text


def test_a_digit_changed_by_hand_is_found(tree):
    text = rewritten(tree)
    readme = tree / "README.md"
    readme.write_text(text.replace("26.5", "27.5", 1))
    (sentence,) = report.check(readme, root=tree)
    assert "27.5" in sentence
    assert "26.5" in sentence


def test_a_new_run_and_a_removed_line_are_found(tree):
    text = rewritten(tree)
    readme = tree / "README.md"
    readme.write_text(text.replace("\n| 4", "\nx| 4", 1))
    assert len(report.check(readme, root=tree)) == 1
    readme.write_text(text.replace("| | llama.cpp", "", 1).replace("\n\nllama", "\nllama"))
    assert report.check(readme, root=tree)
    readme.write_text(text)
    newer = make_run()
    newer = replace(
        newer,
        env=replace(newer.env, utc="2026-03-03T00:00:00Z"),
        rows=tuple(replace(r, tflops=(r.tflops or 0) * 1.1) for r in newer.rows),
    )
    record.write(newer, tree / "results")
    assert len(report.check(readme, root=tree)) >= 6


def test_missing_markers_or_readme_are_sentences(tree):
    readme = tree / "README.md"
    readme.write_text("nothing")
    assert "needs one" in report.check(readme, root=tree)[0]
    with pytest.raises(ValueError, match="needs one"):
        report.rewrite(readme, root=tree)
    readme.unlink()
    assert report.check(readme, root=tree) == ["README.md does not exist"]


def test_nothing_measured_yet(tmp_path):
    (tmp_path / "README.md").write_text(README)
    assert report.rewrite(tmp_path / "README.md", root=tmp_path)
    assert report.NOTHING in (tmp_path / "README.md").read_text()
    assert report.check(tmp_path / "README.md", root=tmp_path) == []


def test_stale_steps_are_marked(tree):
    ladder = rewritten(tree).split("before")[1].split("between")[0]
    assert ladder.count(report.STALE) == 17  # no sources at all: every rung, and the note
    (tree / "steps").mkdir()
    (tree / "steps" / "step04_dp4a_emulated.py").write_text("x = 1\n")
    now = record.source_hash(4, tree)
    run = make_run()
    rows = tuple(replace(r, source_hash=now) if r.step == 4 else r for r in run.rows)
    path = record.headline(tree / "results")
    record.write(replace(run, rows=rows), path=path)
    (line,) = (x for x in rewritten(tree).splitlines() if "dot products packed" in x)
    assert line.startswith("| 4 |")


def test_a_coarse_step_is_marked_and_is_in_no_column_of_others() -> None:
    run = make_run()
    table = report.ladder_table(run, "r.json")
    marks = {x.split(" | ")[0]: x for x in table.splitlines() if x.startswith("| 1")}
    assert "(fast)" in marks["| 13"]
    assert "(coarse)" in marks["| 14"]
    assert not any("(" + each in marks["| 12"] for each in ("fast", "coarse"))
    assert report.FAST_NOTE in table
    assert report.COARSE_NOTE in table
    fastest = [r.kernel_us for r in run.rows if r.step == 14 and r.M == 512]
    assert min(fastest) < min(r.kernel_us for r in run.rows if r.step == 13 and r.M == 512)
    for others in (report.peers_table, report.headline_table):
        assert "(step 13)" in others(run, "r.json")
        assert "(step 14)" not in others(run, "r.json")


# --- the headline ---------------------------------------------------------------------------------

HEAD = ["M", "N", "K", "ours", "llama.cpp", "x", "our kernel", "cuBLAS fp16", "x"]


def headline_cells(run: Run, m: int, n: int, k: int, stale=frozenset()) -> list[str]:
    table = report.headline_table(run, "r.json", stale)
    (line,) = (x for x in table.splitlines() if x.startswith(f"| {m} | {n} | {k} |"))
    return line.strip("| ").split(" | ")[3:]


def test_the_headline_is_of_one_run_and_every_m():
    run = make_run()
    table = report.headline_table(run, "results/x/r.json")
    assert table.startswith(
        "Q4_0 on an NVIDIA H200 @ 700 W, measured in [r.json](results/x/r.json)"
    )
    head, _, *lines = (line for line in table.splitlines() if line.startswith("|"))
    assert head.strip("| ").split(" | ") == [*HEAD, "fast", "fast kernel"]
    assert [line.split(" | ")[0] for line in lines] == [
        f"| {m}" for m in (1, 16, 128, 512, 4096) for _ in range(3)
    ]
    rows = tuple(row for row in run.rows if row.accuracy == "exact")
    exact = report.headline_table(replace(run, rows=rows), "r.json")
    assert exact.splitlines()[2].strip("| ").split(" | ") == HEAD
    assert "step 13" not in exact


def test_totals_are_of_exact_steps_and_the_range_is_over_the_formats():
    run, shape = make_run(), (512, 4096, 4096)
    best, ratios = {}, {}
    for name in FORMATS:
        rows = of(run, M=512, N=4096, K=4096, format=name, accuracy="exact", output="float32")
        best[name] = min(rows, key=lambda row: row.total_us)
        ratios[name] = report.peer_us(run, "ggml", name, shape) / best[name].total_us
    low, high = (report.number(f(ratios.values())) for f in (min, max))
    ours, theirs, times, *_ = headline_cells(run, *shape)
    assert ours == f"{report.number(best['q4_0'].total_us)} us (step 12)"
    assert theirs == "95.4 us"
    assert times == f"{report.number(ratios['q4_0'])}x ({low}-{high}x)"
    assert headline_cells(run, 1, 4096, 4096)[0].endswith("us (step 10)")
    assert headline_cells(run, *shape, frozenset({12}))[0].endswith(f"(step 12 {report.STALE})")


def test_kernels_are_those_of_the_best_duel():
    run = make_run()
    duels = [d for d in run.duels if (d.shape, d.format) == ((512, 4096, 4096), "q4_0")]
    best = {
        pace: max(
            (d for d in duels if d.pace == pace and d.accuracy == "exact"), key=lambda d: d.x_rival
        )
        for pace in ("sustained", "burst")
    }
    assert best["sustained"].output == "float16"
    ours, theirs, times, _, fast = headline_cells(run, 512, 4096, 4096)[3:]
    assert ours == f"{report.number(best['sustained'].us)} us (step 12)"
    assert theirs == f"{report.number(best['sustained'].rival_us)} us"
    assert times.startswith(f"{report.number(best['sustained'].x_rival)}x (")
    assert times.endswith(f"burst {report.number(best['burst'].x_rival)}x")
    quick = max((d for d in duels if d.accuracy == "fast"), key=lambda d: d.x_rival)
    assert fast.startswith(
        f"{report.number(min(d.us for d in duels if d.step == 13 and d.pace == 'sustained'))} us"
    )
    assert fast.endswith(f"burst {report.number(quick.x_rival)}x")
    wide = replace(run, duels=tuple(d for d in run.duels if d.output == "float32"))
    assert headline_cells(wide, 512, 4096, 4096)[3].endswith("us, float32 C (step 12)")
    note = report.headline_table(run, "r.json").splitlines()[-1]
    assert "timed in turn" in note


def test_a_duel_that_failed_does_not_count():
    run = make_run()
    failed = {"status": "failed", "why": "wrong"}
    none = replace(run, duels=tuple(replace(d, **failed) for d in run.duels))
    ours, theirs, times = headline_cells(none, 512, 4096, 4096)[3:6]
    (row,) = of(run, step=12, M=512, N=4096, K=4096, format="q4_0", output="float32")
    assert ours == f"{report.number(row.kernel_us)} us (step 12)"
    assert theirs == "24.9 us"
    assert times.endswith(report.UNPAIRED)
    note = report.headline_table(none, "r.json").splitlines()[-1]
    assert "in turn, round" not in note
    assert "not timed in turn; two medians, ours with a float32 C" in note


def test_overlapping_launches_are_marked_and_come_second():
    run = make_run()
    over = tuple(replace(d, overlap=True, x_rival=9.0) for d in run.duels)
    cells = headline_cells(replace(run, duels=over), 512, 4096, 4096)
    assert cells[5].startswith("9.00x (9.00")
    assert cells[5].endswith(report.OVERLAPPING)
    note = report.headline_table(replace(run, duels=over), "r.json").splitlines()[-1]
    assert f"{report.OVERLAPPING}: ours may each begin under the one before" in note
    both = headline_cells(replace(run, duels=(*over, *run.duels)), 512, 4096, 4096)
    assert both == headline_cells(run, 512, 4096, 4096)
    assert report.OVERLAPPING not in report.headline_table(run, "r.json")


def test_what_is_not_of_this_run_is_marked_in_the_headline():
    run = make_run()
    given = next(p for p in run.peers if (p.format, p.shape) == ("q4_0", (1, 4096, 14336)))
    here = replace(given, us=99.0, same_run=True, source="llama-cpp-python 9 (ggml 1), clock")
    mixed = replace(run, peers=(*run.peers, here))
    assert headline_cells(mixed, 1, 4096, 14336)[1] == "99.0 us"
    assert headline_cells(mixed, 1, 4096, 4096)[1].endswith(f" us{report.ELSEWHERE}")
    note = report.headline_table(mixed, "r.json").splitlines()[-1]
    assert "of the same run (llama-cpp-python 9 (ggml 1)), some of another run" in note
    peers = tuple(replace(p, same_run=False) for p in run.peers)
    note = report.headline_table(replace(run, peers=peers), "r.json").splitlines()[-1]
    assert f"cuBLAS's of {report.UNPAIRED} are of another run on the same GPU model" in note
    assert report.headline_table(run, "r.json", frozenset({10})).count(report.STALE) > 6


def test_a_headline_of_little():
    assert report.headline_table(Run(env=Environment()), "r.json") == report.NOTHING
    few = make_run(((8, 4096, 4096),))
    assert "Nothing was measured at the headline's M" in report.headline_table(few, "r.json")
    alone = make_run(((512, 64, 32),), formats=("q8_0",), peers=False)
    assert headline_cells(alone, 512, 64, 32)[1:6] == ["-", "-", "2.50 us (step 1)", "-", "-"]
    assert report.headline_table(alone, "r.json").startswith("Q8_0 on an")


# --- against llama.cpp and cuBLAS -----------------------------------------------------------------


def peers_cells(run: Run, m: int, n: int, k: int, stale=frozenset()) -> list[str]:
    table = report.peers_table(run, "r.json", stale)
    (line,) = (x for x in table.splitlines() if x.startswith(f"| {m} | {n} | {k} |"))
    return line.strip("| ").split(" | ")[3:]


def of(run: Run, **fields) -> list:
    return [r for r in run.rows if all(getattr(r, key) == x for key, x in fields.items())]


def test_the_fastest_step_in_total_time_is_set_against_llama_cpp():
    run = make_run()
    rows = of(run, M=1, N=4096, K=14336, format="q4_0")
    best = min(rows, key=lambda row: row.total_us)
    (peer,) = (p for p in run.peers if (p.format, p.shape) == ("q4_0", best.shape))
    times = [report.number(us) for us in (peer.us, best.total_us, best.chain_us)]
    ratios = [report.number(peer.us / us) for us in (best.total_us, best.chain_us)]
    cells = peers_cells(run, 1, 4096, 14336)
    assert best.step == 10
    assert len(cells) == 5 + 1
    assert cells[0] == (
        f"{times[0]} -> {times[1]} us, {ratios[0]}x (step 10); chain {times[2]} us, {ratios[1]}x"
    )
    assert cells[5] == "32.6 us"


def test_many_tokens_have_tflops_and_no_chain():
    cells = peers_cells(make_run(), 512, 4096, 4096)
    assert "TFLOPS" in cells[0]
    assert "(step 12)" in cells[0]
    assert "chain" not in cells[0]
    assert cells[5] == "24.9 us, 690 TFLOPS"


def test_a_figure_of_the_same_run_counts_and_where_from_is_said():
    run = make_run()
    given = next(p for p in run.peers if (p.format, p.shape) == ("q4_0", (1, 4096, 14336)))
    here = replace(
        given, us=99.0, same_run=True, source="llama-cpp-python 9 (ggml 1), by the clock"
    )
    mixed = replace(run, peers=(*run.peers, here))
    cells = peers_cells(mixed, 1, 4096, 14336)
    assert cells[0].startswith("99.0 -> ")
    assert cells[1].split()[0].endswith(report.ELSEWHERE)
    note = report.peers_table(mixed, "r.json").splitlines()[-1]
    assert "of the same run (llama-cpp-python 9 (ggml 1)), some of another run" in note
    note = report.peers_table(run, "r.json").splitlines()[-1]
    assert "llama.cpp's figures are of another run on the same GPU model (invented)." in note
    assert "*" not in report.peers_table(run, "r.json")


def test_what_failed_is_not_the_fastest_and_a_stale_one_is_marked():
    run = make_run()
    rows = tuple(
        replace(r, status="failed", why="wrong") if r.step in (9, 10, 11, 12) else r
        for r in run.rows
    )
    (first, *_) = peers_cells(replace(run, rows=rows), 512, 4096, 4096, frozenset({8}))
    assert f"(step 8 {report.STALE})" in first


def test_a_step_that_is_not_exact_is_never_the_fastest_but_stands_beside_it():
    run = make_run()
    (fast,) = of(run, step=13, M=512, N=4096, K=4096, format="q4_0", output="float32")
    (exact,) = of(run, step=12, M=512, N=4096, K=4096, format="q4_0", output="float32")
    assert fast.total_us < exact.total_us
    cell = peers_cells(run, 512, 4096, 4096)[0]
    first, second = cell.split("; ")
    assert f"-> {report.number(exact.total_us)} us" in first
    assert "(step 12)" in first
    assert second.startswith(f"fast {report.number(fast.total_us)} us")
    assert second.endswith("(step 13)")
    assert "fast: " in report.peers_table(run, "r.json").splitlines()[-1]
    without = replace(run, rows=tuple(r for r in run.rows if r.accuracy == "exact"))
    assert "fast" not in report.peers_table(without, "r.json").replace("fastest", "").replace(
        "as fast", ""
    )


def test_without_llama_cpp_there_is_nothing_to_compare():
    assert "no figure" in report.peers_table(make_run(peers=False), "r.json")
    assert report.peers_table(Run(env=Environment()), "r.json") == report.NOTHING


def test_what_was_not_measured_is_a_dash_and_a_failure_says_so():
    run = make_run(peers=False)
    rows = []
    for row in run.rows:
        if row.step == 4 and row.format == "q5_1":
            continue
        if row.step == 5 and row.format == "q8_0":
            row = replace(row, status="failed", why="wrong")
        if row.step == 5 and row.format == "q4_1":
            row = replace(row, status="unsupported", why="no")
        rows.append(row)
    table = report.ladder_table(Run(env=run.env, rows=tuple(rows)), "r.json")
    four, five = (
        line.split(" | ") for line in table.splitlines() if line.startswith(("| 4", "| 5"))
    )
    assert four[6] == "-"
    assert five[4] == "-"
    assert five[7] == "failed"
    assert "llama.cpp" not in table


def test_a_run_without_figures_has_no_table():
    assert report.ladder_table(Run(env=Environment()), "r.json") == report.NOTHING


def test_numbers_have_three_digits_and_ranges():
    assert [report.number(x) for x in (0.042, 0.5, 0.996, 1, 9.999, 12, 99.97, 188.4)] == [
        "0.042",
        "0.50",
        "1.00",
        "1.00",
        "10.0",
        "12.0",
        "100",
        "188",
    ]
    assert report.span([2.0, None, 2.5]) == "2.00-2.50x"
    assert report.span([None]) == "-"
    assert report.percent([0.018, 0.42]) == "2-42 %"
    assert report.percent([0.004]) == "0.4 %"


def test_command_line(tree, capsys):
    run = str(record.headline(tree / "results"))
    readme = str(tree / "README.md")
    assert report.main([run, "--readme", readme]) == 0
    assert "rewritten" in capsys.readouterr().out
    assert report.main([run, "--readme", readme, "--check"]) == 1  # its charts are not drawn yet
    errors = capsys.readouterr().err
    assert "README" not in errors
    assert "is missing: run `make charts`" in errors or "does not show" in errors


@pytest.mark.parametrize("table", [report.ladder_table, report.peers_table])
def test_figures_of_cublas_from_another_run_are_said_to_be(table):
    run = make_run()
    ours = table(run, "run.json")
    assert "cuBLAS: kernel only, both operands already float16." in ours
    peers = tuple(
        replace(peer, same_run=False) if peer.peer == "cublas_fp16" else peer for peer in run.peers
    )
    theirs = table(replace(run, peers=peers), "run.json")
    assert "already float16, of another run on the same GPU model" in theirs
