"""`python -m results.render.charts`: draw the charts of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from results.record.store import read
from results.render import charts
from results.render.arguments import parser_of, run_path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("charts", charts.__doc__)
    parser.add_argument("--out", type=Path, default=charts.FOLDER)
    parser.add_argument("--png", action="store_true", help="PNG files too, for looking at")
    options = parser.parse_args(arguments)
    path = run_path(options.run)
    kinds = ("svg", "png") if options.png else ("svg",)
    for written in charts.write(read(path) if path else None, options.out, kinds):
        print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
