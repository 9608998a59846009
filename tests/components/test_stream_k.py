"""Every step of every tile is done once, by whom the others think, and the sums meet."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, int32

from steps.components.stream_k import PARTS, cuts, shares, stretches
from steps.simulator.launch import simulate

BN, BM = 128, 16
find = stretches(BN, BM)
begin, go_on, corner, sharers = find.begin, find.go_on, find.corner, find.sharers


@cuda.jit
def visits_kernel(stretch, tiles, tiles_n, steps, visits, corners):
    """visits[block, i] = number, k0, count, first, last, early of the i-th tile of a block."""
    tail, rate = stretch
    block = int32(cuda.blockIdx.x)
    number, k0, count, left = begin(tail, rate, steps)
    i = 0
    while number < tiles:
        visits[block, i, 0], visits[block, i, 1], visits[block, i, 2] = number, k0, count
        if count < steps:
            first, last, early = sharers(number, tail, rate, steps)
            visits[block, i, 3], visits[block, i, 4], visits[block, i, 5] = first, last, early
        corners[number, 0], corners[number, 1] = corner(number, tiles_n)
        number, k0, count, left = go_on(number, left, tail, steps)
        i += 1


def visits(tiles: int, steps: int, blocks: int, tail: int, tiles_n: int = 1) -> np.ndarray:
    """[block, i, 6], -1 where nothing is."""
    seen = np.full((blocks, tiles + 2, 6), -1, np.int32)
    corners = np.full((tiles, 2), -1, np.int32)
    args = (shares(tail, steps, blocks), tiles, tiles_n, steps, seen, corners)
    simulate(visits_kernel, blocks, 1, args)
    number = np.arange(tiles)
    np.testing.assert_array_equal(corners[:, 0], number // tiles_n * BM)
    np.testing.assert_array_equal(corners[:, 1], number % tiles_n * BN)
    return seen


CASES = [
    (7, 5, 3, 0),  # whole tiles, one block with more
    (3, 4, 5, 0),  # more blocks than tiles
    (2, 9, 6, 2),  # three equal parts
    (4, 9, 7, 4),  # uneven stretches
    (3, 8, 24, 3),  # one step each
    (11, 5, 4, 3),  # what is left of whole rounds
    (11, 5, 4, 7),  # with a round more: stretches of more than a tile
    (1, 17, 5, 1),
    (3, 4, 5, 3),  # a block begins with a tile
]


@pytest.mark.parametrize(("tiles", "steps", "blocks", "tail"), CASES)
def test_every_step_is_done_once(tiles: int, steps: int, blocks: int, tail: int) -> None:
    done = np.zeros((tiles, steps), int)
    slots: dict[int, dict[int, int]] = {}
    for block, seen in enumerate(visits(tiles, steps, blocks, tail, tiles_n=2)):
        taken = []
        for number, k0, count, first, last, early in seen:
            if number < 0:
                continue
            done[number, k0 : k0 + count] += 1
            if count < steps:
                assert first <= block <= last
                assert first < last
                assert number < tail
                slots.setdefault(int(number), {})[block] = int(last - first)
                taken.append(early if block == first else 0)
        assert len(set(taken)) == len(taken) <= 2, "two parts of a block in one place"
    assert (done == 1).all()
    for who in slots.values():
        assert set(who.values()) == {len(who) - 1}, "the last to come knows how many come"


def test_stretches_differ_by_one_step() -> None:
    seen = visits(7, 10, 4, 7)
    steps = np.where(seen[:, :, 0] >= 0, seen[:, :, 2], 0).sum(axis=1)
    assert steps.tolist() == [17, 18, 17, 18]


@pytest.mark.parametrize("tiles", [1, 2, 5, 6, 7, 9, 12, 13, 40])
def test_cuts_are_what_they_say(tiles: int) -> None:
    steps, sms = 9, 6
    found = list(cuts(tiles, steps, sms))
    assert found[0][:2] == (min(tiles, sms), 0), "whole tiles are always possible"
    for blocks, tail, busiest, worked_on in found:
        assert blocks <= sms
        assert tail <= tiles
        seen = visits(tiles, steps, blocks, tail)
        there = seen[:, :, 0] >= 0
        assert np.where(there, seen[:, :, 2], 0).sum(axis=1).max() == busiest
        assert there.sum(axis=1).max() <= worked_on
        assert (seen[:, :, 4] - seen[:, :, 3]).max() < PARTS + 1


def test_no_block_is_left_without_a_share() -> None:
    with pytest.raises(ValueError, match="2 tiles of 3 steps are shared by 7 blocks: use 6"):
        shares(2, 3, 7)
    for steps in (1, 2, 9):
        for tiles in range(1, 60):
            for blocks, tail, _, _ in cuts(tiles, steps, 24):
                shares(tail, steps, blocks)
