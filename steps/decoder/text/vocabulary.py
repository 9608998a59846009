"""Texts to tokens and back, by the `tokenizers` package, as the metadata of a GGUF file say.

    gpt2     byte-level BPE: tokens, merges, and by name the pre-tokenizer that cuts texts in words
             (`PRE_TOKENIZERS`)
    llama    SentencePiece: tokens with scores. Two neighbours are merged if they are a token, those
             of the best score first; letters that are no token are written as bytes

Pre-tokenizers are those of the models' own `tokenizer.json`; llama.cpp (src/llama-vocab.cpp) and
transformers (integrations/gguf/gguf_tokenizer_mapping.py) list them by the same names. Merges of a
SentencePiece vocabulary are found as in transformers' `generate_merges`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qformats.gguf_file import GGUFError

SPACE: Final = "\u2581"  # how SentencePiece writes one
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
ENDS: Final = frozenset(
    [
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "</s>",
    ]
)
"""Names of control tokens that end an answer, whatever the file's eos and eot are: a part of those
that llama.cpp looks for (`special_eog_ids`)."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """split: a regular expression, or "" for that of GPT-2, which tokenizers has. single_digits:
    each digit is a word. whole_words: a word that is a token is one, whatever the merges say.
    begins: whether texts begin with a token of their own where the file does not say. nfc: whether
    letters and their accents are composed first."""

    split: str = ""
    single_digits: bool = False
    whole_words: bool = False
    begins: bool = False
    nfc: bool = False


def _words(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = PreTokenizer()
_SMOLLM = PreTokenizer(single_digits=True)
_LLAMA_3 = PreTokenizer(_words(r"\p{N}{1,3}"), whole_words=True, begins=True)
_QWEN_2 = PreTokenizer(_words(r"\p{N}"), nfc=True)
PRE_TOKENIZERS: Final = {
    **dict.fromkeys(("default", "gpt-2"), _GPT2),
    **dict.fromkeys(("smollm", "refact", "command-r"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN_2),
}
"""By tokenizer.ggml.pre."""
MOST_MERGES: Final = 1 << 20
"""Twice those of the largest vocabulary in use."""


class Vocabulary:
    """The vocabulary of a file.

    begin : the token that `ids` puts before a text, or None.
    end   : the token that it puts behind it, or None.
    bos, eos : the tokens with which texts begin and end, as chat templates write them, or "".
    ends  : tokens that end an answer.
    """

    def __init__(self, keys: Mapping[str, Any], where: Any) -> None:
        """keys: the metadata of the file `where`. Raises GGUFError, in one sentence, for a kind of
        vocabulary that is not supported, ModuleNotFoundError without the tokenizers package."""

        def key(name: str, default: Any = None) -> Any:
            return keys.get(f"tokenizer.ggml.{name}", default)

        kind, tokens = key("model"), key("tokens")
        if kind not in ("gpt2", "llama") or not tokens:
            raise GGUFError(
                f"{where} has a vocabulary of kind {kind!r}, and those supported are gpt2 and "
                "llama: give tokens with --ids"
            )
        if kind == "gpt2":
            name = key("pre", "default")
            if name not in PRE_TOKENIZERS:
                raise GGUFError(
                    f"{where} has the pre-tokenizer {name!r}, and those supported are "
                    f"{', '.join(PRE_TOKENIZERS)}: give tokens with --ids"
                )
            pre = PRE_TOKENIZERS[name]
            self._tokenizer = _byte_level(tokens, key("merges", []), pre)
        else:
            pre = PreTokenizer(begins=True)
            merges = key("merges")
            found = merges_of(tokens, key("scores", ())) if merges is None else _pairs(merges)
            unknown = tokens[key("unknown_token_id", 0)]
            self._tokenizer = _sentencepiece(tokens, found, unknown, key("add_space_prefix", True))
        kinds = key("token_type", ())
        control = {token for token, of in zip(tokens, kinds, strict=False) if of == CONTROL}
        own = [token for token, of in zip(tokens, kinds, strict=False) if of == USER_DEFINED]
        tokenizers = _tokenizers()
        added = [tokenizers.AddedToken(one, normalized=False, special=True) for one in control]
        self._tokenizer.add_special_tokens(added)
        self._tokenizer.add_tokens(
            [tokenizers.AddedToken(one, normalized=False, special=False) for one in own]
        )
        bos, eos = key("bos_token_id"), key("eos_token_id")
        self.begin = bos if key("add_bos_token", pre.begins) else None
        self.end = eos if key("add_eos_token", False) else None
        self.bos, self.eos = ("" if one is None else str(tokens[one]) for one in (bos, eos))
        ends = {i for i, token in enumerate(tokens) if token in control & ENDS}
        ends |= {key(f"{one}_token_id") for one in ("eos", "eot", "eom")}
        self.ends = frozenset(one for one in ends if one is not None)

    def ids(self, text: str, whole: bool = True) -> list[int]:
        """Tokens of a text. Names of control tokens in it are these tokens. whole: with the tokens
        before and behind it that the file asks for."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        begin, end = ([one] if whole and one is not None else [] for one in (self.begin, self.end))
        return [*begin, *found, *end]

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, without control tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self, before: Sequence[int] = ()) -> Callable[[int], str]:
        """A function that takes tokens one at a time and returns what each adds to the text of
        those `before`: "" while a character is not complete."""
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(ids=list(before), skip_special_tokens=True)
        return lambda one: decoder.step(self._tokenizer, one) or ""


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "texts need the package tokenizers: pip install tokenizers, or give tokens with --ids",
            name="tokenizers",
        ) from missing
    return tokenizers


def _pairs(merges: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(one.split(" ")) for one in merges]


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: PreTokenizer) -> Any:
    tokenizers = _tokenizers()
    parts, regex = tokenizers.pre_tokenizers, tokenizers.Regex
    number = {token: i for i, token in enumerate(tokens)}
    model = tokenizers.models.BPE(number, _pairs(merges), ignore_merges=pre.whole_words)
    made = tokenizers.Tokenizer(model)
    steps = [parts.Digits(individual_digits=True)] if pre.single_digits else []
    if pre.split:
        steps.append(parts.Split(regex(pre.split), behavior="isolated"))
    steps.append(parts.ByteLevel(add_prefix_space=False, use_regex=not pre.split))
    made.pre_tokenizer = parts.Sequence(steps)
    if pre.nfc:
        made.normalizer = tokenizers.normalizers.NFC()
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def _sentencepiece(
    tokens: Sequence[str], merges: Sequence[tuple[str, ...]], unknown: str, prefixed: bool
) -> Any:
    tokenizers = _tokenizers()
    decoders = tokenizers.decoders
    number = {token: i for i, token in enumerate(tokens)}
    model = tokenizers.models.BPE(
        number, list(merges), fuse_unk=True, byte_fallback=True, unk_token=unknown
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        SPACE, prepend_scheme="first" if prefixed else "never", split=False
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", left=1, right=0)] if prefixed else steps
    )
    return made


def merges_of(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs of tokens that make a token, those of the best score first; of one score, longer
    left parts first. GGUFError where there are more than `MOST_MERGES`."""
    number = {token: i for i, token in enumerate(tokens)}
    lengths = sorted({len(token) for token in number if token})
    found = array("i")  # (token, left part, right part) one after the other
    for i, token in enumerate(tokens):
        for length in lengths[: bisect_left(lengths, len(token))]:
            left = number.get(token[:length])
            right = None if left is None else number.get(token[length:])
            if left is not None and right is not None:
                found.extend((i, left, right))
        if len(found) > 3 * MOST_MERGES:
            raise GGUFError(f"its tokens are made by more than {MOST_MERGES} merges")
    pairs = np.array(found).reshape(-1, 3)
    sizes = np.array([len(token) for token in tokens])[pairs]
    order = np.lexsort((-sizes[:, 2], -sizes[:, 1], -np.asarray(scores)[pairs[:, 0]]))
    return [(tokens[a], tokens[b]) for a, b in pairs[order, 1:]]
