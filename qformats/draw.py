"""Pictures of blocks, as text at most 100 columns wide.

`draw` shows what a format's bytes are: fields, offsets, alignment, and the element to which every
bit belongs. Everything is derived from the dtype and from `places`, the one statement of which bit
is whose; the tests flip those bits in real blocks to see that the codec agrees. A K-quant's scales
are integers in the block too: `factors` says which bit is whose there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from qformats.blocks import BLOCK, alignment, offsets
from qformats.codec import Format

COLUMNS: Final = 16  # bytes a line

_VALUE: Final = {
    "q4_0": "(q - 8) d,  q = 0..15",
    "q4_1": "q d + m,  q = 0..15",
    "q5_0": "(q - 16) d,  q = 0..31",
    "q5_1": "q d + m,  q = 0..31",
    "q8_0": "q d,  q = -127..127",
    "q8_1": "q d,  q = -127..127",
    "mxfp4": "2^(e-128) t[q],  q = 0..15",
    "iq4_nl": "d t[q],  q = 0..15",
    "q2_k": "d s q - dmin m,  q = 0..3",
    "q3_k": "d (s - 32) (q - 4),  q = 0..7",
    "q4_k": "d s q - dmin m,  q = 0..15",
    "q5_k": "d s q - dmin m,  q = 0..31",
    "q6_k": "d s (q - 32),  q = 0..63",
    "iq4_xs": "d (s - 32) t[q],  q = 0..15",
    "nvfp4": "d t[q],  q = 0..15",
    "q1_0": "d t[q],  q = 0, 1",
    "tq2_0": "d t[q],  q = 0..3",
}
_HOLDS: Final = {
    "d": "scale",
    "m": "minimum, the value of code 0",
    "s": "d times the sum of the codes, or the sum of the values",
    "qh": "bit 4 of the codes: a little-endian u32, bit j for element j",
    "qs": "codes",
    "e": "scale, as an exponent of two",
    "dmin": "scale of the minima",
    "scales": "scale s and minimum m of each group",
}
_INDICES: Final = {"qs": "codes: indices of the table t"}
_OF_SCALES: Final = {"d": "scale of the scales"}
_HOLDS_INSTEAD: Final[Mapping[str, Mapping[str, str]]] = {  # where a format says it more exactly
    **dict.fromkeys(("mxfp4", "iq4_nl", "q1_0", "tq2_0"), _INDICES),
    **dict.fromkeys(("q2_k", "q4_k"), _OF_SCALES),
    "q3_k": _OF_SCALES
    | {"hmask": "bit 2 of the codes", "qs": "bits 1..0 of the codes"}
    | {"scales": "scale s of each group"},
    "q5_k": _OF_SCALES | {"qh": "bit 4 of the codes", "qs": "bits 3..0 of the codes"},
    "q6_k": _OF_SCALES
    | {"ql": "bits 3..0 of the codes", "qh": "bits 5..4 of the codes"}
    | {"scales": "scale s of each group"},
    "iq4_xs": _OF_SCALES
    | _INDICES
    | {"scales_h": "bits 5..4 of the scale s of each group"}
    | {"scales_l": "bits 3..0 of the scale s of each group"},
    "nvfp4": _INDICES | {"d": "half the scale of each group, UE4M3"},
}
_COLOUR: Final = {
    **dict.fromkeys(("d", "e", "scales", "scales_h", "scales_l"), 33),
    **dict.fromkeys(("m", "s", "dmin"), 35),
    **{"qh": 36, "hmask": 36, "qs": 32, "ql": 32, "bold": 1, "dim": 2},
}


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
    at, found = offsets(fmt.dtype), []
    for packed in fmt.packed:
        byte, low = packed.place(element)
        found += [(at[packed.field] + byte, low + bit) for bit in range(packed.bits)]
    return tuple(found)


def factors(fmt: Format) -> dict[str, tuple[tuple[int, int], ...]]:
    """The bits of integer scales, "s3" the scale of group 3 and "m3" its minimum, as `places` has
    them; nothing for the formats without."""
    if fmt.name == "iq4_xs":
        low, high = (offsets(fmt.dtype)[field] for field in ("scales_l", "scales_h"))
        return {
            f"s{i}": tuple((low + i // 2, i % 2 * 4 + bit) for bit in range(4))
            + tuple((high + i // 4, i % 4 * 2 + bit) for bit in range(2))
            for i in range(8)
        }
    if "scales" not in (fmt.dtype.names or ()):
        return {}
    at = offsets(fmt.dtype)["scales"]

    def bits(byte: int, low: int, count: int) -> tuple[tuple[int, int], ...]:
        return tuple((at + byte, low + bit) for bit in range(count))

    groups = range(fmt.elements // fmt.group)
    if fmt.name == "q2_k":
        return {f"{what}{i}": bits(i, low, 4) for what, low in (("s", 0), ("m", 4)) for i in groups}
    if fmt.name == "q3_k":
        return {
            f"s{i}": bits(i % 8, i // 8 * 4, 4) + bits(8 + i % 4, i // 4 * 2, 2) for i in groups
        }
    if fmt.name == "q6_k":
        return {f"s{i}": bits(i, 0, 8) for i in groups}
    return {
        f"{what}{i}": bits(first + i, 0, 6)
        if i < 4
        else bits(4 + i, low, 4) + bits(first + i - 4, 6, 2)
        for what, first, low in (("s", 0, 0), ("m", 4, 4))
        for i in groups
    }


def draw(fmt: Format, ink: Ink = PLAIN) -> str:
    """The block of a format: its bytes to scale, its fields, and the element behind every bit."""
    per_element = fmt.block_bytes * 8 / fmt.elements
    title = ink.paint(fmt.name, "bold")
    return "\n".join(
        (
            f" {title}   {fmt.block_bytes} bytes for {fmt.elements} elements, {per_element:g} bits"
            f" each   value = {_VALUE[fmt.name]}",
            *_table(fmt),
            "",
            *_strip(fmt, ink),
            "",
            *_fields(fmt, ink),
            "",
            *_alignment(fmt),
            "",
            *_owners(fmt, ink),
            "",
            *_factors(fmt, ink),
            *_example(fmt, 213 if fmt.elements > 213 else 21),
        )
    )


def _extents(fmt: Format) -> Iterator[tuple[str, int, int, str]]:
    """(field, first byte, past its last byte, C type) in memory order."""
    at = offsets(fmt.dtype)
    ends = [*list(at.values())[1:], fmt.block_bytes]
    for (name, start), end in zip(at.items(), ends, strict=True):
        base, shape = fmt.dtype[name].base, fmt.dtype[name].shape
        c_type = {"f": "f", "i": "i", "u": "u"}[base.kind] + str(base.itemsize * 8)
        yield name, start, end, c_type + "".join(f"[{n}]" for n in shape)


def _table(fmt: Format) -> Iterator[str]:
    """What the codes stand for, in the formats with a codebook."""
    if fmt.codebook is not None:
        yield f" t = {' '.join(map(str, fmt.codebook))}"


def _strip(fmt: Format, ink: Ink) -> Iterator[str]:
    """The bytes in a row of boxes under a ruler of offsets: to scale where they fit."""
    to_scale = fmt.elements == BLOCK
    per_byte = 4 if fmt.block_bytes <= 24 else 2  # 24 x 4 and 36 x 2 columns: within 100
    ruler, top, middle, bottom = "", "", "", ""
    for k, (name, start, end, c_type) in enumerate(_extents(fmt)):
        label = f" {name} {c_type} "
        inside = (end - start) * per_byte - 1 if to_scale else len(label)
        if inside < len(label):
            label = f" {name} "
        ruler += f"{start:<{inside + 1}d}"
        top += ink.top[min(k, 1)] + ink.dash * inside
        middle += ink.side + ink.paint(f"{label:<{inside}}", name)
        bottom += ink.bottom[min(k, 1)] + ink.dash * inside
    yield f" {ruler}{fmt.block_bytes}"
    yield f" {top}{ink.top[2]}"
    yield f" {middle}{ink.side}" + ("" if to_scale else "  (not to scale)")
    yield f" {bottom}{ink.bottom[2]}"


def _fields(fmt: Format, ink: Ink) -> Iterator[str]:
    yield ink.paint(f" {'field':<9}{'bytes':<9}{'type':<9}{'aligned':<10}holds", "dim")
    for name, start, end, c_type in _extents(fmt):
        aligned = alignment(fmt.dtype, name)
        wide = f"{aligned} byte{'s' * (aligned > 1)}"
        span = f"{start}..{end - 1}" if end - start > 1 else f"{start}"
        holds = _HOLDS_INSTEAD.get(fmt.name, _HOLDS).get(name) or _HOLDS[name]
        yield f" {ink.paint(f'{name:<9}', name)}{span:<9}{c_type:<9}{wide:<10}{holds}".rstrip()


def _alignment(fmt: Format) -> Iterator[str]:
    size, codes = fmt.block_bytes, fmt.packed[0].field
    wide = alignment(fmt.dtype, codes)
    yield f" Blocks follow each other without padding: the next begins at byte {size}."
    if wide >= 4:
        says = f"is {wide}-byte aligned in every block, so that 4-byte loads of it are safe."
    else:
        says = "is not 4-byte aligned in every block: a 4-byte load would fault on a GPU."
    yield f" {codes} {says}"


def _owners(fmt: Format, ink: Ink) -> Iterator[str]:
    """For every bit of the fields of codes, the element whose code it is part of."""
    owner = {place: j for j in range(fmt.elements) for place in places(fmt, j)}
    extents = {name: range(start, end) for name, start, end, _ in _extents(fmt)}
    for k, (field, bits, run) in enumerate(fmt.packed):
        if k:
            yield ""
        if run == 1:  # a plain bit field: a line for each byte
            head = "".join(f"{bit:4d}" for bit in range(7, -1, -1))
            yield ink.paint(f" {f'{field:<5} bit':<18}{head}", "dim")
            for byte in extents[field]:
                elements = "".join(f"{owner[byte, bit]:4d}" for bit in range(7, -1, -1))
                yield f" {f'      byte {byte}':<18}{ink.paint(elements, field)}"
            continue
        whole = extents[field]
        for columns in (whole[i : i + COLUMNS] for i in range(0, len(whole), COLUMNS)):
            head = "".join(f"{byte:4d}" for byte in columns)
            yield ink.paint(f" {f'{field:<5} byte':<18}{head}", "dim")
            for low in range(8 - bits, -1, -bits):
                label = "all" if bits == 8 else _span(low, low + bits - 1)
                elements = "".join(f"{owner[byte, low]:4d}" for byte in columns)
                yield f" {f'      {label}':<18}{ink.paint(elements, field)}"


def _factors(fmt: Format, ink: Ink) -> Iterator[str]:
    """For every bit of `scales`, the group whose scale or minimum it is part of."""
    whose: dict[int, list[tuple[int, int, str]]] = {}  # by byte: lowest bit, highest bit, of what
    for name, bits in factors(fmt).items():
        for k, (byte, run) in enumerate(groupby(bits, key=lambda place: place[0])):
            own = [bit for _, bit in run]
            whose.setdefault(byte, []).append((own[0], own[-1], name + "'" * k))
    if not whose:
        return
    for parts in whose.values():
        parts.sort(reverse=True)
    alike = groupby(sorted(whose), key=lambda byte: [part[:2] for part in whose[byte]])
    for spans, run_of_bytes in alike:
        columns = list(run_of_bytes)
        head = "".join(f"{byte:5d}" for byte in columns)
        yield ink.paint(f" {'scales byte':<18}{head}", "dim")
        for row, (low, high) in enumerate(spans):
            label = "all" if high - low == 7 else _span(low, high)
            names = "".join(f"{whose[byte][row][2]:>5}" for byte in columns)
            yield f" {f'      {label}':<18}{ink.paint(names, 'scales')}"
    yield f" s0 is of elements 0..{fmt.group - 1}, s1 of the next {fmt.group}, and so on."
    if any("'" in name for parts in whose.values() for _, _, name in parts):
        yield " A prime marks bits 5..4 of a number whose bits 3..0 are elsewhere."
    yield ""


def _example(fmt: Format, element: int) -> Iterator[str]:
    """One element followed through the maps, in words."""
    parts = []
    bit = 0
    for byte, run in groupby(places(fmt, element), key=lambda place: place[0]):
        bits = [b for _, b in run]
        whole = "byte" if len(bits) == 8 else _span(bits[0], bits[-1]) + " of byte"
        what = "is" if len(bits) == 1 else "are"
        of_code = "" if bit else " of its code"
        parts.append(f"{_span(bit, bit + len(bits) - 1)}{of_code} {what} {whole} {byte}")
        bit += len(bits)
    yield f" Element {element}: {'; '.join(parts)}."


def _span(low: int, high: int) -> str:
    return f"bit {low}" if low == high else f"bits {high}..{low}"
