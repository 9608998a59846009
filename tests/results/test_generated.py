"""What is generated: README.md's tables, results/RESULTS.md, CSV files. A drift is a sentence.

That their cells are those of the committed runs is what `make docs-check` says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from results import __main__ as command
from results.record import store
from results.record.provenance import called_hash, source_hash
from results.record.schema import AsCalled, Environment, Row, Run
from results.render import charts, complete, generated, models, query, readme, staleness, table
from results.render.readme import NOTHING

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
    for asked in (["M=8", "--run", "nowhere.json"], ["page", "--run", "nowhere.json"]):
        with pytest.raises(SystemExit):
            command.main([*asked, "--root", str(tree)])
        assert "nowhere.json: No such file or directory" in capsys.readouterr().err


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

    rows = tuple(replace(row, x_parent=row.x_parent or 1.0) for row in run.rows)
    assert readme.RATIO_NOTE not in title(replace(run, rows=rows))
    rows = tuple(replace(row, x_parent=None) if row.step == 6 else row for row in rows)
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


def test_figures_that_are_missing_or_stale_are_said(run) -> None:
    exact = tuple(one for one in run.as_called if one.accuracy == "exact")
    lines = cells(readme.called_table(replace(run, as_called=exact, peers=()), "r.json"))
    assert all(line[3] == line[5] == "-" for line in lines)
    assert readme.called_table(replace(run, as_called=()), "r.json") is None
    one = query.called(run, "QuantLinear", "exact", "float16", readme.CALLED[0])
    assert one is not None
    made = readme.called_table(run, "r.json", {one.key})
    lines = cells(made)
    assert made is not None
    assert made.title.endswith(staleness.STALE_NOTE)
    assert lines[0][2] == f"{table.number(one.us)} (stale)"
    assert not any("(stale)" in cell for line in lines[1:] for cell in line)


# --- results/RESULTS.md ---------------------------------------------------------------------------


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


def test_failed_and_stale_rows_are_listed(tree, run) -> None:
    def broken(row: Row) -> Row:
        return replace(row, status="failed", why="it is wrong") if row.step == 7 else row

    store.write(replace(run, rows=tuple(map(broken, run.rows))), tree / HERE / "run.json")
    count = sum(row.step == 7 for row in run.rows)
    last = section(tree, "Failed")
    assert f"- step 7: it is wrong ({count} rows)" in last
    (older,) = (line for line in page(tree).splitlines() if "older than their code" in line)
    assert f" step 7 ({count}), " in older
    assert re.search(r"QuantLinear with step 14 \(\d+\)", older)


def test_whole_models_that_were_not_measured_are_left_out(tree) -> None:
    for _, made, _ in models.TABLES:
        assert made(tree / "nothing.json") is None


def test_experts_in_a_sentence(tmp_path: Path) -> None:
    """Of the first layer, and of tokens that choose at random, alone."""

    def row(layer: str, tokens: int, routing: str, us: float) -> dict[str, Any]:
        return {"layer": layer, "tokens": tokens, "routing": routing, "format": "q4_0",
                "pair_us": us, "x_torch": us / 10}  # fmt: skip

    path = tmp_path / "experts.json"
    assert models.experts_in_short(path) == ""
    env = {"gpu": "H9", "git": {"sha": "0123abcd"}, "utc": "2026-11-26T00:00:00Z"}
    rows = [row("a", 1, "random", 20), row("a", 4, "zipf", 30), row("a", 4, "random", 40),
            row("b", 1, "random", 50)]  # fmt: skip
    path.write_text(json.dumps({"env": env, "rows": rows}))
    told = models.experts_in_short(path)
    assert told.startswith(
        "Experts of a (Q4_0, both products, on an H9, 2026-11-26, commit 0123abcd)"
    )
    assert "20.0, 40.0 us for 1, 4 tokens, 2.00x, 4.00x as fast" in told
