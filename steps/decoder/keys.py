"""What a file says of its model: each key that is read, its type and its range.

A file comes from anywhere. `checked` looks at its keys once, before anything is computed from them,
and what is not in `KEYS` is not read. Names and types are those of ggml's `docs/gguf.md`, where
[llm] stands for the architecture. Ranges hold any model that there is, and what is computed from
them stays finite.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from qformats.gguf_file import GGUFError

WHOLE: Final = "a whole number"
NUMBER: Final = "a number"
TEXT: Final = "a text"
TOKEN: Final = "a token"
"""A whole number from 0 to the last token of the file (`require_tokens`)."""
SWITCH: Final = "true or false"
TEXTS: Final = "an array of texts"
NUMBERS: Final = "an array of numbers"
WHOLES: Final = "an array of whole numbers"
Reader = Literal["models", "texts"]


class Key(NamedTuple):
    """least, most : of a number, or of each one of an array; of a text, or of each one of an array,
    how many characters. default : where the file does not say. needed_by : who refuses a file
    without it; nobody by default."""

    type: str
    least: float = 0
    most: float = 0
    default: Any = None
    needed_by: Reader | None = None


POSITIONS: Final = (1 << 31) - 1

ARCHITECTURE: Final = "general.architecture"
KEYS: Final[dict[str, Key]] = {
    ARCHITECTURE: Key(TEXT, 1, 64, needed_by="models"),
    "[llm].block_count": Key(WHOLE, 1, 1024, needed_by="models"),
    "[llm].embedding_length": Key(WHOLE, 1, 1 << 20, needed_by="models"),
    "[llm].feed_forward_length": Key(WHOLE, 1, 1 << 24, needed_by="models"),
    "[llm].context_length": Key(WHOLE, 1, POSITIONS, needed_by="models"),
    "[llm].expert_count": Key(WHOLE, 0, 1 << 16, 0),
    "[llm].expert_used_count": Key(WHOLE, 1, 1 << 16, 1),
    "[llm].expert_feed_forward_length": Key(WHOLE, 1, 1 << 24),
    "[llm].expert_shared_feed_forward_length": Key(WHOLE, 1, 1 << 24),
    "[llm].attention.head_count": Key(WHOLE, 1, 1 << 16, needed_by="models"),
    "[llm].attention.head_count_kv": Key(WHOLE, 1, 1 << 16),
    "[llm].attention.key_length": Key(WHOLE, 2, 1 << 16),
    "[llm].attention.layer_norm_rms_epsilon": Key(NUMBER, 1e-30, 1, needed_by="models"),
    "[llm].rope.dimension_count": Key(WHOLE, 2, 1 << 16),
    "[llm].rope.freq_base": Key(NUMBER, 2, 1e15, 10000.0),
    "[llm].rope.scale_linear": Key(NUMBER, 1e-3, 1e6, 1.0),
    "[llm].rope.scaling.type": Key(TEXT, 0, 64, "linear"),
    "[llm].rope.scaling.factor": Key(NUMBER, 1e-3, 1e6),
    "[llm].rope.scaling.attn_factor": Key(NUMBER, 1e-3, 1e3, 1.0),
    "[llm].rope.scaling.original_context_length": Key(WHOLE, 1, POSITIONS),
    "[llm].rope.scaling.yarn_attn_factor": Key(NUMBER, 1e-3, 1e3),
    "[llm].rope.scaling.yarn_beta_fast": Key(NUMBER, 1e-3, 1e6, 32.0),
    "[llm].rope.scaling.yarn_beta_slow": Key(NUMBER, 1e-3, 1e6, 1.0),
    "tokenizer.ggml.model": Key(TEXT, 0, 64, needed_by="texts"),
    "tokenizer.ggml.pre": Key(TEXT, 0, 64),
    "tokenizer.ggml.tokens": Key(TEXTS, 0, 1024, needed_by="texts"),
    "tokenizer.ggml.merges": Key(TEXTS, 0, 2 * 1024 + 1),
    "tokenizer.ggml.scores": Key(NUMBERS, -1e30, 1e30),
    "tokenizer.ggml.token_type": Key(WHOLES, 0, 6),
    "tokenizer.ggml.bos_token_id": Key(TOKEN),
    "tokenizer.ggml.eos_token_id": Key(TOKEN),
    "tokenizer.ggml.eot_token_id": Key(TOKEN),
    "tokenizer.ggml.eom_token_id": Key(TOKEN),
    "tokenizer.ggml.fim_pad_token_id": Key(TOKEN),
    "tokenizer.ggml.fim_rep_token_id": Key(TOKEN),
    "tokenizer.ggml.fim_sep_token_id": Key(TOKEN),
    "tokenizer.ggml.unknown_token_id": Key(TOKEN),
    "tokenizer.ggml.add_bos_token": Key(SWITCH),
    "tokenizer.ggml.add_eos_token": Key(SWITCH),
    "tokenizer.ggml.add_space_prefix": Key(SWITCH),
    "tokenizer.chat_template": Key(TEXT, 0, 1 << 20),
}
"""A new reader of a key adds it here."""

PER_TOKEN: Final = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def checked(
    stated: Mapping[str, Any], architectures: Collection[str], where: Any
) -> dict[str, Any]:
    """The keys of `KEYS` that the file `where` states, and defaults of the others that have one, by
    their names in the file. stated: `qformats.gguf_file.metadata`.

    Raises GGUFError, in one sentence, for another architecture, for a key that models need and the
    file lacks, for one of another type or out of its range, and where lists of tokens differ in
    length.
    """
    found: dict[str, Any] = {}
    for known, key in KEYS.items():
        architecture = found.get(ARCHITECTURE, "")
        if found and architecture not in architectures:
            raise GGUFError(
                f"{where} has the architecture {architecture!r}: those supported are "
                f"{', '.join(architectures)}"
            )
        name = known.replace("[llm]", architecture)
        value = stated.get(name)
        if value is not None:
            found[name] = _checked(name, value, key, where)
        elif key.default is not None:
            found[name] = key.default
        elif key.needed_by == "models":
            raise GGUFError(f"{where} lacks {name}: convert the model again")
    tokens = found.get("tokenizer.ggml.tokens", [])
    for name in PER_TOKEN:
        if name in found and len(found[name]) != len(tokens):
            raise GGUFError(
                f"{where} has {len(tokens)} tokens and {len(found[name])} of {name}: convert the "
                "model again"
            )
    return found


def require_tokens(keys: Mapping[str, Any], count: int, where: Any) -> None:
    """GGUFError unless keys name tokens of a model that has `count`, as rows of its embedding."""
    tokens = keys.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) != count:
        raise GGUFError(
            f"{where} has {len(tokens)} tokens and an embedding of {count}: convert the model again"
        )
    for name, key in KEYS.items():
        if key.type == TOKEN and name in keys and not 0 <= keys[name] < count:
            raise GGUFError(
                f"{where}: {name} is {keys[name]}, and tokens are 0 to {count - 1}: convert the "
                "model again"
            )


def require_for_texts(keys: Mapping[str, Any], where: Any) -> None:
    """GGUFError where a key is missing that texts need."""
    for name, key in KEYS.items():
        if key.needed_by == "texts" and name not in keys:
            raise GGUFError(f"{where} lacks {name}, which texts need: give tokens with --ids")


def _checked(name: str, value: Any, key: Key, where: Any) -> Any:
    """The value, a float of a number; GGUFError unless it has the key's type and range."""
    is_array = isinstance(value, np.ndarray)
    if is_array and key.type in (WHOLE, NUMBER):
        raise GGUFError(f"{where} has another {name} in each layer: one is supported")
    kinds, types = _PYTHON[key.type]
    if type(value) not in types or (is_array and value.dtype.kind not in kinds):
        said = f"an array of {len(value)}" if is_array or type(value) is list else repr(value)
        raise GGUFError(f"{where}: {name} is {said}, and not {key.type}: convert the model again")
    if key.type in (SWITCH, TOKEN):
        return value
    texts = {TEXT: [value], TEXTS: value}.get(key.type)
    sizes = np.atleast_1d(value if texts is None else [len(one) for one in texts])
    fits = (key.least <= sizes) & (sizes <= key.most)  # NaN does not
    if not fits.all():
        at = int(fits.argmin())
        one = name if key.type in (WHOLE, NUMBER, TEXT) else f"{name}[{at}]"
        verb, unit = ("has", " characters") if key.type in (TEXT, TEXTS) else ("is", "")
        raise GGUFError(
            f"{where}: {one} {verb} {sizes[at].item()}{unit}, and {key.least} to {key.most} are "
            "taken: convert the model again"
        )
    return float(value) if key.type == NUMBER else value


_PYTHON: Final[dict[str, tuple[str, tuple[type, ...]]]] = {
    WHOLE: ("", (int,)),
    TOKEN: ("", (int,)),
    NUMBER: ("", (int, float)),
    TEXT: ("", (str,)),
    SWITCH: ("", (bool,)),
    TEXTS: ("", (list,)),
    NUMBERS: ("iuf", (np.ndarray,)),
    WHOLES: ("iu", (np.ndarray,)),
}
"""What `metadata` returns of each: types, and kinds of an array's dtype."""
