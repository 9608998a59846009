"""The command line that charts and the page share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from results.record.store import headline

NOTHING: Final = (
    "Nothing is measured yet: `make bench` on a machine with a CUDA GPU, then `make charts`."
)


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a module here that shows a run, which it may be given."""
    parser = argparse.ArgumentParser(prog=f"python -m results.render.{name}", description=doc)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", nargs="?", type=Path, help="a run.json (default: the largest)")
    return parser


def run_path(given: Path | None) -> Path | None:
    """The run to show; None, and a sentence on stderr, where nothing is measured yet."""
    path = given or headline()
    if path is None:
        print(NOTHING, file=sys.stderr)
    return path
