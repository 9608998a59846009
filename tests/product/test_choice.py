"""Which step is chosen, what is said of it, and that a new step waits until it is measured."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import steps
from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS
from reference import Problem
from steps import find, gemm, ladder, pack, registry
from steps.contract import ACCURACIES, Launch, Shape, Step
from steps.driver.machines import Simulator
from steps.kernels.parts.activations.layouts import (
    by_family,
    float16_rows,
    float32_quantized_inside,
    inputs,
)
from steps.product import choice
from steps.product import tuning_table as tuning
from steps.product.choice import (
    Choice,
    choose,
    choose_uncast,
    launch_configuration,
    packing_step,
    packings,
)
from steps.product.tuning_table import Entry, Tuning
from tests.driver.fake_gpu import FakeGpu

DEFAULTS = [step for step in ladder() if step.chosen_untuned]
H200 = SimpleNamespace(name="NVIDIA H200", cc=(9, 0), sms=132)


def entry(m: int, n: int = 4096, k: int = 4096, name: str = "q4_0", **times: float) -> Entry:
    """An entry with the times of steps: s5A8=12.0 is step 5 in family A8."""
    named = {key[1:].replace("A", " A"): us for key, us in times.items()}
    return Entry(name, n, k, m, named)


def table(*entries: Entry, gpu: str = "NVIDIA H200", cc: Any = (9, 0), sms: int = 132) -> Tuning:
    return Tuning(gpu, cc, sms, entries)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the tables that are known."""

    def known(*tables: Tuning) -> None:
        monkeypatch.setattr(tuning, "known", lambda: tables)

    known()
    return known


def chosen(m: int = 1, machine: Any = H200, **options: Any) -> Choice:
    return choose("q4_0", Shape(m, 4096, 4096), machine, **options)


# --- by its time ----------------------------------------------------------------------------------


def test_the_fastest_measured_step_is_chosen_and_said_to_be(tuned: Any) -> None:
    tuned(table(entry(1, s2A8=30.0, s5A8=20.0, s3A16=9.0), entry(16, s2A8=31.0, s5A8=21.0)))
    one = chosen(1)
    assert (one.step.number, one.family) == (3, "A16")
    assert str(one) == (
        "step 3 (shared-memory tiles) as W4A16 for M=1 N=4096 K=4096: fastest of 3 steps measured "
        "at M=1 N=4096 K=4096 on the NVIDIA H200 (9 us)"
    )
    launched = replace(one, configuration="8x4 blocks of 256 threads")
    assert "K=4096, launched as 8x4 blocks of 256 threads: fastest" in str(launched)
    assert chosen(2).step.number == 5, "M=2 counts as M=16"
    assert chosen(1, family="A8").step.number == 5


def test_a_step_of_both_families_is_one_step(tuned: Any) -> None:
    tuned(table(entry(1, s3A8=20.0, s3A16=9.0)))
    assert chosen().why.startswith("fastest of 1 step measured at")


def test_a_choice_from_the_table_of_another_gpu_says_so(tuned: Any) -> None:
    tuned(table(entry(1, s5A8=20.0), gpu="NVIDIA H100 PCIe", sms=114))
    assert chosen().why.endswith(
        " on the NVIDIA H100 PCIe (20 us), the tuned GPU most like the NVIDIA H200"
    )


def test_a_format_without_times_uses_those_of_the_one_stored_most_like_it(tuned: Any) -> None:
    tuned(table(entry(1, name="q4_1", s10A8=20.0, s11A16=9.0), entry(1, s10A8=1.0)))
    found = choose("q4_k", Shape(1, 4096, 4096), H200)
    assert (found.step.number, found.format) == (11, "q4_k")
    assert found.why.endswith("(9 us) in q4_1, stored most like q4_k")


def test_only_steps_that_can_are_chosen(tuned: Any) -> None:
    """The packing, the family and the GPU all leave steps out."""
    tuned(table(entry(1, s2A8=3.0, s3A16=2.0, s5A8=20.0)))
    among = [step for step in ladder() if step.pack is find(5).pack]
    assert chosen(among=among).step.number == 5
    assert chosen(step=1).step.number == 1
    assert chosen(step=1).why == "asked for by number"
    newer = next(step for step in ladder() if step.min_cc > (7, 5))
    tuned(table(entry(1, **{f"s{newer.number}A8": 1.0, "s5A8": 20.0}), cc=(7, 5), gpu="T4"))
    old = SimpleNamespace(name="T4", cc=(7, 5), sms=40)
    assert chosen(machine=old).step.number == 5


TWO_FAMILIES = (
    entry(1, **{"s7A8": 27.0, "s10A8": 6.1, "s11A16": 21.0}),
    entry(64, **{"s7A8": 33.0, "s10A8": 19.0, "s11A16": 15.0}),
    entry(4096, **{"s7A8": 620.0, "s10A8": 830.0, "s11A16": 310.0}),
)


@pytest.mark.parametrize(
    ("m", "step", "family"), [(1, 10, "A8"), (17, 10, "A8"), (49, 11, "A16"), (999, 11, "A16")]
)
def test_one_packing_serves_both_families_and_m_decides(m, step, family, tuned) -> None:
    tuned(table(*TWO_FAMILIES))
    among = [one for one in ladder() if one.pack is find(17).pack]
    assert {10, 11} <= {one.number for one in among}
    for found in (chosen(m, among=among), chosen(m)):
        assert (found.step.number, found.family) == (step, family)
        assert "fastest of 3 steps measured at M=" in found.why
    eights = chosen(m, among=among, family="A8")
    assert (eights.step.number, eights.family) == ({1: 10, 17: 10, 49: 10, 999: 7}[m], "A8")
    assert "fastest of 2 steps" in eights.why
    assert chosen(m, among=among, family="A16").step.number == 11


def test_between_two_entries_times_lie_on_a_line() -> None:
    """Each token counts up to 8, then each 16, as tiles are multiplied whole; outside, the ends."""
    few = entry(1, **{"s18A16": 10.0, "s14A16": 14.0, "s17A8": 9.0})
    many = entry(8, **{"s18A16": 17.0, "s14A16": 14.0, "s15A8": 12.0})
    most = entry(128, **{"s14A16": 28.0, "s15A8": 12.0})
    made = table(most, few, many)
    for m, wanted, where in (
        (1, few.times, "M=1 N=4096 K=4096"),
        (3, {"18 A16": 12.0, "14 A16": 14.0, "15 A8": 12.0}, "M=1 and 8, N=4096 K=4096"),
        (8, many.times, "M=8 N=4096 K=4096"),
        (9, {"14 A16": 14 + 14 * 8 / 120, "15 A8": 12.0}, "M=8 and 128, N=4096 K=4096"),
        (16, {"14 A16": 14 + 14 * 8 / 120, "15 A8": 12.0}, "M=8 and 128, N=4096 K=4096"),
        (17, {"14 A16": 14 + 14 * 24 / 120, "15 A8": 12.0}, "M=8 and 128, N=4096 K=4096"),
        (113, most.times, "M=128 N=4096 K=4096"),
        (5000, most.times, "M=128 N=4096 K=4096"),
    ):
        found = made.entry("q4_0", m, 4096, 4096)
        assert found is not None
        assert (found.times, found.where) == (pytest.approx(wanted), where)


# --- A in 16 bits ---------------------------------------------------------------------------------


def test_bfloat16_costs_more_where_weights_are_made_of_it(tuned) -> None:
    """14 is the faster one in float16, and 15, which quantizes A, in bfloat16."""
    times = entry(64, **{"s14A16": 20.0, "s15A8": 21.0})
    tuned(table(times))
    for dtype, step in (("float16", 14), ("bfloat16", 15)):
        found = chosen(64, input=dtype, output=dtype, accuracy="fast")
        assert found.step.number == step, dtype
    tuned(table(entry(4, **{"s14A16": 20.0, "s18A16": 20.9})))
    for dtype, step in (("float16", 14), ("bfloat16", 18)):
        assert chosen(4, input=dtype, output=dtype).step.number == step, dtype


@pytest.fixture
def both_families(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ladder whose step 98 reads float16 rows (A16) or quantizes float32 (A8), up to 16 tokens;
    its own rows of A are no bfloat16."""
    step = replace(
        find(10),
        number=98,
        families=("A8", "A16"),
        activations=by_family(float16_rows, float32_quantized_inside),
        outputs=("float32", "float16"),
        most_tokens=16,
    )
    before = tuple(one for one in ladder() if one.number < 17)
    monkeypatch.setattr(choice, "ladder", lambda: (*before, step))
    monkeypatch.setattr(choice, "find", lambda number: step if number == 98 else find(number))
    return step


def both(found: Choice) -> tuple[int, str]:
    return found.step.number, found.family


def test_float16_is_chosen_for_by_the_times_of_float16(tuned: Any, both_families: Any) -> None:
    """Those from float32 stand in where there are none."""
    times = {"98 A8": 3.7, "98 A16": 5.4, "14 A16": 9.0}
    half = {"98 A16 float16": 3.9, "14 A16 float16": 3.8}
    tuned(table(Entry("q4_0", 4096, 4096, 1, times)))
    assert both(chosen()) == (98, "A8")
    assert both(chosen(input="float16")) == (98, "A16"), "only those that read it"
    tuned(table(Entry("q4_0", 4096, 4096, 1, {**times, **half})))
    assert both(chosen()) == (98, "A8"), "of float32 as before"
    found = chosen(input="float16")
    assert both(found) == (14, "A16")
    assert found.why.endswith(" on the NVIDIA H200 (3.8 us)")
    assert both(chosen(input="bfloat16")) == (14, "A16"), "step 98 does not read it"


def test_a_cast_counts(tuned: Any, both_families: Any) -> None:
    times = {"98 A8": 3.7, "98 A16": 8.0, "14 A16": 9.0}
    tuned(table(Entry("q4_0", 4096, 4096, 1, times)))
    for input in ("float16", "bfloat16"):
        found = chosen(input=input, cast_us=2.5)
        assert both(found) == (98, "A8")
        assert found.why.endswith(" (6.2 us, with the cast of A to float32)")
        assert both(chosen(input=input, cast_us=0.0)) == (98, "A8")
    assert both(chosen(input="float16", cast_us=4.5)) == (98, "A16")
    assert both(chosen(input="bfloat16", cast_us=4.5)) == (98, "A8")
    assert both(chosen(input="bfloat16", cast_us=6.0)) == (98, "A8"), "14 takes 10.2 us of bfloat16"
    assert both(chosen(input="bfloat16", cast_us=7.0)) == (14, "A16")
    assert "cast" not in chosen(input="float16", cast_us=4.5).why
    assert both(chosen(cast_us=4.5)) == (98, "A8"), "float32 is not cast"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nothing_is_cast_where_a_step_reads_and_writes_the_dtype(dtype: str) -> None:
    """Before compute capability 8.0 no step does, and the caller casts."""
    packed = ["tiles", "byte_tiles"]
    for cc in ((8, 0), (8, 9), (9, 0)):
        gpu = FakeGpu(cc=cc)
        for m in (1, 4, 17, 512):
            found = choose_uncast("q4_0", Shape(m, 4096, 4096), packed, gpu, "exact", dtype)
            assert dtype in inputs(found.step, found.family)
            assert dtype in found.step.outputs
    old = choose_uncast("q4_0", Shape(1, 64, 64), ["k_outermost"], FakeGpu(cc=(7, 5)), dtype=dtype)
    assert old.step.outputs == ("float32",)
    with pytest.raises(ValueError, match="no step can do this"):
        choose_uncast("q4_0", Shape(1, 64, 64), ["tiles"], FakeGpu(cc=(7, 5)), dtype=dtype)


def test_a_family_that_was_never_measured_waits(tuned: Any, both_families: Any) -> None:
    """Where a step has no time here, it is taken in a family that has some elsewhere."""
    of_8 = Entry("q4_1", 4096, 4096, 1, {"98 A8": 3.7})
    for input in ("float32", "float16"):
        tuned(table(of_8, gpu="NVIDIA L4", cc=(8, 9)))
        assert both(chosen(input=input, cast_us=2.5)) == (98, "A8")
        both_times = replace(of_8, times={"98 A8": 3.7, "98 A16 float16": 3.9})
        tuned(table(both_times, gpu="NVIDIA L4", cc=(8, 9)))
        assert both(chosen(input=input, cast_us=2.5)) == (98, "A16")
        tuned()
        assert both(chosen(input=input, cast_us=2.5)) == (98, "A16"), "the last, without any"
    tuned(table(of_8, gpu="NVIDIA L4", cc=(8, 9)))
    assert both(chosen(input="float16")) == (98, "A16"), "nobody casts it"
    assert both(chosen(input="bfloat16", cast_us=2.5)) == (98, "A8"), "made for so few tokens"
    assert chosen(input="bfloat16").step.most_tokens is None
    assert both(chosen(17, input="bfloat16", cast_us=2.5)) == (14, "A16")


def test_a_step_that_is_named_reads_a_or_is_refused(tuned: Any, both_families: Any) -> None:
    assert both(chosen(step=98)) == (98, "A16"), "the family that continues the ladder"
    assert both(chosen(step=98, input="bfloat16", cast_us=0.0)) == (98, "A16")
    with pytest.raises(ValueError, match=r"^step 98 reads A as float32 or float16 in family A16"):
        chosen(step=98, input="bfloat16")
    with pytest.raises(ValueError, match=r"^step 98 reads A as float32 in family A8, not float16$"):
        chosen(step=98, input="float16", family="A8")
    with pytest.raises(ValueError, match=r"^step 5 reads A as float32, not bfloat16$"):
        chosen(step=5, input="bfloat16")
    assert both(chosen(among=[both_families], input="float16")) == (98, "A16")
    old = SimpleNamespace(name="Tesla T4", cc=(7, 5), sms=40)
    with pytest.raises(ValueError, match=r"no step can do this: step 98 .* compute capability 8"):
        chosen(machine=old, input="float16")


# --- without a time -------------------------------------------------------------------------------


def default(m: int) -> Choice:
    exact = [step for step in DEFAULTS if step.accuracy == "exact"]
    fitting = [step for step in exact if step.most_tokens is None or m <= step.most_tokens]
    best = ([step for step in fitting if step.most_tokens] or fitting)[-1]
    return Choice(best, best.families[-1], "q4_0", Shape(m, 4096, 4096), "")


def test_a_step_that_is_not_in_the_ladder_is_passed_over(tuned: Any) -> None:
    tuned(table(entry(1, s99A8=0.1, s5A8=20.0)))
    assert chosen().step.number == 5
    tuned(table(entry(1, s99A8=0.1)))
    assert chosen() == replace(default(1), why=chosen().why)
    assert chosen().why.endswith(
        "; the table of the NVIDIA H200 has no time for it (run make tune)"
    )


@pytest.mark.parametrize("m", [1, 16, 17, 4096])
def test_without_a_table_the_highest_step_for_so_many_tokens(m: int, tuned: Any) -> None:
    found = chosen(m)
    assert (found.step, found.family) == (default(m).step, default(m).family)
    limit = " for M up to 16" if m <= 16 else ""
    assert found.why == (
        f"the highest default step{limit} on the NVIDIA H200; no tuning table covers this GPU "
        "(run make tune)"
    )
    assert found.step.branch == ("decode" if m <= 16 else "float16")
    simulated = choose("q4_0", Shape(m, 4096, 4096), Simulator())
    assert simulated.step == found.step
    assert simulated.why == f"the highest default step{limit} on the simulator"


def test_a_step_for_few_tokens_is_taken_for_no_more(tuned: Any, monkeypatch: Any) -> None:
    exact = [step for step in DEFAULTS if step.accuracy == "exact"]
    few = replace(exact[-1], number=98, most_tokens=16)
    others = tuple(replace(step, most_tokens=None) for step in exact)
    monkeypatch.setattr(choice, "ladder", lambda: (*others, few))
    assert chosen(16).step is few
    assert chosen(17).step is others[-1]
    assert chosen(17, among=[few]).step is few, "weights packed for it leave no other"
    tuned(table(entry(32, **{f"s98{few.families[-1]}": 1.0}, s5A8=2.0)))
    assert chosen(17).step is few, "what was measured counts more"


def test_an_old_gpu_gets_the_highest_step_that_runs_there(tuned: Any) -> None:
    old = SimpleNamespace(name="Tesla T4", cc=(7, 5), sms=40)
    highest = [step for step in DEFAULTS if step.min_cc == (7, 5)][-1]
    assert chosen(machine=old).step is highest
    with pytest.raises(ValueError, match=r"no step can do this: .* needs compute capability"):
        chosen(machine=SimpleNamespace(name="Tesla V100", cc=(7, 0), sms=80))


# --- a new step -----------------------------------------------------------------------------------


@pytest.fixture
def new_step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a copy of a step the last one of the ladder, in a layout of its own or in the same."""

    def register(of: int, **changes: Any) -> Step:
        original = find(of)

        def own_layout(blocks: Any) -> Any:
            return original.pack(blocks)

        options = {"chosen_untuned": False, "pack": own_layout, **changes}
        new = replace(original, number=99, name="step99_new", **options)
        every = (*ladder(), new)
        monkeypatch.setattr(choice, "ladder", lambda: every)
        monkeypatch.setattr(registry, "ladder", lambda: every)
        return new

    return register


@pytest.mark.parametrize("own_layout", [True, False])
@pytest.mark.parametrize("of", [step.number for step in ladder()])
def test_a_new_step_changes_no_choice_until_it_is_measured(
    of: int, own_layout: bool, new_step: Any, tuned: Any
) -> None:
    """A copy of every step in turn, on GPUs without a table and with one that lacks the step."""
    machines = [H200, SimpleNamespace(name="Tesla T4", cc=(7, 5), sms=40), Simulator()]

    def decisions() -> list[Any]:
        found: list[Any] = []
        for tables in ((), (table(entry(64, s5A8=20.0, s6A8=15.0)),)):
            tuned(*tables)
            for machine in machines:
                for name in (*WEIGHT_FORMATS, *FILE_FORMATS):
                    for accuracy in ACCURACIES:
                        shapes = [Shape(m, 4096, 4096) for m in (1, 512)]
                        found += [choose(name, s, machine, accuracy=accuracy) for s in shapes]
                        found += packings(name, machine.cc, accuracy)
                        found.append(packing_step(name, None, machine.cc, accuracy))
        return found

    before = decisions()
    new = new_step(of, **({} if own_layout else {"pack": find(of).pack}))
    assert decisions() == before
    assert chosen(1, machine=Simulator(), step=99).step is new, "by its number it multiplies"


def test_a_new_step_is_chosen_by_its_time_once_it_is_measured(new_step: Any, tuned: Any) -> None:
    new = new_step(14)
    tuned(table(entry(512, s14A16=30.0, s99A16=20.0), entry(1024, s14A16=30.0, s99A16=40.0)))
    assert chosen(512).step is new
    assert chosen(1024).step is find(14)
    assert packing_step("q4_0", None, (9, 0), "exact") is not new, "its layout is not the default"


def test_a_new_step_may_say_that_it_is_a_default(new_step: Any, tuned: Any) -> None:
    new = new_step(14, chosen_untuned=True)
    assert chosen(512).step is new
    assert packing_step("q4_0", None, (9, 0), "exact") is new


def test_gemm_pack_and_plan_pass_a_new_step_over(new_step: Any, tuned: Any) -> None:
    new, machine = new_step(14), Simulator()
    problem = Problem(17, 5, 96, "q4_0")
    handle = steps.pack(problem.blocks, machine=machine)
    assert new not in handle.steps
    assert steps.pack(problem.blocks, step=99, machine=machine).steps == (new,)
    for w in (problem.blocks, handle):
        _, found = steps.gemm(problem.a, w, machine=machine, explain=True)
        assert found.step is find(14)
        assert steps.plan(17, w, machine=machine).choice.step is find(14)
    asked = steps.gemm(problem.a, problem.blocks, step=99, machine=machine, explain=True)[1]
    assert asked.step is new


def test_where_only_a_new_step_can_it_is_named(new_step: Any, tuned: Any) -> None:
    new = new_step(14, outputs=("float32", "float16"), min_cc=(7, 5), max_cc=None)
    old = SimpleNamespace(name="Tesla T4", cc=(7, 5), sms=40)
    with pytest.raises(ValueError, match=r"^only step 99 can do this, never measured .*step=99"):
        chosen(machine=old, output="float16")
    assert chosen(machine=old, output="float16", step=99).step is new
    assert chosen(machine=old, output="float16", among=[new]).step is new


# --- accuracy -------------------------------------------------------------------------------------


@pytest.fixture
def with_fast(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ladder whose last step is not exact."""
    fast = replace(find(10), number=97, accuracy="fast")
    monkeypatch.setattr(choice, "ladder", lambda: (*ladder(), fast))
    return fast


def test_a_step_that_is_not_exact_is_chosen_only_where_asked_for(tuned, with_fast) -> None:
    assert chosen(512).step is default(512).step
    assert chosen(512, accuracy="fast").step is with_fast
    tuned(table(entry(512, s9A8=60.0, s11A16=33.0, s97A8=20.0)))
    found = chosen(512)
    assert found.step.number == 11
    assert found.why == (
        "fastest of 2 steps measured at M=512 N=4096 K=4096 on the NVIDIA H200 (33 us); with "
        "accuracy='fast' step 97 would take 20 us"
    )
    asked = chosen(512, accuracy="fast")
    assert asked.step is with_fast
    assert asked.why == (
        "fastest of 3 steps measured at M=512 N=4096 K=4096 on the NVIDIA H200 (20 us)"
    )
    assert chosen(512, accuracy="fast", family="A16").step.number == 11
    assert "97" not in chosen(512, family="A16").why
    tuned(table(entry(512, s11A16=33.0, s97A8=50.0)))
    assert chosen(512, accuracy="fast").step.number == 11, "it need not be the faster"
    assert "97" not in chosen(512).why


def test_weights_packed_for_a_step_alone_ask_for_it(tuned: Any, with_fast: Any) -> None:
    assert chosen(512, among=[with_fast]).step is with_fast
    assert chosen(512, among=[with_fast]).why == "w is packed for this step alone"
    with pytest.raises(ValueError, match="step 97 is not exact: ask for it with accuracy='fast'"):
        chosen(512, among=[with_fast, with_fast])


def test_packings_are_one_or_with_fast_two() -> None:
    exact = [one for one in DEFAULTS if one.accuracy == "exact"][-1]
    assert packings("q4_0", (9, 0), "exact") == (exact,)
    one, two = packings("q4_0", (9, 0), "fast")
    assert one is exact
    assert (two.accuracy, two.pack.__name__) == ("fast", "byte_tiles")
    assert packings("q4_0", (8, 0), "fast") == packings("q4_0", (8, 0), "exact")
    assert packings("q4_0", (7, 5), "exact") == (find(6),)
    with pytest.raises(ValueError, match="accuracy is 'good'"):
        packings("q4_0", (9, 0), "good")


# --- sentences ------------------------------------------------------------------------------------


def test_what_cannot_be_chosen_is_a_sentence(tuned: Any) -> None:
    with pytest.raises(ValueError, match=r"^family is 'A4': it must be A16 or A8$"):
        chosen(family="A4")
    with pytest.raises(ValueError, match="there is no step 99"):
        chosen(step=99)
    with pytest.raises(ValueError, match="step 2 is of family A8, not A16"):
        chosen(step=2, family="A16")
    for wrong in ("Exact", "sloppy", None):
        with pytest.raises(ValueError, match=rf"^accuracy is {wrong!r}: it must be one of exact, "):
            chosen(accuracy=wrong)


def test_how_a_launch_is_described() -> None:
    assert launch_configuration(Launch(None, (3, 2), (32, 4), ())) == "3x2 blocks of 128 threads"
    shared = Launch(None, (7,), (256,), (), shared_bytes=65536)
    assert launch_configuration(shared) == (
        "7 blocks of 256 threads with 65536 bytes of shared memory"
    )


def test_a_plan_on_a_gpu_tells_how_it_is_launched(gpu: FakeGpu) -> None:
    problem = Problem(3, 5, 96, "q4_0")
    plan = steps.gemm.plan(3, steps.pack(problem.blocks, step=1, machine=gpu))
    assert plan.choice.configuration == "1x1 blocks of 256 threads"


def test_a_k_that_integer_sums_do_not_hold_is_refused() -> None:
    """127 * 128 K < 2^31. Exact steps take any K, so what only allows less exact ones gets them."""
    step, most = 15, find(15).most_k
    assert most == 132096
    assert most * 127 * 128 < 2**31 <= (most + 32) * 127 * 128
    blocks = np.zeros((1, most // 32 + 1), FORMATS["q4_0"].dtype)
    machine = Simulator()
    calls = (
        lambda: gemm(np.zeros((1, most + 32), np.float32), blocks, step=step, machine=machine),
        lambda: gemm.plan(1, blocks, step=step, machine=machine),
        lambda: pack(blocks, step=step, machine=machine),
    )
    for call in calls:
        with pytest.raises(ValueError, match="int32, which holds 132096 of them, and K=132128"):
            call()
    accuracy = find(step).accuracy
    for k, wanted in ((most, accuracy), (most + 32, "exact")):
        assert packings("q4_0", (9, 0), accuracy, k)[-1].accuracy == wanted
        packed = pack(blocks[:, : k // 32], accuracy=accuracy, machine=machine)
        assert packed.steps[-1].accuracy == wanted


# --- the same bits at every M ---------------------------------------------------------------------


def test_an_invariant_product_is_of_one_step_whatever_the_table_says(tuned: Any) -> None:
    tuned(table(entry(1, s2A8=3.0, s18A8=4.0), entry(16, s14A16=1.0, s18A16=9.0)))
    for m in (1, 2, 9, 16):
        found = choose("q4_0", Shape(m, 4096, 4096, True), H200)
        assert (found.step.number, found.family) == (18, "A16")
        assert "same bits at every M up to 16" in str(found)
    assert choose("q4_0", Shape(16, 4096, 4096), H200).step.number == 14
    assert choose("q4_0", Shape(17, 4096, 4096, True), H200).step.number == 14, "no promise there"


def test_an_invariant_product_that_no_step_can_do_is_refused() -> None:
    few = Shape(2, 4096, 4096, True)
    for options in ({"family": "A8"}, {"step": 7}, {"among": [find(15)]}):
        with pytest.raises(ValueError, match="the same bits at every M in steps 17 and 18 alone"):
            choose("q4_0", few, H200, **options)
    assert choose("q4_0", few, H200, step=17).step.number == 17
