"""One self-contained HTML page about the ladder: `python -m results.render.page [run.json] [--out FILE]`.

A function of one run's JSON, of the sources in this tree and of the worklog: every figure of a
measurement comes out of the file, every line of code out of the steps, and what the wrong kernels
of the museum give is computed while the page is made. Registers and opcodes are those of the
offline compiler, which takes most of the minute that this needs; none of it is kept from one time
to the next.

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

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined
from markupsafe import Markup

from results.measure import ab as duel
from results.measure import protocol as measure
from results.record import ROOT
from results.record.provenance import stale_steps
from results.record.schema import Environment, Row, Run
from results.record.store import headline, read
from results.render import captions as words
from results.render import charts, lesson, markup
from results.render import tables as report
from results.render import text as table
from results.render.charts import UNIT_LABELS, Shape, dims, number, timed
from steps import ladder, pitfalls
from steps.api import dry_run
from steps.api.compile import machine_code, signature_of
from steps.contract import Step, Work, scheme
from steps.pitfalls import Finding, Pitfall, right
from steps.pitfalls.__main__ import error_of, value_of
from steps.registry import diff_base, source

OUT: Final = ROOT / "build" / "report.html"
HOPPER: Final = (9, 0)  # from here on a launch compiles for the architecture's own instructions


# ------------------------------------------------------------------------------------ machine code


@dataclass(frozen=True, slots=True)
class Opcode:
    """How often it stands in a lesson. `promised`: the step says that its code shows it."""

    name: str
    count: int
    promised: bool


@dataclass(frozen=True, slots=True)
class Compiled:
    """A step's kernel as the offline compiler makes it. Bytes of shared memory are of a block, of
    stack and spills of a thread."""

    what: str  # "W4A8, q4_0, M=512, N=4096, K=4096"
    arch: str
    grid: str
    block: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    instructions: int
    opcodes: list[Opcode]
    others: int  # instructions of the opcodes that are not listed


Compiler = Callable[[Step, Shape, "tuple[int, int] | None"], "Compiled | str"]
LISTED: Final = 14
"""Opcodes shown of a step, besides those it promises."""


def compiled(step: Step, shape: Shape, cc: tuple[int, int] | None) -> Compiled | str:
    """The step's machine code for a GPU of that compute capability, or the oldest it runs on where
    that is none; a sentence where it cannot be had."""
    family = step.families[-1]
    name = charts.MAIN_FORMAT if charts.MAIN_FORMAT in step.formats else step.formats[0]
    if cc is None or step.supports(name, family, cc) is not None:
        cc = step.min_cc
    arch = f"sm_{cc[0]}{cc[1]}" + ("a" if cc >= HOPPER else "")
    _, launch = dry_run.launches(Work(step, family, name), shape)
    try:
        code = machine_code(launch.kernel, signature_of(launch.args), arch)
    except (ValueError, RuntimeError) as error:
        return f"No machine code on this computer: {error}"
    promises = tuple(p for each in step.contains.get(family, ()) for p in each.split("|"))
    every = [
        Opcode(opcode, count, opcode.startswith(promises) if promises else False)
        for opcode, count in code.instructions.most_common()
    ]
    shown = [each for i, each in enumerate(every) if i < LISTED or each.promised]
    total = sum(code.instructions.values())
    return Compiled(
        what=f"{scheme(name, family)}, {name.upper()}, {dims(shape)}",
        arch=arch,
        grid=" x ".join(map(str, launch.grid)),
        block=" x ".join(map(str, launch.block)),
        registers=code.registers,
        stack_bytes=code.stack_bytes,
        spill_bytes=code.spill_store_bytes + code.spill_load_bytes,
        shared_bytes=code.shared_bytes + launch.shared_bytes,
        instructions=total,
        opcodes=shown,
        others=total - sum(each.count for each in shown),
    )


# ------------------------------------------------------------------------------------- the sections


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing that says what it shows, and its caption."""

    name: str
    said: words.Said
    svg: Markup


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step's source beside its parent's, both without their docstrings."""

    parent: int
    taken: list[str]  # what the step imports from its parent: no different, and left out
    stretches: list[markup.Stretch]
    changed: int  # lines that its parent has not
    lines: int


@dataclass(frozen=True, slots=True)
class Section:
    """All that the page says of a step."""

    number: int
    name: str
    title: str
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
    comparison: Comparison | None
    source: list[markup.Code]  # of a step without a parent


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A wrong kernel: its story, its code, what it gives and what would be right."""

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


CODE: Final = "Machine code"
APART: Final = (CODE, "Read next")
"""Headings of a docstring that do not stand where they stood: the page has places for them."""

HEADINGS: Final = (
    "format",
    "scheme",
    "kernel us",
    "20-80 %",
    "total us",
    "TFLOPS",
    "x parent",
    "x step 1",
    "of its limit",
    "NMSE, kernel",
    "NMSE, all",
)


def drawn(run: Run, source: str) -> list[Chart]:
    """The charts of the page, each with its words."""
    said = words.chart_words(run)
    files = charts.render(run, source, only=said) if said else {}
    return [
        Chart(name, each, markup.picture(files[f"{name}.svg"], name, each.title, each.figures))
        for name, each in said.items()
    ]


def section(
    step: Step, run: Run, stale: frozenset[int], log: markup.Worklog, compiler: Compiler
) -> Section:
    text = "".join(source(step))
    names = {each.name: each.number for each in ladder()}
    intro, passages = markup.lesson(inspect.getdoc(sys.modules[_module(step)]) or "", names)
    intro = intro.partition(" - ")[2] or intro
    shape = words.shape_of_interest(run, step.most_tokens) or charts.MAIN_SHAPE
    rows = [row for row in timed(run) if (row.step, row.shape) == (step.number, shape)]
    return Section(
        number=step.number,
        name=step.name,
        title=step.title,
        accuracy=step.accuracy,
        stale=step.number in stale,
        intro=intro[:1].upper() + intro[1:],
        passages=[each for each in passages if each.heading not in APART],
        promise=next((each.body for each in passages if each.heading == CODE), Markup()),
        entry=log.entries.get(step.number),
        best=words.best_words(run, step.number),
        shape=dims(shape),
        rows=[_cells(row) for row in rows],
        machine=compiler(step, shape, run.env.cc),
        comparison=_comparison(step),
        source=markup.body(text) if diff_base(step) is None else [],
    )


def _module(step: Step) -> str:
    return f"steps.{step.name}"


def _cells(row: Row) -> list[str]:
    def cell(value: float | None, unit: str = "") -> str:
        return report.cell(value) + (unit if value is not None else "")

    spread = report.ABSENT
    if row.p20_us is not None and row.p80_us is not None:
        spread = f"{number(row.p20_us)}-{number(row.p80_us)}"
    return [
        row.format.upper(),
        row.scheme,
        cell(row.kernel_us),
        spread,
        cell(row.total_us),
        cell(row.tflops),
        cell(row.x_parent, "x"),
        cell(row.x_step1, "x"),
        report.percent([row.limit_share] if row.limit_share is not None else []),
        table.error(row.nmse_same_operands),
        table.error(row.nmse_float),
    ]


def _comparison(step: Step) -> Comparison | None:
    number = diff_base(step)
    if number is None:
        return None
    parent = next(each for each in ladder() if each.number == number)
    taken, lines = lesson.imported(step, parent), source(parent)
    kept = {i + 1 for i in lesson.without(lines, taken)}
    before = [line for line in markup.body("".join(lines)) if line.number in kept]
    after = markup.body("".join(source(step)))
    stretches = markup.compared(before, after)
    changed = sum(len(each.after) for each in stretches if each.kind == "changed")
    return Comparison(number, sorted(taken), stretches, changed, len(after))


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


def facts(env: Environment) -> list[tuple[str, str]]:
    """The machine of a run and its software, one line each; what is not known is left out."""
    clocks = env.clocks_mhz
    given: list[tuple[str, Any]] = [
        ("GPU", env.where if env.gpus == 1 else f"{env.gpus} x {env.where}"),
        ("Compute capability", env.cc and "{}.{}".format(*env.cc)),
        ("Multiprocessors", env.sms),
        ("L2 cache", env.l2_bytes and f"{env.l2_bytes / 2**20:.0f} MiB"),
        ("Memory", env.memory_bytes and f"{env.memory_bytes / 2**30:.0f} GiB"),
        ("SM clock before", clocks.before and f"{clocks.before:.0f} MHz"),
        ("SM clock after", clocks.after and f"{clocks.after:.0f} MHz"),
        ("SM clock at most", clocks.max and f"{clocks.max:.0f} MHz"),
        ("Power after the run", env.power_draw_w and f"{env.power_draw_w:.0f} W"),
        ("Reasons for lower clocks", env.throttle),
        ("Driver", env.driver),
        ("CUDA toolkit", env.cuda),
        ("numba-cuda", env.numba_cuda),
        ("Numba", env.numba),
        ("NumPy", env.numpy),
        ("Python", env.python),
        ("Commit", env.git.sha and env.git.sha + (" and changes" if env.git.dirty else "")),
        ("Command", env.command),
        ("Date", env.utc),
    ]
    return [(what, str(value)) for what, value in given if value is not None]


def limits(env: Environment) -> list[tuple[str, str]]:
    given = env.limits
    rates = [("copy", given.copy_tbps), ("read", given.read_tbps)]
    found = [(what, f"{number(rate)} TB/s") for what, rate in rates if rate]
    tops = sorted(given.tops.items(), key=lambda item: item[1])
    return found + [
        (UNIT_LABELS.get(unit, unit), f"{number(rate)} T operations/s") for unit, rate in tops
    ]


# ----------------------------------------------------------------------------------------- the page


def build(path: Path, root: Path = ROOT, compiler: Compiler = compiled) -> str:
    """The page about the run in `path`, as one document. `compiler` gives a step's machine code."""
    run = read(path)
    stale = stale_steps(run, root)
    log = markup.worklog((root / "results" / "worklog.md").read_text(encoding="utf-8"))
    steps, museum = ladder(), pitfalls.pitfalls()
    with table.progress(len(steps) + 2) as say:
        say("charts")
        pictures = drawn(run, charts.source_name(path))
        sections = []
        for step in steps:
            say(f"step {step.number}: its machine code")
            sections.append(section(step, run, stale, log, compiler))
        say("the museum")
        exhibits = [exhibit(one, pitfalls.examine(one)) for one in museum]

    def tabled(make: Callable[[Run, str, frozenset[int]], str], label: str) -> Markup:
        text = make(run, charts.source_name(path), stale)
        return markup.markdown(markup.linked(text, [step.number for step in steps]), label)

    templates = Templates(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.jinja").render(
        env=run.env,
        source=charts.source_name(path),
        headline=tabled(report.headline_table, "Results"),
        ladder=tabled(report.ladder_table, "The ladder"),
        peers=tabled(report.peers_table, "Against llama.cpp and cuBLAS"),
        charts=pictures,
        headings=HEADINGS,
        sections=sections,
        stale_note=markup.inline(report.STALE_NOTE) if stale else None,
        exhibits=exhibits,
        right=markup.body(inspect.getsource(right), imports=False),
        layers=markup.markdown((inspect.getdoc(pitfalls.exhibit) or "").partition("\n\n")[2]),
        protocol=markup.markdown(inspect.getdoc(measure) or ""),
        duels=markup.markdown(inspect.getdoc(duel) or "") if run.duels else None,
        facts=facts(run.env),
        limits=limits(run.env),
        worklog=log.preamble,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = charts.parser_of("page", __doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="default: build/report.html")
    options = parser.parse_args(arguments)
    path = options.run or headline()
    if path is None:
        print("no run to show: measure one first with `make ladder` on a GPU", file=sys.stderr)
        return 1
    text = build(path)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
