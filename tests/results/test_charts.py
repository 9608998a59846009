"""Charts are pure functions of the run: same bytes, everything in it shown, nothing else needed."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from types import SimpleNamespace

import matplotlib as mpl
import pytest

from results import __main__ as command
from results.record import store
from results.record.schema import Environment, Run
from results.render import charts, query
from results.render.charts import calls, ladder, roofline, style
from tests.results.conftest import SWEPT

pytestmark = pytest.mark.xdist_group("charts")  # one process makes `files`
NAMES = {"ladder", "as_called", "tokens", "roofline"}


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """Of the run that the README shows, whole."""
    path = store.headline()
    assert path is not None
    return charts.render(store.read(path))


def text_of(svg: bytes) -> str:
    root = ET.fromstring(svg)
    return "\n".join("".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text"))


def test_every_chart_is_there_alike_each_time_with_its_gpu_and_its_date(run, files) -> None:
    assert set(files) == {f"{name}.svg" for name in NAMES}
    assert sum(map(len, files.values())) < 300_000
    for name, data in files.items():
        assert b"<dc:date>" not in data
        assert f"{run.env.where}, {(run.env.utc or '')[:10]}" in text_of(data), name
    assert charts.render(Run(env=Environment())) == {}
    assert set(charts.render(run, {"roofline"})) == {"roofline.svg"}


def test_charts_say_what_the_committed_ones_do(files) -> None:
    """Names, figures, axes: all that is text."""
    for name, data in files.items():
        assert text_of(data) == text_of((charts.FOLDER / name).read_bytes()), name


# --- the ladder -----------------------------------------------------------------------------------


def test_a_step_stands_beside_its_parent_at_its_own_shape(run) -> None:
    beside = [(r.row, r.parent) for panel in query.ladder(run) for r in panel.rungs if r.parent]
    assert len(beside) > 15
    for row, parent in beside:
        assert (parent.step, parent.format, parent.shape) == (row.parent, row.format, row.shape)


def test_cublas_is_a_line_at_the_speed_that_it_has_at_the_shape_of_each_step(run) -> None:
    """In the decode panel where its time puts it, not where its bytes would. A step at a shape of
    its own, where cuBLAS has more or less to do, has a piece of its own. Experts have none, nor
    have two products in one launch."""
    with mpl.rc_context(style.STYLE):
        panels = ladder.draw(run).axes
    for panel, axes in zip(query.ladder(run), panels, strict=True):
        color = style.BASELINE_COLORS[query.CUBLAS]
        lines = [line for line in axes.lines if line.get_color() == color]
        for y, rung in enumerate(panel.rungs):
            row = rung.row if rung.away else next(r.row for r in panel.rungs if not r.away)
            us = query.baseline_us(run, query.CUBLAS, "q4_0", row.shape)
            if panel.branch == "experts":
                assert us is None
                assert not lines
                continue
            here = [line for line in lines if min(line.get_ydata()) < y < max(line.get_ydata())]
            if row.step == 21:
                assert us is None
                assert not here
                continue
            assert us
            wanted = 2 * math.prod(row.shape) / us * 1e-6
            if panel.branch == ladder.DECODE:
                wanted = (row.limit_share or 0) * (row.kernel_us or 0) / us
            assert here
            assert [x for line in here for x in line.get_xdata()] == pytest.approx(
                2 * len(here) * [wanted]
            )


def test_no_share_of_the_bandwidth_is_drawn_beyond_all_of_it(run) -> None:
    rows = tuple(
        replace(row, limit_share=1.04) if row.format == "q5_1" else row for row in run.rows
    )
    with mpl.rc_context(style.STYLE):
        drawn = ladder.draw(replace(run, rows=rows)).axes
    at = [panel.branch for panel in query.ladder(run)].index(ladder.DECODE)
    decode = drawn[at]
    bands = [line for line in decode.lines if line.get_linewidth() == 9]
    assert max(max(line.get_xdata()) for line in bands) == 1.0


def test_the_name_of_a_line_leads_to_its_end() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    style.named_ends(axes, [((0.3, 0.5), "early", "red"), ((1.0, 0.5), "late", "blue")], 0.1)
    early, late = axes.texts
    assert (early.xy, late.xy) == ((0.3, 0.5), (1.0, 0.5))
    assert early.arrow_patch.get_linestyle() != late.arrow_patch.get_linestyle()


# --- the others -----------------------------------------------------------------------------------


def test_curves_have_every_m_and_the_steps_that_were_chosen(run) -> None:
    """What a caller gets at the tabled ones, time at all of the sweep."""
    size = 4096, 14336
    speeds, times = dict(calls.speeds(run, *size)), dict(calls.times(run, *size))
    assert [m for m, _ in speeds["QuantLinear"]] == sorted({one.M for one in query.tabled(run)})
    one = query.called(run, "QuantLinear", "fast", "float16", (33, *size))
    theirs = query.called(run, "QuantLinear", "exact", "float16", (512, *size))
    assert one is not None
    assert theirs is not None
    assert dict(times["QuantLinear, fast"])[33] == one.us
    assert dict(times["cuBLAS float16"])[33] == one.cublas_us
    assert dict(speeds["QuantLinear"])[512] == theirs.x_cublas
    for name, label in ((query.LLAMA_CPP, "llama.cpp"), (query.W4A16, "Humming W4A16")):
        us = query.baseline_us(run, name, "q4_0", (512, *size))
        assert dict(speeds[label])[512] == theirs.cublas_us / (us or 0)
    for label in ("QuantLinear", "QuantLinear, fast", "cuBLAS float16"):
        assert [m for m, _ in times[label]] == list(range(1, SWEPT + 1))
    chosen = [SimpleNamespace(step=step, M=m) for m, step in enumerate((18, 18, 14, 18), 1)]
    assert calls.ranges_of_steps(chosen) == [(18, 1, 2), (14, 3, 3), (18, 4, 4)]


def test_the_sweep_ends_with_the_tabled_m_that_follows_it(run) -> None:
    few = tuple(one for one in run.as_called if not one.swept or one.M < 16)
    calls = query.sweep(replace(run, as_called=few), "exact", 4096, 4096)
    assert [one.M for one in calls] == list(range(1, 17))
    none = tuple(query.tabled(run))
    assert query.sweep(replace(run, as_called=none), "exact", 4096, 4096) == []
    assert "tokens" not in charts.plans(replace(run, as_called=none))
    assert "as_called" in charts.plans(replace(run, as_called=none))


def test_cliffs_are_where_one_token_more_takes_too_long(run) -> None:
    calls = query.sweep(run, "exact", 4096, 4096)
    flat = tuple(replace(one, us=10.0 * 1.15**0.99**one.M) for one in calls)
    assert query.cliffs(replace(run, as_called=flat)) == []

    def at(m: int) -> float:
        return 10.0 if m < 20 else 11.6 if m < 30 else 13.6

    jumps = tuple(replace(one, us=at(one.M)) for one in calls)
    found = query.cliffs(replace(run, as_called=jumps))
    assert [(one.M, more.M) for one, more in found] == [(29, 30), (19, 20)], "the worst first"
    assert [(one.us, more.us) for one, more in found] == [(11.6, 13.6), (10.0, 11.6)]
    gap = tuple(one for one in jumps if one.M not in (20, 29))
    assert query.cliffs(replace(run, as_called=gap)) == [], "M and M + 1 must both be there"
    other = tuple(replace(one, dtype="bfloat16") if one.M == 20 else one for one in jumps)
    assert [one.M for one, _ in query.cliffs(replace(run, as_called=other))] == [29]


def test_tabled_calls_that_are_newer_are_no_part_of_the_sweep(run) -> None:
    newer = tuple(one if one.swept else replace(one, commit="new", us=1.0) for one in run.as_called)
    changed = replace(run, as_called=newer)
    assert all(one.swept for one in query.sweep(changed, "exact", 4096, 4096))
    assert all(one.commit == more.commit for one, more in query.cliffs(changed))


def test_the_roofline_has_the_last_step_of_each_branch(run) -> None:
    rows = roofline.rows_of(run)
    assert {row.step for row in rows} == {6, 10, 14, 15, 18}
    assert len({(row.N, row.K, row.format) for row in rows}) == 1
    assert "18 bulk copies" in roofline.curves(run), "by the name of its lesson"
    with mpl.rc_context(style.STYLE):
        (axes,) = roofline.draw(run).axes
    for line in axes.lines[:5]:
        xs = list(line.get_xdata())
        assert xs == sorted(xs), "one point for each M, from left to right"
        assert line.get_markerfacecolor() == "none", "no point hides another"


# --- what is missing ------------------------------------------------------------------------------


def test_missing_data_is_left_out(run) -> None:
    rows = tuple(
        replace(row, status="failed", why="wrong", kernel_us=None, tflops=None, x_parent=None)
        if row.step == 4
        else replace(row, nmse_same_operands=None, limit_share=None)
        for row in run.rows
    )
    files = charts.render(Run(env=Environment(), rows=rows))
    assert set(files) == {"ladder.svg", "roofline.svg"}
    text = text_of(files["ladder.svg"])
    assert "unknown GPU" in text
    assert "4 dp4a emulated" in text, "a step that failed is not hidden"
    assert "\nfailed\n" in text
    assert "llama.cpp" not in text


def test_nothing_is_cut_off_at_the_edge(run) -> None:
    """With room to spare at both sides, as a browser's font may be wider; and no label of a step
    reaches into its panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with mpl.rc_context(style.STYLE):
        for name, chart in charts.plans(run).items():
            figure = chart.draw(run)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            box, (width, height) = figure.get_tightbbox(canvas.renderer), figure.get_size_inches()
            assert width == style.COLUMN
            assert 0.05 < box.x0 < box.x1 < width - 0.05, (name, box)
            assert 0 <= box.y0 < box.y1 <= height, (name, box)
            for axes in figure.axes if name == "ladder" else ():
                left = axes.get_window_extent(canvas.renderer).x0
                names = [text for text in axes.texts if text.get_text()[:1].isdigit()]
                names = [text for text in names if text.get_window_extent().x0 < left]
                assert names
                assert all(text.get_window_extent().x1 < left for text in names), name


def test_labels_are_spread_apart_in_order() -> None:
    assert style.spread([0.1, 0.9], 0.1) == [0.1, 0.9]
    out = style.spread([0.5, 0.51, 0.49, 0.9], 0.1)
    assert out[2] < out[0] < out[1] < out[3]
    assert out[0] - out[2] == pytest.approx(0.1)
    assert out[1] - out[0] == pytest.approx(0.1)
    assert style.spread([], 0.1) == []


# --- files ----------------------------------------------------------------------------------------


def test_drifts_are_found_and_what_no_run_holds_is_removed(run, tmp_path, monkeypatch) -> None:
    def drawn(run: Run) -> dict[str, bytes]:
        return {f"{name}.svg": charts.digest(run).encode() for name in charts.plans(run)}

    monkeypatch.setattr(charts, "render", drawn)
    assert {path.stem for path in charts.write(run, tmp_path)} == NAMES
    assert charts.drifts(run, tmp_path) == []
    (tmp_path / "roofline.svg").unlink()
    (tmp_path / "old.svg").write_text("<svg/>")
    newer = replace(run, rows=run.rows[1:])
    found = charts.drifts(newer, tmp_path)
    assert "roofline.svg is missing: run `make charts`" in found[0]
    assert "old.svg shows what no run holds: remove it" in " ".join(found)
    assert sum("shows another state of the run" in one for one in found) == len(NAMES) - 1
    charts.write(newer, tmp_path)
    assert charts.drifts(newer, tmp_path) == []
    assert charts.drifts(None, tmp_path) != []
    assert charts.write(None, tmp_path) == charts.drifts(None, tmp_path) == []


def test_the_command_draws_a_run_into_a_folder(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(charts, "render", lambda run: {"one.svg": run.env.where.encode()})
    path = store.write(Run(env=Environment(gpu="A GPU")), tmp_path / "run.json")
    out = tmp_path / "charts"
    assert command.main(["charts", "--run", str(path), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out / 'one.svg'}\n"
    assert (out / "one.svg").read_text() == "A GPU"
    assert command.main(["charts", "--root", str(tmp_path), "--out", str(out)]) == 0
    assert "Nothing is measured yet" in capsys.readouterr().out
    assert list(out.iterdir()) == []


def test_charts_tell_what_one_sees(run) -> None:
    said = {name: chart.tell(run) for name, chart in charts.plans(run).items()}
    assert "float16 tensor cores and beyond: step 13 reaches " in said["ladder"]
    own = dict(calls.speeds(run, 4096, 4096))["QuantLinear"]
    least, most = (float(x) for x in re.findall(r"([\d.]+)x", said["as_called"]))
    assert all(least - 0.01 <= x <= most + 0.01 for _, x in own)
    assert "at M=1 step 18 moves " in said["roofline"]
    flat = tuple(replace(one, us=10.0) for one in run.as_called)
    told = calls.tell_times(replace(run, as_called=flat))
    assert "Nowhere does one token more take more than 1.15 times as long." in told
    jump = tuple(replace(one, us=90.0) if one.M == 33 else one for one in flat)
    told = calls.tell_times(replace(run, as_called=jump))
    assert "times as long, from M=32 to 33." in told


def test_importing_results_needs_neither_matplotlib_nor_torch() -> None:
    code = (
        "import sys; import results.render.charts, results.render.generated;"
        "print(sorted({'matplotlib', 'torch', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
