"""The stream-K scheduler: every step of every tile is done once, and contributors agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numba import cuda, int32

from qformats import FORMATS, WEIGHT_FORMATS
from steps.contract import Shape, Work, ceil_div, multiprocessors, shared_memory
from steps.kernels.parts.stream_k import MOST_CONTRIBUTORS, scheduler, schedules, work_rate
from steps.kernels.prefill.stream_k_tiles import BLOCKS_PER_SM, tiling
from steps.product.choice import Choice
from steps.registry import kernel_of
from steps.simulator.launch import simulate

BN, BM = 128, 16
find = scheduler(BN, BM)
first_work, next_work, tile_origin, contributors = (
    find.first_work,
    find.next_work,
    find.tile_origin,
    find.contributors,
)


@cuda.jit
def visits_kernel(schedule, tiles, tiles_n, steps, visits, origins):
    """visits[block, i] = tile_id, k0, count, first, last, partial_slot of a block's i-th tile."""
    shared_tiles, rate = schedule
    block = int32(cuda.blockIdx.x)
    tile_id, k0, count, left = first_work(shared_tiles, rate, steps)
    i = 0
    while tile_id < tiles:
        visits[block, i, 0], visits[block, i, 1], visits[block, i, 2] = tile_id, k0, count
        if count < steps:
            first, last, partial_slot = contributors(tile_id, shared_tiles, rate, steps)
            visits[block, i, 3], visits[block, i, 4], visits[block, i, 5] = (
                first,
                last,
                partial_slot,
            )
        origins[tile_id, 0], origins[tile_id, 1] = tile_origin(tile_id, tiles_n)
        tile_id, k0, count, left = next_work(tile_id, left, shared_tiles, steps)
        i += 1


def visits(tiles: int, steps: int, blocks: int, shared_tiles: int, tiles_n: int = 1) -> np.ndarray:
    """[block, i, 6], -1 where nothing is."""
    seen = np.full((blocks, tiles + 2, 6), -1, np.int32)
    origins = np.full((tiles, 2), -1, np.int32)
    args = (work_rate(shared_tiles, steps, blocks), tiles, tiles_n, steps, seen, origins)
    simulate(visits_kernel, blocks, 1, args)
    tile_id = np.arange(tiles)
    np.testing.assert_array_equal(origins[:, 0], tile_id // tiles_n * BM)
    np.testing.assert_array_equal(origins[:, 1], tile_id % tiles_n * BN)
    return seen


CASES = [
    (7, 5, 3, 0),  # whole tiles, one block with more
    (3, 4, 5, 0),  # more blocks than tiles
    (2, 9, 6, 2),  # three equal parts
    (4, 9, 7, 4),  # uneven ranges
    (3, 8, 24, 3),  # one step each
    (11, 5, 4, 3),  # what is left of whole rounds
    (11, 5, 4, 7),  # with a round more: ranges of more than a tile
    (1, 17, 5, 1),
    (3, 4, 5, 3),  # a block begins with a tile
]


@pytest.mark.parametrize(("tiles", "steps", "blocks", "shared_tiles"), CASES)
def test_every_step_is_done_once(tiles: int, steps: int, blocks: int, shared_tiles: int) -> None:
    done = np.zeros((tiles, steps), int)
    slots: dict[int, dict[int, int]] = {}
    for block, seen in enumerate(visits(tiles, steps, blocks, shared_tiles, tiles_n=2)):
        taken = []
        for tile_id, k0, count, first, last, partial_slot in seen:
            if tile_id < 0:
                continue
            done[tile_id, k0 : k0 + count] += 1
            if count < steps:
                assert first <= block <= last
                assert first < last
                assert tile_id < shared_tiles
                slots.setdefault(int(tile_id), {})[block] = int(last - first)
                taken.append(partial_slot if block == first else 0)
        assert len(set(taken)) == len(taken) <= 2, "two contributions of a block in one slot"
    assert (done == 1).all()
    for who in slots.values():
        assert set(who.values()) == {len(who) - 1}, "the last to come knows how many come"


def test_work_ranges_differ_by_one_step() -> None:
    seen = visits(7, 10, 4, 7)
    steps = np.where(seen[:, :, 0] >= 0, seen[:, :, 2], 0).sum(axis=1)
    assert steps.tolist() == [17, 18, 17, 18]


@pytest.mark.parametrize("tiles", [1, 2, 5, 6, 7, 9, 12, 13, 40])
def test_schedules_are_what_they_say(tiles: int) -> None:
    steps, sms = 9, 6
    found = list(schedules(tiles, steps, sms))
    assert found[0][:2] == (min(tiles, sms), 0), "whole tiles are always possible"
    for blocks, shared_tiles, busiest, worked_on in found:
        assert blocks <= sms
        assert shared_tiles <= tiles
        seen = visits(tiles, steps, blocks, shared_tiles)
        there = seen[:, :, 0] >= 0
        assert np.where(there, seen[:, :, 2], 0).sum(axis=1).max() == busiest
        assert there.sum(axis=1).max() <= worked_on
        assert (seen[:, :, 4] - seen[:, :, 3]).max() < MOST_CONTRIBUTORS + 1


def test_no_block_is_left_without_work() -> None:
    with pytest.raises(ValueError, match="2 tiles of 3 steps are shared by 7 blocks: use 6"):
        work_rate(2, 3, 7)
    for steps in (1, 2, 9):
        for tiles in range(1, 60):
            for blocks, shared_tiles, _, _ in schedules(tiles, steps, 24):
                work_rate(shared_tiles, steps, blocks)


# --- the tiles of kernel 10 -----------------------------------------------------------------------
@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0"])
def test_tiles_of_kernel_10_where_whole_ones_leave_sms_idle(name: str) -> None:
    """With 128 tokens nearly all places of 132 SMs have a block, and none has two tiles; 512 tokens
    fill them with whole tiles."""
    for k in (4096, 14336):
        bm, tiles, blocks, shared_tiles = tiling(FORMATS[name], Shape(128, 4096, k), 132)
        assert shared_tiles == tiles
        assert blocks % tiles == 0
        assert blocks >= 0.9 * 132 * BLOCKS_PER_SM[bm]
        assert tiling(FORMATS[name], Shape(512, 4096, k), 132) == (64, 256, 256, 0)


@pytest.mark.parametrize("sms", [1, 16, 108, 132])
def test_any_shape_has_tiles(sms: int) -> None:
    for m in (1, 8, 16, 17, 40, 64, 65, 128, 512, 4096):
        for n, k in ((1, 32), (16, 4096), (4096, 4096), (14336, 4096), (4096, 14336)):
            for name in ("q4_0", "q5_1"):
                bm, tiles, blocks, shared_tiles = tiling(FORMATS[name], Shape(m, n, k), sms)
                assert tiles == ceil_div(m, bm) * ceil_div(n, BN)
                assert 1 <= blocks <= sms * BLOCKS_PER_SM[bm]
                assert blocks <= tiles or shared_tiles == tiles
                work_rate(shared_tiles, ceil_div(k, 128), blocks)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_an_sm_has_room_for_its_even_part_of_the_blocks_and_for_no_more(name: str) -> None:
    """Else an overlapping launch, whose blocks come while others still work, is uneven."""
    of_an_sm = shared_memory() + 1024
    for m, (n, k) in itertools.product((1, 8, 128, 512), ((4096, 4096), (14336, 4096), (64, 64))):
        *_, launch = Choice.of_work(Work(kernel_of(10), "A8", name), (m, n, k)).launches()
        (blocks,), own = launch.grid, launch.shared_bytes + 1024
        assert launch.shared_bytes <= shared_memory()
        even = ceil_div(blocks, multiprocessors())
        assert even * own <= of_an_sm < (even + 1) * own, (m, n, k)
