"""`python -m steps.learn.pitfalls [--json]`: shows the museum; exits 1 if the checks miss a bug.

A table on a terminal, plain text in a pipe, one JSON document with --json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
from typing import Any

from steps.learn.pitfalls.exhibit import Finding, Pitfall, examine, pitfalls

WIDTH = 100
HEADINGS = ("", "pitfall", "format", "right", "wrong", "NMSE", "caught by")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m steps.learn.pitfalls", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    museum = [(pitfall, examine(pitfall)) for pitfall in pitfalls()]
    if options.json:
        print(json.dumps([_as_json(*pair) for pair in museum], indent=2))
    elif sys.stdout.isatty():
        _show(museum)
    else:
        _print(museum)
    escaped = [str(pitfall.number) for pitfall, finding in museum if not finding.caught]
    if escaped:
        print(f"not caught as its story says: pitfall {', '.join(escaped)}", file=sys.stderr)
    return 1 if escaped else 0


def _row(pitfall: Pitfall, finding: Finding) -> tuple[str, ...]:
    return (
        f"{pitfall.number}",
        pitfall.title,
        pitfall.format.upper(),
        f"{finding.expected:g}",
        value_of(finding),
        error_of(finding.nmse),
        ", ".join(finding.layers) if finding.caught else "NOT CAUGHT",
    )


def value_of(finding: Finding) -> str:
    """The wrong one's value on the golden block, as a cell."""
    if not math.isnan(finding.golden):
        return f"{finding.golden:g}"
    return "trap" if "misaligned" in finding.layers else "NaN"


def error_of(nmse: float) -> str:
    """Its NMSE, as a cell."""
    return "-" if math.isnan(nmse) else f"{nmse:.1e}" if math.isfinite(nmse) else "NaN/Inf"


def _story(pitfall: Pitfall, finding: Finding) -> tuple[str, str]:
    """The story in one paragraph, and the sentences of the first two layers."""
    story = " ".join(pitfall.story.split())
    heard = [f"{layer}: {said}" for layer, said in finding.layers.items()][:2]
    return f"{story} {finding.aside}".strip(), "\n".join(heard)


def _print(museum: list[tuple[Pitfall, Finding]]) -> None:
    rows = [HEADINGS, *(_row(*pair) for pair in museum)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    for pitfall, finding in museum:
        story, heard = _story(pitfall, finding)
        print(f"\n{pitfall.number}. {pitfall.title}")
        print(textwrap.fill(story, WIDTH, initial_indent="   ", subsequent_indent="   "))
        for line in heard.splitlines():
            print(textwrap.fill(line, WIDTH, initial_indent="   > ", subsequent_indent="     "))


def _show(museum: list[tuple[Pitfall, Finding]]) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(caption="right, wrong: the golden block. NMSE: a small random problem.")
    for heading, justify in zip(HEADINGS, "rllrrrl", strict=True):
        table.add_column(heading, justify="right" if justify == "r" else "left")
    for pair in museum:
        table.add_row(*_row(*pair), style=None if pair[1].caught else "bold red")
    console.print(table)
    for pitfall, finding in museum:
        story, heard = _story(pitfall, finding)
        title = f"{pitfall.number}. {pitfall.title}"
        body = Text(story).append("\n").append(heard, style="dim")
        console.print(Panel(body, title=Text(title), title_align="left", width=WIDTH))


def _as_json(pitfall: Pitfall, finding: Finding) -> dict[str, Any]:
    """JSON has no NaN: null instead."""
    return {
        "number": pitfall.number,
        "title": pitfall.title,
        "format": pitfall.format,
        "story": " ".join(pitfall.story.split()),
        "aside": finding.aside,
        "golden": {"right": finding.expected, "wrong": _number(finding.golden)},
        "nmse": _number(finding.nmse),
        "caught": finding.caught,
        "layers": dict(finding.layers),
        "expected_layers": list(pitfall.caught_by),
        "right_one_says": dict(finding.complaints),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
