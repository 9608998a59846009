"""Charts are pure functions of the run: same bytes, everything in it shown, nothing else needed."""

from __future__ import annotations

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib as mpl
import pytest

import tests.results.synthetic_run
from results.record import schema as record
from results.record.schema import Environment, Run
from results.render import charts
from tests.results.synthetic_run import FORMATS, make_run

SMALL = ((1, 4096, 4096), (512, 4096, 4096))


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return charts.render(make_run(SMALL), "nvidia-h200/2026-01-02-0123abcd.json")


def text_of(svg: bytes) -> str:
    root = ET.fromstring(svg)
    return "\n".join("".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text"))


def test_every_chart_is_there(files):
    assert set(files) == {
        "ladder-m1-n4096-k4096.svg",
        "ladder-m512-n4096-k4096.svg",
        "tflops.svg",
        "roofline.svg",
        "time.svg",
        "time-q4_0-n4096-k4096.svg",
        "error.svg",
    }


def test_same_run_same_bytes(files):
    again = charts.render(make_run(SMALL), "nvidia-h200/2026-01-02-0123abcd.json")
    assert again == files
    assert all(b"<dc:date>" not in data for data in files.values())


def test_titles_say_which_gpu_and_which_file(files):
    for name, data in files.items():
        text = text_of(data)
        assert "NVIDIA H200 @ 700 W" in text, name
        assert "nvidia-h200/2026-01-02-0123abcd.json" in text, name


def test_every_step_and_format_is_named(files):
    every = ("tflops.svg", "roofline.svg", "time.svg", "time-q4_0-n4096-k4096.svg", "error.svg")
    for name in every:
        text = text_of(files[name])
        for label in ("1 naive A16", "2 naive A8", "3 shared tiled A16", "3 shared tiled A8"):
            assert label in text, (name, label)
        assert "4 dp4a emulated A8" in text
        assert "5 vectorized A8" in text
        assert "10 decode A8" in text
        assert "12 wgmma A16" in text
        assert "13 wgmma A8 fast" in text
        assert "14 integer scales A8 coarse" in text
    for name in ("tflops.svg", "time.svg", "error.svg", "ladder-m512-n4096-k4096.svg"):
        assert all(format_name in text_of(files[name]) for format_name in FORMATS), name


def test_limits_and_peers_are_labelled(files):
    roofline = text_of(files["roofline.svg"])
    assert "copy 4.26 TB/s" in roofline
    for label in charts.UNIT_LABELS.values():
        assert label in roofline
    large = "time-q4_0-n4096-k4096.svg"
    for name in ("ladder-m512-n4096-k4096.svg", "tflops.svg", "time.svg", large):
        assert "llama.cpp" in text_of(files[name])
        assert "cuBLAS fp16" in text_of(files[name])


def test_three_roofs_stand_out_and_each_step_has_its_number_at_each_m():
    run = make_run(SMALL, formats=("q4_0",))
    with mpl.rc_context(charts.STYLE):
        (axes,) = charts.roofline_chart(run, "a.json").axes
    bold = {t.get_text() for t in axes.texts if t.get_fontweight() == "bold"}
    roofs = {t for t in bold if not t.isdigit()}
    assert roofs == {"62.1  fp32 FMA", "810  fp16 tensor cores", "1600  int8 tensor cores"}
    rungs = [step for step, *_ in tests.results.synthetic_run.LADDER]
    numbers = [int(t.get_text()) for t in axes.texts if t.get_text().isdigit()]
    assert sorted(numbers) == sorted(rungs * 2)
    first = [t for t in axes.texts if t.get_text().isdigit() and t.xy[0] < 10]  # at M=1
    for shape in ("Square", "Circle"):
        boxes = [t for t in first if type(t.get_bbox_patch().get_boxstyle()).__name__ == shape]
        heights = sorted(t.xyann[1] for t in boxes)
        assert len(heights) > 3
        gaps = [b - a for a, b in itertools.pairwise(heights)]
        assert min(gaps) > 0.03, "numbers lie on each other"


def test_figures_in_the_chart_are_those_of_the_run(files):
    run = make_run(SMALL)
    text = text_of(files["tflops.svg"])
    for row in run.rows:
        if row.shape == (512, 4096, 4096) and row.output == "float32":
            assert charts.number(row.tflops or 0) in text


def test_rows_of_another_type_of_c_are_not_in_the_charts(files):
    """Their times are others: nothing of them may stand beside those of float32."""
    run = make_run(SMALL)
    alone = replace(run, rows=tuple(row for row in run.rows if row.output == "float32"))
    assert len(alone.rows) < len(run.rows)
    assert charts.render(alone, "nvidia-h200/2026-01-02-0123abcd.json") == files
    assert {row.output for row in charts.timed(run, "float16")} == {"float16"}


def test_missing_data_is_left_out_or_said():
    run = make_run(SMALL, formats=("q4_0", "q8_0"), peers=False)
    rows = []
    for row in run.rows:
        if row.step == 4:
            row = replace(row, status="failed", why="wrong", kernel_us=None, tflops=None)
        if row.step == 5 and row.format == "q8_0":
            continue
        if row.step == 2:
            row = replace(row, nmse_same_operands=None, gbps=None, total_us=None)
        rows.append(row)
    files = charts.render(Run(env=Environment(), rows=tuple(rows)), "a.json")
    assert "unknown GPU" in text_of(files["tflops.svg"])
    assert "4 dp4a" not in text_of(files["tflops.svg"])
    assert "\n-\n" in text_of(files["tflops.svg"])  # step 5 has no q8_0
    assert "llama.cpp" not in text_of(files["tflops.svg"])
    assert "copy" not in text_of(files["roofline.svg"])


def test_without_step_1_there_is_no_ladder_and_without_rows_no_chart():
    run = make_run(SMALL, formats=("q4_0",))
    rest = tuple(row for row in run.rows if row.step != 1)
    assert set(charts.plans(replace(run, rows=rest))) == {
        "tflops",
        "roofline",
        "time",
        "time-q4_0-n4096-k4096",
        "error",
    }
    assert charts.render(Run(env=Environment()), "a.json") == {}


def test_nothing_is_cut_off_at_the_edge_of_a_committed_chart() -> None:
    """With room to spare at both sides, as a browser's font may be wider."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    run = charts.headline()
    assert run is not None
    with mpl.rc_context(charts.STYLE):
        plans = charts.plans(record.read(run))
        for name in {one.split("-")[0]: one for one in plans}.values():  # one of each kind
            figure = plans[name](run.name)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            box, (width, height) = figure.get_tightbbox(canvas.renderer), figure.get_size_inches()
            assert 0.05 < box.x0 < box.x1 < width - 0.05, (name, box)
            assert 0 <= box.y0 < box.y1 <= height, (name, box)


def test_one_chart_of_all_steps_for_each_size_of_weights() -> None:
    run = make_run(((1, 64, 32), (8, 64, 32), (1, 32, 64)), formats=("q5_0", "q8_0"))
    found = [name for name in charts.plans(run) if name.startswith("time-")]
    assert found == ["time-q5_0-n32-k64", "time-q5_0-n64-k32"]


def test_a_figure_of_the_same_run_is_the_one_drawn() -> None:
    run = make_run(SMALL)
    given = next(p for p in run.peers if p.peer == "ggml")
    here = replace(given, us=3.0, same_run=True)
    for peers in ((given, here), (here, given)):
        one = replace(run, peers=peers)
        assert charts.peer_us(one, "ggml", given.format, given.shape) == 3.0


def test_labels_are_spread_apart_in_order():
    assert charts.spread([0.1, 0.9], 0.1) == [0.1, 0.9]
    out = charts.spread([0.5, 0.51, 0.49, 0.9], 0.1)
    assert out[2] < out[0] < out[1] < out[3]
    assert out[0] - out[2] == pytest.approx(0.1)
    assert out[1] - out[0] == pytest.approx(0.1)
    assert charts.spread([], 0.1) == []


def test_command_line_draws_and_drifts_are_found(tmp_path, capsys):
    run = record.write(make_run(((512, 4096, 4096),), formats=("q4_0",)), tmp_path)
    out = tmp_path / "charts"
    assert charts.main([str(run), "--out", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert charts.drifts(out, run) == []
    (out / "time.svg").unlink()
    (out / "old.svg").write_text("<svg/>")
    tflops = out / "tflops.svg"
    tflops.write_text(tflops.read_text().replace("0123abcd", "feedbeef"))
    missing, left_over, other = charts.drifts(out, run)
    assert "time.svg is missing" in missing
    assert "old.svg has no data" in left_over
    assert "tflops.svg does not show" in other


def test_importing_results_needs_neither_matplotlib_nor_torch():
    code = (
        "import sys; import results.render.charts, results.render.tables, results.baselines.peers, results.measure.protocol;"
        "print(sorted({'matplotlib', 'torch', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
