"""A conversation with a model of a file, in a terminal: answers appear as they are generated.

Chat templates are programs that files bring (tokenizer.chat_template): `render` runs them, in a
process with little time and memory, with what transformers' `apply_chat_template` gives them. Where
a template leaves out the token with which texts begin and the file asks for it, it is added, as
llama.cpp does (`Vocabulary.conversation`).
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steps.decoder.text.stream import Stream
from steps.decoder.text.vocabulary import Vocabulary, require_utf8

Message = dict[str, str]
"""{"role": "system", "user" or "assistant", "content": text}"""

ASKS: Final = "> "
LIMITS: Final = {"seconds": 5, "megabytes": 512, "characters": 1 << 22}
"""Of a chat template: of the CPU's time, memory, and the text that it writes."""


class Template:
    """The chat template of a file. where: the file, for messages."""

    def __init__(self, source: str | None, vocabulary: Vocabulary, where: Any) -> None:
        """ValueError where there is none, or it is no template."""
        if not source:
            raise ValueError(f"{where} has no chat template: use `decoder` with --prompt")
        self.where, self._source, self._vocabulary = where, source, vocabulary
        self._rendered(None)

    def text(self, messages: Sequence[Message]) -> str:
        """The messages as the model was trained on them, and the beginning of an answer.

        ValueError where the template refuses them, or takes more than `LIMITS`.
        """
        return self._rendered(
            {
                "messages": list(messages),
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
                "bos_token": self._vocabulary.bos,
                "eos_token": self._vocabulary.eos,
            }
        )

    def _rendered(self, given: dict[str, Any] | None) -> str:
        asked = json.dumps({"template": self._source, "given": given, **LIMITS})
        script = str(Path(__file__).with_name("render.py"))
        done = subprocess.run(
            [sys.executable, "-P", script], input=asked.encode(), capture_output=True, check=False
        )
        if done.returncode == -signal.SIGXCPU:
            kind, text = "says", f"it takes more than {LIMITS['seconds']} s"
        elif done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            kind = "says"
            text = f"its process ended with status {done.returncode} {' '.join(last)}".strip()
        else:
            kind, text = json.loads(done.stdout)
        if kind != "text":
            verb = "is none" if kind == "none" else "says"
            raise ValueError(f"{self.where}: its chat template {verb}: {text}")
        return text


@dataclass(slots=True)
class Pace:
    """When tokens came: `times` in seconds, of the question first, then of each token. interrupted:
    whether Ctrl-C ended the answer."""

    times: list[float]
    interrupted: bool = False

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
) -> Iterator[tuple[int | None, str]]:
    """(token, the text that it adds) until one ends the answer. That one is not among them; None
    with U+FFFD is the last where the answer ends within a character."""
    add = vocabulary.stream(ids)
    for token in stream.tokens(ids, most):
        pace.times.append(time.perf_counter())
        if token in vocabulary.ends:
            break
        yield token, add(token)
    if rest := add(None):
        yield None, rest


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

        ValueError, with the question taken back, where the template refuses it, it is no UTF-8, or
        it does not fit into the context.
        """
        require_utf8(question, "the question")
        self.messages.append({"role": "user", "content": question})
        pace = Pace([time.perf_counter()])
        try:
            ids = self.vocabulary.conversation(self.template.text(self.messages))
            if len(ids) >= self.context:
                raise ValueError(
                    f"the conversation has {len(ids)} tokens and the model's context is "
                    f"{self.context}: begin anew"
                )
        except (ValueError, KeyboardInterrupt):
            self.messages.pop()
            raise
        pieces: list[str] = []
        most = min(self.most or self.context, self.context - len(ids))
        try:
            for _, piece in answer(self.stream, self.vocabulary, ids, most, pace):
                pieces.append(piece)
                say(piece)
        except KeyboardInterrupt:
            pace.interrupted = True
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        return pace

    def loop(
        self,
        say: Callable[[str], Any],
        tell: Callable[[str], Any],
        read: Callable[[str], str] | None = None,
    ) -> int:
        """Answer questions that are typed, until Ctrl-C or Ctrl-D instead of one.

        say: shows text. tell: shows what is not the model's, such as why a question is refused,
        after which the next one is asked for. read: asks for a question, `input` by default.
        Returns how many were refused.
        """
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - makes input() edit lines
        if isinstance(sys.stdin, io.TextIOWrapper):  # `Vocabulary.ids` refuses what is no UTF-8
            sys.stdin.reconfigure(errors="surrogateescape")
        asks, refused = ASKS if sys.stdin.isatty() else "", 0
        while True:
            try:
                question = (read or input)(asks)
            except (EOFError, KeyboardInterrupt):
                if asks:
                    say("\n")
                return refused
            if not question.strip():
                continue
            try:
                pace = self.ask(question, say)
            except ValueError as error:
                refused += 1
                tell(str(error))
                continue
            say("\n")
            tell(str(pace))
