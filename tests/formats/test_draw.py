"""The drawing is read back and tried on real blocks: every bit it names must move that element."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import pytest

from qformats import BLOCK, FORMATS
from qformats.blocks import alignment, offsets
from qformats.draw import BOXES, COLOUR, draw, factors, places

name_of_format = pytest.mark.parametrize("name", list(FORMATS))
name_of_k_quant = pytest.mark.parametrize("name", [n for n in FORMATS if n.endswith("_k")])
ANSI = re.compile(r"\x1b\[\d+m")


def numbers(line):
    return [int(word) for word in re.findall(r"\d+", line)]


def read_map(text):
    """The drawing's maps as {element: [(byte, bit), ...]}, lowest code bit first, from its text.

    Rows under a line of bytes give some bits (or all) of each to an element; rows under a line of
    bits, those of five-bit blocks of 32 and of one-bit blocks, give one byte each.
    """
    where = defaultdict(list)
    lines = iter(text.splitlines())
    columns = []
    for line in lines:
        if re.match(r" (qs|ql|qh|hmask) +byte", line):
            columns = numbers(line)
        elif columns and (row := re.match(r"       (?:all|bits? (\d)(?:\.\.(\d))?)", line)):
            high, low = (7, 0) if row[1] is None else (int(row[1]), int(row[2] or row[1]))
            for byte, element in zip(columns, numbers(line[18:]), strict=True):
                where[element] += [(byte, bit) for bit in range(low, high + 1)]
        else:
            columns = []
        if re.match(r" (qh|qs)    bit", line):
            bits = numbers(line)
            while row := numbers(next(lines, "")):
                for bit, element in zip(bits, row[1:], strict=True):
                    where[element].append((row[0], bit))
    return dict(where)


def read_factors(text):
    """The drawing's map of `scales` as {"s0": {bit of the number: (byte, bit of it)}, ...}.

    A prime marks bits 5..4; other rows hold the lowest bits.
    """
    where = defaultdict(dict)
    columns = []
    for line in text.splitlines():
        if line.startswith(" scales byte"):
            columns = numbers(line)
        elif columns and (row := re.match(r"       (?:all|bits (\d)\.\.(\d))", line)):
            high, low = (7, 0) if row[1] is None else (int(row[1]), int(row[2]))
            for byte, name in zip(columns, line[18:].split(), strict=True):
                first = 4 if name.endswith("'") else 0
                for k, bit in enumerate(range(low, high + 1)):
                    assert first + k not in where[name.rstrip("'")]
                    where[name.rstrip("'")][first + k] = byte, bit
        else:
            columns = []
    return where


@name_of_format
def test_the_drawn_bits_are_the_elements_bits(name):
    """Flip each drawn bit in a real block: that element's code moves by its power of two, alone."""
    fmt = FORMATS[name]
    drawn = read_map(draw(fmt))
    assert sorted(drawn) == list(range(fmt.elements))
    rng = np.random.default_rng(6)
    raw = rng.integers(0, 256, fmt.block_bytes, np.uint8)
    before = fmt.codes(raw.view(fmt.dtype))
    for element, bits in drawn.items():
        assert len(bits) == fmt.bits
        assert sorted(places(fmt, element)) == sorted(bits)
        for k, (byte, bit) in enumerate(bits):
            flipped = raw.copy()
            flipped[byte] ^= np.uint8(1 << bit)
            change = fmt.codes(flipped.view(fmt.dtype)) - before
            assert np.flatnonzero(change).tolist() == [element]
            assert abs(change[element]) == 1 << k


@name_of_k_quant
def test_the_drawn_bits_of_scales_are_the_groups(name):
    """Flip each in a real block: the scale or minimum of that group moves by d or dmin times a
    power of two (the sign bit of an int8 too), alone."""
    fmt = FORMATS[name]
    drawn = read_factors(draw(fmt))
    groups = fmt.elements // fmt.group
    minima = "dmin" in fmt.dtype.names
    assert set(drawn) == {f"{what}{i}" for what in "sm"[: 1 + minima] for i in range(groups)}
    raw = np.random.default_rng(6).integers(0, 256, fmt.block_bytes, np.uint8)
    block = raw.view(fmt.dtype)
    block["d"] = 1
    if minima:
        block["dmin"] = 1
    scale = fmt.scale(block)
    for factor, bits in drawn.items():
        assert sorted(bits) == list(range(len(bits)))
        assert list(factors(fmt)[factor]) == [bits[k] for k in range(len(bits))]
        for k, (byte, bit) in bits.items():
            flipped = raw.copy()
            flipped[byte] ^= np.uint8(1 << bit)
            other = flipped.view(fmt.dtype)
            # The offset of formats with a zero point follows the scale.
            what = (fmt.scale(other) - scale, fmt.offset(other) - fmt.offset(block))
            change = what[1] if factor[0] == "m" else what[0]
            assert not (minima and what["sm".index(factor[0]) ^ 1].any())
            assert np.flatnonzero(change).tolist() == [int(factor[1:])]
            assert abs(change[int(factor[1:])]) == 1 << k


@name_of_format
def test_the_drawn_fields_are_the_dtypes(name):
    """Bytes of each field, and alignment: tried by brute force over the blocks of an array."""
    fmt = FORMATS[name]
    text = draw(fmt)
    rows = re.findall(
        r"^ (\w+) +(\d+)(?:\.\.(\d+))? +([fiu])(\d+)(?:\[(\d+)\])? +(\d+) bytes?", text, re.M
    )
    assert [row[0] for row in rows] == list(fmt.dtype.names)
    for field, start, last, kind, bits, count, aligned in rows:
        dtype, offset = fmt.dtype.fields[field][:2]
        assert (int(start), int(last or start)) == (offset, offset + dtype.itemsize - 1)
        assert dtype.base == np.dtype(f"{kind}{int(bits) // 8}")
        assert dtype.shape == ((int(count),) if count else ())
        addresses = np.arange(64) * fmt.block_bytes + offset
        assert not (addresses % int(aligned)).any()
        assert (addresses % (2 * int(aligned))).any()
        assert int(aligned) in (1, 2, 4, 8, 16)
        assert int(aligned) == alignment(fmt.dtype, field)
    title = re.match(r" (\w+) +(\d+) bytes for (\d+) elements, ([\d.]+) bits each", text)
    assert title.groups()[:3] == (name, str(fmt.block_bytes), str(fmt.elements))
    assert float(title[4]) * fmt.elements == fmt.block_bytes * 8
    assert f"the next begins at byte {fmt.block_bytes}." in text
    field = fmt.packed[0].field
    safe = re.search(rf"^ {field} is (\d+)-byte aligned .* 4-byte loads of it are safe", text, re.M)
    wide = ("q4_1", "q5_1", "q8_1", "q2_k", "q4_k", "q5_k", "iq4_xs", "nvfp4")
    assert bool(safe) == (alignment(fmt.dtype, field) >= 4) == (name in wide)


@name_of_format
def test_the_boxes_are_to_scale(name):
    """Under each box edge stands the ruler's number, and edges are equally far apart per byte, but
    for blocks of 256 elements, which say that they are not."""
    text = draw(FORMATS[name])
    ruler, top, middle, bottom = text.split("\n\n")[1].splitlines()
    edges = [i for i, char in enumerate(middle) if char == "|"]
    assert [i for i, char in enumerate(top) if char == "+"] == edges
    assert [i for i, char in enumerate(bottom) if char == "+"] == edges
    marks = {match.start(): int(match[0]) for match in re.finditer(r"\d+", ruler)}
    fmt = FORMATS[name]
    assert marks == dict(zip(edges, [*offsets(fmt.dtype).values(), fmt.block_bytes], strict=True))
    per_byte = {(edge - edges[0]) / byte for edge, byte in marks.items() if byte}
    assert (len(per_byte) == 1) == (fmt.elements == BLOCK) == ("(not to scale)" not in middle)


def test_the_example_sentence():
    assert draw(FORMATS["q5_1"]).endswith(
        " Element 21: bits 3..0 of its code are bits 7..4 of byte 13; bit 4 is bit 5 of byte 6."
    )
    assert draw(FORMATS["q8_0"]).endswith(" Element 21: bits 7..0 of its code are byte 23.")
    assert draw(FORMATS["q3_k"]).endswith(
        " Element 213: bits 1..0 of its code are bits 5..4 of byte 85; bit 2 is bit 6 of byte 21."
    )


def test_the_drawn_tables_are_the_codebooks():
    for name in ("mxfp4", "iq4_nl"):
        line = draw(FORMATS[name]).splitlines()[1]
        assert line == " t = " + " ".join(str(level) for level in FORMATS[name].codebook)
        one_scale = np.zeros(1, FORMATS[name].dtype)
        one_scale["qs"] = np.arange(16) * 17
        for field, one in (("e", 128), ("d", 1)):
            if field in one_scale.dtype.names:
                one_scale[field] = one
        drawn = [float(word) for word in line.split()[2:]]
        np.testing.assert_array_equal(FORMATS[name].dequantize(one_scale), drawn + drawn)


@name_of_format
def test_plain_is_ascii_and_narrow_and_colour_changes_nothing_else(name):
    fmt = FORMATS[name]
    text = draw(fmt)
    assert text.isascii()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert "\x1b" in draw(fmt, COLOUR)
    assert ANSI.sub("", draw(fmt, COLOUR)) == draw(fmt, BOXES)
    assert draw(fmt, BOXES).translate(str.maketrans("─│┌┬┐└┴┘", "-|++++++")) == text
