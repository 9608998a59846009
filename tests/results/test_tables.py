"""Generated tables: between markers in README.md, and results/RESULTS.md. A drift is a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from results.baselines.humming import W4A16
from results.record import store
from results.record.provenance import called_hash, source_hash
from results.record.schema import Environment, Row, Run
from results.render import charts, complete, query, readme, staleness, tables
from results.render.arguments import NOTHING
from tests.results.synthetic_run import FORMATS, LADDER, make_run

README = "# Title\n\n<!-- ladder:begin -->\n<!-- ladder:end -->\n\nbetween\n\n"
README += "<!-- called:begin -->\n<!-- called:end -->\n\nafter\n"
WIDEST = 200


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run(formats=("q4_0", "q5_1"))


@pytest.fixture
def tree(tmp_path, run):
    """A project folder with a README, one run, its charts, and no step sources."""
    (tmp_path / "README.md").write_text(README)
    path = store.write(run, tmp_path / "results" / "nvidia-h200" / "run.json")
    folder = tmp_path / "results" / "charts"
    folder.mkdir()
    for name in charts.plans(run):  # as far as a check looks at them
        (folder / f"{name}.svg").write_text(charts.digest(store.read(path)))
    return tmp_path


def rewritten(tree) -> str:
    tables.rewrite(tree)
    return (tree / "README.md").read_text()


def lines_of(table: str) -> list[list[str]]:
    """The cells of each line, without the head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in lines[2:]]


def cells(line: list[str]) -> list[str]:
    return [cell.strip() for cell in line]


# --- between the markers --------------------------------------------------------------------------


def test_rewrite_touches_only_what_is_between_the_markers_and_is_idempotent(tree) -> None:
    assert {path.name for path in tables.rewrite(tree)} == {"README.md", "RESULTS.md"}
    text = (tree / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- ladder:begin -->\nQ4_0 on an NVIDIA H200 @ 700 W")
    assert "<!-- ladder:end -->\n\nbetween\n\n<!-- called:begin -->\nQ4_0, float16 in" in text
    assert text.endswith("<!-- called:end -->\n\nafter\n")
    assert tables.rewrite(tree) == []
    assert tables.check(tree) == []


def test_generated_lines_of_the_readme_are_short(tree, run) -> None:
    stale = staleness.stale_keys(run, tree)
    assert len(stale) == len(run.rows) + len(run.as_called), "the longest the tables can get"
    text = rewritten(tree)
    assert max(map(len, text.splitlines())) < WIDEST
    for make in (readme.ladder_table, readme.called_table):
        (_, *_), *_ = table = lines_of(make(run, "results/nvidia-h200/run.json", stale))
        assert {len(line) for line in table} <= {6, 7}


def test_a_digit_changed_by_hand_is_one_sentence(tree) -> None:
    text = rewritten(tree)
    file = tree / "README.md"
    assert text.count("| 26.5 |") == 1
    file.write_text(text.replace("| 26.5 |", "| 27.5 |"))
    (sentence,) = tables.check(tree)
    assert sentence.startswith("README.md, the ladder table: line ")
    assert "27.5" in sentence
    assert "26.5" in sentence
    assert sentence.endswith("run `make charts`")


def test_a_removed_line_and_a_new_run_are_found(tree, run) -> None:
    text = rewritten(tree)
    file = tree / "README.md"
    file.write_text(text.replace("\n| 16 |", "\nx| 16 |", 1))
    assert len(tables.check(tree)) == 1
    kept = [line for line in text.splitlines() if not line.startswith("| 4096 |")]
    file.write_text("\n".join(kept) + "\n")
    (sentence,) = tables.check(tree)
    assert "the called table: line" in sentence
    assert "is nothing" in sentence
    file.write_text(text)
    faster = tuple(replace(row, kernel_us=(row.kernel_us or 0) / 1.1) for row in run.rows)
    store.write(replace(run, rows=faster), tree / "results" / "nvidia-h200" / "run.json")
    said = " ".join(tables.check(tree))
    assert "the ladder table" in said
    assert "results/RESULTS.md" in said
    assert "charts/ladder.svg shows another state of the run" in said
    assert "the called table" not in said, "its figures are the same"


def test_missing_markers_or_files_are_sentences(tree) -> None:
    rewritten(tree)
    file = tree / "README.md"
    file.write_text("nothing")
    assert "README.md needs one <!-- ladder:begin -->" in tables.check(tree)[0]
    with pytest.raises(ValueError, match=r"README\.md needs one"):
        tables.rewrite(tree)
    file.unlink()
    (tree / "results" / "RESULTS.md").unlink()
    first, second = tables.check(tree)
    assert first == "README.md does not exist"
    assert second == "results/RESULTS.md is missing: run `make charts`"


def test_nothing_measured_yet_passes_only_where_that_is_said(tmp_path, capsys) -> None:
    file = tmp_path / "README.md"
    file.write_text(README)
    assert tables.main(["--check", "--root", str(tmp_path)]) == 1
    assert NOTHING in capsys.readouterr().out
    assert tables.main(["--root", str(tmp_path)]) == 0
    assert file.read_text().count(NOTHING) == 2
    assert NOTHING in (tmp_path / "results" / "RESULTS.md").read_text()
    capsys.readouterr()
    assert tables.main(["--check", "--root", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert NOTHING in said.out
    assert said.err == ""


def test_a_folder_without_a_readme_is_refused(tmp_path, capsys) -> None:
    """Such as where the project is installed."""
    with pytest.raises(SystemExit):
        tables.main(["--root", str(tmp_path)])
    assert f"{tmp_path} has no README.md: name a checkout with --root" in capsys.readouterr().err


def test_command_line(tree, capsys) -> None:
    assert tables.main(["--root", str(tree)]) == 0
    assert "README.md" in capsys.readouterr().out
    assert tables.main(["--root", str(tree), "--check"]) == 0
    (tree / "results" / "charts" / "error.svg").unlink()
    assert tables.main(["--root", str(tree), "--check"]) == 1
    said = capsys.readouterr().err
    assert said == "charts/error.svg is missing: run `make charts`\n"


# --- the ladder -----------------------------------------------------------------------------------


def test_the_ladder_has_a_line_per_step_and_one_per_branch(run) -> None:
    lines = [cells(line) for line in lines_of(readme.ladder_table(run, "r.json"))]
    steps = [line for line in lines if line[0]]
    assert len(lines) == len(steps) + 4
    assert next(line[1].partition("**,")[0] for line in lines if not line[0]) == "**CUDA cores"
    for panel in query.ladder(run):
        for rung in panel.rungs:
            row = rung.row
            (line,) = (line for line in steps if line[0] == f"[{row.step}](steps/{row.name}.py)")
            assert line[2:] == [
                query.number(row.kernel_us or 0),
                query.number(row.tflops or 0),
                query.ratio(row.x_parent) if row.x_parent else "",
                query.percent(row.limit_share),
            ]
    assert len(steps) == len({step for step, *_ in LADDER})


def test_a_parent_of_another_loop_is_said(run) -> None:
    assert readme.RATIO_NOTE not in readme.ladder_table(run, "r.json")
    rows = tuple(replace(row, x_parent=None) if row.step == 6 else row for row in run.rows)
    assert readme.RATIO_NOTE in readme.ladder_table(replace(run, rows=rows), "r.json")


def test_a_step_away_from_home_or_not_exact_says_so(run) -> None:
    table = readme.ladder_table(run, "r.json")
    (tenth,) = (line for line in table.splitlines() if line.startswith("| [10]"))
    assert ", at 128 x 4096 x 4096 |" in tenth
    assert table.count(", at ") == 2, "and the sentence above"
    assert "(fast)" in next(line for line in table.splitlines() if line.startswith("| [15]"))


def test_what_failed_says_so_and_what_was_not_measured_is_left_out(run) -> None:
    rows = tuple(
        replace(row, status="failed", why="wrong", kernel_us=None, tflops=None, x_parent=None)
        if row.step == 4
        else row
        for row in run.rows
        if row.step != 5
    )
    table = readme.ladder_table(replace(run, rows=rows), "r.json")
    (fourth,) = (cells(line) for line in lines_of(table) if "[4]" in line[0])
    assert fourth[2:5] == ["failed", "-", ""]
    assert "[5]" not in table
    assert readme.ladder_table(Run(env=Environment()), "r.json") == NOTHING


def test_a_call_that_would_choose_another_step_today_is_stale() -> None:
    path = store.headline()
    assert path is not None
    run = store.read(path)
    one = next(call for call in run.as_called if call.step == 14 and call.api == "gemm.plan")
    made = {"step": 10, "source_hash": called_hash(one.api, 10)}
    for fresh, changes in ((True, {"source_hash": called_hash(one.api, 14)}), (False, made)):
        changed = replace(run, rows=(), as_called=(replace(one, **changes),))
        assert (one.key not in staleness.stale_keys(changed)) is fresh
    unknown = replace(run, env=Environment(), rows=(), as_called=(replace(one, **made),))
    assert staleness.stale_keys(unknown) == frozenset()


def test_stale_steps_are_marked(tree, run) -> None:
    assert (
        readme.ladder_table(run, "r.json", staleness.stale_keys(run, tree)).count("(stale)") == 18
    )
    (tree / "steps").mkdir()
    (tree / "steps" / "step04_dp4a_emulated.py").write_text("x = 1\n")
    now = source_hash(4, tree)
    rows = tuple(replace(r, source_hash=now) if r.step == 4 else r for r in run.rows)
    stale = staleness.stale_keys(replace(run, rows=rows), tree)
    marked = readme.ladder_table(replace(run, rows=rows), "r.json", stale).splitlines()
    assert [line[:4] for line in marked if line.startswith("| [") and "(stale)" not in line] == [
        "| [4"
    ]
    assert staleness.STALE not in readme.ladder_table(run, "r.json")


# --- what a caller gets ---------------------------------------------------------------------------


def test_what_a_caller_gets_is_float16_beside_the_baselines(run) -> None:
    lines = [cells(line) for line in lines_of(readme.called_table(run, "r.json"))]
    assert [int(line[0]) for line in lines] == [size[0] for size in readme.CALLED]
    for size, line in zip(readme.CALLED, lines, strict=True):
        exact, fast = (
            query.called(run, "QuantLinear", accuracy, "float16", size)
            for accuracy in ("exact", "fast")
        )
        assert exact is not None
        assert fast is not None
        theirs = query.baseline_us(run, query.LLAMA_CPP, "q4_0", size)
        layer = query.baseline_us(run, W4A16, "q4_0", size)
        times = (exact.us, fast.us, exact.cublas_us, theirs, layer)
        assert line[2:] == [query.cell(us) for us in times]


def test_llama_cpp_of_another_run_and_missing_figures_are_said(run) -> None:
    first, second, *_ = readme.called_table(run, "r.json").splitlines()
    assert first.endswith("llama.cpp: float32 in and out, from another run.")
    assert second == "Humming W4A16: from another run."
    here = tuple(replace(peer, same_run=True) for peer in run.peers)
    first, second, *_ = readme.called_table(replace(run, peers=here), "r.json").splitlines()
    assert first.endswith("llama.cpp: float32 in and out.")
    assert second == ""
    exact = tuple(one for one in run.as_called if one.accuracy == "exact")
    lines = lines_of(readme.called_table(replace(run, as_called=exact, peers=()), "r.json"))
    assert all(cells(line)[3] == cells(line)[5] == "-" for line in lines)
    assert readme.called_table(replace(run, as_called=()), "r.json") == NOTHING


def test_a_stale_call_is_marked(run) -> None:
    one = query.called(run, "QuantLinear", "exact", "float16", readme.CALLED[0])
    assert one is not None
    table = readme.called_table(run, "r.json", {one.key})
    assert f"| {query.number(one.us)} (stale) |" in table
    assert staleness.STALE_NOTE in table


# --- results/RESULTS.md ---------------------------------------------------------------------------


def test_results_are_reproducible_and_hold_every_row_at_home(tree, run) -> None:
    text = complete.page(tree)
    assert complete.page(tree) == text
    for row in (r for r in run.rows if r.home):
        assert f"| {row.step} (stale) | {row.scheme} | {row.format.upper()} |" in text
    body = text.split("### Each step at its home shapes")[1].split("\n### ")[0]
    assert len([line for line in body.splitlines() if "(stale)" in line]) == sum(
        row.home for row in run.rows
    )


def test_results_hold_what_a_caller_gets_the_tops_and_the_baselines(tree, run) -> None:
    text = complete.page(tree)
    calls = text.split("### What a caller gets")[1].split("\n### ")[0]
    heads = [line.strip("# ") for line in calls.splitlines() if line.startswith("####")]
    assert heads == [
        *("Q4_0", "Q5_1"),
        "gemm.plan float32, Q4_0, in detail",
        *(f"QuantLinear {dtype}, Q4_0, in detail" for dtype in ("float32", "float16", "bfloat16")),
        *(f"QuantLinear {dtype}, fast, Q4_0, in detail" for dtype in ("float16", "bfloat16")),
    ]
    tabled = query.tabled(run)
    assert len(tabled) < len(run.as_called)
    for name in ("q4_0", "q5_1"):
        own = [one for one in tabled if one.format == name]
        table = calls.split(f"#### {name.upper()}\n")[1].split("\n####")[0]
        assert len(lines_of(table)) == len({one.shape for one in own})
        for one in own:
            assert f"| {query.number(one.us)}, {query.ratio(one.x_cublas)} (stale) |" in table
        assert ("Humming W4A16" in table) == (name == "q4_0")
    least = calls.split("#### ")[0]
    own = [one for one in tabled if one.M == 512 and one.dtype == "bfloat16"]
    exact = [
        min(o.x_cublas for o in own if (o.format, o.accuracy) == (name, "exact"))
        for name in ("q4_0", "q5_1")
    ]
    (line,) = (cells(line) for line in lines_of(least) if cells(line)[0] == "512")
    assert line[2] == query.span(exact)
    tops = text.split("### The last step of each branch at every shape")[1].split("\n### ")[0]
    assert [line for line in tops.splitlines() if line.startswith("####")] == [
        "#### Step 10, float32",
        *(f"#### Step {n}, {dtype}" for n in (14, 15) for dtype in ("float32", "float16")),
        "#### Step 18, float32",
    ]
    (row,) = (
        row
        for row in run.rows
        if (row.step, row.shape, row.format, row.output)
        == (14, (4096, 4096, 14336), "q5_1", "float32")
    )
    times = f"{query.number(row.kernel_us or 0)} / {query.number(row.total_us or 0)}, "
    assert times in tops
    others = text.split("### Baselines")[1].split("\n### ")[0]
    assert len(lines_of(others)) == len({peer.shape for peer in run.peers})
    assert "- llama.cpp: invented. From another run on the same GPU model" in others
    assert "- dp4a: 125 T operations/s" in text


def test_results_hold_the_sweep_and_say_where_time_jumps(tree, run) -> None:
    def section() -> str:
        return complete.page(tree).split("### Every number of tokens")[1].split("\n### ")[0]

    assert "drawn in tokens.svg (stale)" in section()
    assert "| QuantLinear | 4096 x 4096 | 18 (M=1-16), 14 (M=17-48) |" in section()
    assert "| QuantLinear, fast | 14336 x 4096 | 18 (M=1-16), 15 (M=17-48) |" in section()
    assert "Nowhere does one token more take more than 1.15 times as long." in section()
    path = tree / "results" / "nvidia-h200" / "run.json"
    jump = tuple(replace(one, us=9 * one.us) if one.M == 33 else one for one in run.as_called)
    store.write(replace(run, as_called=jump), path)
    found = query.cliffs(store.read(path))
    assert found
    assert "One token more takes more than 1.15 times as long here:" in section()
    lines = [line for line in section().splitlines() if line.startswith("- ")]
    assert len(lines) == len(found)
    assert all(": M=32 " in line and ", M=33 " in line for line in lines)
    none = replace(run, as_called=tuple(query.tabled(run)))
    store.write(none, path)
    assert "### Every number of tokens" not in complete.page(tree)


def test_results_have_a_section_per_gpu_the_largest_first(tree, run) -> None:
    few = replace(run, env=replace(run.env, gpu="NVIDIA H100"), rows=run.rows[:9], as_called=())
    store.write(few, tree / "results" / "nvidia-h100" / "run.json")
    heads = [line for line in complete.page(tree).splitlines() if line.startswith("## ")]
    assert heads == ["## NVIDIA H200 @ 700 W", "## NVIDIA H100 @ 700 W"]


def test_failed_and_stale_rows_are_listed(tree, run) -> None:
    def broken(row: Row) -> Row:
        return replace(row, status="failed", why="it is wrong") if row.step == 7 else row

    path = tree / "results" / "nvidia-h200" / "run.json"
    store.write(replace(run, rows=tuple(map(broken, run.rows))), path)
    last = complete.page(tree).split("### Failed, not possible, stale")[1]
    count = sum(row.step == 7 for row in run.rows)
    assert f"- step 7, failed: it is wrong ({count} rows)" in last
    assert "- step 18, stale: " in last
    assert "- QuantLinear with step 14, stale: " in last


def test_numbers_have_three_digits_and_ranges() -> None:
    assert [query.number(x) for x in (0.042, 0.5, 0.996, 1, 9.999, 12, 99.97, 188.4)] == [
        "0.042",
        "0.50",
        "1.00",
        "1.00",
        "10.0",
        "12.0",
        "100",
        "188",
    ]
    assert [query.ratio(x) for x in (None, 0.5, 1.018, 19.4, 53.2)] == [
        "-",
        "0.50x",
        "1.02x",
        "19.4x",
        "53x",
    ]
    assert [query.percent(x) for x in (None, 0.004, 0.42)] == ["-", "0.4 %", "42 %"]


def test_dates_and_commits_of_what_is_shown(run) -> None:
    rows = run.rows[:2]
    assert query.when(rows) == "2026-01-02, commit 0123abcd"
    later = replace(rows[0], utc="2026-02-03T00:00:00Z", commit="feedbeef")
    assert query.when([*rows, later]) == "2026-01-02 to 2026-02-03, 2 commits"
    assert query.when([replace(rows[0], utc=None, commit=None)]) == ""


def test_formats_have_the_order_of_the_record() -> None:
    rows = make_run(((512, 4096, 4096),)).rows
    assert query.formats(reversed(rows)) == list(FORMATS)
