"""What is generated: README.md's tables, results/RESULTS.md, CSV files. A drift is a sentence."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from results import __main__ as command
from results.record import store
from results.record.provenance import called_hash, source_hash
from results.record.schema import AsCalled, Environment, Row, Run
from results.render import charts, complete, generated, query, readme, staleness, table
from results.render.readme import NOTHING
from tests.results.conftest import FORMATS

README = "# Title\n\n<!-- ladder:begin -->\n<!-- ladder:end -->\n\nbetween\n\n"
README += "<!-- called:begin -->\n<!-- called:end -->\n\nafter\n"
HERE = Path("results", "nvidia-h200")


@pytest.fixture
def tree(tmp_path, run):
    """A project folder with a README, one run, its charts, and no step sources."""
    (tmp_path / "README.md").write_text(README)
    path = store.write(run, tmp_path / HERE / "run.json")
    folder = tmp_path / "results" / "charts"
    folder.mkdir()
    for name in charts.plans(run):  # as far as a check looks at them
        (folder / f"{name}.svg").write_text(charts.digest(store.read(path)))
    return tmp_path


def cells(made: table.Table | None) -> list[list[str]]:
    """The cells of each line."""
    assert made is not None
    return [list(line.cells) for line in made.lines]


def page(tree) -> str:
    return complete.page(staleness.measured(tree))


def section(tree, title: str) -> str:
    return page(tree).split(f"### {title}\n")[1].split("\n### ")[0]


def lines_of(text: str) -> list[list[str]]:
    """The cells of each line of the Markdown tables in a text, without their heads."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    heads = len(re.findall(r"^\|:?-", text, re.MULTILINE))
    return lines[1:] if heads == 1 else lines


# --- files and their drifts -----------------------------------------------------------------------


def test_rewrite_touches_only_what_is_between_the_markers_and_is_idempotent(tree) -> None:
    wanted = {"README.md", "RESULTS.md", "steps.csv", "calls.csv", "baselines.csv"}
    assert {path.name for path in generated.rewrite(tree)} == wanted
    text = (tree / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- ladder:begin -->\nQ4_0 on an NVIDIA H200 @ 700 W")
    assert "<!-- ladder:end -->\n\nbetween\n\n<!-- called:begin -->\nQ4_0, float16 in" in text
    assert text.endswith("<!-- called:end -->\n\nafter\n")
    assert max(map(len, text.splitlines())) < 200
    assert generated.rewrite(tree) == []
    assert generated.check(tree) == []


def test_each_drift_is_one_sentence(tree, run) -> None:
    generated.rewrite(tree)
    file, text = tree / "README.md", (tree / "README.md").read_text()
    (first,) = (row for row in run.rows if row.step == 1 and row.home and row.format == "q4_0")
    time = f"| {table.cell(first.kernel_us)} |"
    assert text.count(time) == 1
    file.write_text(text.replace(time, "| 27.5 |"))
    (sentence,) = generated.check(tree)
    assert re.fullmatch(r"README.md: line \d+ is .*\| 27\.5 \|.* the run gives .*", sentence)
    assert time in sentence
    assert sentence.endswith("; run `make charts`")
    file.write_text("".join(x for x in text.splitlines(True) if not x.startswith("| 4096 |")))
    assert len(generated.check(tree)) == 1
    file.write_text(text)
    (tree / HERE / "calls.csv").unlink()
    assert generated.check(tree) == [f"{HERE}/calls.csv is missing; run `make charts`"]
    generated.rewrite(tree)
    faster = tuple(replace(row, kernel_us=(row.kernel_us or 0) / 1.1) for row in run.rows)
    store.write(replace(run, rows=faster, as_called=()), tree / HERE / "run.json")
    said = " ".join(generated.check(tree))
    for name in ("README.md: line", "results/RESULTS.md: line", f"{HERE}/steps.csv: line"):
        assert name in said
    assert "charts/ladder.svg shows another state of the run" in said
    assert f"{HERE}/calls.csv shows what no run holds" in said
    assert f"{HERE}/baselines.csv" not in said, "its figures are the same"
    assert tree / HERE / "calls.csv" in generated.rewrite(tree)
    assert not (tree / HERE / "calls.csv").exists()


def test_missing_markers_or_files_are_sentences(tree) -> None:
    generated.rewrite(tree)
    (tree / "README.md").write_text("nothing")
    assert "README.md needs one <!-- ladder:begin -->" in generated.check(tree)[0]
    with pytest.raises(ValueError, match=r"README\.md needs one"):
        generated.rewrite(tree)
    (tree / "README.md").unlink()
    (tree / "results" / "RESULTS.md").unlink()
    first, second = generated.check(tree)
    assert first == "README.md does not exist"
    assert second == "results/RESULTS.md is missing; run `make charts`"


def test_command_line(tree, capsys, monkeypatch) -> None:
    monkeypatch.setattr(charts, "write", lambda *_: [])  # tests/results/test_charts.py has it
    root = ["--root", str(tree)]
    assert command.main(["charts", *root]) == 0
    assert "README.md" in capsys.readouterr().out
    assert command.main(["check", *root]) == 0
    (tree / "results" / "charts" / "ladder.svg").unlink()
    assert command.main(["check", *root]) == 1
    assert capsys.readouterr().err == "charts/ladder.svg is missing: run `make charts`\n"
    (tree / "README.md").unlink()  # such as where the project is installed
    with pytest.raises(SystemExit):
        command.main(["charts", *root])
    assert f"{tree} has no README.md: name a checkout with --root" in capsys.readouterr().err


def test_nothing_measured_yet_passes_only_where_that_is_said(tmp_path, capsys) -> None:
    (tmp_path / "README.md").write_text(README)
    root = ["--root", str(tmp_path)]
    assert command.main(["check", *root]) == 1
    assert NOTHING in capsys.readouterr().out
    assert command.main(["charts", *root]) == 0
    assert (tmp_path / "README.md").read_text().count(NOTHING) == 2
    assert NOTHING in (tmp_path / "results" / "RESULTS.md").read_text()
    capsys.readouterr()
    assert command.main(["check", *root]) == 0
    assert command.main(["M=8", *root]) == 1
    said = capsys.readouterr()
    assert NOTHING in said.out
    assert said.err == ""


# --- rows -----------------------------------------------------------------------------------------


def test_csv_files_have_every_row_with_its_figures(tree, run) -> None:
    generated.rewrite(tree)
    run = store.read(tree / HERE / "run.json")
    for name, records in (("steps", run.rows), ("calls", run.as_called), ("baselines", run.peers)):
        with (tree / HERE / f"{name}.csv").open() as file:
            found = list(csv.DictReader(file))
        assert len(found) == len(records)
        for line, one in zip(found, records, strict=True):
            for key, text in line.items():
                value = getattr(one, key)
                if isinstance(value, float | bool):
                    assert float(text) == pytest.approx(float(value), rel=1e-3), key
                else:
                    assert text == ("" if value is None else str(value))
        assert {"M", "N", "K", "format", "commit"} <= set(found[0])


def test_a_question_prints_the_rows_that_have_these_values(tree, run, capsys) -> None:
    def said(*wanted: str) -> tuple[int, str]:
        done = command.main([*wanted, "--root", str(tree)])
        return done, capsys.readouterr().out

    done, text = said("M=8", "FORMAT=q5_1")
    assert done == 0
    found = [
        one
        for records in (run.rows, run.as_called, run.peers)
        for one in records
        if (one.M, one.format) == (8, "q5_1")
    ]
    lines = [line for line in text.splitlines() if " 8 x " in line]
    assert len(lines) == len(found) > 10
    for one in found:
        us = one.kernel_us if isinstance(one, Row) else one.us
        assert any(f" {table.number(us or 0)} " in line for line in lines)
    assert text.count(staleness.STALE_NOTE) == 2, "no source is there; baselines have none"
    done, text = said("step=14,15", "Scheme=w4a8", "gpu=h200")
    assert {line.split()[0] for line in text.splitlines() if "W4A" in line} == {"15"}
    assert "Calls" not in text, "they have no scheme"
    assert said("M=3", "STEP=1") == (1, "NVIDIA H200 @ 700 W: no row has these values\n")
    for wrong in ("SPEED=8", "gpu=a100", "charts8"):
        with pytest.raises(SystemExit):
            said("M=8", wrong)
    assert "'charts8' is none of charts, check, page" in capsys.readouterr().err


# --- the ladder -----------------------------------------------------------------------------------


def test_the_ladder_has_a_line_per_step_and_one_per_branch(run) -> None:
    made = readme.ladder_table(run, "r.json")
    lines = cells(made)
    steps = [line for line in lines if line[0]]
    assert len(lines) == len(steps) + len(query.ladder(run))
    assert next(line[1].partition("**,")[0] for line in lines if not line[0]) == "**CUDA cores"
    for panel in query.ladder(run):
        for rung in panel.rungs:
            row = rung.row
            (line,) = (line for line in steps if line[0] == f"[{row.step}](steps/{row.name}.py)")
            assert line[2:] == [
                table.number(row.kernel_us or 0),
                table.number(row.tflops or 0),
                table.ratio(row.x_parent) if row.x_parent else "",
                table.percent(row.limit_share),
            ]
    assert len(steps) == len({row.step for row in run.rows if row.home})
    of_step = {line[0].partition("]")[0][1:]: line[1] for line in steps}
    assert of_step["10"].endswith(", at 128 x 4096 x 4096")
    away = {step for step, text in of_step.items() if ", at " in text}
    assert away == {"10", "14", "17", "18", "20", "21", "22"}
    assert of_step["15"].endswith("(fast)")


def test_what_failed_says_so_and_what_was_not_measured_is_left_out(run) -> None:
    rows = tuple(
        replace(row, status="failed", why="wrong", kernel_us=None, tflops=None, x_parent=None)
        if row.step == 4
        else row
        for row in run.rows
        if row.step != 5
    )
    lines = cells(readme.ladder_table(replace(run, rows=rows), "r.json"))
    (fourth,) = (line for line in lines if "[4]" in line[0])
    assert fourth[2:5] == ["failed", "-", ""]
    assert not any("[5]" in line[0] for line in lines)
    assert readme.ladder_table(Run(env=Environment()), "r.json") is None


def test_a_parent_of_another_loop_is_said(run) -> None:
    def title(run: Run) -> str:
        made = readme.ladder_table(run, "r.json")
        assert made is not None
        return made.title

    assert readme.RATIO_NOTE not in title(run)
    rows = tuple(replace(row, x_parent=None) if row.step == 6 else row for row in run.rows)
    assert readme.RATIO_NOTE in title(replace(run, rows=rows))


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
    def marked(run: Run, stale: staleness.Keys) -> list[str]:
        return [
            line[0] for line in cells(readme.ladder_table(run, "", stale)) if "(stale)" in line[1]
        ]

    every = {row.step for row in run.rows}
    assert len(marked(run, staleness.stale_keys(run, tree))) == len(every)
    (tree / "steps").mkdir()
    (tree / "steps" / "step04_dp4a_emulated.py").write_text("x = 1\n")
    now = source_hash(4, root=tree)
    rows = tuple(replace(r, source_hash=now) if r.step == 4 else r for r in run.rows)
    newer = replace(run, rows=rows)
    left = marked(newer, staleness.stale_keys(newer, tree))
    assert len(left) == len(every) - 1
    assert not any(name.startswith("[4]") for name in left)
    assert marked(run, ()) == []


# --- what a caller gets ---------------------------------------------------------------------------


def test_what_a_caller_gets_is_float16_beside_the_baselines(run) -> None:
    made = readme.called_table(run, "r.json")
    for size, line in zip(readme.CALLED, cells(made), strict=True):
        exact, fast = (
            query.called(run, "QuantLinear", accuracy, "float16", size)
            for accuracy in ("exact", "fast")
        )
        assert exact is not None
        assert fast is not None
        theirs = query.baseline_us(run, query.LLAMA_CPP, "q4_0", size)
        layer = query.baseline_us(run, query.W4A16, "q4_0", size)
        times = (exact.us, fast.us, exact.cublas_us, theirs, layer)
        assert line == [
            *(str(size[0]), f"{size[1]} x {size[2]}"),
            *(table.cell(us) for us in times),
        ]


def test_figures_of_another_run_missing_and_stale_ones_are_said(run) -> None:
    def title(run: Run, stale: staleness.Keys = ()) -> list[str]:
        made = readme.called_table(run, "r.json", stale)
        assert made is not None
        return made.title.splitlines()

    there, here = (
        replace(run, peers=tuple(replace(peer, same_run=same) for peer in run.peers))
        for same in (False, True)
    )
    first, second = title(there)
    assert first.endswith("llama.cpp: float32 in and out, from another run.")
    assert second == "Humming W4A16: from another run."
    (first,) = title(here)
    assert first.endswith("llama.cpp: float32 in and out.")
    exact = tuple(one for one in run.as_called if one.accuracy == "exact")
    lines = cells(readme.called_table(replace(run, as_called=exact, peers=()), "r.json"))
    assert all(line[3] == line[5] == "-" for line in lines)
    assert readme.called_table(replace(run, as_called=()), "r.json") is None
    one = query.called(run, "QuantLinear", "exact", "float16", readme.CALLED[0])
    assert one is not None
    assert title(run, {one.key})[-1] == staleness.STALE_NOTE
    lines = cells(readme.called_table(run, "r.json", {one.key}))
    assert lines[0][2] == f"{table.number(one.us)} (stale)"
    assert not any("(stale)" in cell for line in lines[1:] for cell in line)


# --- results/RESULTS.md ---------------------------------------------------------------------------


def test_results_hold_what_a_caller_gets(tree, run) -> None:
    told, _ = section(tree, "What a caller gets").split("One token more")
    least, by_format = told.split("by format:")
    own = [one for one in query.tabled(run) if one.M == 512 and one.dtype == "bfloat16"]
    exact = [
        min(o.x_cublas for o in own if (o.format, o.accuracy) == (name, "exact"))
        for name in ("q4_0", "q5_1")
    ]
    (line,) = (line for line in lines_of(least) if line[0] == "512")
    assert line[2] == table.span(exact)
    for line in lines_of(by_format):
        for name, text in zip(("q4_0", "q5_1"), line[1:], strict=True):
            size = (int(line[0]), *complete.WEIGHTS)
            one = query.called(run, "QuantLinear", "exact", "float16", size, name)
            assert one is not None
            assert text == f"{table.number(one.us)}, {table.ratio(one.x_cublas)}"


def test_results_hold_every_step_at_home_its_time_and_its_error(tree, run) -> None:
    """An error is compared with that of its own problem, not of one that another shape has."""
    fifteen = next(r for r in run.rows if (r.step, r.format, r.home) == (15, "q5_1", True))
    exact = [
        row.nmse_float
        for row in run.rows
        if (row.format, row.shape, row.accuracy) == ("q5_1", fifteen.shape, "exact")
    ]
    off = fifteen.nmse_float / min(exact)
    assert off > 1.05, "else this shows nothing"
    times, errors = section(tree, "Each step at home, in every format").split("Error of the")
    rungs = [rung for panel in query.ladder(run) for rung in panel.rungs]
    for line in lines_of(times):
        own = [{r.format.upper(): r.kernel_us for r in rung.every} for rung in rungs]
        assert line[1:] == [table.cell(us.get(line[0])) for us in own]
    assert "step 10: 128 x 4096 x 4096" in times
    kinds = dict(line[2:].split(", ", 1) for line in errors.splitlines() if line[:2] == "- ")
    assert [*kinds] == ["A16", "A8", "fast", "pruned"]
    assert re.fullmatch(r".*: Q4_0 1[0-9]\.[0-9]x", kinds["pruned"])
    assert kinds["fast"].endswith(f", Q5_1 {table.ratio(off)}")
    assert re.search(r": Q4_0 1\.00x.*, Q5_1 1\.0", kinds["A16"])


def test_results_say_where_time_jumps(tree, run) -> None:
    def called(us: Callable[[AsCalled], float], calls: Sequence[AsCalled]) -> str:
        changed = replace(run, as_called=tuple(replace(one, us=us(one)) for one in calls))
        store.write(changed, tree / HERE / "run.json")
        return section(tree, "What a caller gets")

    told = called(lambda _: 10.0, run.as_called)
    assert "Nowhere does one token more take more than 1.15 times as long." in told
    told = called(lambda one: 90.0 if one.M == 33 else 10.0, run.as_called)
    found = query.cliffs(store.read(tree / HERE / "run.json"))
    (line,) = (line for line in told.splitlines() if line.startswith("One token more"))
    more = f"One token more takes more than 1.15 times as long in {len(found)} places"
    assert line == f"{more}, at most here: {query.jump(*found[0])}."
    assert ": M=32 " in line
    assert ", M=33 " in line
    assert "one token more" not in called(lambda one: one.us, query.tabled(run))


def test_results_have_a_section_per_gpu_with_its_machine_the_largest_first(tree, run) -> None:
    few = replace(run, env=replace(run.env, gpu="NVIDIA H100"), rows=run.rows[:9], as_called=())
    store.write(few, tree / "results" / "nvidia-h100" / "run.json")
    heads = [line for line in page(tree).splitlines() if line.startswith("## ")]
    assert heads == ["## NVIDIA H200 @ 700 W", "## NVIDIA H100 @ 700 W"]
    text = page(tree)
    for name in charts.plans(run):
        assert text.count(f"![{name}](charts/{name}.svg)") == 1, "of the first GPU"
    assert text.count("Error of the product") == 1, "the same on both"
    assert "[steps.csv](nvidia-h200/steps.csv)" in text
    machine = text.partition("## NVIDIA H200")[2].partition("###")[0]
    assert f"dp4a: {table.number(run.env.limits.tops['dp4a'])} T operations/s" in machine
    assert f"SM clock after: {run.env.clocks_mhz.after:.0f} MHz" in machine


def test_failed_and_stale_rows_are_listed(tree, run) -> None:
    def broken(row: Row) -> Row:
        return replace(row, status="failed", why="it is wrong") if row.step == 7 else row

    store.write(replace(run, rows=tuple(map(broken, run.rows))), tree / HERE / "run.json")
    count = sum(row.step == 7 for row in run.rows)
    last = section(tree, "Failed or not possible")
    assert f"- step 7, failed: it is wrong ({count} rows)" in last
    (older,) = (line for line in page(tree).splitlines() if "older than their code" in line)
    assert f" step 7 ({count}), " in older
    assert re.search(r"QuantLinear with step 14 \(\d+\)", older)


# --- what is asked of a run -----------------------------------------------------------------------


def test_dates_and_commits_of_what_is_shown(run) -> None:
    rows = [replace(r, utc="2026-01-02T03:04:05Z", commit="0123abcd") for r in run.rows[:2]]
    assert query.when(rows) == "2026-01-02, commit 0123abcd"
    later = replace(rows[0], utc="2026-02-03T00:00:00Z", commit="feedbeef")
    assert query.when([*rows, later]) == "2026-01-02 to 2026-02-03, 2 commits"
    assert query.when([replace(rows[0], utc=None, commit=None)]) == ""


def test_formats_have_the_order_of_the_record(run) -> None:
    assert query.formats(reversed(run.rows)) == list(FORMATS)
