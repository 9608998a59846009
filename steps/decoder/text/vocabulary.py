"""Texts to tokens and back, by the `tokenizers` package, as the metadata of a GGUF file say.

    gpt2     byte-level BPE: tokens, merges, and by name the pre-tokenizer that cuts texts in words
             (`PRE_TOKENIZERS`)
    llama    SentencePiece: tokens with scores. Two neighbours are merged if they are a token, those
             of the best score first; letters that are no token are written as bytes

Texts become the tokens that llama.cpp makes (src/llama-vocab.cpp), which are those that the model
was trained with: a SentencePiece vocabulary puts a space before a text and behind every control
token in it. Pre-tokenizers are those of the models' own `tokenizer.json`; llama.cpp and
transformers (integrations/gguf/gguf_tokenizer_mapping.py) list them by the same names. Qwen's
composes letters and accents, as the model's own does and llama.cpp does not. Merges of a
SentencePiece vocabulary are found as in transformers' `generate_merges`.

Tokens become bytes, and these a text: bytes that are no UTF-8 show as U+FFFD. (The decoders of
`tokenizers` raise an error in the middle of an answer instead.)
"""

from __future__ import annotations

import codecs
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from qformats.gguf_file import GGUFError

SPACE: Final = "\u2581"  # how SentencePiece writes one
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type
# fmt: off
ENDS: Final = frozenset([
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>",
    "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    "<|file_sep|>",
])
# fmt: on
"""Names of tokens that end an answer and are control tokens, whatever else the file says of them:
those of llama.cpp (`special_eog_ids`)."""
ENDED_BY: Final = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""tokenizer.ggml.<name>_token_id are tokens that end an answer, too."""
NO_END: Final = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|calls|>", "<|flush|>"}),
    ("</s>", {"<|tool_response>"}),
)
"""(a name that ends no answer, in vocabularies that have all of these), as in llama.cpp."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """splits: regular expressions; each cuts what those before it left. Without one, that of GPT-2,
    which tokenizers has. single_digits: each digit is a word. whole_words: a word that is a token
    is one, whatever the merges say. begins: whether texts begin with a token of their own where the
    file does not say. nfc: whether letters and their accents are composed first."""

    splits: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words: bool = False
    begins: bool = False
    nfc: bool = False


def _words(digits: str) -> tuple[str]:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )


_GPT2 = PreTokenizer()
_DEFAULT = PreTokenizer(
    (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )
)
_SMOLLM = PreTokenizer(single_digits=True)
_LLAMA_3 = PreTokenizer(_words(r"\p{N}{1,3}"), whole_words=True, begins=True)
_QWEN_2 = PreTokenizer(_words(r"\p{N}"), nfc=True)
PRE_TOKENIZERS: Final = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    **dict.fromkeys(("smollm", "refact", "command-r"), _SMOLLM),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN_2),
}
"""By tokenizer.ggml.pre."""
MOST_MERGES: Final = 1 << 20
"""Twice those of the largest vocabulary in use."""
MOST_LETTERS: Final = 1 << 18
"""Of tokens that texts are searched for before they are cut into words, by a machine that takes a
hundred bytes and some microseconds a letter. Gemma 3 has 80 000."""

_SHOWN: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES: Final = {
    **{chr(byte): byte for byte in _SHOWN},
    **{chr(256 + i): byte for i, byte in enumerate(sorted({*range(256)} - {*_SHOWN}))},
}
"""Letters of byte-level tokens -> bytes: GPT-2's table, which has visible letters for all."""


class Vocabulary:
    """The vocabulary of a file.

    begin : the token that `ids` puts before a text, or None.
    end   : the token that it puts behind it, or None.
    bos, eos : the tokens with which texts begin and end, as chat templates write them, or "".
    ends  : tokens that end an answer.
    assumed : what the file does not say and is taken for granted, in a sentence, or "".
    """

    def __init__(self, keys: Mapping[str, Any], where: Any) -> None:
        """keys: the metadata of the file `where`. Raises GGUFError, in one sentence, for a kind of
        vocabulary that is not supported or not complete, ModuleNotFoundError without the tokenizers
        package."""

        def key(name: str, default: Any = None) -> Any:
            return keys.get(f"tokenizer.ggml.{name}", default)

        kind, tokens = key("model"), key("tokens")
        if kind not in ("gpt2", "llama") or not tokens:
            raise GGUFError(
                f"{where} has a vocabulary of kind {kind!r}, and those supported are gpt2 and "
                "llama: give tokens with --ids"
            )
        self._tokens: Sequence[str] = tokens
        self._byte_level, self._spaced, self.assumed = kind == "gpt2", False, ""
        number, merges, ids = _numbered(tokens, where), key("merges"), {}
        if self._byte_level:
            if not key("pre"):
                self.assumed = (
                    f"{where} lacks tokenizer.ggml.pre: words are cut as by llama.cpp's default, "
                    "which may not be how the model was trained; convert it again"
                )
            pre = PRE_TOKENIZERS.get(key("pre") or "default")
            if pre is None:
                raise GGUFError(
                    f"{where} has the pre-tokenizer {key('pre')!r}, and those supported are "
                    f"{', '.join(PRE_TOKENIZERS)}: give tokens with --ids"
                )
            self._tokenizer = _byte_level(number, _pairs(merges, number, where), pre)
        else:
            pre = PreTokenizer(begins=True)
            ids = {name: i for name, i in (("bos", 1), ("eos", 2)) if i < len(tokens)}
            if merges is not None:
                pairs = _pairs(merges, number, where)
            elif key("scores") is not None:
                pairs = merges_of(tokens, key("scores"))
            else:
                raise GGUFError(f"{where} lacks tokenizer.ggml.scores: convert the model again")
            unknown = tokens[key("unknown_token_id", 0)]
            self._spaced = key("add_space_prefix", True)
            self._tokenizer = _sentencepiece(number, pairs, unknown, self._spaced)

        stated = {name: key(f"{name}_token_id") for name in ("bos", *ENDED_BY)}
        ids |= {name: one for name, one in stated.items() if one is not None}
        named = ENDS & number.keys()
        ends = {number[name] for name in named} | {ids[one] for one in ENDED_BY if one in ids}
        self.ends = frozenset(
            ends - {number[name] for name, others in NO_END if name in named and others <= named}
        )
        kinds = dict(enumerate(key("token_type", ())))
        control = {i for i, one in kinds.items() if one in (CONTROL, UNKNOWN)}
        self._silent = frozenset(control | (self.ends & {number[name] for name in named}))
        self._whole = frozenset(i for i, one in kinds.items() if one == USER_DEFINED)
        letters = sum(len(tokens[i]) for i in self._silent | self._whole)
        if letters > MOST_LETTERS:
            raise GGUFError(
                f"{where} has control and user-defined tokens of {letters} letters together, and "
                f"{MOST_LETTERS} are the most: convert the model again"
            )
        parted = _tokenizers().AddedToken
        self._tokenizer.add_special_tokens(
            [parted(tokens[i], normalized=False, special=True) for i in sorted(self._silent)]
        )
        self._tokenizer.add_tokens(
            [parted(tokens[i], normalized=False, special=False) for i in sorted(self._whole)]
        )
        adds = {"bos": key("add_bos_token", pre.begins), "eos": key("add_eos_token", False)}
        for name, added in adds.items():
            if added and name not in ids:
                raise GGUFError(
                    f"{where} lacks tokenizer.ggml.{name}_token_id, a token that it puts to texts: "
                    "convert the model again, or give tokens with --ids"
                )
        self.begin, self.end = (ids[name] if added else None for name, added in adds.items())
        self.bos, self.eos = (tokens[ids[name]] if name in ids else "" for name in adds)

    def ids(self, text: str, whole: bool = True) -> list[int]:
        """Tokens of a text. Names of control tokens in it are these tokens. whole: with the tokens
        before and behind it that the file asks for. ValueError for a text that is no UTF-8."""
        require_utf8(text, "the text")
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        begin, end = ([one] if whole and one is not None else [] for one in (self.begin, self.end))
        return [*begin, *found, *end]

    def conversation(self, text: str) -> list[int]:
        """Tokens of a text that a chat template wrote. As in llama.cpp, the token with which texts
        begin is put before it where the file asks for that and the template left it out; none
        is put behind it, as an answer follows."""
        found = self.ids(text, whole=False)
        begin = [] if self.begin is None or found[:1] == [self.begin] else [self.begin]
        return [*begin, *found]

    def text(self, ids: Iterable[int]) -> str:
        """The text of tokens, without control tokens. Bytes that are no UTF-8 are U+FFFD."""
        add = self.stream()
        return "".join([*map(add, ids), add(None)])

    def stream(self, before: Iterable[int] = ()) -> Callable[[int | None], str]:
        """A function that takes tokens one at a time and returns what each adds to the text of
        those `before`: "" while a character is not complete. None instead of a token ends the
        text, and with it such a character."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        begins_with_space = self._spaced

        def add(token: int | None) -> str:
            nonlocal begins_with_space
            found = decoder.decode(b"" if token is None else self._bytes(token), token is None)
            if found and begins_with_space:
                found, begins_with_space = found.removeprefix(" "), False
            return found

        for one in before:
            add(one)
        return add

    def _bytes(self, token: int) -> bytes:
        """What a token adds to a text."""
        if token in self._silent or token >= len(self._tokens):
            return b""
        name = self._tokens[token]
        if not self._byte_level:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
            return bytes.fromhex(byte[1]) if byte else name.replace(SPACE, " ").encode()
        if token in self._whole or not BYTES.keys() >= set(name):
            return name.encode()
        return bytes(BYTES[letter] for letter in name)


def require_utf8(text: str, what: str) -> None:
    """ValueError for a text that is none: with bytes of a command line or of a terminal, which
    Python keeps in lone surrogates. what: its name in the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        start = error.start
        raise ValueError(
            f"{what} is no UTF-8 at its character {start + 1}: {text[max(start - 20, 0) :][:21]!r}"
        ) from None


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "texts need the package tokenizers: pip install tokenizers, or give tokens with --ids",
            name="tokenizers",
        ) from missing
    return tokenizers


def _numbered(tokens: Sequence[str], where: Any) -> dict[str, int]:
    """Tokens -> their numbers, without those that are "": they stand for nothing, and there may be
    several."""
    number = {token: i for i, token in enumerate(tokens) if token}
    twice = ((i, token) for i, token in enumerate(tokens) if number.get(token, i) != i)
    for first, token in twice:
        raise GGUFError(
            f"{where}: tokens {first} and {number[token]} are both {token[:40]!r}: convert the "
            "model again"
        )
    return number


def _pairs(
    merges: Sequence[str] | None, number: Mapping[str, int], where: Any
) -> list[tuple[str, str]]:
    """The pairs of tokens of tokenizer.ggml.merges, each of which makes a token."""
    if not merges:
        raise GGUFError(f"{where} lacks tokenizer.ggml.merges: convert the model again")
    found = []
    for i, one in enumerate(merges):
        left, _, right = one.partition(" ")
        if left not in number or right not in number or left + right not in number:
            raise GGUFError(
                f"{where}: tokenizer.ggml.merges[{i}] is {one[:40]!r}, and not two tokens that "
                "make another: convert the model again"
            )
        found.append((left, right))
    return found


def _byte_level(
    number: Mapping[str, int], merges: Sequence[tuple[str, str]], pre: PreTokenizer
) -> Any:
    tokenizers = _tokenizers()
    parts, regex = tokenizers.pre_tokenizers, tokenizers.Regex
    model = tokenizers.models.BPE(dict(number), list(merges), ignore_merges=pre.whole_words)
    made = tokenizers.Tokenizer(model)
    steps = [parts.Digits(individual_digits=True)] if pre.single_digits else []
    steps += [parts.Split(regex(one), behavior="isolated") for one in pre.splits]
    steps.append(parts.ByteLevel(add_prefix_space=False, use_regex=not pre.splits))
    made.pre_tokenizer = parts.Sequence(steps)
    if pre.nfc:
        made.normalizer = tokenizers.normalizers.NFC()
    return made


def _sentencepiece(
    number: Mapping[str, int], merges: Sequence[tuple[str, str]], unknown: str, spaced: bool
) -> Any:
    """spaced: whether a space is put before a text, and behind every control token in it: each
    piece of text between these is normalized by itself."""
    tokenizers = _tokenizers()
    parts = tokenizers.normalizers
    model = tokenizers.models.BPE(
        dict(number), list(merges), fuse_unk=True, byte_fallback=True, unk_token=unknown or None
    )
    made = tokenizers.Tokenizer(model)
    steps = [parts.Prepend(SPACE)] if spaced else []
    made.normalizer = parts.Sequence([*steps, parts.Replace(" ", SPACE)])
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
