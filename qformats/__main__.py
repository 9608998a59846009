"""The command line of the block formats: `python -m qformats draw | show | tensors`."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import numpy as np

from qformats.blocks import BLOCK
from qformats.codec import FORMATS, Floats, format_named, format_of
from qformats.draw import BOXES, COLOUR, PLAIN, Ink, draw, show
from qformats.terminal import sentence, shown

ROW: Final = 4096  # K of the random row that `show` uses


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one sentence without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 2 after one sentence on stderr where the request cannot be met."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that its encoding lacks, as escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _parser()
    args = parser.parse_args(_shielded(sys.argv[1:] if argv is None else argv))
    try:
        text = args.run(args)
    except (ValueError, TypeError, OSError) as error:
        print(f"{parser.prog} {args.command}: {sentence(str(error))}", file=sys.stderr)
        return 2
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m qformats", description="ggml's quantized blocks, seen closely.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="draw|show|tensors")
    names = ", ".join(FORMATS)

    one = commands.add_parser("draw", help="draw the block of a format, byte by byte, bit by bit")
    one.add_argument("format", nargs="*", help=f"{names}; all when left out")
    one.set_defaults(run=_draw)

    one = commands.add_parser(
        "show",
        help="quantize 32 values and show the block: bytes, fields, codes, values, errors",
        description="The values are typed, from a file, or a block of a seeded normal row.",
    )
    one.add_argument("format", help=f"{names}; or - for the format of the blocks in --file")
    one.add_argument("values", nargs="*", help="1 to 32 numbers; zeros fill up the block")
    one.add_argument("--file", type=Path, help=".npy of float32 values, or of blocks")
    one.add_argument("--row", type=int, default=0, help="row of the file (default 0)")
    one.add_argument("--block", type=int, default=0, help="block of the row (default 0)")
    one.add_argument("--seed", type=int, default=0, help="seed of the random row (default 0)")
    one.set_defaults(run=_show)

    one = commands.add_parser("tensors", help="list the tensors of a GGUF file")
    one.add_argument("file", type=Path, help="the .gguf file")
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
    one.set_defaults(run=_tensors)
    return parser


def _shielded(argv: Sequence[str]) -> list[str]:
    """argv with a space before negative numbers, since argparse takes "-1e-3" for an option."""

    def is_number(word: str) -> bool:
        try:
            float(word)
        except ValueError:
            return False
        return True

    return [f" {word}" if word.startswith("-") and is_number(word) else word for word in argv]


def _ink() -> Ink:
    """Colour and boxes on a terminal that can show them; plain ASCII in a pipe or a file."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return PLAIN
    if "utf" not in (sys.stdout.encoding or "").lower():
        return PLAIN
    return BOXES if os.environ.get("NO_COLOR") else COLOUR


def _draw(args: argparse.Namespace) -> str:
    ink = _ink()
    return "\n\n\n".join(draw(format_named(name), ink) for name in args.format or FORMATS)


def _show(args: argparse.Namespace) -> str:
    if args.file is not None and args.values:
        raise ValueError(f"give values or --file, not both ({len(args.values)} values were given)")
    if args.file is not None:
        return _show_file(args)
    fmt = format_named(args.format)
    if args.values:
        x, title = _typed(args.values), f"{len(args.values)} values from the command line"
    else:
        if args.row:
            raise ValueError(f"--row {args.row} needs --file; the random row is one row")
        if args.seed < 0:
            raise ValueError(f"--seed is {args.seed}; a seed is 0 or more")
        row = np.random.default_rng(args.seed).standard_normal(ROW, np.float32).reshape(-1, BLOCK)
        x = row[_within(args.block, len(row), "--block", "a row of 4096 values")]
        title = f"block {args.block} of a normal row of {ROW}, seed {args.seed}"
    return show(fmt.quantize(x), x, title, _ink())


def _show_file(args: argparse.Namespace) -> str:
    """The block of --file at --row and --block, quantized first where the file holds values."""
    try:
        array = np.load(args.file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{args.file} is not a .npy file of plain numbers ({error})") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{args.file} holds several arrays; save one with np.save")
    if array.ndim < 1 or array.size == 0:
        raise ValueError(f"{args.file} has shape {array.shape}; at least one block is needed")
    rows = array.reshape(-1, array.shape[-1])
    row = rows[_within(args.row, len(rows), "--row", f"{args.file} of shape {array.shape}")]
    title = f"block {args.block} of row {args.row} of {args.file}"
    if row.dtype.names is not None:
        fmt = format_of(row)
        if args.format not in ("-", fmt.name):
            raise ValueError(f"{args.file} holds {fmt.name} blocks, not {args.format}")
        at = _within(args.block, len(row), "--block", f"a row of {args.file}")
        return show(row[at : at + 1], None, title, _ink())
    blocks = format_named(args.format).quantize(row)
    at = _within(args.block, len(blocks), "--block", f"a row of {args.file}")
    return show(blocks[at : at + 1], row.reshape(-1, BLOCK)[at], title, _ink())


def _typed(words: Sequence[str]) -> Floats:
    """float32[32] of 1 to 32 numbers, zeros after them."""
    if len(words) > BLOCK:
        raise ValueError(f"{len(words)} values were given, and a block holds {BLOCK}")
    x = np.zeros(BLOCK, np.float32)
    for j, word in enumerate(words):
        try:
            with np.errstate(over="ignore"):  # 1e39 becomes inf, which the codec refuses
                x[j] = float(word)
        except ValueError:
            raise ValueError(f"value {j} is {word!r}, which is not a number") from None
    return x


def _within(index: int, count: int, option: str, what: str) -> int:
    if not 0 <= index < count:
        raise ValueError(f"{option} {index} is outside 0..{count - 1} of {what}")
    return index


def _tensors(args: argparse.Namespace) -> str:
    """Name, type, shape (outermost first) and bytes of each tensor, in the file's order."""
    # Both only here, so that the other commands need NumPy alone.
    from qformats.gguf_file import READABLE, tensors

    found = tensors(args.file).values()
    if args.json:
        listed = [
            {
                "name": one.name,
                "file": one.path.name,
                "type": one.type,
                "shape": one.shape,
                "bytes": one.nbytes,
                "offset": one.offset,
                "readable": one.type in READABLE,
            }
            for one in found
        ]
        return json.dumps({"schema": 1, "file": str(args.file), "tensors": listed}, indent=2)
    rows = [("name", "type", "shape", "bytes")]
    rows += [
        (
            shown(one.name),
            one.type,
            " x ".join(map(str, one.shape)) or "scalar",
            str(one.nbytes),
        )
        for one in found
    ]
    name, kind, shape, size = (max(len(row[i]) for row in rows) for i in range(4))
    rows.insert(1, ("-" * name, "-" * kind, "-" * shape, "-" * size))
    lines = [f"{a:<{name}}  {b:<{kind}}  {c:<{shape}}  {d:>{size}}" for a, b, c, d in rows]
    lines += ["", f"{len(found)} tensors, {sum(one.nbytes for one in found)} bytes"]
    if others := sorted({one.type for one in found} - set(READABLE)):
        lines.append(f"Listed, but not read here: {', '.join(others)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
