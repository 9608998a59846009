"""A request of a warp as a picture: 32 lanes above, what they touch in memory below.

Global memory is drawn as the sectors of 32 bytes that are touched, in the order of their addresses,
with a gap where sectors in between are not; shared memory as its 32 banks, a line for each cycle
that the request takes. Colours are those of `results/render/memory.css`, which also lets the lanes
come one after the other: a picture has no script.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

from steps.simulator.banks import BANKS, SECTOR, WORD, lanes_together, served
from steps.simulator.trace import BULK, PREFETCH, Instruction

LEFT: Final = 36
LANE: Final = 20  # pixels of a lane, and of a bank
WIDE: Final = BANKS * LANE
LANES_HIGH: Final = 18
APART: Final = 76  # between lanes and memory
SECTOR_WIDE, SECTOR_HIGH = 40.0, 24
MOST_LABELS: Final = 9
LETTER: Final = 6  # pixels of a letter of a label

LEGEND: Final = (
    "One request of each memory instruction: lanes above, what they touch below, each lane in a "
    "colour of its own. Global memory comes in sectors of 32 bytes; gaps are sectors that are not "
    "touched. Shared memory has 32 banks, and a line for each cycle. Counts are of the source: a "
    "compiler may merge loads, or keep a value. Bytes are counted from where the array begins."
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A memory instruction as the page shows it."""

    place: str  # "step03_shared_tiled.py:114"
    line: str  # the source there
    by: str  # the places that led from there to the instruction, where a function executes it
    warp: int
    what: str  # "load, 4 bytes a lane, of a in global memory"
    figures: list[tuple[str, str]]
    svg: Markup


def picture(instruction: Instruction, identity: str) -> Picture:
    """`identity`: of the picture, and of nothing else on its page."""
    place, *inner = reversed(instruction.way)
    return Picture(
        place=place.name,
        line=place.text,
        by=", then ".join(site.name for site in inner),
        warp=instruction.warp,
        what=what_of(instruction),
        figures=figures_of(instruction),
        svg=_drawn(instruction, identity),
    )


def what_of(instruction: Instruction) -> str:
    """In words: what it does, with how many bytes, where."""
    where = f"{instruction.array} in {instruction.space} memory"
    if instruction.kind in (BULK, PREFETCH):
        to = "of" if instruction.space == "global" else "to"
        return f"{instruction.kind} of {instruction.size} bytes, {to} {where}"
    a_row = "row" if instruction.kind in ("ldmatrix", "stmatrix") else "lane"
    many = "byte" if instruction.size == 1 else "bytes"
    to = "to" if instruction.kind in ("store", "stmatrix") else "of"
    if instruction.kind == "cp.async":
        to = "from" if instruction.space == "global" else "to"
    return f"{instruction.kind}, {instruction.size} {many} a {a_row}, {to} {where}"


def figures_of(instruction: Instruction) -> list[tuple[str, str]]:
    """Its counts: (of what, how many)."""
    found = [("requests of the warp", f"{instruction.requests}")]
    if instruction.space == "global":
        used, touched = instruction.bytes_used, len(_sector_numbers(instruction))
        found.append(("sectors per request", f"{instruction.sectors_per_request:.4g}"))
        found.append(("bytes used, of those touched", f"{used} of {SECTOR * touched}"))
    elif instruction.kind != BULK:
        each = instruction.wavefronts / instruction.requests
        found.append(("wavefronts per request", f"{each:.4g}"))
        found.append(("bank conflicts", f"{instruction.conflicts}"))
    return found


def in_words(instruction: Instruction) -> str:
    """Which lane accesses what, for those who cannot see the picture."""
    runs: list[tuple[int, int, int, int]] = []  # first lane, last lane, address, step
    for lane, address in enumerate(instruction.lanes):
        if address is None:
            continue
        if runs and runs[-1][1] == lane - 1:
            first, last, start, step = runs[-1]
            ahead = address - (start + (last - first) * step)
            if first == last or ahead == step:
                runs[-1] = (first, lane, start, ahead)
                continue
        runs.append((lane, lane, address, 0))
    said = [
        f"lane {a} byte {at}"
        if a == b
        else f"lanes {a} to {b} byte {at}" + (f" and on, {step} apart" if step else "")
        for a, b, at, step in runs[:6]
    ]
    return "; ".join(said) + ("; and so on" if len(runs) > 6 else "")


def _sector_numbers(instruction: Instruction) -> list[int]:
    """Of the request that is shown, in order."""
    return sorted(
        {
            sector
            for a in instruction.lanes
            if a is not None
            for sector in range(a // SECTOR, (a + instruction.size - 1) // SECTOR + 1)
        }
    )


# --- drawing --------------------------------------------------------------------------------------


def _drawn(instruction: Instruction, identity: str) -> Markup:
    if instruction.kind in (BULK, PREFETCH):
        parts, high = _copied(instruction)
    elif instruction.space == "global":
        parts, high = _in_sectors(instruction)
    else:
        parts, high = _in_banks(instruction)
    title = f"{what_of(instruction)}, {instruction.place.name}"
    title_id, text_id = f"{identity}-title", f"{identity}-text"
    head = Markup(
        '<svg class="memory" role="img" viewBox="0 0 {} {}" style="--drawn:{}px" '
        'aria-labelledby="{} {}"><title id="{}">{}</title><desc id="{}">{}</desc>'
    ).format(
        LEFT + WIDE + 4,
        high,
        LEFT + WIDE + 4,
        *(title_id, text_id, title_id, title, text_id, in_words(instruction)),
    )
    return head + Markup("").join(parts) + Markup("</svg>")


def _lane(lane: int, address: int | None, drawn: str) -> Markup:
    """A lane's box, with what belongs to it below; `drawn` are paths, the first its line."""
    x = LEFT + LANE * lane
    box = f'<path class="box" d="M{x + 1} 1h{LANE - 2}v{LANES_HIGH - 2}h{2 - LANE}z"/>'
    number = f'<text x="{x + LANE / 2:g}" y="13">{lane}</text>'
    if address is None:
        return Markup(f'<g class="idle">{box}{number}</g>')
    says = f"<title>lane {lane}: byte {address}</title>"
    return Markup(f'<g class="lane" style="--i:{lane}">{says}{drawn}{box}{number}</g>')


def _rect(x: float, y: float, wide: float, high: float) -> str:
    return f"M{x:.5g} {y:g}h{wide:.4g}v{high:g}h{-wide:.4g}z"


def _label(x: float, y: float, text: str, anchor: str = "start") -> Markup:
    return Markup('<text class="label" x="{:.5g}" y="{:g}" text-anchor="{}">{}</text>').format(
        x, y, anchor, escape(text)
    )


def _line(lane: int, x: float, y: float) -> str:
    start, end = LANES_HIGH, y - LANES_HIGH
    at = LEFT + LANE * lane + LANE / 2
    return (
        f'<path class="line" d="M{at:g} {start}C{at:g} {start + end * 0.55:g} '
        f'{x:.5g} {y - end * 0.55:g} {x:.5g} {y:g}"/>'
    )


def _in_sectors(instruction: Instruction) -> tuple[list[Markup], int]:
    numbers = _sector_numbers(instruction)
    starts = [i for i, s in enumerate(numbers) if not i or numbers[i - 1] != s - 1]
    gap = 10.0 if len(starts) <= MOST_LABELS else 3.0
    wide = min(SECTOR_WIDE, (WIDE - gap * (len(starts) - 1)) / len(numbers))
    top = LANES_HIGH + APART
    places, x = {}, float(LEFT)
    for i, sector in enumerate(numbers):
        x += gap if i and i in starts else 0.0
        places[sector] = x
        x += wide
    frame = "".join(_rect(x, top, wide, SECTOR_HIGH) for x in places.values())
    parts = [_label(0, 13, "lane"), Markup(f'<path class="frame" d="{frame}"/>')]
    for lane, address in enumerate(instruction.lanes):
        if address is None:
            parts.append(_lane(lane, None, ""))
            continue
        bytes_ = ""
        at, left = address, instruction.size
        while left:
            part = min(left, SECTOR - at % SECTOR)
            x = places[at // SECTOR] + wide * (at % SECTOR) / SECTOR
            bytes_ += _rect(x, top, wide * part / SECTOR, SECTOR_HIGH)
            at, left = at + part, left - part
        middle = places[address // SECTOR] + wide * (
            (address % SECTOR + min(instruction.size, SECTOR) / 2) / SECTOR
        )
        line = _line(lane, middle, top)
        parts.append(_lane(lane, address, f'{line}<path class="bytes" d="{bytes_}"/>'))
    free = 0.0  # from here on there is room for a label
    for i in starts:
        text, x, anchor = f"byte {numbers[i] * SECTOR}", places[numbers[i]], "start"
        if i == starts[-1] and len(starts) > 1 and x + LETTER * len(text) > LEFT + WIDE:
            x, anchor = LEFT + WIDE, "end"
        begin = x - LETTER * len(text) * (anchor == "end")
        if begin >= free and (i in (starts[0], starts[-1]) or len(starts) <= MOST_LABELS):
            parts.append(_label(x, top + SECTOR_HIGH + 14, text, anchor))
            free = begin + LETTER * (len(text) + 1)
    below = top + SECTOR_HIGH + 32
    found = "1 sector" if len(numbers) == 1 else f"{len(numbers)} sectors"
    pieces = "" if len(starts) == 1 else f" in {len(starts)} places"
    parts.append(_label(LEFT, below, f"{found} of {SECTOR} bytes{pieces}"))
    return parts, below + 6


def _in_banks(instruction: Instruction) -> tuple[list[Markup], int]:
    size, lanes = instruction.size, instruction.lanes
    together, by_part = lanes_together(lanes, size), served(lanes, size)
    cycles = sum(map(len, by_part))
    high = 16 if cycles <= 8 else 10 if cycles <= 16 else 7
    top = LANES_HIGH + APART + 14
    place: dict[tuple[int, int], int] = {}  # (part of the warp, word) -> cycle
    before = 0
    for part, own_cycles in enumerate(by_part):
        for cycle, words in enumerate(own_cycles, before):
            place |= {(part, word): cycle for word in words}
        before += len(own_cycles)
    frame = "".join(
        _rect(LEFT + LANE * bank, top + high * cycle, LANE, high)
        for cycle in range(cycles)
        for bank in range(BANKS)
    )
    parts = [
        _label(0, 13, "lane"),
        _label(0, top - 4, "bank"),
        Markup(f'<path class="frame" d="{frame}"/>'),
        *(_label(LEFT + LANE * (b + 0.5), top - 4, str(b), "middle") for b in range(0, BANKS, 4)),
    ]
    for lane, address in enumerate(instruction.lanes):
        if address is None:
            parts.append(_lane(lane, None, ""))
            continue
        first, last = address // WORD, (address + size - 1) // WORD
        own = [(word % BANKS, place[lane // together, word]) for word in range(first, last + 1)]
        bytes_ = "".join(
            _rect(LEFT + LANE * b + 1, top + high * c + 1, LANE - 2, high - 2) for b, c in own
        )
        bank, cycle = own[0]
        line = _line(lane, LEFT + LANE * (bank + len(own) / 2), top + high * cycle)
        parts.append(_lane(lane, address, f'{line}<path class="bytes" d="{bytes_}"/>'))
    below = top + high * cycles + 16
    lost = cycles - sum(1 for each in by_part if each)
    took = "1 cycle" if cycles == 1 else f"{cycles} cycles"
    text = f"{took}, {lost} of them lost to bank conflicts" if lost else f"{took}, no conflict"
    parts.append(_label(LEFT, below, text))
    return parts, below + 6


def _copied(instruction: Instruction) -> tuple[list[Markup], int]:
    lane, address = next((i, a) for i, a in enumerate(instruction.lanes) if a is not None)
    top = LANES_HIGH + APART // 2
    cells = -(-instruction.size // SECTOR)
    frame = _rect(LEFT, top, WIDE, SECTOR_HIGH)
    line = _line(lane, LEFT + WIDE / 2, top)
    parts = [_label(0, 13, "lane"), Markup(f'<path class="frame" d="{frame}"/>')]
    for each in range(BANKS):
        own = f'{line}<path class="bytes" d="{frame}"/>' if each == lane else ""
        parts.append(_lane(each, address if each == lane else None, own))
    end = address + instruction.size - 1
    parts.append(_label(LEFT, top + SECTOR_HIGH + 14, f"byte {address}"))
    parts.append(_label(LEFT + WIDE, top + SECTOR_HIGH + 14, f"byte {end}", "end"))
    below = top + SECTOR_HIGH + 32
    text = (
        f"{instruction.size} bytes side by side, {cells} sectors: lane {lane} only starts the copy"
    )
    parts.append(_label(LEFT, below, text))
    return parts, below + 6
