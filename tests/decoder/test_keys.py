"""What a file says of its model is looked at once: its types, ranges and what belongs together.

Files are written byte by byte (`tests.decoder.gguf_bytes`), so that a key may have any type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qformats.gguf_file import GGUFError, metadata
from steps.decoder import files, keys
from steps.decoder.keys import KEYS, TEXT, TEXTS, TOKEN, WHOLE
from steps.decoder.model import torch_products
from tests.decoder import gguf_bytes
from tests.decoder.gguf_bytes import BOOL, F32, F64, I32, I64, STRING, U32, array
from tests.decoder.test_decoder import SMALL

NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> gguf_bytes.File:
    folder = tmp_path_factory.mktemp("tiny")
    return gguf_bytes.read(files.write_tiny(folder / "tiny.gguf", **SMALL | {"block_count": 1}))


def said(path: Path, file: gguf_bytes.File) -> str:
    """The sentence that refuses a file, "" where it is loaded."""
    path.write_bytes(file.bytes())
    try:
        files.load(path, torch_products(), requantize="float32")
    except GGUFError as error:
        where, _, why = str(error).partition(str(path))
        return f"{where}{why.lstrip(': ')}"
    return ""


def test_the_file_as_it_is_is_read(tiny: gguf_bytes.File, tmp_path: Path) -> None:
    assert said(tmp_path / "m.gguf", tiny) == ""
    config = files.Model(tmp_path / "m.gguf").config
    assert (config.heads, config.head_dim, config.rotated, config.context) == (4, 16, 16, 1024)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": (
        {"llama.attention.head_count": (U32, 0)},
        "llama.attention.head_count is 0, and 1 to 65536 are taken: convert the model again",
    ),
    "a text for a number": (
        {"llama.attention.head_count": (STRING, "4")},
        "llama.attention.head_count is '4', and not a whole number: convert the model again",
    ),
    "true for one": (
        {"llama.block_count": (BOOL, True)},
        "llama.block_count is True, and not a whole number: convert the model again",
    ),
    "more rotated values than a head has": (
        {"llama.rope.dimension_count": (U32, 18)},
        "has 4 heads of 16 values, of which 18 are rotated, and 2 heads of keys: the last must",
    ),
    "half a pair": (
        {"llama.rope.dimension_count": (U32, 3)},
        "has 4 heads of 16 values, of which 3 are rotated, and 2 heads of keys",
    ),
    "a value without its pair": (
        {"llama.attention.key_length": (U32, 15), "llama.rope.dimension_count": (U32, 14)},
        "has 4 heads of 15 values, of which 14 are rotated, and 2 heads of keys",
    ),
    "queries of no key": (
        {"llama.attention.head_count_kv": (U32, 3)},
        "has 4 heads of 16 values, of which 16 are rotated, and 3 heads of keys",
    ),
    "more heads than values": (
        {"llama.attention.head_count": (U32, 65)},
        "has 65 heads of 0 values, of which 16 are rotated, and 2 heads of keys",
    ),
    "another count in each layer": (
        {"llama.attention.head_count_kv": array(U32, [2])},
        "has another llama.attention.head_count_kv in each layer: one is supported",
    ),
    "no architecture": (
        {"general.architecture": None},
        "lacks general.architecture: convert the model again",
    ),
    "several architectures": (
        {"general.architecture": array(STRING, ["llama", "llama"])},
        "general.architecture is an array of 2, and not a text: convert the model again",
    ),
    "tokens that are numbers": (
        {"tokenizer.ggml.tokens": array(U32, range(288))},
        "tokenizer.ggml.tokens is an array of 288, and not an array of texts: convert the model",
    ),
    "a long token": (
        {"tokenizer.ggml.tokens": array(STRING, ["a"] * 287 + ["b" * 1025])},
        "tokenizer.ggml.tokens[287] has 1025 characters, and 0 to 1024 are taken: convert the",
    ),
    "fewer tokens than rows": (
        {
            "tokenizer.ggml.tokens": array(STRING, ["a"] * 287),
            "tokenizer.ggml.scores": None,
            "tokenizer.ggml.token_type": None,
        },
        "has 287 tokens and an embedding of 288: convert the model again",
    ),
    "fewer scores than tokens": (
        {"tokenizer.ggml.scores": array(F32, [0.0] * 287)},
        "has 288 tokens and 287 of tokenizer.ggml.scores: convert the model again",
    ),
    "more kinds than tokens": (
        {"tokenizer.ggml.token_type": array(I32, [1] * 289)},
        "has 288 tokens and 289 of tokenizer.ggml.token_type: convert the model again",
    ),
    "kinds in fractions": (
        {"tokenizer.ggml.token_type": array(F32, [1.0] * 288)},
        "tokenizer.ggml.token_type is an array of 288, and not an array of whole numbers",
    ),
    "a switch of 1": (
        {"tokenizer.ggml.add_bos_token": (U32, 1)},
        "tokenizer.ggml.add_bos_token is 1, and not true or false: convert the model again",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(tiny: gguf_bytes.File, tmp_path: Path, case: str) -> None:
    changes, told = BAD[case]
    assert said(tmp_path / "m.gguf", tiny.with_keys(changes)).startswith(told)


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("block_count", U32, 2**32 - 1),
        ("context_length", I64, -1),
        ("attention.layer_norm_rms_epsilon", F32, -1.0),
        ("rope.dimension_count", U32, 2**32 - 1),
        ("rope.freq_base", F32, NAN),
        ("rope.scaling.factor", F64, 1e-320),
        ("rope.scaling.factor", F32, INFINITE),
        ("rope.scaling.yarn_beta_slow", F32, 0.0),
    ],
)
def test_numbers_that_no_model_has(
    tiny: gguf_bytes.File, tmp_path: Path, name: str, kind: int, value: Any
) -> None:
    told = said(tmp_path / "m.gguf", tiny.with_keys({f"llama.{name}": (kind, value)}))
    assert told.startswith(f"llama.{name} is {value}, and ")
    assert told.endswith(" are taken: convert the model again")


TOKENS = [name for name, key in KEYS.items() if key.type == TOKEN]


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_are_those_of_the_embedding(
    tiny: gguf_bytes.File, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "m.gguf"
    for kind, value in ((I32, -1), (U32, 288), (U32, 2**32 - 1), (I64, -(2**63))):
        assert said(path, tiny.with_keys({name: (kind, value)})) == (
            f"{name} is {value}, and tokens are 0 to 287: convert the model again"
        )
    for value in (0, 287):
        assert said(path, tiny.with_keys({name: (U32, value)})) == ""
    wrong = said(path, tiny.with_keys({name: array(U32, [1])}))
    assert wrong.startswith(f"{name} is an array of 1, and not a token")


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.most])
def test_a_range_is_all_of_it_and_no_more(name: str) -> None:
    key = KEYS[name]
    below, above = key.least - max(abs(key.least) / 1e6, 1e-40), key.most + abs(key.most) / 1e6
    made: Any = float
    if key.type in (WHOLE, keys.WHOLES):
        below, above, made = key.least - 1, key.most + 1, int
    if key.type in (TEXT, TEXTS):
        below, above, made = key.least - 1, key.most + 1, lambda count: "a" * int(count)
    arrays = {TEXTS: lambda one: ["a", one], keys.NUMBERS: lambda one: np.array([0.0, one])}
    arrays[keys.WHOLES] = lambda one: np.array([0, one])
    value = arrays.get(key.type, lambda one: one)
    for size in (key.least, key.most):
        keys._checked(name, value(made(size)), key, "m")
    wrong = [above, below] if below >= 0 or made in (int, float) else [above]
    for size in wrong + [NAN, INFINITE] * (made is float):
        with pytest.raises(GGUFError, match=r"^m: .* are taken: convert the model again$"):
            keys._checked(name, value(made(size)), key, "m")


def test_whole_numbers_are_numbers() -> None:
    found = keys._checked("a", 10000, KEYS["[llm].rope.freq_base"], "m")
    assert (type(found), found) == (float, 10000.0)


def test_what_is_not_in_the_table_is_not_read(tiny: gguf_bytes.File, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert said(path, tiny.with_keys({"llama.rope.other": (U32, 1)})) == ""
    assert "llama.rope.other" in metadata(path)
    assert "llama.rope.other" not in files.Model(path).keys


def test_texts_need_tokens_and_tokens_do_not(tiny: gguf_bytes.File, tmp_path: Path) -> None:
    bare = {name: None for name in tiny.keys if name.startswith("tokenizer.")}
    path = tmp_path / "m.gguf"
    assert said(path, tiny.with_keys(bare)) == ""
    model = files.Model(path)
    assert model.first == 1
    with pytest.raises(GGUFError, match=r"lacks tokenizer.ggml.model, which texts need: give tok"):
        _ = model.vocabulary


def test_the_first_token_of_a_model_that_has_one(tiny: gguf_bytes.File, tmp_path: Path) -> None:
    bare = {name: None for name in tiny.keys if name.startswith("tokenizer.")}
    one = tiny.with_keys(bare).with_tensor("token_embd.weight", dims=(64, 1))
    path = tmp_path / "m.gguf"
    path.write_bytes(one.bytes())
    assert files.Model(path).first == 0


def test_other_vectors_than_numbers(tiny: gguf_bytes.File, tmp_path: Path) -> None:
    values = np.ones(64, np.float32)
    for bad in (NAN, INFINITE, -INFINITE):
        values[3] = bad
        for name in ("blk.0.attn_norm.weight", "output_norm.weight"):
            wrong = said(tmp_path / "m.gguf", tiny.with_tensor(name, data=values.tobytes()))
            assert wrong == f"{name} has 1 values that are no numbers: get the file again"


def test_blocks_whose_scales_are_no_numbers(tmp_path: Path) -> None:
    """Of matrices, of the embedding, and of experts: the logits would be none, and the tokens 0."""
    for kind, names in (
        ("llama", ("blk.0.attn_k", "blk.0.ffn_up", "token_embd", "output")),
        ("qwen3moe", ("blk.0.ffn_gate_exps", "blk.0.ffn_down_exps")),
    ):
        path = files.write_tiny(tmp_path / f"{kind}.gguf", "q4_1", architecture=kind)
        file = gguf_bytes.read(path)
        held = {one.name: one.data for one in file.tensors}
        for name in names:
            data = bytearray(held[f"{name}.weight"])
            data[20:24] = np.array([NAN, INFINITE], np.float16).tobytes()
            wrong = said(path, file.with_tensor(f"{name}.weight", data=bytes(data)))
            assert wrong == f"{name}.weight has 2 scales that are no numbers: get the file again"


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_factors_that_frequencies_cannot_be_divided_by(tmp_path: Path, bad: float) -> None:
    factors = np.array([1, 1, bad, 1, 1, 1, 1, 1], np.float32)
    path = files.write_tiny(tmp_path / "m.gguf", factors=factors, **SMALL | {"block_count": 1})
    with pytest.raises(GGUFError, match=rf"rope_freqs.weight has {bad}, and frequencies are div"):
        files.load(path, torch_products(), requantize="float32")


@pytest.mark.parametrize("dims", [(64,), (64, 0), (64, 8, 1), ()])
def test_an_embedding_is_a_matrix(
    tiny: gguf_bytes.File, tmp_path: Path, dims: tuple[int, ...]
) -> None:
    wrong = said(tmp_path / "m.gguf", tiny.with_tensor("token_embd.weight", dims=dims, type=0))
    assert wrong.startswith(f"token_embd.weight has shape {list(dims[::-1])}, and a row for each")


def test_what_a_context_holds(tiny: gguf_bytes.File, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert said(path, tiny.with_keys({"llama.context_length": (U32, 10)})) == ""
    model = files.Model(path)
    assert model.room([1] * 4, 6) == 6
    assert model.room([1] * 4, None, 64) == 6
    assert model.room([1] * 4, None, 5) == 5
    assert model.room([287] * 9) == 1
    for ids, asked in (([1] * 4, 7), ([1] * 10, None), ([1] * 11, None)):
        with pytest.raises(ValueError, match=rf"{len(ids)} tokens and {asked or 1} more are asked"):
            model.room(ids, asked)
    for wrong in (288, -1):
        with pytest.raises(ValueError, match=rf"--ids has {wrong} and .* has tokens 0 to 287"):
            model.room([1, wrong])
