"""What is generated besides the charts, and the check that all of it is that of the current runs.

python -m results.render.tables            # rewrite README.md's tables and results/RESULTS.md
python -m results.render.tables --check    # exit 1 and say what drifted, charts included
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from results.record import ROOT
from results.record.store import headline, read
from results.render import charts, complete
from results.render.arguments import NOTHING
from results.render.readme import readme_tables, split

CURE: Final = "run `make charts`"


def rewrite(root: Path = ROOT) -> list[Path]:
    """Bring README.md and results/RESULTS.md up to the runs in `root`; what changed."""
    readme, results = root / "README.md", root / "results" / complete.NAME
    text = readme.read_text(encoding="utf-8")
    for name, table in readme_tables(root).items():
        try:
            before, _, after = split(text, name)
        except ValueError as error:
            raise ValueError(f"{readme.name} {error}") from None
        text = f"{before}\n{table}\n{after}"
    changed = []
    for file, now in ((readme, text), (results, complete.page(root))):
        if not file.exists() or file.read_text(encoding="utf-8") != now:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(now, encoding="utf-8")
            changed.append(file)
    return changed


def check(root: Path = ROOT) -> list[str]:
    """What drifted from the runs in `root`: a sentence for each table, page and chart."""
    readme, results = root / "README.md", root / "results" / complete.NAME
    path = headline(root / "results")
    found = []
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        for name, table in readme_tables(root).items():
            found += _drift(text, name, table)
    else:
        found.append("README.md does not exist")
    if not results.exists():
        found.append(f"results/{complete.NAME} is missing: {CURE}")
    else:
        have, want = results.read_text(encoding="utf-8"), complete.page(root)
        found += _differ(f"results/{complete.NAME}", have, want)
    run = read(path) if path else None
    return found + charts.drifts(run, root / "results" / "charts")


def _drift(text: str, name: str, table: str) -> list[str]:
    try:
        _, between, _ = split(text, name)
    except ValueError as error:
        return [f"README.md {error}"]
    return _differ(f"README.md, the {name} table", between.strip("\n"), table)


def _differ(what: str, have: str, want: str) -> list[str]:
    """One sentence with the first line that differs, if one does."""
    if have == want:
        return []
    old, new = have.split("\n"), want.split("\n")
    pairs = [*zip(old, new, strict=False)]
    i = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    lines = [repr(part[i]) if i < len(part) else "nothing" for part in (old, new)]
    return [f"{what}: line {i + 1} is {lines[0]} and the run gives {lines[1]}; {CURE}"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m results.render.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on a drift")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md")
    options = parser.parse_args(arguments)
    if headline(options.root / "results") is None:
        print(NOTHING)
    if not options.check:
        if not (options.root / "README.md").exists():
            parser.error(f"{options.root} has no README.md: name a checkout with --root")
        for path in rewrite(options.root):
            print(path)
        return 0
    found = check(options.root)
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
