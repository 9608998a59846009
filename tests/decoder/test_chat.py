"""Chats: the template of a file, tokens as they come, and what ends an answer."""

from __future__ import annotations

import builtins
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from steps.cli import language_model as command
from steps.cli.main import _parser, main
from steps.decoder import files
from steps.decoder.compare import checks
from steps.decoder.model import generate, torch_products
from steps.decoder.text.chat import LIMITS, Chat, Pace, Template
from steps.decoder.text.stream import Sampling, Stream
from tests.decoder.smollm2 import smollm2
from tests.decoder.test_decoder import SMALL, filled, reference
from tests.decoder.test_vocabulary import byte_level, of

VOCABULARY = of(byte_level("gpt-2"))
END = byte_level("gpt-2")["eos_token_id"]
SIMPLE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
WIDE = """\
{%- set ns = namespace(n=0) -%}
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- bos_token }}
    {% endif %}
    {% if message['role'] == 'tool' %}
        {% continue %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
{{ ns.n }} <{{ message | tojson }}>{{ eos_token if not loop.last }}
{% endfor %}
{%- if add_generation_prompt %}go{% endif %}
"""
TRAINED = """\
{%- for m in messages %}
    {%- if m.role != 'tool' %}
        {%- generation -%} {{ m.content | tojson(indent=1) }} {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{{- 'no tools' if tools is none and documents is none }}{{ tools | tojson }}
"""
MESSAGES = [
    {"role": "system", "content": "Be brief, \u00e9l\u00e8ve <b>."},
    {"role": "tool", "content": "not shown"},
    {"role": "user", "content": 'What\'s "up"?'},
]


# --- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [SIMPLE, WIDE, TRAINED, "the file's"])
def test_messages_are_written_as_by_transformers(source: str) -> None:
    if source == "the file's":
        source = files.Model(smollm2()).keys["tokenizer.chat_template"]
        assert "<|im_start|>assistant" in Template(source, VOCABULARY, "a").text(MESSAGES)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=VOCABULARY._tokenizer, bos_token=VOCABULARY.bos, eos_token=VOCABULARY.eos
    )
    for messages in (MESSAGES, MESSAGES[1:], MESSAGES[2:]):
        assert Template(source, VOCABULARY, "a.gguf").text(messages) == theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True
        )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "a.gguf has no chat template: use `decoder` with --prompt"),
        ("{% if %}", "a.gguf: its chat template is none: "),
        ("{{ raise_exception('only users') }}", "a.gguf: its chat template says: only users"),
        ("{{ ''.__class__.__mro__ }}", "a.gguf: its chat template says: access to attribute"),
        ("{{ messages.append(1) }}", "a.gguf: its chat template says: "),
        ("{{ messages[0].x.y }}", "a.gguf: its chat template says: .* has no attribute 'x'"),
        ("{% generation %}", "a.gguf: its chat template is none: Unexpected end of template"),
        ("{{" + "(" * 9999, "a.gguf: its chat template is none: maximum recursion depth exceeded"),
        ("{{ 1 // 0 }}", "a.gguf: its chat template says: integer division or modulo by zero"),
        (
            "{{ x | tojson }}",
            "a.gguf: its chat template says: Object of type Undefined is not JSON",
        ),
        ("{{ 'a' * 10 ** 9 }}", "its chat template says: it takes more than 512 MB of memory"),
        ("{{ 'a' * (messages | length) * 10 ** 9 }}", "it takes more than 512 MB of memory"),
        (
            "{{ 'ab' * 2 ** 22 }}",
            "says: it writes 8388608 characters, and 4194304 at most are take",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "says: maximum recursion depth exceed"),
        ("{% include '/etc/passwd' %}", "a.gguf: its chat template says: no loader for this"),
    ],
)
def test_templates_that_are_refused(source: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Template(source, VOCABULARY, "a.gguf").text(MESSAGES)


def test_templates_take_little_time(monkeypatch: Any) -> None:
    loops = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
    monkeypatch.setitem(LIMITS, "seconds", 2)
    with pytest.raises(ValueError, match=r"a.gguf: its chat template says: it takes more than 2 s"):
        Template(loops, VOCABULARY, "a.gguf").text(MESSAGES)


def test_a_process_that_fails_says_so(monkeypatch: Any) -> None:
    monkeypatch.setitem(LIMITS, "seconds", None)
    with pytest.raises(ValueError, match=r"says: its process ended with status 1 TypeError: "):
        Template(SIMPLE, VOCABULARY, "a.gguf")


def test_templates_know_the_day() -> None:
    year = Template("{{ strftime_now('%Y') }}", VOCABULARY, "a").text(MESSAGES)
    assert 2024 < int(year) < 3000


# --- tokens ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> Any:
    return reference(files.write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", **SMALL))


def test_a_stream_has_the_tokens_of_all_at_once(tiny: Any) -> None:
    stream = Stream(tiny)
    for seed, length, most in ((0, 7, 9), (1, 3, 1), (2, 520, 4), (3, 5, 6)):
        ids = checks.prompt(files.WORDS, length, seed)
        wanted, _ = generate(tiny, torch.tensor([ids]), most)
        assert list(stream.tokens(ids, most)) == wanted[0].tolist()
    assert stream._steps is not None
    assert stream._steps.cache.length == 1024, "the one that was long enough for all of them"


def test_what_is_launched_is_prepared_once(tiny: Any) -> None:
    asked: list[int] = []
    stream = Stream(tiny, prepare=asked.append)
    for length in (5, 9):
        first = next(stream.tokens(checks.prompt(files.WORDS, length), 3))
        assert asked == [5], "before the first token, and at the first prompt alone"
        assert 0 <= first < files.WORDS


def test_a_first_prompt_is_compiled_for_on_all_cores(capsys: Any) -> None:
    asked: list[Any] = []

    class Model:
        def compile_ahead(self, cases: Any, jobs: int, say: Any, report: Any) -> None:
            asked.append((cases, jobs))
            report(1, 2)
            say("one was not compiled")

    args = _parser().parse_args(["chat", "model.gguf", "--jobs", "3", "--accuracy", "fast"])
    command._compile(Model(), args, 17)
    assert asked == [([("fast", 1), ("fast", 17)], 3)]
    assert capsys.readouterr().err == "[one was not compiled]\n", "no progress without a terminal"


def test_a_cache_grows_while_an_answer_does(tiny: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("steps.decoder.text.stream.SHORTEST", 256)
    stream, ids = Stream(tiny), checks.prompt(files.WORDS, 250)
    found, lengths = [], []
    for one in stream.tokens(ids, 12):
        assert stream._steps is not None
        found.append(one)
        lengths.append(stream._steps.cache.length)
    assert lengths == [256] * 7 + [512] * 5
    assert found == generate(tiny, torch.tensor([ids]), 12)[0][0].tolist()


def test_drawn_tokens_have_their_probabilities() -> None:
    shares = torch.tensor([[0.05, 0.5, 0.15, 0.3]])
    count = 2000

    def drawn(temperature: float, top_p: float, seed: int = 0) -> np.ndarray:
        one = Sampling(temperature, top_p, seed)
        found: Counter[int] = Counter()
        for _ in range(count):
            one.draw()
            found[int(one(shares.log()))] += 1
        return np.array([found[i] for i in range(4)]) / count

    error = 4 * 0.5 / count**0.5  # four standard deviations
    np.testing.assert_allclose(drawn(1.0, 1.0), shares[0], atol=error)
    np.testing.assert_allclose(drawn(1.0, 0.7), [0, 0.625, 0, 0.375], atol=error)
    np.testing.assert_allclose(drawn(1.0, 0.81), [0, 0.526, 0.158, 0.316], atol=error)
    squared = shares[0] ** 2 / (shares**2).sum()
    np.testing.assert_allclose(drawn(0.5, 1.0), squared, atol=error)
    assert drawn(1.0, 1e-6)[1] == 1, "the likeliest at least"
    for cold in (1e-3, 1e-45, 1e-300, 0.0):
        assert drawn(cold, 1.0)[1] == 1
    assert (drawn(1.0, 1.0, 5) == drawn(1.0, 1.0, 5)).all()
    assert (drawn(1.0, 1.0, 5) != drawn(1.0, 1.0, 6)).any()


def test_the_largest_draw_is_a_token() -> None:
    one = Sampling(1.0)
    one._drawn.fill_(1.0)
    assert int(one(torch.full((1, 7), 3.0))) == 6
    one._drawn.fill_(0.5)
    assert int(one(torch.full((1, 2), 3.0))) == 1, "draws below a half are of the first of two"
    half = Sampling(1.0, 0.5)
    half._drawn.fill_(0.75)
    assert int(half(torch.full((1, 2), 3.0))) == 0, "which has the probability of 0.5 alone"


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(np.nan, 1), (-1, 1), (0, 0), (1, 1.1), (1, np.nan)]
)
def test_draws_that_cannot_be(temperature: float, top_p: float) -> None:
    with pytest.raises(ValueError, match=f"temperature is {temperature:g} and top-p {top_p:g}"):
        Sampling(temperature, top_p)


def test_a_seed_gives_an_answer(tiny: Any) -> None:
    ids = checks.prompt(files.WORDS, 5)
    found = [list(Stream(tiny, Sampling(1.5, 0.95, seed)).tokens(ids, 12)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_at_temperature_0_the_likeliest_are_taken(tiny: Any) -> None:
    ids = checks.prompt(files.WORDS, 5)
    likeliest = list(Stream(tiny).tokens(ids, 12))
    for seed in (1, 2):
        cold = Stream(tiny, Sampling(0.0, 0.95, seed))
        assert list(cold.tokens(ids, 12)) == likeliest
        assert cold._choose == tiny.operations.argmax_of_rows, "ties are broken alike"


# --- conversations --------------------------------------------------------------------------------


class Told:
    """In place of a `Stream`: answers that are known, and what was asked."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers, self.asked = list(answers), []

    def tokens(self, ids: list[int], most: int) -> Iterator[int]:
        self.asked.append((VOCABULARY.text(ids), most))
        for one in self.answers.pop(0)[:most]:
            if one is KeyboardInterrupt:
                raise KeyboardInterrupt
            yield one


def chat(told: Any, **rest: Any) -> Chat:
    return Chat(told, VOCABULARY, Template(SIMPLE, VOCABULARY, "a"), **{"context": 500} | rest)


def test_an_answer_ends_at_its_token_and_is_remembered() -> None:
    hello = VOCABULARY.ids("H\u00e9llo \U0001f600.")
    told = Told([*hello, END, *hello], hello)
    one, said = chat(told, system="Be brief."), []
    one.ask("Hi", said.append)
    assert "".join(said) == "H\u00e9llo \U0001f600."
    assert not any("\ufffd" in piece for piece in said)
    one.ask("And?", said.append)
    assert told.asked[1][0] == (
        "[system] Be brief.\n[user] Hi\n[assistant] H\u00e9llo \U0001f600.\n[user] And?\n"
        "[assistant] "
    )
    first, second = (500 - len(VOCABULARY.ids(text)) for text, _ in told.asked)
    assert [most for _, most in told.asked] == [first, second], "what the context holds"
    assert [message["role"] for message in one.messages] == ["system", *["user", "assistant"] * 2]


def test_an_answer_has_at_most_so_many_tokens() -> None:
    told = Told(VOCABULARY.ids("one two three"))
    said: list[str] = []
    pace = chat(told, most=3).ask("Count.", said.append)
    assert len(pace.times) == 4
    assert told.asked[0][1] == 3


def test_an_answer_may_end_within_a_character() -> None:
    smile = VOCABULARY.ids("\U0001f600")
    assert len(smile) > 1
    one, said = chat(Told([*VOCABULARY.ids("So "), *smile[:1], END], [*smile[:1]])), []
    one.ask("Hi", said.append)
    one.ask("Hi", said.append)
    assert "".join(said) == "So \ufffd\ufffd"


def test_conversations_begin_with_the_token_of_the_file() -> None:
    """Where it asks for that, and the template does not write it."""
    keys, asked = byte_level("gpt-2"), []

    class First:
        def tokens(self, ids: list[int], most: int) -> Iterator[int]:
            asked.append(ids)
            return iter([])

    for adds in (True, False):
        vocabulary = of(keys | {"add_bos_token": adds})
        Chat(First(), vocabulary, Template(SIMPLE, vocabulary, "a"), context=99).ask("Hi", print)
    bos = keys["bos_token_id"]
    assert asked[0] == [bos, *asked[1]]
    assert bos not in asked[1]


def test_control_c_ends_an_answer_alone() -> None:
    hello = VOCABULARY.ids("Hello")
    one, said = chat(Told([*hello, KeyboardInterrupt, *hello], hello)), []
    assert one.ask("Hi", said.append).interrupted
    assert "".join(said) == "Hello"
    assert one.messages[-1] == {"role": "assistant", "content": "Hello"}
    assert not one.ask("Go on", said.append).interrupted
    assert "".join(said) == "HelloHello"


def test_a_conversation_that_is_too_long_is_refused() -> None:
    one = chat(Told(), context=20)
    with pytest.raises(ValueError, match=r"has \d+ tokens and the model's context is 20: begin an"):
        one.ask("word " * 30, print)
    assert one.messages == []
    text = one.template.text([{"role": "user", "content": "Hi"}])
    one.context = count = len(VOCABULARY.conversation(text))  # there is no place for an answer
    with pytest.raises(ValueError, match=f"has {count} tokens and the model's context is {count}:"):
        one.ask("Hi", print)


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_the_loop_asks_until_it_is_left(monkeypatch: Any, end: type[BaseException]) -> None:
    typed = iter(["Hi", "  ", "Bye", end])

    def line(asks: str) -> str:
        one = next(typed)
        if isinstance(one, str):
            return one
        raise one

    monkeypatch.setattr(builtins, "input", line)
    hello, told, said = VOCABULARY.ids("Hello"), [], []
    one = chat(Told([*hello, END], hello))
    one.loop(said.append, told.append)
    assert "".join(said) == "Hello\nHello\n"
    assert [message["content"] for message in one.messages] == ["Hi", "Hello", "Bye", "Hello"]
    assert len(told) == 2
    assert re.match(rf"{len(hello) + 1} tokens, first one after \d+\.\d\d s, ", told[0])


def test_a_question_that_is_refused_is_taken_back(monkeypatch: Any) -> None:
    """And the next one is asked for."""
    typed = iter(["caf\udce9?", "word " * 100, "Hi"])

    def line(asks: str) -> str:
        if (one := next(typed, None)) is None:
            raise EOFError
        return one

    monkeypatch.setattr(builtins, "input", line)
    one, said, told = chat(Told(VOCABULARY.ids("Hello")), context=60), [], []
    assert one.loop(said.append, told.append) == 2
    assert told[0] == "the question is no UTF-8 at its character 4: 'caf\\udce9?'"
    assert told[1].endswith("tokens and the model's context is 60: begin anew")
    assert "".join(said) == "Hello\n"
    assert [message["content"] for message in one.messages] == ["Hi", "Hello"]


def test_pace() -> None:
    assert str(Pace([1.0])) == "0 tokens"
    assert str(Pace([1.0, 1.25])) == "1 tokens, first one after 0.25 s"
    assert str(Pace([1.0, 1.25, 3.0, 3.5, 4.0])) == (
        "4 tokens, first one after 0.25 s, 2.0 tokens/s from the second on"
    )


# --- the command line -----------------------------------------------------------------------------


def test_a_text_is_continued(tmp_path: Path, capsys: Any) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", **SMALL)
    there = tmp_path / "found.json"
    arguments = [path, "--reference", "--prompt", "the hat", "--tokens", 5, "--json", there]
    assert main(["decoder", *map(str, arguments)]) == 0
    shown, written = capsys.readouterr(), json.loads(there.read_text())
    vocabulary = files.Model(path).vocabulary
    logits = filled(reference(path), [*written["ids"], *written["tokens"]])
    likeliest = logits[len(written["ids"]) - 1 :].argmax(-1).tolist()
    assert written["tokens"] == likeliest[: len(written["tokens"])]
    assert likeliest[len(written["tokens"])] in vocabulary.ends or len(written["tokens"]) == 5
    assert shown.out == written["text"] + "\n"
    assert vocabulary.text([*written["ids"], *written["tokens"]]).startswith(written["text"])
    assert "first one after" in shown.err


def test_a_file_without_a_chat_template(tmp_path: Path, capsys: Any) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", **SMALL)
    assert main(["chat", str(path), "--reference"]) == 2
    assert "tiny.gguf has no chat template: use `decoder` with --prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decoder", "--prompt", "caf\udce9"], "--prompt is no UTF-8 at its character 4: 'caf"),
        (
            ["chat", "--prompt", "Hi", "--system", "\udc80"],
            "--system is no UTF-8 at its character 1",
        ),
        (
            ["decoder", "--prompt", "a", "--temperature", "0", "--top-p", "7"],
            "and top-p 7: the first",
        ),
        (
            ["decoder", "--prompt", "a", "--temperature", "nan"],
            "temperature is nan and top-p 1: the",
        ),
    ],
)
def test_requests_that_are_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: Any
) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", **SMALL)
    command, *rest = arguments
    assert main([command, str(path), "--reference", *rest]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_what_a_file_does_not_say_is_told(tmp_path: Path, capsys: Any) -> None:
    model = files.Model(files.write_tiny(tmp_path / "tiny.gguf", **SMALL))
    assert command._vocabulary(model) is model.vocabulary
    assert capsys.readouterr().err == ""
    model.vocabulary.assumed = "tiny.gguf lacks something"
    command._vocabulary(model)
    assert capsys.readouterr().err == "[tiny.gguf lacks something]\n"


@pytest.mark.parametrize("name", ["decoder", "chat"])
def test_control_c_while_tokens_come(
    name: str, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    """What there is of the text, one sentence, and 130: also of one question, whose answer is not
    complete."""
    path = files.write_tiny(tmp_path / "tiny.gguf", **SMALL)
    hat = files.Model(path).vocabulary.ids("hat")[1:]
    monkeypatch.setattr(command, "_stream", lambda *rest: Told([*hat, KeyboardInterrupt]))
    monkeypatch.setattr(
        "steps.decoder.text.chat.Template", lambda _, *rest: Template(SIMPLE, *rest)
    )
    assert main([name, str(path), "--reference", "--prompt", "the"]) == 130
    shown = capsys.readouterr()
    assert shown.out.strip() == {"chat": "hat", "decoder": "the hat"}[name]
    assert shown.err.endswith(f"\npython -m steps {name}: interrupted\n")


class Driver:
    """Counts the calls that make a context."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.made = fails, []

    def cuInit(self, flags: int) -> int:
        return 100 if self.fails else 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        self.made.append(device)
        return 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_context_is_made_while_torch_is_imported(fails: bool, monkeypatch: Any) -> None:
    driver = Driver(fails)
    monkeypatch.setattr(command.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("LOCAL_RANK", "1")
    command._make_context()
    assert driver.made == ([] if fails else [1])


def test_on_a_cpu_there_is_no_context(tmp_path: Path, monkeypatch: Any) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(command, "_make_context", lambda: begun.append(True))
    path = files.write_tiny(tmp_path / "tiny.gguf", **SMALL)
    assert main(["decoder", str(path), "--reference", "--prompt", "the hat", "--tokens", "1"]) == 0
    assert not begun
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["decoder", str(path), "--prompt", "the hat", "--gpus", "2"]) == 2
    assert not begun, "torchrun's processes make their own"
    assert main(["decoder", str(path), "--prompt", "the hat"]) == 2
    assert begun


def test_a_real_model_answers(capsys: Any) -> None:
    """SmolLM2 from torch's products in float32, on the CPU."""
    smollm2()
    question = "What is the capital of France? One sentence."
    assert main(["chat", "--reference", "--prompt", question, "--tokens", "12"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "The capital of France is Paris.\n"
    assert "8 tokens, first one after" in shown.err
    assert "SmolLM2-135M-Instruct.Q4_1.gguf, ready" in shown.err


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True])
def test_a_stream_on_a_gpu(cuda: Any, tmp_path: Path, sampled: bool) -> None:
    """Steps from a CUDA graph, which holds the drawing too: the tokens of the same model on the
    CPU, by products in float32."""
    path, found = files.write_tiny(tmp_path / "tiny.gguf", **SMALL), []
    ids = checks.prompt(files.WORDS, 7)
    for device in ("cpu", "cuda"):
        make = torch_products(device, torch.float32)
        model = files.load(path, make, device=device, cache_dtype=torch.float32)
        sampling = Sampling(0.7, 0.9, 3, device) if sampled else None
        stream = Stream(model, sampling)
        found.append([list(stream.tokens(ids, 20)) for _ in range(2)])
    assert found[0] == found[1]
    assert (found[0][0] == found[0][1]) != sampled


@pytest.mark.gpu
def test_a_real_model_on_a_gpu(cuda: Any, capsys: Any) -> None:
    """SmolLM2 by the steps: right in both accuracies, and it knows what it knows on the CPU."""
    assert main(["decoder", str(smollm2()), "--check"]) == 0
    assert capsys.readouterr().out.count(": right: ") == 2
    question = "What is the capital of France? One sentence."
    assert main(["chat", "--prompt", question, "--tokens", "12"]) == 0
    assert "Paris" in capsys.readouterr().out
