"""Renders a chat template in a process of its own: `python render.py`, by `chat.Template`.

A template is a program that a file brings, in the language of jinja2. jinja2's sandbox keeps it
from files and from Python's insides; its process keeps it from all memory and from all time.

stdin: JSON {"template": its text, "given": variables or null, and the limits "seconds" of the CPU,
"megabytes" of memory and "characters" of what it writes}. stdout: JSON [kind, text]: "text" and
what it writes ("" where nothing is given), "none" and why it is no template, or "says" and why it
refuses what is given.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which marks answers for training: what is between
    is as if the marks were not there."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's name

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """What templates find, as in transformers' `apply_chat_template`."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, without escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(why: str) -> NoReturn:
    raise TemplateError(why)


def rendered(asked: dict[str, Any]) -> tuple[str, str]:
    """(kind, text), as the first lines say."""
    kind = "none"
    try:
        template = environment().from_string(asked["template"])
        if asked["given"] is None:
            return "text", ""
        kind = "says"
        text = template.render(asked["given"])
    except MemoryError:
        return kind, f"it takes more than {asked['megabytes']} MB of memory"
    except Exception as error:  # whatever a program may raise
        return kind, str(error) or type(error).__name__
    if len(text) > asked["characters"]:
        most = asked["characters"]
        return kind, f"it writes {len(text)} characters, and {most} at most are taken"
    return "text", text


if __name__ == "__main__":
    ask = json.load(sys.stdin)
    seconds, size = ask["seconds"], ask["megabytes"] << 20
    for what, most in (
        (resource.RLIMIT_CPU, (seconds, seconds + 1)),  # a signal, which ends the process
        (resource.RLIMIT_AS, (size, size)),
        (resource.RLIMIT_CORE, (0, 0)),
    ):
        resource.setrlimit(what, most)
    json.dump(rendered(ask), sys.stdout)
