"""Texts to tokens and back: as transformers does it, from the same files, and sentencepiece.

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
    splits = PRE_TOKENIZERS[pre].splits
    steps = [parts.Digits(individual_digits=True)] if PRE_TOKENIZERS[pre].single_digits else []
    steps += [parts.Split(tokenizers.Regex(one), behavior="isolated") for one in splits]
    steps.append(parts.ByteLevel(add_prefix_space=False, use_regex=not splits))
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
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_tokens_are_those_of_transformers(tmp_path: Path, pre: str) -> None:
    path = written(tmp_path / "words.gguf", byte_level(pre))
    ours, theirs = Vocabulary(metadata(path), path), of_transformers(path)
    assert len(ours.ids(PAGE)) < len(PAGE.encode()), "some words are tokens"
    for text in TEXTS:
        assert ours.ids(text, whole=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.text(ours.ids(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )


SENTENCEPIECE = json.loads((GOLDEN / "sentencepiece.json").read_text())


def test_tokens_are_those_of_sentencepiece() -> None:
    """A space is before a text and behind each control token, also where there is one already."""
    keys = {name: SENTENCEPIECE[name] for name in ("tokens", "scores", "token_type")}
    vocabulary, words = of({"model": "llama"} | keys), keys["tokens"]
    for text, ids in SENTENCEPIECE["ids"]:
        assert vocabulary.ids(text, whole=False) == ids, text
        assert vocabulary.text(ids) == text.replace(SPACE, " ")
    for text, ids in SENTENCEPIECE["chats"]:
        assert vocabulary.ids(text, whole=False) == ids, text
    chat = [words[i] for i in vocabulary.ids("<s>[b</s>", whole=False)]
    assert chat == ["<s>", SPACE + "[", "b", "</s>"]
    assert (vocabulary.begin, vocabulary.ends) == (1, {2}), "where the file does not say"
    bare = of({"model": "llama", "add_space_prefix": False} | keys)
    assert [words[i] for i in bare.ids("<s>[b", whole=False)] == ["<s>", "[", "b"]
    assert bare.text(bare.ids(" b")) == " b"


def test_tokens_that_are_parted_from_the_text() -> None:
    """The unknown token, those of the user and those that end answers, by their names."""
    keys = sentencepiece()
    kinds = [*keys["token_type"], 4, 1]
    keys |= {"tokens": [*keys["tokens"], "<tool>", "<|eot_id|>"], "token_type": kinds}
    keys["scores"] = [*keys["scores"], 0.0, 0.0]
    vocabulary, last = of(keys), len(kinds) - 1
    ids = vocabulary.ids("<unk><tool><|eot_id|>", whole=False)
    assert ids == [0, last - 1, last]
    assert vocabulary.text(ids) == "<tool>"
    keys = byte_level("gpt-2")
    keys |= {"tokens": [*keys["tokens"], "\u00e9"], "token_type": [*keys["token_type"], 4]}
    keys["tokens"].remove("\u00e9")  # the letter of the byte 0xe9
    keys["token_type"].pop(0)
    keys["merges"] = [one for one in keys["merges"] if "\u00e9" not in one]
    assert of(keys).text(of(keys).ids("\u00e9.", whole=False)) == "\u00e9."


def test_tokens_of_a_real_model() -> None:
    """Of a page that transformers has read, when the golden file was made."""
    path, golden = smollm2(), json.loads((GOLDEN / "page_smollm2.json").read_text())
    vocabulary = Vocabulary(metadata(path), path)
    assert path.name == golden["file"]
    assert vocabulary.ids(PAGE) == golden["ids"]
    assert vocabulary.text(golden["ids"]) == PAGE
    assert vocabulary.ends == {0, 2, 4}, "<|endoftext|>, <|im_end|>, <reponame>: as llama.cpp's"
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
    assert pieces.count("") > 10, "tokens that are parts of a character"
    # behind other tokens, as when a prompt is continued
    add = vocabulary.stream(ids[:40])
    assert vocabulary.text(ids[:40]) + "".join(add(one) for one in ids[40:]) == PAGE


def test_bytes_that_are_no_utf8_do_not_end_an_answer() -> None:
    vocabulary = of(sentencepiece())
    byte = [vocabulary._tokens.index(f"<0x{i:02X}>") for i in range(256)]

    def pieces(raw: bytes) -> list[str]:
        add = vocabulary.stream([1])
        return [*(add(byte[one]) for one in raw), add(None)]

    assert pieces(b"\n\xf0\x9f\x98\x80") == ["\n", "", "", "", "\U0001f600", ""]
    assert pieces(b"\n\xf0\x9fab") == ["\n", "", "", "\ufffda", "b", ""]
    assert pieces(b"a\xe9") == ["a", "", "\ufffd"], "at the end"
    assert pieces(b"\xff\xc0.") == ["\ufffd", "\ufffd", ".", ""]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_any_tokens_are_a_text(kind: str) -> None:
    """Of a byte-level vocabulary the text that `tokenizers` makes of them, which makes one at a
    time fail; of SentencePiece the text of the bytes."""
    keys = sentencepiece() if kind == "sentencepiece" else byte_level("gpt-2")
    vocabulary, rng = of(keys), np.random.default_rng(0)
    vocabulary._tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for _ in range(1000):
        ids = rng.integers(3, len(keys["tokens"]), rng.integers(1, 12)).tolist()
        add = vocabulary.stream()
        found = "".join([*map(add, ids), add(None)])
        assert found == vocabulary.text(ids)
        if kind == "byte-level":
            assert found == vocabulary._tokenizer.decode(ids), ids
            continue
        words = [keys["tokens"][i] for i in ids]
        raw = [
            bytes([int(one[3:5], 16)]) if one.startswith("<0x") else one.encode() for one in words
        ]
        text = b"".join(raw).decode("utf-8", "replace").replace(SPACE, " ")
        assert found == text.removeprefix(" "), words


def test_tokens_past_the_vocabulary_add_nothing() -> None:
    vocabulary = of(byte_level("gpt-2"))
    assert vocabulary.text([len(vocabulary._tokens), 1 << 30]) == ""


def test_texts_that_are_no_utf8_are_refused() -> None:
    vocabulary = of(byte_level("gpt-2"))
    with pytest.raises(ValueError, match=r"the text is no UTF-8 at its character 4: 'caf.udce9!'"):
        vocabulary.ids("caf\udce9!")


def test_words_where_the_file_does_not_say_how_they_are_cut() -> None:
    """As by llama.cpp's default, not as by any model's."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    more = ["12", "23", "123", "1234", "'V", "'VE", "!'"]
    keys = {
        "model": "gpt2",
        "tokens": [*letters, *more],
        "merges": ["1 2", "2 3", "12 3", "123 4", "' V", "'V E", "! '"],
        "token_type": [1] * 263,
        "bos_token_id": 0,
    }

    def words(keys: dict[str, Any]) -> list[str]:
        return [keys["tokens"][i] for i in of(keys).ids("I'VE 1234!'", whole=False)]

    assert words(keys) == ["I", "'", "V", "E", "\u0120", "123", "4", "!'"]
    assert words(keys | {"pre": "default"}) == words(keys)
    assert words(keys | {"pre": "gpt-2"})[-2:] == ["1234", "!'"]
    assert words(keys | {"pre": "llama-bpe"}) == ["I", "'VE", "\u0120", "123", "4", "!'"]
    said = of(keys).assumed
    assert of(keys | {"pre": ""}).assumed == said
    assert said.startswith("a.gguf lacks tokenizer.ggml.pre: words are cut as by llama.cpp's defau")
    assert of(keys | {"pre": "default"}).assumed == of(sentencepiece()).assumed == ""
    assert of(keys).begin is None


def test_what_a_conversation_begins_with() -> None:
    """As in llama.cpp: once, whether the template writes it or not."""
    keys = sentencepiece()
    for text in ("ab", "<s>ab"):
        assert of(keys).conversation(text) == of(keys).ids("ab"), text
    assert of(keys | {"add_bos_token": False}).conversation("ab") == of(keys).ids("ab")[1:]
    assert of(keys | {"add_bos_token": False}).conversation("<s>ab") == of(keys).ids("ab")
    assert of(keys | {"add_eos_token": True}).conversation("ab")[-1] != 2, "an answer follows"


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
    assert of(keys | {"fim_pad_token_id": 0, "eos_token_id": 9}).ends == {0, last - 2, last, 9}


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<|eot_id|>", "[EOS]", "<fim_pad>"], ["<|eot_id|>", "[EOS]", "<fim_pad>"]),
        (["<|end|>", "<|return|>"], ["<|end|>", "<|return|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|calls|>", "<|flush|>"], ["<|calls|>", "<|flush|>"]),
        (["</s>", "<|tool_response>"], ["<|tool_response>"]),
        (["<|eot_id|> ", "<stop>"], []),
    ],
)
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_names_that_end_an_answer(names: list[str], ends: list[str], kind: int) -> None:
    """As llama.cpp has them, whatever the type of the token."""
    keys = byte_level("gpt-2")
    first = len(keys["tokens"])
    keys["tokens"] = [*keys["tokens"], *names]
    keys["token_type"] = [*keys["token_type"], *[kind] * len(names)]
    found = of(keys).ends - of(byte_level("gpt-2")).ends
    assert found == {first + names.index(one) for one in ends}
    for one in ends:
        assert of(keys).text(of(keys).ids(f"a{one}b")) == "ab"


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


def test_tokens_that_texts_are_searched_for_have_a_limit(monkeypatch: Any) -> None:
    keys = sentencepiece()
    letters = sum(len(keys["tokens"][i]) for i, of in enumerate(keys["token_type"]) if of in (2, 3))
    monkeypatch.setattr(vocabulary, "MOST_LETTERS", letters)
    assert of(keys).bos == "<s>"
    for kind in (3, 4):
        more = keys | {"token_type": [*keys["token_type"][:-1], kind]}
        count = letters + len(keys["tokens"][-1])
        with pytest.raises(GGUFError, match=rf"of {count} letters together, and {letters} are the"):
            of(more)


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
        ({"merges": None}, "a.gguf lacks tokenizer.ggml.merges: convert the model again"),
        ({"merges": []}, "a.gguf lacks tokenizer.ggml.merges: convert the model again"),
        (
            {"merges": ["n d", "a  b"]},
            r"merges\[1\] is 'a b', and not two tokens that make anothe",
        ),
        (
            {"merges": ["n d", "n d \u0120"]},
            r"merges\[1\] is 'n d \u0120', and not two tokens that",
        ),
        ({"merges": ["th"]}, r"tokenizer.ggml.merges\[0\] is 'th', and not two tokens that make"),
        ({"merges": ["\u4e16 h"]}, r"tokenizer.ggml.merges\[0\] is '\u4e16 h', and not two tokens"),
        ({"merges": ["! !"]}, r"a.gguf: tokenizer.ggml.merges\[0\] is '! !', and not two tokens"),
        ({"bos_token_id": None, "add_bos_token": True}, "lacks tokenizer.ggml.bos_token_id, a to"),
        ({"bos_token_id": None, "pre": "llama-bpe"}, "lacks tokenizer.ggml.bos_token_id, a token"),
        ({"eos_token_id": None, "add_eos_token": True}, "lacks tokenizer.ggml.eos_token_id, a to"),
    ],
)
def test_what_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(GGUFError, match=said):
        of({n: one for n, one in (byte_level("gpt-2") | change).items() if one is not None})


def test_tokens_that_stand_for_nothing() -> None:
    """There may be several, and each kind of token may be one."""
    keys, more = sentencepiece(), ["", ""]
    for kind in (2, 3, 4, 5):
        keys |= {"tokens": [*keys["tokens"], *more], "scores": [*keys["scores"], 0.0, 0.0]}
        keys["token_type"] = [*keys["token_type"], kind, kind]
        keys["unknown_token_id"] = len(keys["tokens"]) - 1
        assert of(keys).text([*of(keys).ids("ab\u4e16"), keys["unknown_token_id"]]) == "ab\u4e16"
    bare = {"model": "llama", "tokens": ["", SPACE, "a"], "scores": [0.0] * 3}
    assert of(bare).ids("a\u4e16a", whole=False) == [1, 2, 2], "no letter, no byte, no token"


def test_incomplete_vocabularies_are_refused() -> None:
    keys = sentencepiece()
    with pytest.raises(GGUFError, match=r"a.gguf lacks tokenizer.ggml.scores: convert the model"):
        of({name: one for name, one in keys.items() if name != "scores"})
    words = [*keys["tokens"]]
    words[300] = words[270]
    with pytest.raises(GGUFError, match=r"a.gguf: tokens 270 and 300 are both '.*': convert the"):
        of(keys | {"tokens": words})


def test_without_the_package_it_says_so(monkeypatch: Any) -> None:
    keys = byte_level("gpt-2")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tokenizers, or give tokens with"):
        of(keys)
