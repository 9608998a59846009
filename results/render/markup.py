"""Texts of this project as HTML: docstrings, the worklog, Python beside Python, drawn charts.

Everything that comes back is `Markup`: escaped where it has to be, and not to be escaped again.
"""

from __future__ import annotations

import ast
import difflib
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

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


# --- docstrings and the worklog -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it. `predicted`: a prediction beside its measurement."""

    heading: Markup
    body: Markup
    predicted: bool = False


def lesson(docstring: str, names: Mapping[str, int]) -> tuple[str, list[Section]]:
    """(the line that says what a step is, what its docstring has under headings). `names` are the
    steps' module names, which become links."""
    first, _, rest = docstring.strip("\n").partition("\n")
    _, *parts = re.split(r"(?m)^(\S.*)\n", f"{rest}\n")
    return first, [
        Section(inline(heading.strip()), _prose(textwrap.dedent(text), names))
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def _prose(text: str, names: Mapping[str, int]) -> Markup:
    """Paragraphs; lines that are indented, or set in columns, are pictures or formulas."""
    lines, before = [], False
    for line in text.split("\n"):
        drawn = line.startswith(" ") or "   " in line
        if line and drawn != before:
            lines.append("")  # Markdown begins no picture within a paragraph
            before = drawn
        for name, number in () if drawn else names.items():
            line = line.replace(name, f"[{name}](#step-{number})")
        lines.append(f"    {line}" if drawn else line)
    return markdown("\n".join(lines))


@dataclass(frozen=True, slots=True)
class Entry:
    """A page of the worklog: what stands above its sections, and those."""

    opening: Markup
    findings: list[Section]


def worklog(folder: Path) -> dict[str, Entry]:
    """The pages of the worklog in a folder: "step01" and so on, and "README"."""
    return {
        path.stem: entry(path.read_text(encoding="utf-8"), 5 if path.stem == "README" else 6)
        for path in folder.glob("*.md")
    }


def entry(text: str, level: int) -> Entry:
    """A worklog page by its sections; headings within those become headings of `level`. Links to
    pages of steps lead to their sections here."""
    text = re.sub(r"\]\(step0*(\d+)\.md(?:#[^)]*)?\)", r"](#step-\1)", text)
    text = re.sub(r"\A# .*\n", "", text.lstrip())
    opening, *parts = re.split(r"(?m)^## (.*)\n", re.sub(r"(?m)^###+", "#" * level, text))
    return Entry(
        markdown(opening),
        [
            Section(inline(heading), markdown(body, heading), "**Predicted" in body)
            for heading, body in zip(parts[::2], parts[1::2], strict=True)
        ],
    )


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


@cache
def python(source: str) -> tuple[Code, ...]:
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
    made = tuple(Code(i + 1, texts[i], Markup().join(line)) for i, line in enumerate(lines))
    return made[:-1] if not texts[-1] else made


def body(source: str) -> list[Code]:
    """The lines of a module after its docstring."""
    first = 0
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            first = node.end_lineno or 0
    return trimmed(python(source)[first:])


def trimmed(lines: Sequence[Code]) -> list[Code]:
    """Without empty lines at either end."""
    full = [i for i, line in enumerate(lines) if line.text.strip()]
    return list(lines[full[0] : full[-1] + 1]) if full else []


@dataclass(frozen=True, slots=True)
class Hunk:
    """Neighbouring lines that are the same in both files, or that differ. `folded`: so many equal
    lines that a reader need not see them."""

    same: bool
    before: Sequence[Code]
    after: Sequence[Code]
    folded: bool = False


CONTEXT: Final = 4  # equal lines that are shown on either side of a change


def compared(before: Sequence[Code], after: Sequence[Code]) -> list[Hunk]:
    """Both from top to bottom: nothing of either is left out. Empty lines alone keep nothing
    together, and of many equal lines those at a change stay in sight."""
    texts = [line.text for line in before], [line.text for line in after]
    matcher = difflib.SequenceMatcher(lambda text: not text.strip(), *texts, autojunk=False)
    hunks = []
    for tag, i, j, m, n in matcher.get_opcodes():
        head, tail = (CONTEXT if m else 0), (CONTEXT if n < len(after) else 0)
        if tag != "equal" or n - m <= head + tail + CONTEXT:
            hunks.append(Hunk(tag == "equal", before[i:j], after[m:n]))
            continue
        for first, last in ((m, m + head), (m + head, n - tail), (n - tail, n)):
            if first < last:
                old, new = before[first + i - m : last + i - m], after[first:last]
                hunks.append(Hunk(True, old, new, folded=(first, last) == (m + head, n - tail)))
    return hunks


# --- charts ---------------------------------------------------------------------------------------


def picture(svg: bytes, name: str, title: str, description: str) -> Markup:
    """A chart to stand in a page among others: its ids carry its name, it brings no styles for
    the page (`page.css` has them), and it says in words what it shows."""
    text = re.sub(
        r"(?s)<(metadata|style)\b.*?</\1>", "", svg.decode().replace("xlink:href", "href")
    )
    text = re.sub(r'\bid="|\bhref="#|url\(#', rf"\g<0>{name}-", text)
    head = re.search(r'<svg [^>]*?(viewBox="0 0 ([\d.]+) [^"]*")[^>]*>', text)
    assert head, "no picture of matplotlib"
    opened = Markup(
        '<svg class="chart" role="img" {view} style="--drawn: {width:.0f}px" '
        'aria-labelledby="{name}-title {name}-desc">'
        '<title id="{name}-title">{title}</title><desc id="{name}-desc">{said}</desc>'
    )
    view, width = Markup(head[1]), float(head[2]) * 4 / 3  # pt to px
    opened = opened.format(view=view, width=width, name=name, title=title, said=description)
    return opened + Markup(text[head.end() :])


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
