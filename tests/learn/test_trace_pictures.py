"""Pictures of a warp's requests: what is drawn where, and which of a step's requests are."""

from __future__ import annotations

import re
from itertools import pairwise

from markupsafe import Markup

from steps.contract import Work
from steps.learn.trace.picture import figures_of, in_words, picture, what_of
from steps.learn.trace.traced import main_requests, size_of, trace
from steps.registry import find, source
from steps.simulator.lanes import Site
from steps.simulator.trace import Instruction


def request(
    kind: str, space: str, size: int, lanes: list[int | None], **counts: int
) -> Instruction:
    place = Site(0, 0, request.__code__)
    one = Instruction(0, kind, "x", space, size, (place,), **{"requests": 1} | counts)
    one.lanes = lanes
    return one


def rects(svg: Markup, name: str) -> list[tuple[float, float]]:
    """Where the rectangles of paths of a class begin."""
    paths = re.findall(rf'<path class="{name}" d="([^"]*)"', str(svg))
    return [tuple(map(float, at)) for path in paths for at in re.findall(r"M(\S+) ([\d.]+)h", path)]


def test_sectors_side_by_side_and_apart() -> None:
    row = request("load", "global", 4, [4 * i for i in range(32)], sectors=4)
    frame = rects(picture(row, "a").svg, "frame")
    assert len(frame) == 4
    assert len({y for _, y in frame}) == 1
    apart = [b[0] - a[0] for a, b in pairwise(frame)]
    assert apart == [40.0] * 3, "no gap"
    assert "4 sectors of 32 bytes<" in picture(row, "a").svg

    column = request("load", "global", 1, [18 * i for i in range(16)] * 2, sectors=9)
    svg = picture(column, "b").svg
    assert len(rects(svg, "frame")) == 9
    assert len(rects(svg, "bytes")) == 32
    far = request("load", "global", 4, [4096 * i for i in range(32)], sectors=32)
    svg = picture(far, "c").svg
    assert "32 sectors of 32 bytes in 32 places" in svg
    assert max(x for x, _ in rects(svg, "frame")) < 36 + 640
    assert f"byte {4096 * 31}" in svg


def test_a_cycle_a_line_of_banks() -> None:
    column = request("load", "shared", 4, [128 * i for i in range(32)], wavefronts=32, ideal=1)
    svg = picture(column, "a").svg
    cells = rects(svg, "bytes")
    assert len({x for x, _ in cells}) == 1, "one bank"
    assert len({y for _, y in cells}) == 32, "in 32 cycles"
    assert "32 cycles, 31 of them lost to bank conflicts" in svg

    wide = request("load", "shared", 16, [16 * i for i in range(32)], wavefronts=4, ideal=4)
    svg = picture(wide, "b").svg
    cells = rects(svg, "bytes")
    assert len(set(cells)) == 4 * 32, "every bank in every cycle, none twice"
    assert "4 cycles, no conflict" in svg

    one_word = request("load", "shared", 4, [64] * 32, wavefronts=1, ideal=1)
    assert len(set(rects(picture(one_word, "c").svg, "bytes"))) == 1


def test_words_and_figures() -> None:
    half = request("cp.async", "global", 16, [None] * 16 + [32 * i for i in range(16)], sectors=16)
    assert what_of(half) == "cp.async, 16 bytes a lane, from x in global memory"
    assert dict(figures_of(half))["bytes used, of those touched"] == "256 of 512"
    assert in_words(half) == "lanes 16 to 31 byte 0 and on, 32 apart"
    rows = request("load", "global", 4, [0] * 16 + [512] * 15 + [7000])
    assert in_words(rows) == "lanes 0 to 15 byte 0; lanes 16 to 30 byte 512; lane 31 byte 7000"
    assert str(picture(half, "a").svg).count('class="idle"') == 16


def test_the_main_requests_of_a_step() -> None:
    step = find(9)
    work = Work(step, "A8", "q4_0")
    found = main_requests(trace(work, size_of(work, step.home_shapes[0])).instructions)
    kinds = [(each.kind, each.space) for each in found]
    assert kinds.count(("cp.async", "global")) == 2
    assert {each.array for each in found if each.space == "global"} == {"w", "qa", "c"}
    assert kinds.count(("store", "global")) == 1
    assert {kind for kind, space in kinds if space == "shared"} == {"cp.async", "ldmatrix", "load"}
    text = "".join(source(step))
    assert all(each.place.text in text for each in found)


def test_bulk_copies_are_shown_once_and_those_of_tensor_maps_too() -> None:
    work = Work(find(13), "A16", "q4_0")
    found = main_requests(trace(work, (512, 4096, 256)).instructions)
    copies = [each for each in found if each.kind == "bulk copy"]
    assert {each.space for each in copies} == {"global", "shared"}, "W, and A by its map"
    assert {each.warp for each in copies} == {8}, "the producer"
