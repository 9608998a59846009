"""Pictures of blocks, as text at most 100 columns wide.

`draw` shows what a format's bytes are: fields, offsets, alignment, and the element to which every
bit belongs. `show` shows one real block: its bytes, its fields, and its values beside those asked
for. Everything is derived from the dtype and from `places`, the one statement of which bit is
whose; the tests flip those bits in real blocks to see that the codec agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from qformats.blocks import BLOCK, alignment, offsets
from qformats.codec import Blocks, Floats, Format, format_of

HALF: Final = BLOCK // 2

_VALUE: Final = {
    "q4_0": "(q - 8) d,  q = 0..15",
    "q4_1": "q d + m,  q = 0..15",
    "q5_0": "(q - 16) d,  q = 0..31",
    "q5_1": "q d + m,  q = 0..31",
    "q8_0": "q d,  q = -127..127",
    "q8_1": "q d,  q = -127..127",
}
_HOLDS: Final = {
    "d": "scale",
    "m": "minimum, the value of code 0",
    "s": "d times the sum of the codes, or the sum of the values",
    "qh": "bit 4 of the codes: as a little-endian u32, bit j for element j",
    "qs": "codes",
}
_COLOUR: Final = {"d": 33, "m": 35, "s": 35, "qh": 36, "qs": 32, "bold": 1, "dim": 2}


@dataclass(frozen=True, slots=True)
class Ink:
    """How a picture is put down: the characters of its boxes, and whether in colour."""

    dash: str = "-"
    side: str = "|"
    top: str = "+++"  # left, middle, right
    bottom: str = "+++"
    colour: bool = False

    def paint(self, text: str, what: str) -> str:
        """`text` in the colour of a field ("d", "qh", ...), "bold" or "dim"."""
        return f"\x1b[{_COLOUR[what]}m{text}\x1b[0m" if self.colour else text


PLAIN: Final = Ink()
BOXES: Final = Ink(dash="─", side="│", top="┌┬┐", bottom="└┴┘")
COLOUR: Final = Ink(dash="─", side="│", top="┌┬┐", bottom="└┴┘", colour=True)


def places(fmt: Format, element: int) -> tuple[tuple[int, int], ...]:
    """Where an element's code is stored: (byte of the block, bit of the byte), lowest bit first."""
    at = offsets(fmt.dtype)
    if fmt.bits == 8:
        return tuple((at["qs"] + element, bit) for bit in range(8))
    low = 0 if element < HALF else 4
    nibble = tuple((at["qs"] + element % HALF, low + bit) for bit in range(4))
    return nibble if fmt.bits == 4 else (*nibble, (at["qh"] + element // 8, element % 8))


def draw(fmt: Format, ink: Ink = PLAIN) -> str:
    """The block of a format: its bytes to scale, its fields, and the element behind every bit."""
    per_element = fmt.block_bytes * 8 / BLOCK
    title = ink.paint(fmt.name, "bold")
    return "\n".join(
        (
            f" {title}   {fmt.block_bytes} bytes for {BLOCK} elements, {per_element:g} bits each"
            f"   value = {_VALUE[fmt.name]}",
            "",
            *_strip(fmt, ink),
            "",
            *_fields(fmt, ink),
            "",
            *_alignment(fmt),
            "",
            *_owners(fmt, ink),
            "",
            *_example(fmt, 21),
        )
    )


def show(block: Blocks, x: Floats | None = None, title: str = "", ink: Ink = PLAIN) -> str:
    """One block, structured[1]: bytes, fields, codes, values, and errors where x[32] is given."""
    fmt = format_of(block)
    if block.shape != (1,):
        raise ValueError(f"show takes one block, an array of shape (1,), not {block.shape}")
    code, value = fmt.codes(block), fmt.dequantize(block)
    error = None if x is None else value.astype(np.float64) - x
    lines = [f" {ink.paint(fmt.name, 'bold')}   {title or _VALUE[fmt.name]}", ""]
    lines += _contents(block, ink)

    head = f"{'element':>8}" + (f"{'x':>13}" if x is not None else "") + f"{'q':>5}{'value':>13}"
    head += f"{'error':>9}" if x is not None else ""

    def cell(j: int) -> str:
        asked = "" if x is None else f"{x[j]:13.6g}"
        wrong = "" if error is None else f"{error[j]:9.2g}"
        return f"{j:8d}{asked}{code[j]:5d}{ink.paint(f'{value[j]:13.6g}', 'qs')}{wrong}"

    lines += ["", ink.paint(head + "  " + head, "dim")]
    lines += [cell(j) + "  " + cell(j + HALF) for j in range(HALF)]
    if x is not None and error is not None:
        worst = int(np.abs(error).argmax())
        rms = float(np.sqrt((error**2).mean()))
        size = float(np.sqrt((x.astype(np.float64) ** 2).mean()))
        share = f", {rms / size:.2%} of the values' {size:.4g}" if size else ""
        lines += ["", f" rms error {rms:.3g}{share}; largest {error[worst]:.3g} at element {worst}"]
    return "\n".join(lines)


def _extents(fmt: Format) -> Iterator[tuple[str, int, int, str]]:
    """(field, first byte, past its last byte, C type) in memory order."""
    at = offsets(fmt.dtype)
    ends = [*list(at.values())[1:], fmt.block_bytes]
    for (name, start), end in zip(at.items(), ends, strict=True):
        base, shape = fmt.dtype[name].base, fmt.dtype[name].shape
        c_type = {"f": "f", "i": "i", "u": "u"}[base.kind] + str(base.itemsize * 8)
        yield name, start, end, c_type + "".join(f"[{n}]" for n in shape)


def _strip(fmt: Format, ink: Ink) -> Iterator[str]:
    """The bytes to scale, in a row of boxes under a ruler of offsets."""
    per_byte = 4 if fmt.block_bytes <= 24 else 2  # 24 x 4 and 36 x 2 columns: within 100
    ruler, top, middle, bottom = "", "", "", ""
    for k, (name, start, end, c_type) in enumerate(_extents(fmt)):
        inside = (end - start) * per_byte - 1
        label = f" {name} {c_type} " if inside >= len(name) + len(c_type) + 3 else f" {name} "
        ruler += f"{start:<{inside + 1}d}"
        top += ink.top[min(k, 1)] + ink.dash * inside
        middle += ink.side + ink.paint(f"{label:<{inside}}", name)
        bottom += ink.bottom[min(k, 1)] + ink.dash * inside
    yield f" {ruler}{fmt.block_bytes}"
    yield f" {top}{ink.top[2]}"
    yield f" {middle}{ink.side}"
    yield f" {bottom}{ink.bottom[2]}"


def _fields(fmt: Format, ink: Ink) -> Iterator[str]:
    yield ink.paint(f" {'field':<7}{'bytes':<9}{'type':<9}{'aligned':<10}holds", "dim")
    for name, start, end, c_type in _extents(fmt):
        wide = f"{alignment(fmt.dtype, name)} bytes"
        span = f"{start}..{end - 1}"
        yield (
            f" {ink.paint(f'{name:<7}', name)}{span:<9}{c_type:<9}{wide:<10}{_HOLDS[name]}".rstrip()
        )


def _alignment(fmt: Format) -> Iterator[str]:
    size, wide = fmt.block_bytes, alignment(fmt.dtype, "qs")
    yield f" Blocks follow each other without padding: the next begins at byte {size}."
    if wide >= 4:
        yield f" qs is {wide}-byte aligned in every block, so that 4-byte loads of it are safe."
    else:
        yield " qs is not 4-byte aligned in every block: a 4-byte load would fault on a GPU."


def _owners(fmt: Format, ink: Ink) -> Iterator[str]:
    """For every bit of qs and qh, the element whose code it is part of."""
    owner = {place: j for j in range(BLOCK) for place in places(fmt, j)}
    extents = {name: (start, end) for name, start, end, _ in _extents(fmt)}
    first, past = extents["qs"]
    for start in range(first, past, HALF):
        columns = range(start, min(start + HALF, past))
        yield ink.paint(f" {'qs    byte':<18}" + "".join(f"{b:4d}" for b in columns), "dim")
        for label, low in (("bits 7..4", 4), ("bits 3..0", 0)) if fmt.bits < 8 else (("all", 0),):
            elements = "".join(f"{owner[b, low]:4d}" for b in columns)
            yield f" {'      ' + label:<18}{ink.paint(elements, 'qs')}"
    if fmt.bits != 5:
        return
    yield ""
    yield ink.paint(f" {'qh    bit':<18}" + "".join(f"{bit:4d}" for bit in range(7, -1, -1)), "dim")
    for byte in range(*extents["qh"]):
        elements = "".join(f"{owner[byte, bit]:4d}" for bit in range(7, -1, -1))
        yield f" {f'      byte {byte}':<18}{ink.paint(elements, 'qh')}"


def _example(fmt: Format, element: int) -> Iterator[str]:
    """One element followed through the maps, in words."""
    parts = []
    bit = 0
    for byte, run in groupby(places(fmt, element), key=lambda place: place[0]):
        bits = [b for _, b in run]
        whole = "byte" if len(bits) == 8 else _span(bits[0], bits[-1]) + " of byte"
        parts.append(f"{_span(bit, bit + len(bits) - 1)} of its code are {whole} {byte}")
        bit += len(bits)
    text = "; ".join(parts).replace("bit 4 of its code are", "bit 4 is")
    yield f" Element {element}: {text}."


def _span(low: int, high: int) -> str:
    return f"bit {low}" if low == high else f"bits {high}..{low}"


def _contents(block: Blocks, ink: Ink) -> Iterator[str]:
    """Every field's bytes in hexadecimal, sixteen a line, and its value."""
    fmt = format_of(block)
    raw = block.tobytes()
    for name, start, end, c_type in _extents(fmt):
        for line in range(start, end, HALF):
            stop = min(line + HALF, end)
            if name == "qs":
                means = ""
            elif name == "qh":
                means = f"= 0x{int.from_bytes(raw[start:end], 'little'):08x}"
            else:
                means = f"= {float(block[name][0]):.6g}"
            label = f"{name:<4}{c_type:<8}" if line == start else " " * 12
            data = f"{raw[line:stop].hex(' '):<13}"
            yield f" {label}{f'{line}..{stop - 1}':<8}{ink.paint(data, name)}{means}".rstrip()
