"""Which step is chosen, what is said of it, and that a new step waits until it is measured."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import steps
from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS
from qformats.repack import tiles
from reference import Problem
from steps import find, gemm, ladder, pack, registry
from steps.contract import ACCURACIES, Kernel, Launch
from steps.driver.machines import Simulator
from steps.kernels.parts.activations.layouts import (
    float16_rows,
    float32_quantized_inside,
)
from steps.product import choice
from steps.product import tuning_table as tuning
from steps.product.choice import (
    Choice,
    Request,
    choose,
    launch_configuration,
    packing_kernel,
    packings,
)
from steps.product.tuning_table import Entry, Tuning
from steps.registry import kernel_of, kernels
from tests.driver.fake_gpu import FakeGpu

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


def chosen(m: int = 1, machine: Any = H200, name: str = "q4_0", **options: Any) -> Choice:
    return choose(Request(name, m, 4096, 4096, **options), machine)


def both(found: Choice) -> tuple[int, str]:
    return found.kernel.number, found.family


# --- by its time ----------------------------------------------------------------------------------


def test_the_fastest_measured_kernel_is_chosen_and_said_to_be(tuned: Any) -> None:
    tuned(table(entry(1, s10A8=30.0, s14A16=20.0, s11A16=9.0), entry(16, s10A8=31.0, s14A16=21.0)))
    one = chosen(1)
    assert both(one) == (11, "A16")
    assert str(one) == (
        "step 11 (W4A16 on tensor cores: float16 weights made in registers) as W4A16 for M=1 "
        "N=4096 K=4096: fastest of 3 steps measured at M=1 N=4096 K=4096 on the NVIDIA H200 (9 us)"
    )
    launched = one.launched(Launch(None, (8, 4), (256,), ()))
    assert "K=4096, launched as 8x4 blocks of 256 threads: fastest" in str(launched)
    assert chosen(2).kernel.number == 14, "M=2 counts as M=16"
    assert chosen(1, family="A8").kernel.number == 10
    tuned(table(entry(1, s18A8=20.0, s18A16=9.0)))
    assert chosen().why.startswith("fastest of 1 step measured at")
    tuned(table(entry(1, s14A16=20.0), gpu="NVIDIA H100 PCIe", sms=114))
    assert chosen().why.endswith(
        " on the NVIDIA H100 PCIe (20 us), the tuned GPU most like the NVIDIA H200"
    )
    tuned(table(entry(1, name="q4_1", s10A8=20.0, s11A16=9.0), entry(1, s10A8=1.0)))
    found = chosen(name="q4_k")
    assert (found.kernel.number, found.request.format) == (11, "q4_k")
    assert found.why.endswith("(9 us) in q4_1, stored most like q4_k")


def test_lessons_are_chosen_only_where_no_kernel_runs(tuned: Any) -> None:
    """Or by their number; the layout, the family and the GPU leave kernels out, too."""
    fast_lesson = {"s2A8": 3.0, "s5A8": 4.0, "s14A16": 20.0}
    tuned(table(entry(1, **fast_lesson)))
    assert both(chosen()) == (14, "A16")
    assert chosen(step=1).kernel.number == 1
    assert chosen(step=18).kernel is kernels()[-1], "the engineered kernel, not its lesson"
    assert chosen(step=1).why == "asked for by number"
    assert chosen(layouts=(find(5).pack.__name__,)).kernel.number == 5
    old = SimpleNamespace(name="T4", cc=(7, 5), sms=40)
    tuned(table(entry(1, **fast_lesson), cc=(7, 5), gpu="T4"))
    assert chosen(machine=old).kernel.number == 2
    tuned()
    highest = [one for one in ladder() if one.chosen_untuned and one.min_cc == (7, 5)][-1]
    assert chosen(machine=old).kernel is highest
    with pytest.raises(ValueError, match=r"no step can do this: .* needs compute capability"):
        chosen(machine=SimpleNamespace(name="Tesla V100", cc=(7, 0), sms=80))


TWO_FAMILIES = (
    entry(1, **{"s17A8": 27.0, "s10A8": 6.1, "s11A16": 21.0}),
    entry(64, **{"s17A8": 33.0, "s10A8": 19.0, "s11A16": 15.0}),
    entry(4096, **{"s17A8": 620.0, "s10A8": 830.0, "s11A16": 310.0}),
)


@pytest.mark.parametrize(
    ("m", "wanted"), [(1, (10, "A8")), (17, (10, "A8")), (49, (11, "A16")), (999, (11, "A16"))]
)
def test_one_layout_serves_both_families_and_m_decides(m: int, wanted: Any, tuned: Any) -> None:
    tuned(table(*TWO_FAMILIES))
    for layouts in (None, ("tiles",)):
        found = chosen(m, layouts=layouts)
        assert both(found) == wanted
        assert "fastest of 3 steps measured at M=" in found.why
        eights = chosen(m, layouts=layouts, family="A8")
        assert both(eights) == ({1: 10, 17: 10, 49: 10, 999: 17}[m], "A8")
        assert "fastest of 2 steps" in eights.why
        assert chosen(m, layouts=layouts, family="A16").kernel.number == 11


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


def test_bfloat16_costs_more(tuned: Any) -> None:
    """14 is the faster one in float16, and 15, which quantizes A, in bfloat16."""
    tuned(table(entry(64, **{"s14A16": 20.0, "s15A8": 21.0})))
    for dtype, step in (("float16", 14), ("bfloat16", 15)):
        assert chosen(64, a=dtype, c=dtype, accuracy="fast").kernel.number == step, dtype
    tuned(table(entry(4, **{"s14A16": 20.0, "s18A16": 20.4})))
    for dtype, step in (("float16", 14), ("bfloat16", 18)):
        assert chosen(4, a=dtype, c=dtype).kernel.number == step, dtype


def test_times_of_bfloat16_count_as_they_are(tuned: Any) -> None:
    both = entry(16, **{"s14A16": 22.0, "s18A16": 20.0})
    own = {"14 A16 bfloat16": 22.5, "18 A16 bfloat16": 23.0, "14 A16 float16": 21.0}
    tuned(table(replace(both, times={**both.times, **own})))
    for dtype, step in (("float32", 18), ("float16", 18), ("bfloat16", 14)):
        assert chosen(16, a=dtype, c=dtype).kernel.number == step, dtype


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the kernels that are there besides those of the house, or in their place."""

    def among(*added: Kernel, alone: bool = False) -> None:
        every = added if alone else (*kernels(), *added)
        for module in (choice, registry):
            monkeypatch.setattr(module, "kernels", lambda: every)
        known = {one.number: one for one in added}
        monkeypatch.setattr(registry, "find", lambda number: known.get(number) or find(number))

    return among


@pytest.fixture
def both_families(candidates: Any) -> Kernel:
    """A kernel 98 that reads float16 rows (A16) or quantizes float32 (A8), up to 16 tokens; its own
    rows of A are no bfloat16. Those for few tokens are not there."""
    kernel = replace(
        kernel_of(10),
        number=98,
        families=("A8", "A16"),
        activations={"A16": float16_rows, "A8": float32_quantized_inside},
        outputs=("float32", "float16"),
        most_tokens=16,
    )
    candidates(*(one for one in kernels() if one.most_tokens is None), kernel, alone=True)
    return kernel


def test_float16_is_chosen_for_by_the_times_of_float16(tuned: Any, both_families: Any) -> None:
    """Those from float32 stand in where there are none."""
    times = {"98 A8": 3.7, "98 A16": 5.4, "14 A16": 9.0}
    half = {"98 A16 float16": 3.9, "14 A16 float16": 3.8}
    tuned(table(Entry("q4_0", 4096, 4096, 1, times)))
    assert both(chosen()) == (98, "A8")
    assert both(chosen(a="float16")) == (98, "A16"), "only those that read it"
    tuned(table(Entry("q4_0", 4096, 4096, 1, {**times, **half})))
    assert both(chosen()) == (98, "A8"), "of float32 as before"
    found = chosen(a="float16")
    assert both(found) == (14, "A16")
    assert found.why.endswith(" on the NVIDIA H200 (3.8 us)")
    assert both(chosen(a="bfloat16")) == (14, "A16"), "98 does not read it"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_caller_adapts_only_where_no_kernel_reads_and_writes_the_dtype(dtype: str) -> None:
    """That is before compute capability 8.0."""
    for cc in ((8, 0), (8, 9), (9, 0)):
        for m in (1, 4, 17, 512):
            found = chosen(
                m, FakeGpu(cc=cc), a=dtype, c=dtype, layouts=("tiles",), caller_casts=True
            )
            assert (found.reading.source, found.writes) == (dtype, dtype)
    old = FakeGpu(cc=(7, 5))
    found = chosen(1, old, a=dtype, c=dtype, layouts=("k_outermost",), caller_casts=True)
    assert (found.reading.source, found.writes) == ("float32", "float32")
    with pytest.raises(ValueError, match="no step can do this"):
        chosen(1, old, a=dtype, c=dtype, layouts=("tiles",), caller_casts=True)


def test_a_family_that_was_never_measured_waits(tuned: Any, both_families: Any) -> None:
    """Where a kernel has no time here, it is taken in a family that has some elsewhere."""
    of_8 = Entry("q4_1", 4096, 4096, 1, {"98 A8": 3.7})
    tuned(table(of_8, gpu="NVIDIA L4", cc=(8, 9)))
    assert both(chosen()) == (98, "A8")
    assert both(chosen(a="float16")) == (98, "A16"), "nobody casts it"
    assert chosen(a="bfloat16").kernel.most_tokens is None
    half = replace(of_8, times={"98 A8": 3.7, "98 A16 float16": 3.9})
    tuned(table(half, gpu="NVIDIA L4", cc=(8, 9)))
    assert both(chosen()) == (98, "A16")
    tuned()
    assert both(chosen()) == (98, "A16"), "the last, without any"


def test_a_kernel_that_is_named_reads_a_or_is_refused(tuned: Any, both_families: Any) -> None:
    assert both(chosen(step=98)) == (98, "A16"), "the family that continues the ladder"
    with pytest.raises(ValueError, match=r"^step 98 reads A as float32 or float16 in family A16"):
        chosen(step=98, a="bfloat16")
    with pytest.raises(ValueError, match=r"^step 98 reads A as float32 in family A8, not float16$"):
        chosen(step=98, a="float16", family="A8")
    with pytest.raises(ValueError, match=r"^step 5 reads A as float32, not bfloat16$"):
        chosen(step=5, a="bfloat16")
    old = SimpleNamespace(name="Tesla T4", cc=(7, 5), sms=40)
    with pytest.raises(ValueError, match=r"no step can do this: step \d+ needs compute capability"):
        chosen(machine=old, a="float16")


# --- without a time -------------------------------------------------------------------------------


def default(m: int) -> Kernel:
    exact = [one for one in kernels() if one.chosen_untuned and one.accuracy == "exact"]
    fitting = [one for one in exact if one.most_tokens is None or m <= one.most_tokens]
    return ([one for one in fitting if one.most_tokens] or fitting)[-1]


@pytest.mark.parametrize("m", [1, 16, 17, 4096])
def test_without_a_time_the_highest_kernel_for_so_many_tokens(m: int, tuned: Any) -> None:
    found, limit = chosen(m), " for M up to 16" if m <= 16 else ""
    assert (found.kernel, found.family) == (default(m), default(m).families[-1])
    assert found.why == (
        f"the highest default step{limit} on the NVIDIA H200; no tuning table covers this GPU "
        "(run make tune)"
    )
    assert found.kernel.number == (18 if m <= 16 else 14)
    simulated = chosen(m, Simulator())
    assert simulated.kernel == found.kernel
    assert simulated.why == f"the highest default step{limit} on the simulator"
    tuned(table(entry(1, s99A8=0.1)))
    assert chosen(m).kernel is found.kernel, "a step that is not there is passed over"
    assert chosen(m).why.endswith(
        "; the table of the NVIDIA H200 has no time for it (run make tune)"
    )


def test_a_kernel_for_few_tokens_is_taken_for_no_more(tuned: Any, candidates: Any) -> None:
    few = replace(kernel_of(14), number=98, most_tokens=16)
    others = [replace(one, most_tokens=None) for one in kernels() if one.accuracy == "exact"]
    candidates(*others, few, alone=True)
    assert chosen(16).kernel is few
    assert chosen(17).kernel is others[-1]
    tuned(table(entry(32, **{f"s98{few.families[-1]}": 1.0}, s14A16=2.0)))
    assert chosen(17).kernel is few, "what was measured counts more"


# --- a new kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize("own_layout", [True, False])
@pytest.mark.parametrize("of", [one.number for one in kernels()])
def test_a_new_kernel_changes_no_choice_until_it_is_measured(
    of: int, own_layout: bool, candidates: Any, tuned: Any
) -> None:
    """A copy of every kernel in turn, on GPUs without a table and with one that lacks it."""
    original = kernel_of(of)

    def layout(blocks: Any) -> Any:
        return original.pack(blocks)

    machines = [H200, SimpleNamespace(name="Tesla T4", cc=(7, 5), sms=40), Simulator()]

    def decisions() -> list[Any]:
        found: list[Any] = []
        for tables in ((), (table(entry(64, s14A16=20.0, s6A8=15.0)),)):
            tuned(*tables)
            for machine, accuracy in itertools.product(machines, ACCURACIES):
                for name in (*WEIGHT_FORMATS, *FILE_FORMATS):
                    found += [chosen(m, machine, name, accuracy=accuracy) for m in (1, 512)]
                    found += packings(name, machine.cc, accuracy)
        return found

    before = decisions()
    pack_of = layout if own_layout else original.pack
    new = replace(original, number=99, chosen_untuned=False, pack=pack_of)
    candidates(new)
    assert decisions() == before
    assert chosen(1, Simulator(), step=99).kernel is new, "by its number it multiplies"


def test_a_new_kernel_is_chosen_once_it_is_measured_or_a_default(
    candidates: Any, tuned: Any
) -> None:
    new = replace(kernel_of(14), number=99, chosen_untuned=False, pack=lambda blocks: tiles(blocks))
    candidates(new)
    tuned(table(entry(512, s14A16=30.0, s99A16=20.0), entry(1024, s14A16=30.0, s99A16=40.0)))
    assert chosen(512).kernel is new
    assert chosen(1024).kernel.number == 14
    exact = Request("q4_0", 1, 4096, 4096)
    assert packing_kernel(exact, (9, 0)) is not new, "its layout is not the default"
    candidates(replace(new, chosen_untuned=True))
    tuned()
    assert chosen(512).kernel.number == 99
    assert packing_kernel(exact, (9, 0)).number == 99


def test_gemm_pack_and_plan_pass_a_new_kernel_over(candidates: Any, tuned: Any) -> None:
    candidates(replace(kernel_of(14), number=99, chosen_untuned=False))
    problem, machine = Problem(17, 5, 96, "q4_0"), Simulator()
    handle = steps.pack(problem.blocks, machine=machine)
    assert "99" in handle.readers
    assert steps.pack(problem.blocks, step=99, machine=machine).readers == "step 99"
    for w in (problem.blocks, handle):
        _, found = steps.gemm(problem.a, w, machine=machine, explain=True)
        assert found.kernel.number == 14
        assert steps.plan(17, w, machine=machine).choice.kernel.number == 14
    asked = steps.gemm(problem.a, problem.blocks, step=99, machine=machine, explain=True)[1]
    assert asked.kernel.number == 99


def test_where_only_a_new_kernel_can_it_is_named(candidates: Any, tuned: Any) -> None:
    new = replace(kernel_of(14), number=99, min_cc=(7, 5), max_cc=None, chosen_untuned=False)
    candidates(new)
    old = SimpleNamespace(name="Tesla T4", cc=(7, 5), sms=40)
    with pytest.raises(ValueError, match=r"^only step 99 can do this, never measured .*step=99"):
        chosen(machine=old, c="float16")
    assert chosen(machine=old, c="float16", step=99).kernel is new


# --- accuracy -------------------------------------------------------------------------------------


def test_a_kernel_that_is_not_exact_is_chosen_only_where_asked_for(tuned: Any) -> None:
    assert chosen(512).kernel.number == 14
    assert chosen(512, accuracy="fast").kernel.number == 15
    tuned(table(entry(512, s10A8=60.0, s11A16=33.0, s15A8=20.0)))
    found = chosen(512)
    assert found.kernel.number == 11
    assert found.why == (
        "fastest of 2 steps measured at M=512 N=4096 K=4096 on the NVIDIA H200 (33 us); with "
        "accuracy='fast' step 15 would take 20 us"
    )
    asked = chosen(512, accuracy="fast")
    assert asked.kernel.number == 15
    assert asked.why == (
        "fastest of 3 steps measured at M=512 N=4096 K=4096 on the NVIDIA H200 (20 us)"
    )
    assert chosen(512, accuracy="fast", family="A16").kernel.number == 11
    assert "15" not in chosen(512, family="A16").why
    tuned(table(entry(512, s11A16=33.0, s15A8=50.0)))
    assert chosen(512, accuracy="fast").kernel.number == 11, "it need not be the faster"
    assert "15" not in chosen(512).why
    with pytest.raises(ValueError, match="step 15 is not exact: ask for it with accuracy='fast'"):
        chosen(512, layouts=("byte_tiles",))


def test_packings_are_one_or_with_fast_two() -> None:
    (exact,) = packings("q4_0", (9, 0), "exact")
    assert exact.pack.__name__ == "tiles"
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
    for wrong in ("Exact", "sloppy"):
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
    most = kernel_of(15).most_k
    assert most == 132096
    assert most * 127 * 128 < 2**31 <= (most + 32) * 127 * 128
    blocks = np.zeros((1, most // 32 + 1), FORMATS["q4_0"].dtype)
    machine = Simulator()
    calls = (
        lambda: gemm(np.zeros((1, most + 32), np.float32), blocks, step=15, machine=machine),
        lambda: gemm.plan(1, blocks, step=15, machine=machine),
        lambda: pack(blocks, step=15, machine=machine),
    )
    for call in calls:
        with pytest.raises(ValueError, match="int32, which holds 132096 of them, and K=132128"):
            call()
    for k, wanted in ((most, "byte_tiles"), (most + 32, "tiles")):
        assert packings("q4_0", (9, 0), "fast", k)[-1].pack.__name__ == wanted
        assert pack(blocks[:, : k // 32], accuracy="fast", machine=machine).layout == wanted


# --- the same bits at every M ---------------------------------------------------------------------


def test_an_invariant_product_is_of_one_kernel_whatever_the_table_says(tuned: Any) -> None:
    tuned(table(entry(1, s10A8=3.0, s18A8=4.0), entry(16, s14A16=1.0, s18A16=9.0)))
    for m in (1, 2, 9, 16):
        found = chosen(m, invariant=True)
        assert both(found) == (18, "A16")
        assert "same bits at every M up to 16" in str(found)
    assert chosen(16).kernel.number == 14
    assert chosen(17, invariant=True).kernel.number == 14, "no promise there"


def test_an_invariant_product_that_no_kernel_can_do_is_refused() -> None:
    for options in ({"family": "A8"}, {"step": 7}, {"layouts": ("byte_tiles",)}):
        with pytest.raises(ValueError, match="the same bits at every M in steps 17 and 18 alone"):
            chosen(2, invariant=True, **options)
    assert chosen(2, invariant=True, step=17).kernel.number == 17
