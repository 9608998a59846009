"""The page: whole, readable without sight or network, figures and code where they belong."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from markupsafe import Markup

from results import __main__ as command
from results.record import store
from results.record.schema import Run
from results.render import markup, page, table
from results.render.machine_code import Compiled, compiled
from steps import ladder
from steps.contract import Step
from steps.learn.trace.picture import Picture, picture
from steps.registry import find, following, parent_of, source
from steps.simulator.lanes import Site
from steps.simulator.trace import Instruction

VOID = {"meta", "link", "br", "hr", "img", "input", "use", "path", "rect", "col"}
ENDS_A_PARAGRAPH = {"p", "div", "pre", "table", "ul", "ol", "dl", "h2", "h3", "h4", "section"}
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("page")  # one process makes `shown`
SECTIONS = ("ladder", "called", "charts", "steps", "method")


class Page(HTMLParser):
    """A document taken apart: what is open where, ids, links, and the text of elements by class."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.open: list[tuple[str, dict[str, str]]] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.resources: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.headings: list[int] = []
        self.lines: dict[tuple[str, str], list[tuple[int, str]]] = {}  # (article, side) -> source
        self.text: dict[str, str] = {}  # of each article and section
        self.feed(html)
        self.close()
        self.faults += [f"<{tag}> is never closed" for tag, _ in self.open]

    def handle_starttag(self, tag, attrs):
        given = {key: value or "" for key, value in attrs}
        if len(given) != len(attrs):
            self.faults.append(f"<{tag}> has an attribute twice: {attrs}")
        self.tags.append((tag, given))
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a":
            self.targets.append(given.get("href", ""))
        self.resources += [
            given[key] for key in ("src", "href", "srcset", "data") if key in given and tag != "a"
        ]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag in ENDS_A_PARAGRAPH and any(each == "p" for each, _ in self.open):
            self.faults.append(f"<{tag}> within <p>, in {self.where}")
        if tag not in VOID:
            self.open.append((tag, given))
        if "l" in given.get("class", "").split():
            self.lines.setdefault((self.where, self.side), []).append((int(given["data-n"]), ""))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in VOID:  # SVG closes what HTML need not
            return
        if not self.open or self.open[-1][0] != tag:
            self.faults.append(f"</{tag}> where {[each for each, _ in self.open][-3:]} is open")
            return
        self.open.pop()

    def handle_data(self, data):
        for tag, attributes in self.open:
            if tag in ("article", "section"):
                name = attributes["id"]
                self.text[name] = self.text.get(name, "") + data
        if any("l" in each.get("class", "").split() for _, each in self.open):
            number, text = self.lines[self.where, self.side][-1]
            self.lines[self.where, self.side][-1] = (number, text + data)

    @property
    def where(self) -> str:
        inner = [each["id"] for tag, each in self.open if tag in ("article", "section")]
        return inner[-1] if inner else ""

    @property
    def side(self) -> str:
        sides = [each["class"] for _, each in self.open if each.get("class") in ("old", "new")]
        return sides[-1] if sides else ""

    def source(self, article: str, side: str = "") -> list[tuple[int, str]]:
        return [(n, text.rstrip("\n")) for n, text in self.lines.get((article, side), [])]


def stub(step, shape, cc) -> Compiled:
    """In place of the compiler, which takes seconds for each step."""
    lines = [(line, f"IMAD R{line}, R1<&>") for line in kernel_lines(step)]
    return Compiled("47 registers a thread", [(None, "NOP"), *lines])


def kernel_lines(step: Step) -> list[int]:
    """Some lines of a step's file that could have instructions, one of them twice."""
    last = len(source(step))
    return [last - 40, last - 38, last - 40]


def traced(step: Step) -> list[Picture]:
    """In place of the simulator: a load of each kind that a picture is made of."""
    place = Site(0, 0, traced.__code__)
    scattered = Instruction(0, "load", "w", "global", 2, (place,), 3, 96)
    scattered.lanes = [36 * i for i in range(32)]
    column = Instruction(4, "load", "tile", "shared", 16, (place, place), 1, 0, 8, 4)
    column.lanes = [None, *(32 * i for i in range(31))]
    copy = Instruction(0, "bulk copy", "w", "global", 2304, (place,), 2, 144)
    copy.lanes = [None] * 5 + [4608] + [None] * 26
    every = (scattered, column, copy)
    return [picture(each, f"step-{step.number}-request-{i}") for i, each in enumerate(every)]


@pytest.fixture(scope="module")
def shown(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = store.write(run, tmp_path_factory.mktemp("results") / "run.json")
    return Page(page.build(path, compiler=stub, tracer=traced))


# --- structure ------------------------------------------------------------------------------------


def assert_whole(each: Page) -> None:
    """Well-formed, all there, without a request or a script, and to be read without sight."""
    assert each.html.startswith("<!DOCTYPE html>")
    assert each.faults == []
    wanted = [*SECTIONS, *(f"step-{step.number}" for step in ladder())]
    assert set(wanted) <= set(each.ids)
    assert [name for name in each.ids if name in SECTIONS] == list(SECTIONS)
    assert len(each.ids) == len(set(each.ids))
    assert len(each.targets) > 50
    assert {target for target in each.targets if target[1:] not in each.ids} == set()
    labels = [v for _, given in each.tags for v in given.get("aria-labelledby", "").split()]
    assert set(labels) <= set(each.ids)

    assert [one for one in each.resources if not one.startswith(("#", "data:"))] == []
    assert "script" not in {tag for tag, _ in each.tags}
    assert re.findall(r"url\((?!#)|@import", each.html) == []
    used = {given["href"][1:] for tag, given in each.tags if tag == "use"}
    assert used | set(re.findall(r"url\(#([^)]+)\)", each.html)) <= set(each.ids)

    assert each.headings[0] == 1
    assert each.headings.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(each.headings, each.headings[1:], strict=False))
    boxes = [given for _, given in each.tags if "scroll" in given.get("class", "").split()]
    assert len(boxes) > 30
    assert all((box["role"], box["tabindex"]) == ("region", "0") for box in boxes)
    assert all(box["aria-label"] for box in boxes)
    tables = len([tag for tag, _ in each.tags if tag == "table"])
    assert len(re.findall(r'<div class="scroll"[^>]*>\s*<table', each.html)) == tables


def test_the_page_of_a_run_is_whole(shown: Page) -> None:
    assert_whole(shown)


def test_pictures_say_in_words_and_figures_what_they_show(shown: Page) -> None:
    pictures = [given for tag, given in shown.tags if tag == "svg" and "class" in given]
    kinds = Counter(given["class"] for given in pictures)
    assert kinds["chart"] == 4
    assert kinds["memory"] == 3 * len(ladder())
    said = dict(re.findall(r'id="([^"]*)"[^>]*>([^<]+)<', shown.html))
    for given in pictures:
        assert given["role"] == "img"
        title, description = given["aria-labelledby"].split()
        assert said[title]
        assert re.search(r"\d", said[description])
    assert shown.html.count("<figcaption>") == len(pictures)


# --- what stands in it ----------------------------------------------------------------------------


def numbered(step: Step) -> list[tuple[int, str]]:
    """The lines of a step's file."""
    return [(line.number, line.text) for line in markup.body("".join(source(step)))]


def test_each_step_stands_beside_the_step_it_grew_from(shown: Page) -> None:
    for step in ladder():
        name = f"step-{step.number}"
        own = numbered(step)
        base = parent_of(step)
        if base is None:
            assert shown.source(name) == own
            continue
        assert shown.source(name, "new") == own, "nothing of a step is left out"
        assert shown.source(name, "old") == numbered(find(base))
        assert f'href="#step-{base}"' in shown.html


def test_source_and_texts_are_escaped(shown: Page) -> None:
    texts = "".join("".join(source(step)) for step in ladder())
    assert "<" in texts, "else this shows nothing"
    assert "&" in texts
    assert "R1&lt;&amp;&gt;" in shown.html
    line = "threads < 2 && <b> & 'x'"
    (one,) = markup.python(line)
    assert one.html.striptags() == line.replace("  ", " ")
    assert "<b>" not in one.html
    assert markup.inline("a < b <script>x</script>") == ("a &lt; b &lt;script&gt;x&lt;/script&gt;")


def test_each_step_has_its_lesson_its_outcome_and_its_figures(shown: Page, run: Run) -> None:
    measured = {row.step for row in run.rows}
    for step in ladder():
        text = shown.text[f"step-{step.number}"]
        assert step.title in text
        numbers = [f"step {each.number}" for each in following(step)]
        said = re.sub(r"\s+", " ", text)
        assert ("read next: " + ", ".join(numbers) in said) == bool(numbers)
        for heading in ("What is new", "Why it should help", "What it costs", "Machine code"):
            assert heading in text
        assert "47 registers a thread" in text
        if step.number not in measured:
            assert "Not measured at its home" in text
            continue
        assert "stale" in text, "the run has measured other sources"
        rows = [r for r in run.rows if r.step == step.number and r.shape in step.home_shapes]
        for row in rows:
            for value in (row.kernel_us, row.total_us, row.tflops):
                assert table.number(value or 0) in text


def test_requests_of_a_step_are_drawn_lane_by_lane(shown: Page) -> None:
    text = re.sub(r"\s+", " ", shown.text["step-3"])
    assert "load, 2 bytes a lane, of w in global memory" in text
    assert "32 sectors of 32 bytes in 16 places" not in text
    assert "load, 16 bytes a lane, of tile in shared memory; warp 4" in text
    assert "8 cycles, 4 of them lost to bank conflicts" in text
    assert "2304 bytes side by side, 72 sectors: lane 5 only starts the copy" in text
    lanes = [given for tag, given in shown.tags if given.get("class") == "lane"]
    assert len(lanes) == (32 + 31 + 1) * len(ladder())


def test_instructions_stand_beside_the_line_they_are_of(shown: Page) -> None:
    for step in ladder():
        lines = kernel_lines(step)
        made = re.findall(rf'<span class="made n{lines[0]}" [^>]*>([^<]+)', shown.html)
        assert f"IMAD R{lines[0]}, R1&lt;&amp;&gt;\n" in made
        assert f".beside:has(.n{lines[0]}:hover) .n{lines[0]} " in shown.html
    own = source(find(1))[kernel_lines(find(1))[0] - 1].strip()
    assert own in shown.text["step-1"]


def test_machine_and_protocol_are_those_of_the_run(shown: Page, run: Run) -> None:
    text = shown.text["method"]
    assert run.env.where in text
    assert str(run.env.git.sha) in text
    for rate in run.env.limits.tops.values():
        assert table.number(rate) in text
    assert "20 % and 80 % quantiles" in re.sub(r"\s+", " ", text)


# --- its parts ------------------------------------------------------------------------------------


LINES = st.lists(st.sampled_from("abc\n"), max_size=60)


@hypothesis.given(LINES, LINES)
@hypothesis.settings(deadline=None)
def test_a_comparison_leaves_nothing_out(before: list[str], after: list[str]) -> None:
    old, new = (
        [markup.Code(i, text.strip(), Markup("")) for i, text in enumerate(lines)]
        for lines in (before, after)
    )
    hunks = markup.compared(old, new)
    assert [line for each in hunks for line in each.before] == old
    assert [line for each in hunks for line in each.after] == new
    for each in hunks:
        if each.same:
            assert [line.text for line in each.before] == [line.text for line in each.after]
        assert not each.folded or len(each.after) > markup.CONTEXT


def test_links_lead_to_places_of_the_page_and_nowhere_else() -> None:
    assert markup.inline("[a](b.json) [c](#d)") == 'a <a href="#d">c</a>'


def test_a_docstring_keeps_its_drawings() -> None:
    text = "Step 1: x\n\nWhat is new\n    Words\n    of it:\n        a4 = b < c\n    End, a4.\n"
    text += "Cost\n    None"
    first, (new, cost) = markup.lesson(text, {"a4": 4})
    assert (first, new.heading, cost.heading) == ("Step 1: x", "What is new", "Cost")
    drawn = re.findall(r"<pre>(?:<code>)?\s*([^<]*)", new.body)
    assert drawn == ["a4 = b &lt; c\n"]
    assert new.body.startswith("<p>Words\nof it:</p>")
    assert new.body.endswith('<p>End, <a href="#step-4">a4</a>.</p>\n')


def test_the_worklog_by_steps_and_findings(tmp_path: Path) -> None:
    text = "# Step 2: two\n\nOpening, see [one](step01.md#a).\n\n## First\n\n- **Predicted:** a\n\n"
    (tmp_path / "step02.md").write_text(text + "## Then `b`\n\n### Below\n\nc\n")
    (tmp_path / "README.md").write_text("# Log\n\n## General\n\n### Below\n")
    log = markup.worklog(tmp_path)
    assert set(log) == {"step02", "README"}
    assert log["step02"].opening == '<p>Opening, see <a href="#step-1">one</a>.</p>\n'
    first, then = log["step02"].findings
    assert (first.heading, first.predicted) == ("First", True)
    assert "<strong>Predicted:</strong> a" in first.body
    assert (then.heading, then.predicted) == ("Then <code>b</code>", False)
    assert then.body == "<h6>Below</h6>\n<p>c</p>\n"
    assert log["README"].findings[0].body == "<h5>Below</h5>\n"


def test_every_measured_step_has_a_page_in_the_worklog_with_a_prediction(shown: Page) -> None:
    for step in (one for one in ladder() if one.chosen_untuned):  # a new one was not measured
        text = shown.text[f"step-{step.number}"]
        assert re.search(r"Predicted\b[^:\n]*:", text), step.number
        assert re.search(r"Measured\b[^:\n]*:", text), step.number


def test_machine_code_is_the_compilers() -> None:
    first = ladder()[0]
    code = compiled(first, (4, 64, 64), (8, 0))
    assert isinstance(code, Compiled)
    told = r"W4A16, Q4_0, 4 x 64 x 64, compiled for sm_80 .*: \d\d registers .*\bFFMA \d+"
    assert re.match(told, code.told), code.told
    assert len(code.lines) > 100


def test_machine_code_that_cannot_be_had_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_tool(kernel, signature, arch, line_info):
        asked.append(arch)
        raise RuntimeError("nvdisasm was not found")

    monkeypatch.setattr("results.render.machine_code.machine_code", no_tool)
    hopper = next(step for step in ladder() if step.number == 14)
    said = compiled(hopper, (16, 128, 128), (8, 0))
    assert said == "No machine code on this computer: nvdisasm was not found"
    assert asked == ["sm_90a"], "a GPU of 8.0 cannot run it: for the one that can"


def test_the_command_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "build", lambda path: f"<!DOCTYPE html>{path}")
    out = tmp_path / "new" / "page.html"
    assert command.main(["page", "--run", "a.json", "--out", str(out)]) == 0
    assert out.read_text() == "<!DOCTYPE html>a.json"
    assert capsys.readouterr().out.strip() == str(out)
    assert command.main(["page", "--root", str(tmp_path), "--out", str(out)]) == 1
    assert "Nothing is measured yet" in capsys.readouterr().out
