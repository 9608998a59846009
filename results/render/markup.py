"""Texts of this project as HTML: docstrings, the worklog, Python beside Python, drawn charts.

Everything that comes back is `Markup`: escaped where it has to be, and not to be escaped again.
"""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

# --- markdown -------------------------------------------------------------------------------------


def _leave_out_far_links(self: Any, tokens: Any, at: int, options: Any, env: Any) -> str:
    """Links within the page stay. The others lead to files of the repository, which a page that is
    sent to somebody leaves behind: their text remains."""
    token = tokens[at]
    if token.type == "link_open":
        near = str(token.attrGet("href")).startswith("#")
        env.setdefault("links", []).append(near)
        return str(self.renderToken(tokens, at, options, env)) if near else ""
    return "</a>" if env["links"].pop() else ""


_MARKDOWN: Final = MarkdownIt("commonmark", {"html": False}).enable("table")
for _kind in ("link_open", "link_close"):
    _MARKDOWN.add_render_rule(_kind, _leave_out_far_links)


def markdown(text: str, label: str = "Table") -> Markup:
    """Paragraphs, lists and tables. A table scrolls in a box of its own where it is too wide;
    `label` is that box's name."""
    html = _MARKDOWN.render(text)
    box = f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table>'
    return Markup(html.replace("<table>", box).replace("</table>", "</table></div>"))


def inline(text: str) -> Markup:
    """One paragraph without its <p>."""
    return Markup(_MARKDOWN.renderInline(text))


# --- the docstring of a step ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passage:
    """A heading and what stands under it."""

    heading: str
    body: Markup


def lesson(docstring: str, names: Mapping[str, int]) -> tuple[str, list[Passage]]:
    """(the line that says what the step is, its headings). `names` are the steps' module names,
    which become links."""
    first, *rest = docstring.strip("\n").split("\n")
    passages: list[tuple[str, list[str]]] = []
    for line in rest:
        if line and not line.startswith(" "):
            passages.append((line.strip(), []))
        elif passages:
            passages[-1][1].append(line[4:])
    return first, [Passage(heading, _prose(lines, names)) for heading, lines in passages]


def _prose(lines: Sequence[str], names: Mapping[str, int]) -> Markup:
    """Paragraphs; lines that are indented more than these, or set in columns, are pictures or
    formulas."""
    runs: list[tuple[str, list[str]]] = []
    for line in lines:
        drawn = line.startswith(" ") or "   " in line
        kind = "blank" if not line.strip() else "picture" if drawn else "text"
        if kind == "blank" and runs and runs[-1][0] == "picture":
            kind = "picture"  # a gap in it, or its end
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(line)
    parts = []
    for kind, own in runs:
        if kind == "picture":
            parts.append(Markup("<pre>{}</pre>").format(_flush(own)))
        elif kind == "text":
            text = " ".join(own)
            for name, number in names.items():
                text = text.replace(name, f"[{name}](#step-{number})")
            parts.append(Markup("<p>{}</p>").format(inline(text)))
    return Markup("\n").join(parts)


def _flush(lines: Sequence[str]) -> str:
    """Without what all are indented by, and without empty lines at the end."""
    return textwrap.dedent("\n".join(lines)).rstrip()


# --- the worklog ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorklogFinding:
    """A section of a worklog page. `predicted`: it holds a prediction beside the measurement."""

    heading: Markup
    body: Markup
    predicted: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A page of the worklog: what stands above its sections, and those, as the page has them."""

    opening: Markup
    findings: list[WorklogFinding]


@dataclass(frozen=True, slots=True)
class Worklog:
    """A page per step, and the findings that belong to none."""

    steps: Mapping[int, Entry]
    general: Entry | None


def worklog(folder: Path) -> Worklog:
    """The worklog in a folder: `stepNN.md` and `README.md`."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    steps = {
        int(name[4:]): entry(text, 6)
        for name, text in texts.items()
        if re.fullmatch(r"step\d+", name)
    }
    return Worklog(steps, entry(texts["README"], 5) if "README" in texts else None)


def entry(text: str, level: int) -> Entry:
    """A worklog page by its sections; headings within those become headings of `level`. Links to
    pages of steps lead to their sections here."""
    text = re.sub(r"\]\(step0*(\d+)\.md(?:#[^)]*)?\)", r"](#step-\1)", text)
    text = re.sub(r"\A# .*\n", "", text.lstrip())
    opening, *parts = re.split(r"(?m)^## (.*)\n", text)
    findings = [
        WorklogFinding(
            heading=inline(heading),
            body=_leveled(markdown(body, heading), level),
            predicted="**Predicted" in body,
        )
        for heading, body in zip(parts[::2], parts[1::2], strict=True)
    ]
    return Entry(_leveled(markdown(opening), level), findings)


def _leveled(html: Markup, level: int) -> Markup:
    return Markup(re.sub(r"(</?h)[1-6]>", rf"\g<1>{level}>", str(html)))


# --- Python ---------------------------------------------------------------------------------------

_LEXER: Final = PythonLexer(stripnl=False, ensurenl=False)
_CLASSES: Final = (
    (Comment, "c"),
    (String, "s"),
    (Number, "m"),
    (Keyword, "k"),
    (Operator.Word, "k"),
    (Name.Decorator, "d"),
    (Name.Function, "f"),
    (Name.Builtin, "b"),
)


@dataclass(frozen=True, slots=True)
class Code:
    """A line of source: its number in the file, itself, and itself highlighted."""

    number: int
    text: str
    html: Markup
    marked: bool = False


def python(source: str) -> list[Code]:
    """Every line of a module, highlighted."""
    lines: list[list[Markup]] = [[]]
    for kind, text in _LEXER.get_tokens(source):
        name = next((name for each, name in _CLASSES if kind in each), None)
        for i, piece in enumerate(text.split("\n")):
            if i:
                lines.append([])
            if piece:
                shown = (
                    Markup('<i class="{}">{}</i>').format(name, piece) if name else escape(piece)
                )
                lines[-1].append(shown)
    texts = source.split("\n")
    made = [Code(i + 1, texts[i], Markup().join(line)) for i, line in enumerate(lines)]
    return made[:-1] if not texts[-1] else made


def body(source: str, *, imports: bool = True) -> list[Code]:
    """The lines of a module after its docstring; without `imports` also after those."""
    first = 0
    for node in ast.parse(source).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or (not imports and isinstance(node, ast.Import | ast.ImportFrom)):
            first = node.end_lineno or 0
    return trimmed(python(source)[first:])


def trimmed(lines: Sequence[Code]) -> list[Code]:
    """Without empty lines at either end."""
    full = [i for i, line in enumerate(lines) if line.text.strip()]
    return list(lines[full[0] : full[-1] + 1]) if full else []


def marked(lines: Iterable[Code], sign: str = "# <-") -> list[Code]:
    """Those with `sign` in them stand out."""
    return [replace(line, marked=sign in line.text) for line in lines]


@dataclass(frozen=True, slots=True)
class Hunk:
    """Neighbouring lines that are the same in both files, or that differ. `folded`: so many equal
    lines that a reader need not see them."""

    kind: Literal["same", "changed"]
    before: list[Code]
    after: list[Code]
    folded: bool = False


CONTEXT: Final = 4
"""Equal lines that are shown on either side of a change."""


def compared(before: Sequence[Code], after: Sequence[Code]) -> list[Hunk]:
    """Both from top to bottom: nothing of either is left out."""
    texts = [line.text for line in before], [line.text for line in after]
    raw: list[Hunk] = []
    for tag, i, j, m, n in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        kind: Literal["same", "changed"] = "same" if tag == "equal" else "changed"
        if kind == "same" and raw and n < len(after) and not "".join(texts[1][m:n]).strip():
            kind = "changed"  # empty lines alone keep nothing together
        old, new = list(before[i:j]), list(after[m:n])
        if raw and raw[-1].kind == kind:
            raw[-1].before.extend(old)
            raw[-1].after.extend(new)
        else:
            raw.append(Hunk(kind, old, new))
    return [part for i, each in enumerate(raw) for part in _folded(each, i, len(raw))]


def _folded(hunk: Hunk, at: int, count: int) -> Iterator[Hunk]:
    """A long equal hunk in up to three: its ends, beside a change, stay in sight."""
    head = CONTEXT if at > 0 else 0
    tail = CONTEXT if at < count - 1 else 0
    size = len(hunk.after)
    if hunk.kind == "changed" or size <= head + tail + CONTEXT:
        yield hunk
        return
    for first, last in ((0, head), (head, size - tail), (size - tail, size)):
        if last > first:
            old, new = hunk.before[first:last], hunk.after[first:last]
            yield Hunk("same", old, new, folded=(first, last) == (head, size - tail))


# --- charts ---------------------------------------------------------------------------------------

_SVG: Final = "http://www.w3.org/2000/svg"
_XLINK: Final = "http://www.w3.org/1999/xlink"


def picture(svg: bytes, name: str, title: str, description: str) -> Markup:
    """A chart to stand in a page among others: its ids carry its name, it brings no styles for
    the page (`page.css` has them), and it says in words what it shows."""
    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        if target := element.attrib.pop(f"{{{_XLINK}}}href", None):
            element.set("href", target.replace("#", f"#{name}-"))
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif "url(#" in value:
                element.set(key, value.replace("url(#", f"url(#{name}-"))
    width = float(root.attrib.pop("width").removesuffix("pt"))
    root.attrib.pop("height")
    root.set("class", "chart")
    root.set("style", f"--drawn: {width * 4 / 3:.0f}px")
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        said = ET.Element(tag, {"id": f"{name}-{tag}"})
        said.text = text
        root.insert(place, said)
    return Markup(ET.tostring(root, encoding="unicode"))


# --- pages ----------------------------------------------------------------------------------------


@cache
def templates() -> Environment:
    """The templates of pages: what stands in them is escaped, and has to be there."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["python"] = lambda text: Markup().join(one.html for one in python(text))
    made.filters["inline"] = inline
    return made
