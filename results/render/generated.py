"""What is generated from the runs, and the check that all of it is that of the current runs:
README.md's tables, results/RESULTS.md, the CSV files beside each run, and the charts."""

from __future__ import annotations

from pathlib import Path

from results.record import ROOT
from results.record.store import ranked
from results.render import charts, complete, readme
from results.render.rows import KINDS, csv_files
from results.render.staleness import measured


def texts(root: Path = ROOT) -> dict[str, str | None]:
    """Every generated file but the charts, by its path in `root`: its text, None for one that is
    not to be there. ValueError where README.md has no place for a table."""
    every = measured(root)
    made: dict[str, str | None] = {}
    if (root / "README.md").exists():
        text = (root / "README.md").read_text(encoding="utf-8")
        made["README.md"] = readme.filled(text, every[0] if every else None, root)
    made[f"results/{complete.NAME}"] = complete.page(every)
    for one in every:
        files = csv_files(one.run)
        for name in KINDS:
            made[f"results/{one.path.parent.name}/{name}.csv"] = files.get(f"{name}.csv")
    return made


def rewrite(root: Path = ROOT) -> list[Path]:
    """Bring all of it up to the runs in `root`, but the charts; what changed."""
    changed = []
    for name, text in texts(root).items():
        file = root / name
        if text != (file.read_text(encoding="utf-8") if file.exists() else None):
            changed.append(file)
            if text is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    return changed


def check(root: Path = ROOT) -> list[str]:
    """What drifted from the runs in `root`: a sentence for each file."""
    found = [] if (root / "README.md").exists() else ["README.md does not exist"]
    try:
        made = texts(root)
    except ValueError as error:
        return [str(error)]
    for name, text in made.items():
        file = root / name
        have = file.read_text(encoding="utf-8") if file.exists() else None
        if have != text:
            found.append(f"{name}{_differ(have, text)}; {charts.CURE}")
    _, run = next(iter(ranked(root / "results")), (None, None))
    return found + charts.drifts(run, root / "results" / "charts")


def _differ(have: str | None, want: str | None) -> str:
    """The first line that differs."""
    if have is None or want is None:
        return " is missing" if have is None else " shows what no run holds"
    old, new = [*have.split("\n"), None], [*want.split("\n"), None]
    i = next(i for i, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1])
    a, b = ("nothing" if line is None else repr(line) for line in (old[i], new[i]))
    return f": line {i + 1} is {a} and the run gives {b}"
