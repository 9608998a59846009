"""A bench in the simulator, on an invented clock: what is measured, in which order, what is kept,
and which figures are refused."""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qformats import WEIGHT_FORMATS
from reference import BENCH_SHAPES, Reference
from reference.bfloat16 import rounded_to_bfloat16
from reference.problem import PrequantizedProblem
from results.measure import as_called, cublas, products
from results.measure import bench as benching
from results.measure.bench import Bench, Recorder, Wanted
from results.measure.loop import Contestant
from results.measure.products import Data
from results.measure.protocol import Budget
from results.record import provenance, store
from results.record.schema import Environment, Git, Limits, Row, Run
from steps.checks.select import branches, select
from steps.cli import bench as command
from steps.cli.main import _parser
from steps.contract import FLOATS, Kernel, Step, Work
from steps.driver.machines import Simulator
from steps.registry import find, kernel_of, kernels, ladder, lesson_of
from tests.results.fake_stopwatch import FakeStopwatch, by_kernel

HOPPER = (9, 0)
QUICK = Budget(
    replay_seconds=1e-3, warm_seconds=0.0, seconds=0.0, min_rounds=3, max_rounds=3, slow_rounds=1
)
COSTS = {
    "w4a16_naive": 8e-3,
    "w4a8_naive": 6e-3,
    "w4a8_vectorized": 1e-3,
    "q8_1_blocks": 1e-3,
    "q8_1_k_outermost": 0.5e-3,
}
SHAPE = (2, 6, 64)


@pytest.fixture(autouse=True, scope="module")
def _few_objects_to_search() -> Iterator[None]:
    """A bench looks for circles after each loop: among what it made itself, not in all kernels that
    this process has compiled so far, which takes a second each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def fake_bench(limits: Limits | None = None, **watch: Any) -> Bench:
    watch.setdefault("cost", by_kernel(COSTS))
    return Bench(Simulator(), FakeStopwatch(**watch), limits or Limits(), QUICK)


def measured(bench: Bench, works: Sequence[Work], *sizes: Any, **options: Any) -> list[Row]:
    return [row for rows, _ in loops_of(bench, works, *sizes, **options) for row in rows]


def loops_of(bench: Bench, works: Sequence[Work], *sizes: Any, **options: Any) -> Any:
    wanted = [one for size in sizes or (SHAPE,) for one in benching.wanted_at(works, size, None)]
    return benching.measure_loops(bench, benching.in_loops(wanted), **options)


def the_work(number: int, name: str = "q4_0") -> Work:
    return Work(find(number), find(number).families[-1], name)


# --- rows -----------------------------------------------------------------------------------------


def test_kernel_pass_and_total_are_of_one_loop_and_checked() -> None:
    bench = fake_bench()
    rows = measured(bench, [the_work(1, "q5_1"), the_work(2, "q5_1")], (3, 40, 64))
    times = [(row.kernel_us, row.activation_us, row.total_us) for row in rows]
    assert np.array(times) == pytest.approx(np.array([(8000, 0, 8000), (6000, 1000, 7000)]))
    for row in rows:
        assert (row.status, row.why, row.rounds, row.scheme) == ("ok", None, 3, f"W5{row.family}")
        assert row.source_hash == provenance.source_hash(row.step, row.name)
        assert 0 <= (row.nmse_same_operands or 0) < 1e-9 < (row.nmse_float or 0) < 1e-2
    two = rows[1]
    assert (two.total_p20_us, two.total_p80_us) == pytest.approx((7000, 7000))
    assert (two.home, two.branch, two.parent) == (False, "cuda_cores", 1)
    assert (two.input, two.output) == ("float32", "float32")
    counted = [each for each in bench.stopwatch.rounds if len(each) > 1]  # type: ignore[attr-defined]
    assert {len(each) for each in counted} == {4}, "step 1, step 2, its pass and its total"


def lesson_like(kernel: Kernel, **place: Any) -> Step:
    """A lesson that writes all that a kernel writes."""
    return Step(**{one.name: getattr(kernel, one.name) for one in fields(kernel)} | place)


def test_a_step_has_a_row_for_each_dtype_and_bfloat16_at_home_in_one_format() -> None:
    """From a dtype to the same, where the step reads it, against what the numbers of such an A
    give."""
    step = lesson_like(kernel_of(13), branch="float16", homes=((3, 5, 64),))
    rows = measured(fake_bench(), [Work(step, "A16", "q4_0")], (3, 5, 64))
    assert [(row.input, row.output, row.why) for row in rows] == [(x, x, None) for x in FLOATS]
    for row, least, most in zip(rows, (1e-9, 1e-9, 1e-7), (1e-6, 1e-6, 3e-5), strict=True):
        assert least < (row.nmse_same_operands or 0) < most
    assert [row.activation_us > 0 for row in rows] == [True, False, True]
    for work, size in (
        (Work(step, "A16", "q8_0"), (3, 5, 64)),
        (Work(step, "A16", "q4_0"), (4, 5, 64)),
        (Work(replace(step, outputs=FLOATS[:2]), "A16", "q4_0"), (3, 5, 64)),
    ):
        assert [one.output for one in benching.wanted_of(work, size)] == ["float32", "float16"]
    ten = lesson_like(replace(kernel_of(10), outputs=FLOATS), branch="int8")
    reads_float32 = benching.wanted_of(Work(ten, "A8", "q4_0"), ten.home_shapes[0])
    assert [(one.input, one.output) for one in reads_float32] == [
        ("float32", "float32"),
        ("float32", "float16"),
    ]


def test_products_of_one_packing_and_one_pass_share_them() -> None:
    bench = fake_bench(l2_bytes=500)
    works = [the_work(1), Work(find(3), "A16", "q4_0"), the_work(2)]
    measured(bench, works)
    blocks = 6 * 64 // 32 * 18
    slots = math.ceil(4 * 500 / blocks)
    outs = 2 * len(works)  # the checked and the timed one
    assert bench.stopwatch.copies == slots - 1 + outs  # type: ignore[attr-defined]


class Wrong(Simulator):
    def host(self, array: np.ndarray) -> np.ndarray:
        return super().host(array) * np.array(1.5, array.dtype)


def spoil(launches: Sequence[Any]) -> None:
    """As a race would: now and then."""
    for out in (x for x in launches[-1].args if getattr(x, "shape", ()) == SHAPE[:2]):
        out[0, 0] += 1


class Lying(FakeStopwatch):
    """A clock that takes the launch of a pair for faster than the launch alone."""

    def round(self, replays: Sequence[Any]) -> list[float]:
        shares = [0.5 if len({x.kernel for x in each.parts}) == 2 else 1.0 for each in replays]
        return [x * s for x, s in zip(super().round(replays), shares, strict=True)]


@pytest.mark.parametrize(
    ("number", "bench", "options", "timed", "why"),
    [
        (1, replace(fake_bench(), machine=Wrong()), {}, False, "wrong: "),
        (1, fake_bench(), {"wrong": {(1, "A16", "q4_0"): "step 1 lies"}}, False, "step 1 lies"),
        (1, fake_bench(effect=spoil), {}, True, "right before timing, wrong after: wrong: "),
        (1, fake_bench(simulated=False), {}, True, ".*12 of 12 outputs are not finite"),
        (1, fake_bench(Limits(copy_tbps=1e-12)), {}, True, ".*limits of this GPU"),
        (
            *(2, replace(fake_bench(), stopwatch=Lying(cost=by_kernel(COSTS))), {}, True),
            "the total of 3500 us is below the 6000 us of the kernel in it",
        ),
    ],
    ids=["wrong", "failed checks", "wrong while timed", "nothing written", "too fast", "total"],
)
def test_what_cannot_be_believed_is_a_failed_row(
    number: int, bench: Bench, options: Any, timed: bool, why: str
) -> None:
    """What is known to be wrong is not even timed."""
    (row,) = measured(bench, [the_work(number)], **options)
    assert (row.status, row.kernel_us is not None) == ("failed", timed)
    assert re.match(why, row.why or ""), row.why
    assert bool(bench.stopwatch.rounds) == timed  # type: ignore[attr-defined]


def test_an_error_is_one_failed_row_and_a_lost_context_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of\nluck")

    for bad in (replace(find(2), launch=broken), replace(find(2), pack=broken)):
        rows = measured(fake_bench(), [the_work(1), Work(bad, "A8", "q4_0")])
        assert [(row.status, row.why) for row in rows] == [
            ("ok", None),
            ("failed", "RuntimeError: out of luck"),
        ]
    monkeypatch.setattr(benching, "round_robin", broken)
    (row,) = measured(fake_bench(), [the_work(1)])
    assert (row.status, row.why) == ("failed", "the loop failed: RuntimeError: out of luck")
    monkeypatch.setattr(products, "fatal", lambda _: True)
    with pytest.raises(RuntimeError):
        measured(fake_bench(), [Work(bad, "A8", "q4_0")])


# --- data -----------------------------------------------------------------------------------------


def test_formats_share_a_and_the_float_weights() -> None:
    data = Data(5, 4, 64)
    parts = [
        products.PartOf(2, 4, 64, name, data=data, input=dtype)
        for name in ("q4_0", "q5_1")
        for dtype in ("float32", "float16")
    ]
    for part in parts:
        np.testing.assert_array_equal(part.a, data.a("float16")[:2])
        assert part.a.dtype == part.input
        assert part.w is data.w
        assert part.blocks is data.blocks(part.format)
    bits = products.PartOf(2, 4, 64, "q4_0", data=data, input="bfloat16")
    assert data.a("bfloat16").dtype == np.uint16
    np.testing.assert_array_equal(bits.a, rounded_to_bfloat16(parts[0].a))
    np.testing.assert_array_equal(bits.given, data.a("bfloat16")[:2])
    rows, columns = np.arange(2), np.arange(4)
    for one in (parts[0], parts[1], bits):
        wanted = one.a.astype(np.float64) @ data.w.astype(np.float64).T
        found = Reference(one, 8).meant
        np.testing.assert_allclose(found, wanted[np.ix_(rows, columns)], rtol=1e-12)
    with pytest.raises(ValueError, match="the first 6 tokens"):
        _ = products.PartOf(6, 4, 64, "q5_1", data=data).a


def test_formats_that_are_only_read_have_floats_of_their_own() -> None:
    data = Data(2, 4, 256)
    part = products.PartOf(2, 4, 256, "q4_k", data=data)
    np.testing.assert_array_equal(part.w, data.floats("q4_k"))
    assert part.w is not data.w
    assert part.knows_floats


def test_weights_that_are_given_are_taken_as_they_are() -> None:
    blocks = Data(3, 4, 64).blocks("q5_1")
    given = PrequantizedProblem(3, blocks)
    rows = measured(fake_bench(), [the_work(1, "q5_1")], (3, 4, 64), given=given)
    assert [row.status for row in rows] == ["ok"], rows[0].why
    assert rows[0].nmse_float is None, "nobody knows what they were quantized from"
    part = products.PartOf(2, 4, 64, "q5_1", data=Data(3, 4, 64, given=given))
    assert part.blocks is given.blocks
    assert not part.knows_floats


# --- the matrix -----------------------------------------------------------------------------------

MATRIX = benching.matrix(ladder(), cc=HOPPER)


def steps_at(size: Any) -> set[int]:
    return {one.work.step.number for one in MATRIX if one.size == size}


def test_every_step_is_at_its_home_shapes_in_all_formats_with_its_parents() -> None:
    keys = {one.key for one in MATRIX}
    assert len(keys) == len(MATRIX)
    for step in ladder():
        for size in step.home_shapes:
            for name in step.formats[: len(WEIGHT_FORMATS)]:
                for family in step.families:
                    for one in benching.wanted_of(Work(step, family, name), size):
                        assert one.key in keys
            assert {step.number, *step.parents.values()} <= steps_at(size)


def test_the_top_steps_are_at_all_shapes() -> None:
    tops = {step.number for step in benching.top_steps(ladder(), HOPPER)}
    assert tops == {10, 14, 15, 18}
    for size in BENCH_SHAPES:
        wanted = {n for n in tops if find(n).branch != "decode" and size[0] >= 8}
        wanted |= {18} if size[0] <= 16 else set()
        assert wanted <= steps_at(size), size
    assert {step.number for step in benching.top_steps(ladder(), (8, 6))} == {10, 11, 17}


def test_rows_at_home_are_of_lessons_and_others_of_kernels() -> None:
    """A row says which by its name; its place in the ladder is that of the lesson."""
    homes = {size for step in ladder() for size in step.home_shapes}
    for one in MATRIX:
        kernel, lesson = one.work.step, lesson_of(one.work.step)
        if one.size in lesson.home_shapes and one.work.family in lesson.families:
            assert kernel is lesson
        elif one.size not in homes:
            assert kernel is kernel_of(lesson.number)
        row = one.row()
        assert (row.name, row.branch) == (kernel.name, lesson.branch)
        assert row.parent == lesson.parents.get(one.work.family)
    of_file = benching.matrix(ladder(), ["q4_k"], HOPPER)
    fourteen = [one for one in of_file if one.work.step.number == 14]
    assert {one.size for one in fourteen} >= set(find(14).home_shapes)
    assert all(one.work.step is kernel_of(14) for one in fourteen), "no lesson has this format"


def test_the_headline_comes_first_and_home_shapes_before_the_others() -> None:
    loops = benching.in_loops(MATRIX)
    sizes = [size for size, _ in loops]
    assert len(set(sizes)) == len(sizes)
    first = [branch.homes[0] for branch in branches().values()]
    assert sizes[: len(set(first))] == list(dict.fromkeys(first))
    homes = [any(one.at_home for one in own) for _, own in loops]
    assert homes == sorted(homes, reverse=True)
    assert sum(len(own) for _, own in loops) == len(MATRIX)


# --- incremental ----------------------------------------------------------------------------------

ENV = Environment(gpu="A GPU", numba_cuda="0.30.4", driver="580.1", utc="2026-01-02T03:04:05Z")


def good(wanted: Wanted, **changes: Any) -> Row:
    row = replace(
        wanted.row(),
        status="ok",
        why=None,
        kernel_us=1.0,
        total_us=1.0,
        source_hash=provenance.source_hash(wanted.work.step.number, wanted.work.step.name),
        commit="0ld",
        utc="2025-01-01T00:00:00Z",
    )
    return replace(row, **changes)


@pytest.mark.parametrize(
    "changes", [None, {"source_hash": "0" * 12}, {"status": "failed", "why": "no luck"}]
)
def test_missing_stale_or_failed_is_measured_with_all_of_its_loop(changes: Any) -> None:
    """What is left as it is: the same steps in another format, and at another shape."""
    loops = [
        [Wanted(the_work(n, name), size) for n in (1, 2, 4)]
        for name, size in (("q4_0", SHAPE), ("q5_1", SHAPE), ("q4_0", (1, *SHAPE[1:])))
    ]
    wanted = [one for loop in loops for one in loop]
    rows = [good(one) for one in wanted if one is not loops[0][1]]
    if changes is not None:
        rows.append(good(loops[0][1], **changes))
    assert benching.missing(wanted, Run(env=ENV, rows=tuple(rows))) == loops[0]
    rows = [good(one) for one in wanted]
    assert benching.missing(wanted, Run(env=ENV, rows=tuple(rows))) == []


def test_a_bench_keeps_fresh_rows_with_their_commit(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    other = Wanted(the_work(1, "q5_1"), SHAPE)
    wanted = [Wanted(the_work(1), SHAPE), Wanted(the_work(2), SHAPE), other]
    rows = good(wanted[0]), good(wanted[1], source_hash="0" * 12), good(other)
    old = Run(env=ENV, rows=rows)
    store.write(old, path)
    env = replace(ENV, git=Git(sha="new", dirty=True))
    run = benching.begin(path, env, ladder())
    recorder = Recorder(path, env, run)
    for rows, peers in benching.measure_loops(
        fake_bench(), benching.in_loops(benching.missing(wanted, run))
    ):
        recorder.add(rows, peers)
    one, two, three = store.read(path).rows
    assert (three.commit, three.utc, three.kernel_us) == ("0ld", "2025-01-01T00:00:00Z", 1.0)
    assert (one.commit, one.kernel_us) == ("new-dirty", pytest.approx(8000))
    assert (two.commit, two.kernel_us) == ("new-dirty", pytest.approx(6000))
    assert one.utc is not None
    assert one.utc > "2026"
    assert two.x_parent == pytest.approx(8 / 6, rel=1e-4)
    assert benching.missing(wanted, store.read(path)) == []
    assert [row.step for row in recorder.added] == [1, 2]


def test_rows_are_kept_of_this_machine_compiler_and_ladder_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    rows = (
        good(Wanted(the_work(1), SHAPE)),
        good(Wanted(the_work(2), SHAPE), name="step02_other"),
        good(Wanted(the_work(2), SHAPE), output="bfloat16"),  # step 2 writes float32 alone
        good(Wanted(the_work(2), SHAPE), format="q4_k"),  # and has no such format
    )
    store.write(Run(env=ENV, rows=rows), path)
    kept = benching.begin(path, replace(ENV, driver="580.99"), ladder()).rows
    assert [row.step for row in kept] == [1]
    for changes in ({"gpu": "Another"}, {"numba_cuda": "0.31.0"}, {"driver": "590.1"}):
        assert benching.begin(path, replace(ENV, **changes), ladder()).rows == ()
    assert benching.begin(tmp_path / "none.json", ENV, ladder()) == Run(env=ENV)


# --- the command ----------------------------------------------------------------------------------


def asked(**changes: Any) -> Any:
    options = vars(_parser().parse_args(["bench"]))
    return SimpleNamespace(**options | changes)


def test_the_matrix_is_narrowed_by_what_is_asked_for() -> None:
    assert command.rows_of(asked(), HOPPER) == list(MATRIX)
    of_file = command.rows_of(asked(format=["mxfp4"]), HOPPER)
    named = {
        (one.step.number, one.family, one.format)
        for one in select((*ladder(), *kernels()), ["mxfp4"])
    }
    of_works = {(one.work.step.number, one.work.family, one.work.format) for one in of_file}
    assert of_works == named, "a format that is asked for"
    one = command.rows_of(asked(steps=["10"], format=["q4_0"], m=128), HOPPER)
    assert {(w.work.step.number, w.work.format, w.size[0]) for w in one} == {(10, "q4_0", 128)}
    assert len(one) == 3
    other = command.rows_of(asked(steps=["1", "2"], m=77), HOPPER)
    assert {w.size for w in other} == {(77, 4096, 4096)}
    assert len(other) == 10, "a shape apart, of all that is named"
    assert command.rows_of(asked(steps=["5"], scheme="W8A8"), HOPPER) == [
        w for w in MATRIX if w.work.step.number == 5 and w.work.format == "q8_0"
    ]


def test_calls_are_those_of_the_set_the_formats_and_the_shape_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from results.measure import torch_graphs

    version: list[str | None] = ["9.9"]
    monkeypatch.setattr(torch_graphs, "torch_version", lambda: version[0])

    def calls(**changes: Any) -> list[as_called.Call]:
        return command.calls_of(asked(**changes))

    tabled, sweep = list(as_called.TABLED), list(as_called.SWEEP)
    assert calls() == calls(steps=["all"]) == tabled + sweep
    assert (calls(only="calls"), calls(only="sweep"), calls(only="home")) == (tabled, sweep, [])
    assert {way.format for _, way in calls(format=["q5_1"])} == {"q5_1"}
    assert {size for size, _ in calls(m=8, n=4096, k=4096)} == {(8, 4096, 4096)}
    assert calls(steps=["4"]) == calls(scheme="W4A16") == []
    assert command.rows_of(asked(only="sweep"), HOPPER) == []
    homes = {size for step in ladder() for size in step.home_shapes}
    assert command.rows_of(asked(only="home"), HOPPER) == [o for o in MATRIX if o.size in homes]
    assert capsys.readouterr().err == ""
    version[0] = None
    assert calls() == []
    assert "there is no torch with a GPU" in capsys.readouterr().err


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command believes in a GPU: the simulator under another name, and the fake stopwatch."""

    class Pretended(Simulator):
        name = "A GPU"
        cc = HOPPER

    monkeypatch.setattr(command, "machines", lambda _: ("A GPU", lambda _: Pretended(), None))
    monkeypatch.setattr(command, "environment", lambda: ENV)
    monkeypatch.setattr(command, "compile_ahead", lambda *_: 0)
    monkeypatch.setattr(Bench, "here", lambda *_: fake_bench())


@pytest.mark.usefixtures("on_a_gpu")
def test_a_bench_measures_records_prints_and_is_then_up_to_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    args = asked(steps=["1", "5"], format=["q4_0"], m=2, n=6, k=64, out=out)
    assert command.bench(args) == 0
    printed = capsys.readouterr()
    assert printed.err == "2 rows and 0 calls in 1 loops\n"
    assert printed.out.splitlines()[0] == "A GPU: 2 rows measured now"
    assert printed.out.splitlines()[-1] == f"wrote {out}"
    before = out.read_text()
    assert [row["step"] for row in json.loads(before)["rows"]] == [1, 5]

    assert command.bench(args) == 0
    printed = capsys.readouterr()
    assert "is up to date" in printed.out
    assert out.read_text() == before

    args.fresh = True
    assert command.bench(args) == 0
    assert "2 rows measured now" in capsys.readouterr().out


@pytest.mark.usefixtures("on_a_gpu")
def test_a_bench_keeps_what_it_had_when_the_gpu_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, loops = tmp_path / "run.json", Bench.loop, []

    def lost(self: Bench, *args: Any) -> Any:
        loops.append(args)
        if len(loops) == 2:
            raise RuntimeError("an illegal memory access")
        return real(self, *args)

    monkeypatch.setattr(Bench, "loop", lost)
    monkeypatch.setattr(command, "fatal", lambda _: True)
    wanted = [Wanted(the_work(1), size) for size in ((1, 4, 32), (2, 4, 32), (3, 4, 32))]
    monkeypatch.setattr(command, "rows_of", lambda *_: wanted)
    assert command.bench(asked(out=out)) == 1
    assert [row.shape for row in store.read(out).rows] == [(1, 4, 32)]
    assert "the run ended early: RuntimeError: an illegal memory access" in capsys.readouterr().err
    loops[:] = [()]
    none = tmp_path / "none.json"
    assert command.bench(asked(out=none)) == 1
    assert not none.exists()
    assert capsys.readouterr().out == "", "nothing was written"


# --- cuBLAS beside the rows -----------------------------------------------------------------------


def test_cublas_is_in_the_loop_in_the_rows_and_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[str | None] = [None, None]

    class Numpy(cublas.Cublas):
        source = "numpy"

        def __init__(self, shared: products.Shared, budget: Budget) -> None:
            self.shape = shared.shape
            kernel = SimpleNamespace(__name__="cublas", py_func=None)
            part = SimpleNamespace(kernel=kernel)
            self.contestant = Contestant(shared.stopwatch, lambda _: (part,), 1, budget)

        def wrong(self) -> str | None:
            return wrong.pop()

    said: list[str] = []
    watch = FakeStopwatch(cost=by_kernel({"cublas": 3.5e-3, **COSTS}), simulated=False)
    bench = Bench(Simulator(), watch, Limits(), QUICK, True, said.append)
    monkeypatch.setattr(benching.cublas, "Cublas", Numpy)
    monkeypatch.setattr(Bench, "tidy", lambda _: None)
    monkeypatch.setattr(Bench, "_judged", lambda self, some, when: list(some))
    ((rows, peers),) = loops_of(bench, [the_work(2)])
    assert rows[0].cublas_us == pytest.approx(3500)
    assert rows[0].x_cublas == pytest.approx(0.5), "beside the total"
    assert [(p.peer, p.format, p.shape, p.same_run) for p in peers] == [
        ("cublas_fp16", "f16", SHAPE, True)
    ]
    wrong[:] = ["it is wrong"]
    ((rows, peers),) = loops_of(bench, [the_work(2)])
    assert (rows[0].status, rows[0].cublas_us, peers) == ("ok", None, [])
    assert said == [f"no cuBLAS at {SHAPE}: it is wrong"]
