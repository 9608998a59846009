"""Tile heuristics: the cheapest configuration, by hand; a launch within shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from steps.contract import Shape
from steps.kernels.parts.stream_k import work_rate
from steps.kernels.prefill import wgmma_tiles
from steps.kernels.prefill.wgmma_tiles import (
    fewest_cycles,
    launch_that_fits,
    reduction_slices,
    scratch_arrays,
)

NARROW, WIDE = (128, 16), (128, 128)


@pytest.mark.parametrize(
    ("shape", "sms", "stage", "best"),
    [
        (Shape(16, 256, 1024), 2, 1000, (NARROW, 2, 2, 0)),  # a tile an SM: nothing to share
        # alone 8 x 1000 + 3000; split in four 2 x 1000 + 3000 + 3000 + 5 x 8192 / 24 = 9706
        (Shape(16, 128, 1024), 4, 1000, (NARROW, 1, 4, 1)),
        # 8 x 700 + 3000 is less than 2 x 700 + 7706
        (Shape(16, 128, 1024), 4, 700, (NARROW, 1, 1, 0)),
        # three tiles on two SMs: 16 steps and two tiles' ends, or a tile each and half of one:
        # 12 steps, three ends, 3000 + 3 x 8192 / 24
        (Shape(16, 384, 1024), 2, 1750, (NARROW, 3, 2, 0)),
        (Shape(16, 384, 1024), 2, 1760, (NARROW, 3, 2, 1)),
        # two tiles on three SMs: 8 steps and an end, or 6 steps, two ends, 3000 + 3 x 8192 / 24
        # and a sixth more, as the parts are unequal
        (Shape(16, 256, 1024), 3, 8600, (NARROW, 2, 2, 0)),
        (Shape(16, 256, 1024), 3, 8800, (NARROW, 2, 3, 2)),
    ],
)
def test_the_configuration_of_fewest_cycles(
    shape: Shape, sms: int, stage: int, best: tuple
) -> None:
    assert fewest_cycles((NARROW,), shape, sms, lambda bn, bm: stage) == best


def test_tiles_are_taken_by_what_they_cost() -> None:
    shape = Shape(128, 128, 1024)
    assert fewest_cycles((NARROW, WIDE), shape, 1, lambda bn, bm: 100)[0] == WIDE
    assert fewest_cycles((NARROW, WIDE), shape, 1, lambda bn, bm: bm**3)[0] == NARROW


def test_scratch_arrays_for_partial_sums() -> None:
    assert scratch_arrays((WIDE, 5, 5, 0), np.float32) == (((0,), np.float32), ((0,), np.int32))
    # two accumulator halves: a counter for each
    shared = ((2 * 7 * 128 * 256,), np.int32), ((3 * 2 * 2,), np.int32)
    assert scratch_arrays(((128, 256), 3, 7, 3), np.int32) == shared
    # and for each slice
    assert scratch_arrays(((128, 256), 3, 6, 3), np.int32)[1] == ((3 * 2 * 2 * 2,), np.int32)


@pytest.mark.parametrize(
    ("tokens", "blocks", "shared_tiles", "count"),
    [
        (128, 3, 0, 1),  # nothing is shared
        (128, 3, 2, 1),  # ranges that end at different times
        (32, 8, 2, 1),  # few sums
        (48, 8, 2, 3),
        (64, 4, 2, 2),
        (80, 8, 2, 5),  # whole sixteens: one of the four blocks adds up two
        (96, 4, 2, 2),
        (112, 4, 2, 7),
        (128, 6, 2, 2),  # the third block has none of its own
        (128, 8, 2, 4),
        (256, 16, 2, 4),
    ],
)
def test_blocks_that_finish_together_add_up_slices(
    tokens: int, blocks: int, shared_tiles: int, count: int
) -> None:
    assert reduction_slices(((128, tokens), 3, blocks, shared_tiles)) == count


@pytest.mark.parametrize(
    ("memory", "blocks", "made"),
    [
        (9000, 3, (8, 2)),
        (8000, 3, (8, 2)),
        (7999, 3, (7, 2)),
        (3500, 3, (3, 1)),  # no larger stagger than the ring allows
        (9000, 5, (8, 0)),  # a tile each: nothing comes after it
    ],
)
def test_a_launch_for_what_memory_there_is(
    memory: int, blocks: int, made: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma_tiles, "shared_memory", lambda: memory)

    def make(stages: int, stagger: int) -> tuple:
        return (stages, stagger), 1000 * stages

    launch = launch_that_fits(make, 8, 2, (NARROW, 5, blocks, 2), 300, ("w", "a"), ("partials",))
    assert launch.kernel == made
    assert launch.shared_bytes == 1000 * made[0]
    assert (launch.grid, launch.block) == ((blocks,), (384,))
    assert launch.args == ("w", "a", 3, 5, work_rate(2, 3, blocks), "partials")
    assert launch.overlap
