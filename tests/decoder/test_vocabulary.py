"""Texts to tokens and back: as transformers does it, from the same files.

Vocabularies of the kinds that no package brings are learned here, by the tokenizers package, from
the page of English, code, Chinese and emoji that is compared.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from gguf import GGUFWriter

from qformats.gguf_file import GGUFError, metadata
from steps.decoder.text import vocabulary
from steps.decoder.text.vocabulary import PRE_TOKENIZERS, SPACE, Vocabulary, merges_of
from tests.decoder.smollm2 import smollm2

GOLDEN = Path(__file__).parent / "golden"
PAGE = (GOLDEN / "page.txt").read_text(encoding="utf-8")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def learned(pre: Any, trainer: Any) -> tuple[list[str], list[str]]:
    """Tokens and merges learned from the page, words being cut by `pre`."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre
    made.train_from_iterator(PAGE.splitlines(keepends=True), trainer)
    found = json.loads(made.to_str())["model"]
    tokens = sorted(found["vocab"], key=found["vocab"].get)
    return tokens, [" ".join(one) for one in found["merges"]]


def byte_level(pre: str) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary of 600 tokens, some of them control tokens."""
    parts = tokenizers.pre_tokenizers
    alphabet = sorted(parts.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False
    )
    split = PRE_TOKENIZERS[pre].split
    steps = [parts.Digits(individual_digits=True)] if PRE_TOKENIZERS[pre].single_digits else []
    if split:
        steps.append(parts.Split(tokenizers.Regex(split), behavior="isolated"))
    steps.append(parts.ByteLevel(add_prefix_space=False, use_regex=not split))
    tokens, merges = learned(parts.Sequence(steps), trainer)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *SPECIAL, "<think>"],
        "token_type": [1] * len(tokens) + [3] * len(SPECIAL) + [4],
        "merges": merges,
        "bos_token_id": len(tokens) + 1,
        "eos_token_id": len(tokens) + 2,
    }


def sentencepiece() -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary without most Chinese letters: these become bytes."""
    parts = tokenizers.pre_tokenizers
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, limit_alphabet=90, show_progress=False)
    tokens, _ = learned(parts.Metaspace(SPACE), trainer)
    first = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    return {
        "model": "llama",
        "tokens": [*first, *tokens],
        "scores": [0.0] * len(first) + [-float(i) for i in range(len(tokens))],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(tokens)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def written(path: Path, keys: dict[str, Any]) -> Path:
    """A GGUF file of metadata alone."""
    writer = GGUFWriter(path, "llama")
    kinds = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}
    for name, value in keys.items():
        add = kinds.get(type(value), writer.add_array)
        add(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of(keys: dict[str, Any]) -> Vocabulary:
    return Vocabulary({f"tokenizer.ggml.{name}": value for name, value in keys.items()}, "a.gguf")


def of_transformers(path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


TEXTS = [PAGE, "", " ", "a", "  two", "end \n\n", "<|im_end|>", "a<think>b", "\u4e16\u754c 2024"]


# The names under which both know a way to cut words.
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "llama"])
def test_tokens_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    keys = sentencepiece() if pre == "llama" else byte_level(pre)
    path = written(tmp_path / "words.gguf", keys)
    ours, theirs = Vocabulary(metadata(path), path), of_transformers(path)
    assert len(ours.ids(PAGE)) < len(PAGE.encode()), "some words are tokens"
    for text in TEXTS:
        assert ours.ids(text, whole=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.text(ours.ids(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )


def test_tokens_of_a_real_model() -> None:
    """Of a page that transformers has read, when the golden file was made."""
    path, golden = smollm2(), json.loads((GOLDEN / "page_smollm2.json").read_text())
    vocabulary = Vocabulary(metadata(path), path)
    assert path.name == golden["file"]
    assert vocabulary.ids(PAGE) == golden["ids"]
    assert vocabulary.text(golden["ids"]) == PAGE
    assert vocabulary.ends == {0, 2}
    assert (vocabulary.begin, vocabulary.bos) == (None, "<|im_start|>")


def test_golden_tokens_are_those_of_transformers() -> None:
    golden = json.loads((GOLDEN / "page_smollm2.json").read_text())
    assert of_transformers(smollm2()).encode(PAGE) == golden["ids"]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_stream_never_has_half_a_character(kind: str) -> None:
    vocabulary = of(sentencepiece() if kind == "sentencepiece" else byte_level("qwen2"))
    ids = vocabulary.ids(PAGE, whole=False)
    add = vocabulary.stream()
    pieces = [add(one) for one in ids]
    assert "".join(pieces) == PAGE
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("") > 50, "tokens that are parts of a character"
    # behind other tokens, as when a prompt is continued
    add = vocabulary.stream(ids[:40])
    assert vocabulary.text(ids[:40]) + "".join(add(one) for one in ids[40:]) == PAGE


def test_what_texts_begin_and_end_with() -> None:
    keys = byte_level("llama-bpe")
    bos, eos = keys["bos_token_id"], keys["eos_token_id"]
    assert of(keys).ids("")[:1] == [bos], "as Llama 3 does where the file says nothing"
    assert of(keys | {"add_bos_token": False}).ids("") == []
    assert of(keys | {"pre": "qwen2"}).ids("") == []
    both = of(keys | {"add_eos_token": True})
    assert both.ids("") == [bos, eos]
    assert both.ids("", whole=False) == []
    assert (both.bos, both.eos) == ("<|im_start|>", "<|im_end|>")
    assert of(sentencepiece()).ids("")[:1] == [1]


def test_what_ends_an_answer() -> None:
    keys = byte_level("gpt-2")
    last = keys["eos_token_id"]
    assert of(keys).ends == {last - 2, last}, "eos, and <|endoftext|> by its name"
    assert of(keys | {"eot_token_id": 7, "eom_token_id": 8}).ends == {last - 2, last, 7, 8}


def test_words_that_are_tokens() -> None:
    """Llama 3 takes such a word whole, even where no merges lead to it."""
    keys = byte_level("llama-bpe")
    keys["tokens"] = [*keys["tokens"], "zqzqz"]
    assert of(keys).ids("zqzqz", whole=False) == [len(keys["tokens"]) - 1]
    assert len(of(keys | {"pre": "qwen2"}).ids("zqzqz", whole=False)) > 1


def test_letters_and_accents_are_composed_for_qwen() -> None:
    apart, composed = "e\u0301", "\u00e9"
    vocabulary = of(byte_level("qwen2"))
    assert vocabulary.ids(apart) == vocabulary.ids(composed)
    assert of(byte_level("gpt-2")).ids(apart) != of(byte_level("gpt-2")).ids(composed)


def test_merges_of_scores() -> None:
    """The best score first; of two ways to one token the one with the longer left part."""
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    scores = np.array([-9, -9, -9, -2, -1, -3], np.float32)
    assert merges_of(tokens, scores) == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


def test_merges_of_long_tokens_take_little_memory(monkeypatch: Any) -> None:
    """A token of n letters has n cuts, of n letters together; their pairs are some bytes each."""
    tokens = ["a" * i for i in range(1, 300)] + ["b" * 100_000]
    scores = np.zeros(len(tokens), np.float32)
    tracemalloc.start()
    found = merges_of(tokens, scores)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 298 * 299 // 2
    assert most < 200 * len(found)
    monkeypatch.setattr(vocabulary, "MOST_MERGES", len(found))
    assert merges_of(tokens, scores) == found
    monkeypatch.setattr(vocabulary, "MOST_MERGES", len(found) - 1)
    with pytest.raises(GGUFError, match="its tokens are made by more than 44550 merges"):
        merges_of(tokens, scores)


def test_words_of_random_models(tmp_path: Path) -> None:
    from steps.decoder import files

    vocabulary = files.Model(
        files.write_tiny(tmp_path / "tiny.gguf", embedding_length=64)
    ).vocabulary
    ids = vocabulary.ids("the hat X")
    words = metadata(tmp_path / "tiny.gguf")["tokenizer.ggml.tokens"]
    assert [words[one] for one in ids] == ["<s>", SPACE, "the", SPACE, "hat", SPACE, "<0x58>"]
    assert vocabulary.text(ids) == "the hat X"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "bert"}, "a.gguf has a vocabulary of kind 'bert', and those supported are gpt2"),
        ({"tokens": []}, "has a vocabulary of kind 'gpt2'"),
        ({"pre": "viking"}, "has the pre-tokenizer 'viking', and those supported are default, gpt"),
    ],
)
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(GGUFError, match=said):
        of(byte_level("gpt-2") | change)


def test_without_the_package_it_says_so(monkeypatch: Any) -> None:
    keys = byte_level("gpt-2")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tokenizers, or give tokens with"):
        of(keys)
