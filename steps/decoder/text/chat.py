"""A conversation with a model of a file, in a terminal: answers appear as they are generated.

Chat templates are programs that files bring (tokenizer.chat_template), in the language of jinja2.
They run in its sandbox, with what transformers' `apply_chat_template` gives them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from steps.decoder.text.stream import Stream
from steps.decoder.text.vocabulary import Vocabulary

Message = dict[str, str]
"""{"role": "system", "user" or "assistant", "content": text}"""

ASKS: Final = "> "


class Template:
    """The chat template of a file. where: the file, for messages."""

    def __init__(self, source: str | None, vocabulary: Vocabulary, where: Any) -> None:
        """ValueError where there is none, or it is no template."""
        if not source:
            raise ValueError(f"{where} has no chat template: use `decoder` with --prompt")
        self.where, self._vocabulary = where, vocabulary
        made = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        made.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        made.globals["raise_exception"] = _refuse
        made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = made.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"{where}: its chat template is none: {error}") from error

    def text(self, messages: Sequence[Message]) -> str:
        """The messages as the model was trained on them, and the beginning of an answer.

        ValueError where the template refuses them.
        """
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=self._vocabulary.bos,
                eos_token=self._vocabulary.eos,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"{self.where}: its chat template says: {error}") from error


def _refuse(why: str) -> NoReturn:
    raise jinja2.TemplateError(why)


@dataclass(slots=True)
class Pace:
    """When tokens came: `times` in seconds, of the question first, then of each token."""

    times: list[float]

    def __str__(self) -> str:
        """ "37 tokens, first one after 0.02 s, 412 tokens/s from the second on"."""
        asked, *came = self.times
        if not came:
            return "0 tokens"
        found = f"{len(came)} tokens, first one after {came[0] - asked:.2f} s"
        if len(came) > 2:  # before the second one, steps are captured
            found += f", {(len(came) - 2) / (came[-1] - came[1]):.1f} tokens/s from the second on"
        return found


def answer(
    stream: Stream, vocabulary: Vocabulary, ids: Sequence[int], most: int, pace: Pace
) -> Iterator[tuple[int, str]]:
    """(token, the text that it adds) until one ends the answer. The last is not among them."""
    add = vocabulary.stream(ids)
    for token in stream.tokens(ids, most):
        pace.times.append(time.perf_counter())
        if token in vocabulary.ends:
            return
        yield token, add(token)


class Chat:
    """Messages, and the tokens to answer them.

    context : positions that the model is made for. most : tokens of an answer, at most.
    """

    def __init__(
        self,
        stream: Stream,
        vocabulary: Vocabulary,
        template: Template,
        *,
        context: int,
        most: int | None = None,
        system: str | None = None,
    ) -> None:
        self.stream, self.vocabulary, self.template = stream, vocabulary, template
        self.context, self.most = context, most
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def ask(self, question: str, say: Callable[[str], Any]) -> Pace:
        """Answer a question through `say`, piece by piece. Ctrl-C ends the answer.

        ValueError, with the question taken back, where it does not fit into the context.
        """
        self.messages.append({"role": "user", "content": question})
        pace = Pace([time.perf_counter()])
        try:
            # A template writes the token with which texts begin itself, if the model has one.
            ids = self.vocabulary.ids(self.template.text(self.messages), whole=False)
            if len(ids) >= self.context:
                raise ValueError(
                    f"the conversation has {len(ids)} tokens and the model's context is "
                    f"{self.context}: begin anew"
                )
        except ValueError:
            self.messages.pop()
            raise
        pieces: list[str] = []
        most = min(self.most or self.context, self.context - len(ids))
        with contextlib.suppress(KeyboardInterrupt):
            for _, piece in answer(self.stream, self.vocabulary, ids, most, pace):
                pieces.append(piece)
                say(piece)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        return pace

    def loop(
        self,
        say: Callable[[str], Any],
        tell: Callable[[str], Any],
        read: Callable[[str], str] | None = None,
    ) -> None:
        """Answer questions that are typed, until Ctrl-C or Ctrl-D instead of one.

        say: shows text. tell: shows what is not the model's. read: asks for a question,
        `input` by default.
        """
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - makes input() edit lines
        asks = ASKS if sys.stdin.isatty() else ""
        while True:
            try:
                question = (read or input)(asks)
            except (EOFError, KeyboardInterrupt):
                if asks:
                    say("\n")
                return
            if question.strip():
                pace = self.ask(question, say)
                say("\n")
                tell(str(pace))
