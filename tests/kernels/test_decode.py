"""The decode kernels in parts: codes as numbers, the work of warps, and A on its way to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from numba import cuda, uint8

import steps
from qformats import FORMATS, WEIGHT_FORMATS
from qformats.repack import TILE_K, TILE_ROWS, tiles
from qformats.storage import storage_format, stored_weights
from reference import Problem
from reference.bfloat16 import bfloat16_values
from steps.checks.verify import prepare, verify
from steps.contract import Family, Kernel, Shape, Work
from steps.instructions import store_u32
from steps.kernels.decode import tiles as heuristics
from steps.kernels.decode.tiles import fused, scales_weights, tile_configuration
from steps.kernels.parts.weights.offset_numbers import offset_numbers
from steps.kernels.parts.weights.storage_formats import tile_format
from steps.product.choice import Choice
from steps.registry import kernel_of
from steps.simulator.banks import BankCounter
from steps.simulator.launch import simulate
from tests.kernels.passes import RemembersPasses
from tests.steps.test_steps_machine_code import sound
from tests.steps.works import STORED

KINDS = ("float16", "bfloat16")


# --- codes as numbers -----------------------------------------------------------------------------
@cache
def unpacker(stored_as: str, kind: str) -> Any:
    """kernel(m, out): [half, step, term, lane, register] of the first packed tile, by one warp."""
    tile, numbers = tile_format(stored_as), offset_numbers(stored_as, kind)
    load, fragments, terms = tile.load, numbers.fragments, numbers.terms

    @cuda.jit
    def unpack(m, out):
        smem = cuda.shared.array(0, uint8, alignment=128)
        lane = cuda.threadIdx.x
        for i in range(lane, m.shape[0], 32):
            smem[i] = m[i]
        cuda.syncwarp()
        for half in range(2):
            words = load(smem, 0, lane, half)
            for step in range(4):
                for term in range(terms):
                    four = fragments(words, step, term)
                    for i in range(4):
                        at = ((half * 4 + step) * terms + term) * 128 + 4 * lane + i
                        store_u32(out, 4 * at, four[i])

    return unpack


def levels_of(blocks: np.ndarray, name: str) -> np.ndarray:
    """The integers that scales multiply, int64 [N, K]."""
    fmt = FORMATS[name]
    if storage_format(fmt) is not fmt:
        return stored_weights(blocks).levels.astype(np.int64)
    zero = {"q4_0": 8, "q5_0": 16}.get(name, 0)
    return fmt.codes(blocks).astype(np.int64).reshape(len(blocks), -1) - zero


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STORED)
def test_numbers_less_their_offsets_are_the_levels(name: str, kind: str) -> None:
    """Exactly, for every code that there is, and in the order that A of 16 bits has."""
    stored_as = storage_format(FORMATS[name]).name
    tile, numbers = tile_format(stored_as), offset_numbers(stored_as, kind)
    blocks = Problem(1, TILE_ROWS, 256, name, "normal").blocks
    packed = np.ascontiguousarray(tiles(blocks)[0][: tile.tile_bytes])
    out = np.zeros(2 * 4 * numbers.terms * 32 * 4 * 4, np.uint8)
    simulate(unpacker(stored_as, kind), 1, 32, (packed, out), shared_bytes=tile.tile_bytes)

    halves = out.view(np.uint16)
    values = halves.view(np.float16) if kind == "float16" else bfloat16_values(halves)
    # half, step, term, g, t, (a0, a1, a2, a3), the two numbers of a register
    found = values.astype(np.float64).reshape(2, 4, numbers.terms, 8, 4, 4, 2)
    offsets = np.array(numbers.offsets, np.float64)  # step, term, register
    found = (found / numbers.unit - offsets[:, :, None, None, :, None]).sum(axis=2)
    # register 2 e + r: row g + 8 r, k = 16 step + 8 e + 2 t + i
    found = found.reshape(2, 4, 8, 4, 2, 2, 2).transpose(5, 2, 0, 1, 4, 3, 6)
    levels = levels_of(blocks, name)[:, :TILE_K]
    np.testing.assert_array_equal(found.reshape(TILE_ROWS, TILE_K), levels)
    assert len(np.unique(levels)) > (2 if name == "q2_k" else 6)


@pytest.mark.parametrize(("number", "tokens"), [(17, 1), (18, 3), (18, 9)])
def test_float16_products_have_minima_of_16_too(number: int, tokens: int) -> None:
    """Q2_K, which Q8_1 cannot multiply, and so no family of a step has."""
    step = kernel_of(number)
    for distribution in ("integer", "normal"):
        problem = Problem(tokens, 20, 256, "q2_k", distribution, input="float16")
        found = verify(step, "A16", problem, RemembersPasses(1))
        assert found.ok, found.verdict


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_offsets_that_cancel_cost_next_to_nothing(name: str) -> None:
    """They are up to 2000 times as large as a code. A that is far from 0 is the worst case. Where
    weights are scaled, there are none, and weights are rounded to float16."""
    step = kernel_of(17)

    class FromTen(Problem):
        @property
        def a(self) -> np.ndarray:
            return super().a + np.float32(10)

    for kind in KINDS:
        problem = FromTen(2, 20, 512, name, "normal", input=kind)
        found = verify(step, "A16", problem, RemembersPasses())
        assert "nmse" not in found.failures, found.verdict
        scaled = scales_weights(storage_format(FORMATS[name]), Shape(2, 20, 512), kind)
        assert scaled == (kind == "float16" and name in ("q4_1", "q5_0", "q5_1"))
        # A rounded to float16 has 3e-8
        assert found.nmse_same_operands < (1e-7 if scaled else 1e-8)


# --- the work of thread blocks and warps ----------------------------------------------------------
# (SMs, KB of shared memory, bytes of sums, family, format, shape, where A is, warps along N, pairs
# of row tiles of a warp). Where step 17 has float16 A of two tokens or more, step 18 has boxes
CONFIGURATIONS = (
    (1, 227, 65536, "A16", "q4_0", (1, 150, 416), "kept", 1, 5),
    (1, 227, 65536, "A16", "q5_1", (2, 40, 4160), "kept", 1, 2),
    (2, 227, 4096, "A16", "q5_0", (3, 230, 416), "kept", 4, 1),
    (2, 227, 16000, "A16", "q8_0", (9, 230, 416), "kept", 4, 1),
    (1, 80, 65536, "A16", "q5_0", (7, 10, 4192), "with_weights", 1, 1),
    (1, 227, 65536, "A16", "q8_0", (1, 30, 2208), "with_weights", 1, 1),
    (1, 227, 65536, "A16", "q5_1", (3, 20, 288), "with_weights", 1, 1),
    (1, 90, 65536, "A16", "q4_1", (16, 40, 2208), "with_weights", 1, 2),
    (1, 227, 65536, "A16", "q5_0", (19, 40, 288), "kept", 1, 2),
    (1, 70, 65536, "A16", "q4_0", (19, 10, 2080), "with_weights", 1, 1),
    (1, 227, 65536, "A8", "q5_1", (1, 150, 416), "quantized", 1, 5),
    (1, 227, 65536, "A8", "q4_0", (2, 20, 8448), "quantized", 1, 1),
    (1, 227, 65536, "A8", "q8_0", (4, 40, 160), "quantized", 1, 2),
    (2, 227, 16000, "A8", "q4_1", (9, 230, 416), "kept", 4, 1),
    (1, 60, 65536, "A8", "q4_0", (9, 20, 2080), "with_weights", 1, 1),
    (1, 227, 65536, "A8", "q5_1", (19, 40, 288), "kept", 1, 2),
    (1, 64, 65536, "A8", "q4_0", (19, 10, 2080), "with_weights", 1, 1),
)


def configurations() -> Iterator[pytest.param]:
    """`make test` runs each in one of the two steps, QUICK=1 each place of A in one."""
    for number in (17, 18):
        for i, configuration in enumerate(CONFIGURATIONS):
            family, name, shape, place = configuration[3:7]
            label = f"step{number}-{family}-{name}-{'x'.join(map(str, shape))}-{place}"
            marks = (pytest.mark.every if (i + number) % 2 else pytest.mark.slow,)
            if i in (0, 7, 9, 12) and not (i + number) % 2:
                marks = ()
            yield pytest.param(number, *configuration, id=label, marks=marks)


@pytest.mark.parametrize(
    ("number", "sms", "kilobytes", "sums", "family", "name", "shape", "place", "warps_n", "pairs"),
    list(configurations()),
)
def test_every_way_of_a_and_of_the_sums(
    number: int,
    sms: int,
    kilobytes: int,
    sums: int,
    family: Family,
    name: str,
    shape: tuple[int, int, int],
    place: str,
    warps_n: int,
    pairs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole numbers, bit for bit, and no bank conflicts: where it quantizes, too, and where sums
    are stored and added up."""
    monkeypatch.setattr(heuristics, "multiprocessors", lambda: sms)
    monkeypatch.setattr(heuristics, "shared_memory", lambda: kilobytes * 1024)
    monkeypatch.setattr(heuristics, "SUMS", sums)
    mapped = number == 18
    found = tile_configuration(FORMATS[name], Shape(*shape), family, place == "quantized", mapped)
    how = found.variant
    if mapped and family == "A16" and shape[0] > 1:
        place = "kept_boxes" if pairs > 1 and kilobytes > 90 else "in_boxes"
    assert (how.place, how.warps_n, -(-found.row_tiles // (2 * warps_n))) == (place, warps_n, pairs)
    problem = Problem(*shape, name, "integer", seed=number)
    banks = BankCounter()
    machine = RemembersPasses(5 if sms == 1 else -1, banks=banks)
    checked = verify(kernel_of(number), family, problem, machine)
    assert checked.ok, checked.verdict
    assert banks.wavefronts > 300
    assert banks.conflicts == 0, banks.report()


def test_a16_reads_a_as_it_is_and_a8_makes_q8_1_of_few_tokens() -> None:
    for number, m in itertools.product((17, 18), (1, 4, 5)):
        step, machine = kernel_of(number), RemembersPasses()
        problem = Problem(m, 5, 256, "q4_0", input="float16")
        prepared = prepare(step, "A16", "q4_0", problem.given, problem.blocks, machine)
        assert prepared.activations.launches == ()
        assert prepared.activations.arrays[0] is prepared.a
        problem = Problem(m, 5, 256, "q4_0")
        prepared = prepare(step, "A8", "q4_0", problem.a, problem.blocks, machine)
        assert len(prepared.activations.launches) == (0 if m <= 4 else 1)


@pytest.mark.parametrize("family", ["A8", "A16"])
@pytest.mark.parametrize("kilobytes", [99, 163, 227])
def test_configurations_fit_any_gpu(
    family: Family, kilobytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory of compute capability 8.6, 8.0 and 9.0, counted here again: rings, mbarriers,
    A, row scales, and the sums of warps along K, which one pair of row tiles has in its ring."""
    monkeypatch.setattr(heuristics, "shared_memory", lambda: kilobytes * 1024)
    shapes = ((16, 32), (4096, 4096), (4096, 14336), (14336, 4096), (128256, 4096), (96, 57344))
    tokens = 1, 2, 3, 4, 5, 8, 16, 40
    of = itertools.product(WEIGHT_FORMATS, tokens, shapes, (False, True))
    for name, m, (n, k), mapped in of:
        quantized = family == "A8" and fused(m, k)
        found = tile_configuration(FORMATS[name], Shape(m, n, k), family, quantized, mapped)
        how, where = found.variant, (name, m, n, k, found)
        warps_k, with_weights = how.warps // how.warps_n, how.place == "with_weights"
        kept_boxes = how.place == "kept_boxes"
        assert not (how.in_boxes and (not mapped or m == 1 or family == "A8")), where
        rows = how.tokens if quantized else min(m, how.tokens)
        a_tiles = 1 if with_weights or how.in_boxes else found.k_tiles
        pad = 16 if rows > 1 else 0
        of_a = rows * (256 * a_tiles + pad) if family == "A16" else 160 * rows * a_tiles
        slot = 2 * tile_format(name).tile_bytes + (of_a if with_weights else 0)
        need = how.warps * (how.stages * (slot + 8) + 8)
        if how.in_boxes:  # 128 K of 2 to 16 tokens, from a multiple of 1024 bytes on
            of_a = (found.k_tiles if kept_boxes else how.stages) * max(1024, 256 * how.tokens)
            need = -(-need // 1024) * 1024 + how.warps * of_a
        elif not with_weights:
            need += warps_k * of_a
        need += 64 * found.row_tiles
        pairs = -(-found.row_tiles // (2 * how.warps_n))
        sums = found.row_tiles * 64 * how.tokens
        if pairs == how.warps_n == 1:
            assert sums <= how.stages * slot, where
            assert (found.sums_at, found.sums_stride) == (0, how.stages * slot), where
        else:
            need += warps_k * sums
        assert need <= found.shared <= kilobytes * 1024, where
        assert 1 <= how.prefetched <= how.stages, where
        alone = with_weights or how.in_boxes
        assert not kept_boxes or found.row_tiles > 2 * how.warps_n, "one pair has nothing to keep"
        assert how.prefetched == 1 or not alone, "the second slot's A would have no place"
        assert found.k_tiles * warps_k * TILE_K >= k, "all of K is someone's"
        grid = found.grid(m, n)
        assert grid[0] * found.row_tiles * TILE_ROWS >= n, where
        assert (grid[0] - 1) * found.row_tiles * TILE_ROWS < n, "no block is idle"
        assert grid[2] * heuristics.MOST_TOKENS >= m, where
        assert how.tokens >= min(m, heuristics.MOST_TOKENS), where
        assert how.warps_n <= max(1, -(-found.row_tiles // 2)), "no warp is idle"


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (17, "q4_0"),
        (18, "q5_1"),
        *(pytest.param(*one, marks=pytest.mark.every) for one in ((17, "q5_1"), (18, "q4_0"))),
    ],
)
def test_rows_of_an_invariant_product_have_the_same_bits_at_every_m(
    number: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where M alone would choose another number of warps along K."""
    monkeypatch.setattr(heuristics, "multiprocessors", lambda: 2)
    monkeypatch.setattr(heuristics, "SUMS", 16384)
    step, n, k = kernel_of(number), 68, 672
    problem = Problem(16, n, k, name, "normal", input="float16")
    bits, orders = {}, {False: set(), True: set()}
    for m, invariant in itertools.product((1, 3, 16), (False, True)):
        shape = Shape(m, n, k, invariant)
        orders[invariant].add(
            tile_configuration(FORMATS[name], shape, "A16", False).variant.warps_k
        )
        if invariant:
            bits[m] = rows_of(step, problem, shape)
    assert len(orders[False]) > 1, "this case would show nothing"
    assert len(orders[True]) == 1
    for m, rows in bits.items():
        assert np.array_equal(rows, bits[16][:m]), m


@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_rows_of_an_invariant_product_on_a_gpu(name: str) -> None:
    """Of `gemm`, where 16 tokens have fewer warps along K than one."""
    problem = Problem(16, 7168, 2048, name, "normal", input="float16")
    a, w = problem.given, steps.pack(problem.blocks)
    whole = steps.gemm(a, w, invariant=True)
    for m in range(1, 16):
        rows = steps.gemm(a[:m], w, invariant=True)
        assert np.array_equal(rows, whole[:m]), m


def rows_of(step: Kernel, problem: Problem, shape: Shape) -> np.ndarray:
    """C of the first `shape.m` tokens of a problem, of a simulated launch."""
    machine, fmt = RemembersPasses(), FORMATS[problem.format]
    a = machine.array(problem.given[: shape.m])
    activations = step.activations["A16"](a, machine).arrays
    weights = tuple(machine.array(each) for each in step.pack(problem.blocks))
    out = machine.empty((shape.m, shape.n), np.float32)
    machine.run(step.prepare(machine, fmt, "A16", shape, weights, activations, out))
    return np.array(machine.host(out))


def test_a_shared_memory_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristics, "shared_memory", lambda: 16 * 1024)
    with pytest.raises(ValueError, match="16384 bytes of shared memory are too few for M=1 N=64"):
        tile_configuration(FORMATS["q4_0"], Shape(1, 64, 64), "A16", False)


# --- machine code ---------------------------------------------------------------------------------
# (family, dtype of A, shape): A kept, in the slots, quantized; eight and sixteen columns; warps
# along N. Formats go round.
LARGE = (
    ("A16", "float16", (1, 14336, 4096)),
    ("A16", "float16", (8, 4096, 14336)),
    ("A16", "float16", (16, 14336, 4096)),
    ("A16", "bfloat16", (16, 4096, 14336)),
    ("A8", "float32", (4, 4096, 4096)),
    ("A8", "float32", (16, 14336, 4096)),
)


OFTEN = {(17, "sm_80"): (1, 4), (17, "sm_90a"): (2,), (18, "sm_90a"): (3, 5)}
"""Those that `make test` compiles: each of one kernel. `test_products_have_these_registers` has the
first."""


@pytest.mark.parametrize(
    ("order", "number", "arch"),
    [
        pytest.param(i, *on, marks=pytest.mark.slow if i in OFTEN[on] else pytest.mark.every)
        for i in range(len(LARGE))
        for on in OFTEN
    ],
)
def test_machine_code_is_sound(order: int, number: int, arch: str) -> None:
    step, (family, kind, shape) = kernel_of(number), LARGE[order]
    names = [name for name in STORED if name in step.formats]
    name = names[(order + 3 * (number + len(arch))) % len(names)]
    output = kind if family == "A16" else "float16"
    *_, own = Choice.of_work(Work(step, family, name), shape, kind, output).launches()
    code = sound(own, arch)
    assert not code.count("LDL", "STL"), code.log
