"""One self-contained HTML page about the ladder: `python -m results page [--out FILE]`.

A function of one run, of the sources in this tree and of the worklog: every figure of a measurement
comes out of the run, every line of code out of the steps. Registers and opcodes are those of the
offline compiler, and pictures of memory those of the simulator: they take most of the minute
that this needs. Nothing is kept from one time to the next.

The page asks for nothing: styles and charts are in it, there is no script, and links lead to other
places in it. Its text is in `page.html.jinja`, its looks in `page.css`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from results.measure import protocol
from results.record import ROOT
from results.record.schema import Run
from results.record.store import read
from results.render import charts, complete, markup, query, readme, rows
from results.render.machine_code import Compiler, beside, compiled, main_work
from results.render.staleness import STALE_NOTE, stale_keys
from results.render.table import dims, of_records, progress
from steps import ladder
from steps.checks.select import branches
from steps.contract import Step
from steps.learn.trace import traced
from steps.learn.trace.picture import LEGEND, Picture, picture
from steps.registry import find, following, parent_of, source

CODE: Final = "Machine code"  # the heading of a docstring that has a place of its own on the page
FIGURES: Final = rows.of_rows(
    *("format", "scheme", "M x N x K", "A, C", "kernel us", "20-80 %", "total us", "x cuBLAS"),
    *("TFLOPS", "x parent", "of its limit", "NMSE, product", "NMSE, kernel"),
)
Tracer = Callable[[Step], list[Picture]]


def requests_of(step: Step) -> list[Picture]:
    """Its main loads and stores."""
    work = main_work(step)
    recorded = traced.trace(work, traced.size_of(work, step.home_shapes[0]))
    found = traced.main_requests(recorded.instructions)
    return [picture(each, f"step-{step.number}-request-{i}") for i, each in enumerate(found)]


def build(
    path: Path,
    root: Path = ROOT,
    compiler: Compiler = compiled,
    tracer: Tracer = requests_of,
) -> str:
    """The page about the run in `path`, as one document. `compiler` gives a step's machine code,
    `tracer` the pictures of what it does to memory."""
    run = read(path)
    stale = stale_keys(run, root)
    log = markup.worklog(root / "results" / "worklog")
    steps = ladder()
    at_home = {rung.row.step: rung.row for panel in query.ladder(run) for rung in panel.rungs}
    with progress(len(steps) + 1) as say:
        say("charts")
        pictures = _charts(run)
        sections: list[dict[str, Any]] = []
        for step in steps:
            say(f"step {step.number}: its machine code and its accesses")
            home = at_home[step.number].shape if step.number in at_home else step.home_shapes[0]
            machine = compiler(step, home, run.env.cc)
            measured = _figures_of(step, run)
            of_code = _code_of(step, machine)
            sections.append(
                {
                    "step": step,
                    "stale": any(row.key in stale for row in measured["rows"]),
                    "entry": log.get(f"step{step.number:02}"),
                    "requests": tracer(step),
                    "recorded": dims(traced.size_of(main_work(step), step.home_shapes[0])),
                    "format": main_work(step).format,
                }
                | _lesson_of(step)
                | measured
                | of_code
            )
    return (
        markup.templates()
        .get_template("page.html.jinja")
        .render(
            env=run.env,
            when=query.when([*run.rows, *run.as_called]),
            ladder=readme.ladder_table(run, "", stale, lambda step, _: f"#step-{step}"),
            called=readme.called_table(run, "", stale),
            charts=pictures,
            sections=sections,
            legend=LEGEND,
            lines=sorted({n for each in sections for n, _ in each["instructions"]}),
            stale_note=markup.inline(STALE_NOTE) if stale else None,
            protocol=markup.markdown(inspect.getdoc(protocol) or ""),
            facts=complete.facts(run.env),
            limits=complete.limits(run.env),
            findings=log.get("README"),
        )
    )


def _charts(run: Run) -> dict[str, dict[str, Any]]:
    """The charts of the page, each with its caption."""
    files = charts.render(run)
    found: dict[str, dict[str, Any]] = {}
    for name, chart in charts.plans(run).items():
        said = chart.tell(run)
        svg = markup.picture(files[f"{name}.svg"], name, chart.title, said)
        found[name] = {"name": name, "title": chart.title, "finding": said, "svg": svg}
    return found


# --- a step ---------------------------------------------------------------------------------------


def _lesson_of(step: Step) -> dict[str, Any]:
    """What its docstring says, and where it stands in the ladder."""
    names = {each.name: each.number for each in ladder()}
    module = sys.modules[f"steps.{step.name}"]
    intro, passages = markup.lesson(inspect.getdoc(module) or "", names)
    intro = intro.partition(" - ")[2] or intro
    return {
        "branch": branches()[step.branch].title,
        "parent": parent_of(step),
        "following": [each.number for each in following(step)],
        "intro": intro[:1].upper() + intro[1:],
        "passages": [each for each in passages if each.heading != CODE],
        "promise": next((each.body for each in passages if each.heading == CODE), Markup()),
    }


def _figures_of(step: Step, run: Run) -> dict[str, Any]:
    """Its rows at home."""
    found = [
        row
        for row in query.timed(run.rows)
        if row.step == step.number and row.shape in step.home_shapes
    ]
    return {
        "rows": found,
        "figures": of_records(FIGURES, found),
        "shape": " and ".join(dims(each) for each in step.home_shapes),
    }


def _code_of(step: Step, machine: Any) -> dict[str, Any]:
    """Its source beside its machine code, and beside the step it grew from."""

    def lines(of: Step) -> list[markup.Code]:
        return markup.body("".join(source(of)))

    code = markup.python("".join(source(step)))
    base = parent_of(step)
    own, listing = lines(step), [] if isinstance(machine, str) else machine.lines
    hunks = [] if base is None else markup.compared(lines(find(base)), own)
    lines_of, instructions = beside(code, listing)
    return {
        "machine": machine,
        "machine_source": lines_of,
        "instructions": instructions,
        "base": base,
        "hunks": hunks,
        "changed": sum(len(each.after) for each in hunks if not each.same),
        "source": own,
    }
