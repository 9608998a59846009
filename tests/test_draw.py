"""The drawing is read back and tried on real blocks: every bit it names must move that element."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import pytest

from qformats import BLOCK, FORMATS, quantize
from qformats.blocks import alignment, offsets
from qformats.draw import BOXES, COLOUR, draw, places, show

name_of_format = pytest.mark.parametrize("name", list(FORMATS))
ANSI = re.compile(r"\x1b\[\d+m")


def numbers(line):
    return [int(word) for word in re.findall(r"\d+", line)]


def read_map(text):
    """The drawing's maps as {element: [(byte, bit), ...]}, lowest code bit first, from its text.

    `qs` rows give a nibble (or all) of each listed byte to an element, `qh` rows single bits.
    """
    where = defaultdict(list)
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(" qs    byte"):
            columns = numbers(line)
            rows = [next(lines)]
            if "all" not in rows[0]:
                rows.append(next(lines))
            for row in rows:
                label, rest = row[:18], row[18:]
                low, high = (0, 7) if "all" in label else sorted(numbers(label))
                for byte, element in zip(columns, numbers(rest), strict=True):
                    where[element] += [(byte, bit) for bit in range(low, high + 1)]
        elif line.startswith(" qh    bit"):
            bits = numbers(line)
            for _ in range(4):
                byte, *elements = numbers(next(lines))
                for bit, element in zip(bits, elements, strict=True):
                    where[element].append((byte, bit))
    return dict(where)


@name_of_format
def test_the_drawn_bits_are_the_elements_bits(name):
    """Flip each drawn bit in a real block: that element's code moves by its power of two, alone."""
    fmt = FORMATS[name]
    drawn = read_map(draw(fmt))
    assert sorted(drawn) == list(range(BLOCK))
    rng = np.random.default_rng(6)
    raw = rng.integers(0, 256, fmt.block_bytes, np.uint8)
    before = fmt.codes(raw.view(fmt.dtype))
    for element, bits in drawn.items():
        assert len(bits) == fmt.bits
        for k, (byte, bit) in enumerate(bits):
            flipped = raw.copy()
            flipped[byte] ^= np.uint8(1 << bit)
            change = fmt.codes(flipped.view(fmt.dtype)) - before
            assert np.flatnonzero(change).tolist() == [element]
            assert abs(change[element]) == 1 << k


@name_of_format
def test_every_bit_of_the_codes_has_one_owner(name):
    fmt = FORMATS[name]
    owned = [place for element in range(BLOCK) for place in places(fmt, element)]
    fields = offsets(fmt.dtype)
    first = fields["qh"] if "qh" in fields else fields["qs"]
    assert sorted(owned) == [(b, i) for b in range(first, fmt.block_bytes) for i in range(8)]
    assert {element: list(places(fmt, element)) for element in range(BLOCK)} == read_map(draw(fmt))


@name_of_format
def test_the_drawn_fields_are_the_dtypes(name):
    """Bytes of each field, and alignment: tried by brute force over the blocks of an array."""
    fmt = FORMATS[name]
    text = draw(fmt)
    rows = re.findall(
        r"^ (d|m|s|qh|qs) +(\d+)\.\.(\d+) +([fiu])(\d+)(?:\[(\d+)\])? +(\d+) bytes", text, re.M
    )
    assert [row[0] for row in rows] == list(fmt.dtype.names)
    for field, start, last, kind, bits, count, aligned in rows:
        dtype, offset = fmt.dtype.fields[field][:2]
        assert (int(start), int(last)) == (offset, offset + dtype.itemsize - 1)
        assert dtype.base == np.dtype(f"{kind}{int(bits) // 8}")
        assert dtype.shape == ((int(count),) if count else ())
        addresses = np.arange(64) * fmt.block_bytes + offset
        assert not (addresses % int(aligned)).any()
        assert (addresses % (2 * int(aligned))).any()
        assert int(aligned) in (2, 4, 8)
        assert int(aligned) == alignment(fmt.dtype, field)
    title = re.match(r" (\w+) +(\d+) bytes for (\d+) elements, ([\d.]+) bits each", text)
    assert title.groups()[:3] == (name, str(fmt.block_bytes), str(BLOCK))
    assert float(title[4]) * BLOCK == fmt.block_bytes * 8
    assert f"the next begins at byte {fmt.block_bytes}." in text
    safe = "so that 4-byte loads of it are safe" in text
    assert safe == (alignment(fmt.dtype, "qs") >= 4) == (name in ("q4_1", "q5_1", "q8_1"))


@name_of_format
def test_the_boxes_are_to_scale(name):
    """Under each box edge stands the ruler's number, and edges are equally far apart per byte."""
    ruler, top, middle, bottom = draw(FORMATS[name]).splitlines()[2:6]
    edges = [i for i, char in enumerate(middle) if char == "|"]
    assert [i for i, char in enumerate(top) if char == "+"] == edges
    assert [i for i, char in enumerate(bottom) if char == "+"] == edges
    marks = {match.start(): int(match[0]) for match in re.finditer(r"\d+", ruler)}
    fmt = FORMATS[name]
    assert marks == dict(zip(edges, [*offsets(fmt.dtype).values(), fmt.block_bytes], strict=True))
    per_byte = {(edge - edges[0]) / byte for edge, byte in marks.items() if byte}
    assert len(per_byte) == 1


def test_the_example_sentence():
    assert draw(FORMATS["q5_1"]).endswith(
        " Element 21: bits 3..0 of its code are bits 7..4 of byte 13; bit 4 is bit 5 of byte 6."
    )
    assert draw(FORMATS["q8_0"]).endswith(" Element 21: bits 7..0 of its code are byte 23.")


@name_of_format
def test_plain_is_ascii_and_narrow_and_colour_changes_nothing_else(name):
    fmt = FORMATS[name]
    x = np.random.default_rng(0).standard_normal(32).astype(np.float32) * np.float32(1.5e-5)
    blocks = fmt.quantize(x)
    for picture in (
        lambda ink: draw(fmt, ink),
        lambda ink: show(blocks, x, "a title", ink),
        lambda ink: show(blocks, None, "a title", ink),
    ):
        text = picture(draw.__defaults__[0])
        assert text.isascii()
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 100
        assert not any(line != line.rstrip() for line in text.splitlines())
        assert "\x1b" in picture(COLOUR)
        assert ANSI.sub("", picture(COLOUR)) == picture(BOXES)
        assert picture(BOXES).translate(str.maketrans("─│┌┬┐└┴┘", "-|++++++")) == text


@name_of_format
def test_show_gives_the_bytes_codes_and_values(name):
    fmt = FORMATS[name]
    x = np.random.default_rng(2).standard_normal(32).astype(np.float32)
    block = fmt.quantize(x)
    text = show(block, x)
    raw = "".join(re.findall(r"\b[0-9a-f]{2}(?: [0-9a-f]{2})+", text)).replace(" ", "")
    assert raw == block.tobytes().hex()
    seen = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 10 and words[0].isdigit():
            for j, asked, code, value, error in (words[:5], words[5:]):
                seen[int(j)] = int(code), float(value)
                assert float(asked) == pytest.approx(x[int(j)], rel=1e-5)
                assert float(error) == pytest.approx(
                    float(value) - float(asked), rel=0.06, abs=1e-4
                )
    assert [seen[j][0] for j in range(32)] == fmt.codes(block).tolist()
    np.testing.assert_allclose([seen[j][1] for j in range(32)], fmt.dequantize(block), rtol=1e-5)
    error = fmt.dequantize(block).astype(np.float64) - x
    assert f"rms error {np.sqrt((error**2).mean()):.3g}, " in text
    assert (
        f"largest {error[np.abs(error).argmax()]:.3g} at element {np.abs(error).argmax()}" in text
    )


def test_show_wants_one_block():
    blocks = quantize(np.ones(64, np.float32), "q4_0")
    with pytest.raises(ValueError, match=r"an array of shape \(1,\), not \(2,\)"):
        show(blocks)


def test_show_of_zeros_has_no_share():
    x = np.zeros(32, np.float32)
    assert "rms error 0; largest 0 at element 0" in show(quantize(x, "q5_1"), x)
