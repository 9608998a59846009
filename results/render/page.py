"""One self-contained HTML page about the ladder: `python -m results.render.page [--out FILE]`.

A function of one run, of the sources in this tree and of the worklog: every figure of a measurement
comes out of the run, every line of code out of the steps, and the output of the wrong kernels of
the museum is computed while the page is made. Registers and opcodes are those of the offline
compiler, and pictures of memory those of the simulator: they take most of the two minutes that this
needs. Nothing is kept from one time to the next.

The page asks for nothing: styles and charts are in it, there is no script, and links lead to other
places in it. Its text is in `page.html.jinja`, its looks in `page.css`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from qformats import FORMATS
from results.measure import protocol
from results.record import ROOT
from results.record.schema import Environment, Row, Run
from results.record.store import read
from results.render import captions, charts, complete, markup, query, readme, table
from results.render import rows as columns
from results.render.block_picture import block
from results.render.captions import Caption
from results.render.compiled import Compiled, Compiler, compiled, main_work
from results.render.machine_lines import Beside, beside
from results.render.markup import templates
from results.render.query import Rung
from results.render.readme import called_table
from results.render.roof import roof
from results.render.staleness import STALE_NOTE, Keys, stale_keys
from results.render.table import cell, dims, number, percent, ratio
from steps import ladder
from steps.contract import BRANCHES, Step
from steps.learn import pitfalls
from steps.learn.pitfalls import Finding, Pitfall, right
from steps.learn.pitfalls.exhibit import error_of, value_of
from steps.learn.trace import traced
from steps.learn.trace.picture import LEGEND, Picture, picture
from steps.registry import HOLE, diff_base, find, following, parent_of, source

OUT: Final = Path("build", "report.html")
CODE: Final = "Machine code"
"""The heading of a docstring that has a place of its own on the page."""
HEADINGS: Final = (
    "format",
    "scheme",
    "A, C",
    "kernel us",
    "20-80 %",
    "total us",
    "x cuBLAS",
    "TFLOPS",
    "x parent",
    "x step 1",
    "of its limit",
    "NMSE, product",
    "NMSE, kernel",
)


# ------------------------------------------------------------------------------------- the sections


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing that says what it shows, and its caption."""

    name: str
    caption: Caption
    svg: Markup


@dataclass(frozen=True, slots=True)
class LadderLine:
    """A step in the tree at the top of the page."""

    number: int
    idea: str
    away: str  # its home shape, where that is not the first of its branch
    figures: list[tuple[str, str]]  # (of what, figure)


@dataclass(frozen=True, slots=True)
class BranchOfPage:
    title: str
    home: str
    lines: list[LadderLine]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step's source beside that of the step it grew from, both without their docstrings."""

    base: int
    hunks: list[markup.Hunk]
    changed: int  # lines that the other has not
    lines: int


@dataclass(frozen=True, slots=True)
class Section:
    """All that the page says of a step."""

    number: int
    name: str
    title: str
    branch: str
    parent: int | None
    next: list[int]
    accuracy: str
    stale: bool
    intro: str
    passages: list[markup.Passage]
    promise: Markup  # what to look for in the machine code
    entry: markup.Entry | None
    best: list[tuple[str, str]]
    shape: str
    rows: list[list[str]]
    machine: Compiled | str
    beside: Beside | None  # its source, where the machine code says of which line it is
    requests: list[Picture]
    recorded: str  # the shape they were recorded at
    roof: Markup
    format: str
    comparison: Comparison | None
    source: list[markup.Code]  # of a step that grew from none


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A wrong kernel: its story, its code, its output and the right one."""

    number: int
    title: str
    story: Markup
    format: str
    right: str
    wrong: str
    error: str
    caught: bool
    heard: list[tuple[str, str]]
    code: list[markup.Code]


def drawn(run: Run) -> list[Chart]:
    """The charts of the page, each with its caption."""
    said = captions.chart_captions(run)
    files = charts.render(run) if said else {}
    return [
        Chart(name, each, markup.picture(files[f"{name}.svg"], name, each.title, each.figures))
        for name, each in said.items()
    ]


def tree(steps: Sequence[Step], run: Run) -> list[BranchOfPage]:
    """The ladder by branch: every step there is, with its figures where it was measured."""
    measured = {rung.row.step: rung for panel in query.ladder(run) for rung in panel.rungs}
    return [
        BranchOfPage(
            branch.title,
            dims(branch.homes[0]),
            [_line(step, measured.get(step.number)) for step in steps if step.branch == key],
        )
        for key, branch in BRANCHES.items()
        if any(step.branch == key for step in steps)
    ]


def _line(step: Step, rung: Rung | None) -> LadderLine:
    row = rung.row if rung else None
    away = step.home_shapes[0] != BRANCHES[step.branch].homes[0]
    figures = [
        ("us", cell(row.kernel_us) if row else table.ABSENT),
        ("TFLOPS", cell(row.tflops) if row else table.ABSENT),
        ("x parent", ratio(row.x_parent) if row else table.ABSENT),
        ("of its limit", percent(row.limit_share) if row else table.ABSENT),
    ]
    title = step.title + ("" if step.accuracy == "exact" else f" ({step.accuracy})")
    return LadderLine(step.number, title, dims(step.home_shapes[0]) if away else "", figures)


Tracer = Callable[[Step], list[Picture]]


def requests_of(step: Step) -> list[Picture]:
    """Its main loads and stores."""
    work = main_work(step)
    recorded = traced.trace(work, traced.size_of(work, step.home_shapes[0]))
    found = traced.main_requests(recorded.instructions)
    return [picture(each, f"step-{step.number}-request-{i}") for i, each in enumerate(found)]


def section(
    step: Step,
    run: Run,
    stale: Keys,
    log: markup.Worklog,
    compiler: Compiler,
    tracer: Tracer,
) -> Section:
    names = {each.name: each.number for each in ladder()}
    module = sys.modules[f"steps.{step.name}"]
    intro, passages = markup.lesson(inspect.getdoc(module) or "", names)
    intro = intro.partition(" - ")[2] or intro
    shape = captions.home_of(run, step.number) or step.home_shapes[0]
    rows = [
        row
        for row in query.timed(run.rows)
        if row.step == step.number and row.shape in step.home_shapes
    ]
    base = diff_base(step)
    machine = compiler(step, shape, run.env.cc)
    code = markup.python("".join(source(step)))
    at_home = {rung.row.step: rung.row for panel in query.ladder(run) for rung in panel.rungs}
    own = at_home.get(step.number)
    return Section(
        number=step.number,
        name=step.name,
        title=step.title,
        branch=BRANCHES[step.branch].title,
        parent=parent_of(step),
        next=[each.number for each in following(step)],
        accuracy=step.accuracy,
        stale=any(row.key in stale for row in rows),
        intro=intro[:1].upper() + intro[1:],
        passages=[each for each in passages if each.heading != CODE],
        promise=next((each.body for each in passages if each.heading == CODE), Markup()),
        entry=log.steps.get(step.number),
        best=captions.step_facts(run, step.number),
        shape=" and ".join(dims(each) for each in step.home_shapes),
        rows=[_cells(row) for row in rows],
        machine=machine,
        beside=None
        if isinstance(machine, str) or not machine.lines
        else beside(code, machine.lines),
        requests=tracer(step),
        recorded=dims(traced.size_of(main_work(step), step.home_shapes[0])),
        roof=Markup()
        if own is None
        else roof(own, list(at_home.values()), run.env.limits, f"step-{step.number}-roof"),
        format=main_work(step).format,
        comparison=None if base is None else _comparison(step, find(base)),
        source=_lines(step) if base is None else [],
    )


def _cells(row: Row) -> list[str]:
    spread = table.ABSENT
    if row.p20_us is not None and row.p80_us is not None:
        spread = f"{number(row.p20_us)}-{number(row.p80_us)}"
    return [
        row.format.upper(),
        row.scheme,
        columns.dtypes(row),
        cell(row.kernel_us),
        spread,
        cell(row.total_us),
        ratio(row.x_cublas),
        cell(row.tflops),
        ratio(row.x_parent),
        ratio(row.x_step1),
        percent(row.limit_share),
        table.scientific(row.nmse_float),
        table.scientific(row.nmse_same_operands),
    ]


def _lines(step: Step) -> list[markup.Code]:
    """The lines of a step's file without the marks of its exercise."""
    return [line for line in markup.body("".join(source(step))) if not HOLE.match(line.text)]


def _comparison(step: Step, base: Step) -> Comparison:
    before = _lines(base)
    after = _lines(step)
    hunks = markup.compared(before, after)
    changed = sum(len(each.after) for each in hunks if each.kind == "changed")
    return Comparison(base.number, hunks, changed, len(after))


def exhibit(pitfall: Pitfall, finding: Finding) -> Exhibit:
    code = markup.body(inspect.getsource(_home(pitfall)), imports=False)
    end = next((i for i, line in enumerate(code) if line.text.startswith("PITFALL")), len(code))
    story = " ".join(pitfall.story.split())
    return Exhibit(
        number=pitfall.number,
        title=pitfall.title,
        story=markup.inline(f"{story} {finding.aside}".strip()),
        format=pitfall.format.upper(),
        right=f"{finding.expected:g}",
        wrong=value_of(finding),
        error=error_of(finding.nmse),
        caught=finding.caught,
        heard=list(finding.layers.items()),
        code=markup.marked(markup.trimmed(code[:end])),
    )


def _home(pitfall: Pitfall) -> Any:
    """The module of an exhibit."""
    package = pitfalls.__name__
    return next(
        module
        for name, module in sys.modules.items()
        if name.startswith(f"{package}.p") and getattr(module, "PITFALL", None) is pitfall
    )


# ----------------------------------------------------------------------------------------- the page


def build(
    path: Path | None,
    root: Path = ROOT,
    compiler: Compiler = compiled,
    tracer: Tracer = requests_of,
) -> str:
    """The page about the run in `path`, as one document; without one, all but its figures.
    `compiler` gives a step's machine code, `tracer` the pictures of what it does to memory."""
    run = Run(env=Environment()) if path is None else read(path)
    stale = stale_keys(run, root)
    log = markup.worklog(root / "results" / "worklog")
    steps, museum = ladder(), pitfalls.pitfalls()
    with table.progress(len(steps) + 2) as say:
        say("charts")
        pictures = drawn(run)
        sections = []
        for step in steps:
            say(f"step {step.number}: its machine code and its accesses")
            sections.append(section(step, run, stale, log, compiler, tracer))
        say("the museum")
        exhibits = [exhibit(one, pitfalls.examine(one)) for one in museum]
    called = called_table(run, "run.json", stale)
    return (
        templates()
        .get_template("page.html.jinja")
        .render(
            env=run.env,
            measured=path is not None,
            when=query.when([*run.rows, *run.as_called]),
            called=markup.markdown(
                table.markdown(called) if called else readme.NOTHING, "What a caller gets"
            ),
            tree=tree(steps, run),
            ladder=next((each for each in pictures if each.name == "ladder"), None),
            charts=[each for each in pictures if each.name != "ladder"],
            headings=HEADINGS,
            sections=sections,
            legend=LEGEND,
            lines=sorted(
                {run.line for each in sections if each.beside for run in each.beside.machine}
            ),
            blocks=[block(name) for name in FORMATS],
            stale_note=markup.inline(STALE_NOTE) if stale else None,
            exhibits=exhibits,
            right=markup.body(inspect.getsource(right), imports=False),
            layers=markup.markdown((inspect.getdoc(pitfalls.exhibit) or "").partition("\n\n")[2]),
            protocol=markup.markdown(inspect.getdoc(protocol) or ""),
            facts=complete.facts(run.env),
            limits=complete.limits(run.env),
            findings=log.general,
        )
    )
