"""What was measured: any row of it, and what is made of it.

python -m results M=8 FORMAT=q5_1      # the rows, calls and baselines of these values
python -m results STEP=13,14 N=4096 K=4096 GPU=h100
python -m results charts               # redraw charts, README.md's tables, RESULTS.md and CSV files
python -m results check                # exit 1 and say what of these is not that of the runs
python -m results page                 # one page for a browser; a minute
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from results.record import ROOT
from results.record.store import headline, ranked, read
from results.render import charts, generated, rows, table
from results.render.readme import NOTHING
from results.render.staleness import stale_keys


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", nargs="+", help="charts, check, page, or values such as M=8")
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout with its results/")
    parser.add_argument("--run", type=Path, help="a run.json (default: the largest)")
    parser.add_argument("--out", type=Path, help="where charts or the page go")
    options = parser.parse_args(arguments)
    try:
        return _done(options)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")


def _done(options: argparse.Namespace) -> int:
    path = options.run or headline(options.root / "results")
    if path is None:
        print(NOTHING)
    command, *more = options.what
    if command in COMMANDS and not more:
        if command != "page" and not (options.root / "README.md").exists() and not options.out:
            raise ValueError(f"{options.root} has no README.md: name a checkout with --root")
        return COMMANDS[command](path, options)
    wanted = {}
    for one in options.what:
        key, equals, values = one.partition("=")
        if not equals:
            raise ValueError(f"{one!r} is none of {', '.join(COMMANDS)}, and no value such as M=8")
        wanted[key.lower()] = values.lower().split(",")
    return _print(path, options.root, wanted)


def _print(path: Path | None, root: Path, wanted: dict[str, list[str]]) -> int:
    gpu = wanted.pop("gpu", None)
    if gpu is not None:
        every = [one for one, _ in ranked(root / "results")]
        path = next((p for p in every if any(name in p.parent.name for name in gpu)), None)
        if path is None:
            raise ValueError(
                f"no run of {', '.join(gpu)}: there are {[p.parent.name for p in every]}"
            )
    if path is None:
        return 1
    run = read(path)
    found = rows.tables(run, wanted, stale_keys(run, root))
    print(run.env.where if found else f"{run.env.where}: no row has these values")
    for each in found:
        print()
        table.show(each)
    return 0 if found else 1


def _charts(path: Path | None, options: argparse.Namespace) -> int:
    """All that is generated; with --out the charts of a run alone."""
    folder = options.out or options.root / "results" / "charts"
    changed = charts.write(read(path) if path else None, folder)
    for each in changed + ([] if options.out else generated.rewrite(options.root)):
        print(each)
    return 0


def _check(_: Path | None, options: argparse.Namespace) -> int:
    found = generated.check(options.root)
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


def _page(path: Path | None, options: argparse.Namespace) -> int:
    from results.render import page

    if path is None:
        return 1
    out: Path = options.out or Path("build", "report.html")
    text = page.build(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(out)
    return 0


COMMANDS = {"charts": _charts, "check": _check, "page": _page}

if __name__ == "__main__":
    sys.exit(main())
