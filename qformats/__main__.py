"""The command line of the block formats: `python -m qformats draw | tensors`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from qformats.codec import FORMATS, format_named
from qformats.draw import BOXES, COLOUR, PLAIN, Ink, draw
from qformats.terminal import sentence


class Parser(argparse.ArgumentParser):
    """argparse, but an error is one sentence without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 2 after one sentence on stderr where the request cannot be met."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that its encoding lacks, as escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        text = args.run(args)
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {args.command}: {sentence(str(error))}", file=sys.stderr)
        return 2
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m qformats", description="ggml's quantized blocks, seen closely.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="draw|tensors")

    one = commands.add_parser("draw", help="draw the block of a format, byte by byte, bit by bit")
    one.add_argument("format", nargs="*", help=f"{', '.join(FORMATS)}; all when left out")
    one.set_defaults(run=_draw)

    one = commands.add_parser("tensors", help="list the tensors of a GGUF file")
    one.add_argument("file", type=Path, help="the .gguf file")
    one.set_defaults(run=_tensors)
    return parser


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


def _tensors(args: argparse.Namespace) -> str:
    """Name, type, shape (outermost first) and bytes of each tensor, in the file's order."""
    from qformats.gguf_file import READABLE, tensors  # only here: `draw` needs NumPy alone

    found = tensors(args.file).values()
    rows = [("name", "type", "shape", "bytes")]
    for one in found:
        shape = " x ".join(map(str, one.shape)) or "scalar"
        rows.append((one.name, one.type, shape, str(one.nbytes)))
    name, kind, dims, size = (max(map(len, column)) for column in zip(*rows, strict=True))
    rows.insert(1, ("-" * name, "-" * kind, "-" * dims, "-" * size))
    lines = [f"{a:<{name}}  {b:<{kind}}  {c:<{dims}}  {d:>{size}}" for a, b, c, d in rows]
    lines += ["", f"{len(found)} tensors, {sum(one.nbytes for one in found)} bytes"]
    if others := sorted({one.type for one in found} - set(READABLE)):
        lines.append(f"Listed, but not read here: {', '.join(others)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
