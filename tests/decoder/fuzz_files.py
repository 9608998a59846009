"""Files that were changed at random, through the whole decoder: each gives an answer or a sentence.

    .venv-torch/bin/python -m tests.decoder.fuzz_files --count 3000 --seed 1
    .venv-torch/bin/python -m tests.decoder.fuzz_files --only 1:2345 --keep bad.gguf

Changes know what a file is made of: keys and their types, vocabularies, templates, tensors; some
are of bytes. `make chat` and `make decoder` run in this process on the CPU, up to what a GPU would
do otherwise. Whatever is said must be fit for a terminal, and nothing may take long, or memory.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from steps.cli import main as command_line
from steps.decoder import files
from steps.decoder.keys import KEYS
from steps.decoder.text import chat
from steps.nn.linear import QuantLinear
from steps.product.choice import packings
from tests.decoder import gguf_bytes
from tests.decoder.gguf_bytes import ARRAY, BOOL, F32, F64, I32, I64, STRING, U32, File, Tensor

SECONDS: Final = 20.0
"""Of a file, on a slow and busy machine: some tenths of a second, and a chat template's limit."""
MEMORY: Final = 1 << 30
"""Bytes of address space, more than the process has before the first file."""

ANSWER: Final = "an answer"
Dice = random.Random
TEMPLATE: Final = (
    "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def letters() -> list[str]:
    """The letters by which byte-level vocabularies write the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(one if one in plain else next(others)) for one in range(256)]


def bases(folder: Path) -> list[File]:
    """Sound files: a llama with a SentencePiece vocabulary, a Qwen 2 with a byte-level one, and a
    Qwen 3 with as little as possible."""
    small = {
        "block_count": 1,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    made = [
        gguf_bytes.read(files.write_tiny(folder / "base.gguf", architecture=name, **small))
        for name in ("llama", "qwen2", "qwen3")
    ]
    pairs = [f"{a} {b}" for a in "\u0120th" for b in "aeiouhnr"]
    words = [*letters(), *(pair.replace(" ", "") for pair in pairs)]
    words += [f"<|{i}|>" for i in range(files.WORDS - 2 - len(words))] + ["<|im_start|>", "</s>"]
    kinds = [1] * (256 + len(pairs))
    made[1] = made[1].with_keys(
        {
            "tokenizer.ggml.model": (STRING, "gpt2"),
            "tokenizer.ggml.pre": (STRING, "qwen2"),
            "tokenizer.ggml.scores": None,
            "tokenizer.ggml.tokens": gguf_bytes.array(STRING, words),
            "tokenizer.ggml.merges": gguf_bytes.array(STRING, pairs),
            "tokenizer.ggml.token_type": gguf_bytes.array(
                I32, kinds + [3] * (len(words) - len(kinds))
            ),
        }
    )
    return [one.with_keys({"tokenizer.chat_template": (STRING, TEMPLATE)}) for one in made]


# --- changes --------------------------------------------------------------------------------------

WHOLE: Final = (0, 1, 2, 3, 7, 32, 255, 287, 288, 289, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e30, 3e38, float("inf"), float("nan"), 1e-320)
STRINGS: Final = (
    "", " ", "a", "llama", "qwen3", "gpt2", "smollm", "yarn", "none", "linear", "longrope",
    "\x1b]0;owned\x07", "\x9b2J", "\r\n\t\b", "\u202eabc\u2066", "\u2028", "\0", "a b", "a b c",
    "a  ", "\u2581", "<s>", "</s>", "<0x00>", "<0xZZ>", "<|im_end|>", "\ufffd", "\U0001f600",
    "e\u0301", "[bold]x[/nope]", "%s%n{}", "../../etc/passwd", "x" * 1024, "x" * 5000,
    b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b"a\x80b",
)  # fmt: skip
TEMPLATES: Final = (
    "{{ 1/0 }}",
    "{{ 1e400|int }}",
    "{{ x }}",
    "{{ x.y.z }}",
    "{{ messages }}",
    "{{ bos_token }}",
    "{{ 'a'.encode('x-y') }}",
    "{{ '\\ud800' }}",
    "{{ messages|tojson(cls=namespace) }}",
    "{% if %}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ ('x' * 200000000)|length }}",
    "{{ 'x' * 9999999 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{{ 9**9**9 }}",
    "{{ raise_exception('\x1b]0;owned\x07') }}",
    "{{ raise_exception(5) }}",
    "{{ raise_exception() }}",
    "{{ strftime_now('%' * 9999) }}",
    "{{ strftime_now(5) }}",
    "{% generation %}a{% endgeneration %}",
    "{% if tools %}a{% endif %}b",
    "{{ tools|length }}",
    "{{ messages[0]['content'] ~ '\x1b[2J' }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ [] | first }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{{ 'a' | format(1, 2) }}",
    "{{ '%*d' | format(999999999, 1) }}",
    "{{ '{:>999999999}'.format('a') }}",
    "{{ 'a' | center(10**9) }}",
    "{{ messages | join(5) }}",
    "{{ ['a'] * 10**9 }}",
    "{{ lipsum(n=10**6) }}",
    "{{ cycler() }}",
    "{{ joiner() }}",
    "{{ 'a' | indent(10**9) }}",
    "{{ 5 | tojson(indent=10**9) }}",
    "{{ dict(a=1).a }}",
    "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "{{ self }}",
    "{{ self.x() }}",
    "{{ loop }}",
    "{% break %}",
    "{{ caller() }}",
    "{{ varargs }}",
    "<s>{% for m in messages %}{{ loop.index0 }}{% continue %}{% endfor %}",
    "{{ 0 or messages[9] }}",
)


def value(dice: Dice) -> gguf_bytes.Value:
    """Of any type; whole numbers that fit into it."""
    kind = dice.choice([0, 1, 2, 3, U32, U32, I32, F32, F64, BOOL, STRING, STRING, ARRAY, 10, I64])
    if kind == STRING:
        return kind, dice.choice(STRINGS)
    if kind in (F32, F64):
        return kind, dice.choice(FLOATS)
    if kind == BOOL:
        return kind, dice.random() < 0.5
    if kind == ARRAY:
        of, one = value(dice)
        if of == ARRAY:
            return U32, dice.choice(WHOLE[:12])
        return gguf_bytes.array(of, [one] * dice.choice([0, 1, 2, 288]))
    size = 8 * struct.calcsize(gguf_bytes.SCALARS[kind])
    found = dice.choice(WHOLE) % (1 << size)
    if kind in (1, 3, I32, I64):
        found = (found if dice.random() < 0.5 else -found) % (1 << size)
        found -= (found >> size - 1) << size
    return kind, found


def key_names(file: File) -> list[str]:
    """Of all keys that are read, half of them once more for those of the file."""
    kind, name = file.keys.get("general.architecture", (U32, 0))
    prefix = name if kind == STRING and isinstance(name, str) else "llama"
    return [one.replace("[llm]", prefix) for one in KEYS] + list(file.keys)


def other_key(file: File, dice: Dice) -> File:
    return file.with_keys({dice.choice(key_names(file)): value(dice)})


def other_number(file: File, dice: Dice) -> File:
    """Of the right type, of any size."""
    known = [name for name, (kind, _) in file.keys.items() if kind in (U32, F32)]
    if not known:
        return file
    name = dice.choice(known)
    kind = file.keys[name][0]
    return file.with_keys({name: (kind, dice.choice(FLOATS if kind == F32 else WHOLE[:14]))})


def no_key(file: File, dice: Dice) -> File:
    return file.with_keys({dice.choice(key_names(file)): None})


def other_items(file: File, dice: Dice) -> File:
    """An array of the vocabulary with some items changed, added, left out, swapped or doubled."""
    known = [name for name, (kind, _) in file.keys.items() if kind == ARRAY]
    if not known:
        return file
    name = dice.choice(known)
    _, (of, items) = file.keys[name]
    items = list(items)
    for _ in range(dice.choice([1, 1, 3, 40])):
        at = dice.randrange(len(items) + 1)
        one = {
            STRING: lambda: dice.choice(STRINGS),
            F32: lambda: dice.choice(FLOATS),
            I32: lambda: dice.choice([0, 1, 2, 3, 3, 4, 4, 5, 6, 7, -1, 2**31 - 1]),
        }.get(of, lambda: 1)()
        if dice.random() < 0.6 and items:
            items[at % len(items)] = one
        elif dice.random() < 0.3:
            items.insert(at, one)
        elif dice.random() < 0.3:
            del items[at : at + dice.choice([1, 7, 1000])]
        elif items:
            items[at % len(items)] = items[dice.randrange(len(items))]
    return file.with_keys({name: gguf_bytes.array(of, items)})


def other_template(file: File, dice: Dice) -> File:
    parts = [TEMPLATE[dice.randrange(len(TEMPLATE)) :], *dice.choices(TEMPLATES, k=2)]
    source = "".join(dice.sample(parts, dice.choice([1, 1, 2])))
    return file.with_keys({"tokenizer.chat_template": (STRING, source)})


def other_tensor(file: File, dice: Dice) -> File:
    """Another size, type, place or name; or none."""
    if not file.tensors:
        return file
    one = dice.choice(file.tensors)
    dims = list(one.dims)
    change = dice.choice(["dims", "dims", "dims", "type", "offset", "name", "gone", "twice"])
    if change == "gone":
        return replace(file, tensors=tuple(each for each in file.tensors if each is not one))
    if change == "twice":
        other = replace(one, name=dice.choice([one.name, "output.bias", "blk.0.attn_q.bias", "x"]))
        return replace(file, tensors=(*file.tensors, other))
    if change == "dims" and dims and dice.random() < 0.7:
        dims[dice.randrange(len(dims))] = dice.choice([*WHOLE, 64, 96, 2**63, 2**64 - 1])
    elif change == "dims":
        dims = dice.choice([dims[::-1], dims[:1], [], [*dims, 1], [1, *dims], [0, 0], [2**32] * 4])
    changes: dict[str, Any] = {
        "dims": {"dims": tuple(dims)},
        "type": {"type": dice.choice([*range(42), 99, 2**32 - 1])},
        "offset": {"offset": dice.choice([0, 32, 33, 2**20, 2**63, 2**64 - 32])},
        "name": {
            "name": dice.choice([one.name + "x", *STRINGS, "output.bias", "rope_freqs.weight"])
        },
    }[change]
    made = [replace(each, **changes) if each is one else each for each in file.tensors]
    return replace(file, tensors=tuple(made))


def other_weights(file: File, dice: Dice) -> File:
    """Numbers that are none, or any, at some places of a tensor or all over it."""
    if not file.tensors:
        return file
    one = dice.choice(file.tensors)
    data = bytearray(one.data)
    for _ in range(dice.choice([1, 3, 1000])):
        bad = dice.choice(
            [b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\xff" * 4, bytes(4), b"\0\x7e\0\x7c"]
        )
        at = 4 * dice.randrange(max(1, len(data) // 4))
        data[at : at + 4] = bad[: len(data) - at]
    return file.with_tensor(one.name, data=bytes(data))


def of_another_rotation(file: File, dice: Dice) -> File:
    """The keys of scaled frequencies, and a tensor of factors."""
    _, prefix = file.keys.get("general.architecture", (0, ""))
    kinds = ["yarn", "linear", "none", "su"]
    changes: dict[str, Any] = {f"{prefix}.rope.scaling.type": (STRING, dice.choice(kinds))}
    for name, key in KEYS.items():
        if "rope" in name and key.type == "a number" and dice.random() < 0.5:
            size = dice.choice([key.least, key.most, 1.0, 4.0, dice.choice(FLOATS)])
            changes[name.replace("[llm]", str(prefix))] = F64, float(size)
    if dice.random() < 0.3:
        factors = np.array([dice.choice([*FLOATS, 1.0, 8.0]) for _ in range(8)], np.float32)
        last = Tensor("rope_freqs.weight", (8,), 0, factors.tobytes())
        file = replace(file, tensors=(*file.tensors, last))
    return file.with_keys(changes)


def in_parts(file: File, dice: Dice) -> File:
    return file.with_keys(
        {
            "split.count": (2, dice.choice([0, 1, 2, 3, 65535])),
            "split.no": dice.choice([(2, 0), (2, 1), (I32, -1), (STRING, "0"), (F32, 0.0)]),
            "split.tensors.count": (I32, dice.choice([0, -1, 12, 2**31 - 1])),
        }
    )


CHANGES: Final[dict[Callable[[File, Dice], File], int]] = {
    other_key: 5,
    other_number: 4,
    no_key: 1,
    other_items: 5,
    other_template: 3,
    other_tensor: 4,
    other_weights: 3,
    of_another_rotation: 2,
    in_parts: 1,
}
"""Each change, and how often it is made."""


def bytes_changed(data: bytes, dice: Dice) -> bytes:
    """Some bytes of the header replaced, a number put over eight of them, or the file cut."""
    head, changed = data.find(b"blk.0.ffn_down"), bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 9])):
        at = dice.randrange(max(9, head))
        what = dice.random()
        if what < 0.5:
            changed[at] = dice.randrange(256)
        elif what < 0.9:
            changed[at : at + 8] = struct.pack("<Q", dice.choice([*WHOLE, 2**64 - 1]))
        else:
            del changed[dice.randrange(len(changed)) :]
            changed += b"G"  # one byte at least
        head = min(head, len(changed) - 8)
    return bytes(changed)


def changed_file(sound: list[File], dice: Dice) -> bytes:
    file = dice.choice(sound)
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        (change,) = dice.choices(list(CHANGES), list(CHANGES.values()))
        file = change(file, dice)
    data = file.bytes()
    return bytes_changed(data, dice) if dice.random() < 0.15 else data


# --- one file -------------------------------------------------------------------------------------


class TooLong(BaseException):
    """A file that takes too long; no `except Exception` keeps it."""


def _too_long(*_: Any) -> None:
    raise TooLong


def arguments(path: Path, dice: Dice) -> list[str]:
    """A question, a text to continue, or nothing but the first token. A question starts processes
    for the template, which take longer than all the rest."""
    rest = [str(path), "--reference", "--tokens", "2"]
    asked = dice.choice(["hi", "the hat", "", "\u00e9\u4e16\U0001f600", "</s>"])
    command = dice.choices(["chat", "decoder", "tokens"], [1, 8, 3])[0]
    if command == "tokens":
        return ["decoder", *rest]
    return [command, *rest, "--prompt", asked]


def packed_for_a_gpu(path: Path) -> None:
    """What a GPU would get of a file: each matrix as the kernels read it."""

    def make(weights: Any, last: bool, bias: Any = None) -> QuantLinear:
        layer = QuantLinear.from_blocks(weights, bias, accuracy="fast")
        for kernel in packings(layer.format, (9, 0), "fast", layer.in_features):
            kernel.pack(weights)
        return layer

    files.load(path, make)


def wrong_with(argv: list[str], seconds: float = SECONDS) -> tuple[str, str]:
    """("", what was said) of a command that behaves; else (what is wrong, ...)."""
    out, err, outcome = io.StringIO(), io.StringIO(), ANSWER
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command_line.main(argv)
        if status == 0:
            try:
                packed_for_a_gpu(Path(argv[1]))
            except ValueError as error:  # types that no kernel takes, scales that are no numbers
                outcome = f"on a GPU: {error}"
    except TooLong:
        return f"more than {seconds} s", traceback.format_exc()
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:100]}", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    said = out.getvalue() + err.getvalue()
    lines = [one for one in err.getvalue().splitlines() if not one.startswith("[")]
    if re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", said):
        return "a command to the terminal", ascii(said)
    if status not in (0, 2):
        return f"status {status}", said
    if status == 2 and len(lines) != 1:
        return f"{len(lines)} lines", said
    return "", outcome if status == 0 else lines[0].partition(": ")[2].replace(argv[1], "FILE")


def of_seed(seed: str, sound: list[File], folder: Path) -> list[str]:
    """Writes the file of a seed, and returns the arguments of a command for it."""
    dice = random.Random(seed)
    path = folder / dice.choice(["m.gguf", "m.gguf", "m-00001-of-00002.gguf"])
    path.write_bytes(changed_file(sound, dice))
    return arguments(path, dice)


def once(rendered: Any) -> Any:
    """`Template._rendered`, which starts a process, but what it made of the same it makes again."""
    made: dict[tuple[str, str], str] = {}

    def text(template: Any, given: Any) -> str:
        key = template._source, json.dumps(given)
        if key not in made:
            made[key] = rendered(template, given)
        return made[key]

    return text


def fuzz(seeds: Sequence[str]) -> tuple[Counter[str], list[str]]:
    """(How often each outcome came, what is wrong). Limits the memory of this process for good."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    signal.signal(signal.SIGALRM, _too_long)
    chat.LIMITS["seconds"] = 1
    torch.set_num_threads(1)  # several wait longer for each other than such a product takes
    command_line._parser = cache(command_line._parser)  # else half of the time
    chat.Template._rendered = once(chat.Template._rendered)  # and most of the rest
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "sound.gguf"
        sound = bases(folder)
        for file in sound:  # which also imports all that is needed, once
            path.write_bytes(file.bytes())
            for command in ("chat", "decoder"):
                options = [str(path), "--reference", "--tokens", "2", "--prompt", "hi"]
                bad, said = wrong_with([command, *options], 10 * SECONDS)
                assert said == ANSWER, (command, bad, said)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
        for seed in seeds:
            print(f"\r{seed} ", end="", file=sys.stderr, flush=True)  # if the process ends in it
            bad, said = wrong_with(of_seed(seed, sound, folder))
            if bad:
                wrong.append(f"--only {seed}: {bad}\n{said}")
            else:  # sentences are the same but for names and numbers
                outcomes[re.sub(r"'[^']*'|\"[^\"]*\"|-?\d[\d.e+-]*", "_", said)[:90]] += 1
    return outcomes, wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="SEED:NUMBER", help="one file")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="of --only: write it there")
    args = parser.parse_args(argv)
    seeds = [args.only] if args.only else [f"{args.seed}:{i}" for i in range(args.count)]
    if args.keep:
        with tempfile.TemporaryDirectory() as name:
            argv = of_seed(args.only, bases(Path(name)), Path(name))
            args.keep.write_bytes(Path(argv[1]).read_bytes())
            print("python -m steps", *argv)
    start = time.monotonic()
    outcomes, wrong = fuzz(seeds)
    for one, count in outcomes.most_common():
        print(f"{count:5} {one}")
    print(*wrong, sep="\n")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{len(seeds)} files in {time.monotonic() - start:.0f} s, {most} MB: {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
