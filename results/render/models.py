"""Tables of whole models: one of transformers, the decoder's, and how near a real one stays.

Their records lie beside a GPU's run: transformers.json, decoder.json (`make decoder BENCH=1`),
decoder_gpus.json (the same with `GPUS=2`) and smollm2.json (`make quality`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from results.record.schema import ModelRun
from results.record.store import read
from results.render.markdown import grid
from results.render.query import ABSENT, number, ratio

DECODER: Final = "decoder.json"
GPUS: Final = "decoder_gpus.json"
QUALITY: Final = "smollm2.json"
CPU: Final = Path("decoder", "compare", "quality_cpu.json")
"""In the folder of all results: the same on a CPU, llama.cpp among it."""
FLOAT32: Final = "float32"
LLAMA_CPP: Final = "llama.cpp, CPU"


def of_transformers(path: Path) -> list[str]:
    """A model of torch by `quantize_model`; nothing where it was not measured."""
    if not path.exists():
        return []
    run = read(path, ModelRun)
    lines = [
        [
            one.case,
            one.side,
            f"{number(one.ms)} ms",
            f"{number(one.p20_ms)}-{number(one.p80_ms)}",
            f"{one.tokens_per_s:,.0f}",
            ratio(one.x_bfloat16),
            f"{number(one.first_s)} s",
        ]
        for one in run.rows
    ]
    head = ["case", "side", "time", "20-80 %", "tokens/s", "x bfloat16", "first call"]
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    commit = f", commit {run.env.git.sha}" if run.env.git.sha else ""
    return [
        f"{run.model}, {versions}, on an {run.env.where}, {(run.env.utc or '')[:10]}{commit}. Wall "
        "time of a call; the first one compiles.",
        "",
        *grid(head, "llrrrrr", lines),
        "",
        *(f"- {what}: {value:.3g}" for what, value in run.facts.items()),
    ]


def of_decoder(path: Path) -> list[str]:
    """Tokens a second of the decoder beside the same decoder on float16 products of torch."""
    record = _read(path)
    if record is None or "bench" not in record:
        return []
    bench = record["bench"]
    lines = [
        [
            row["case"],
            f"{row['exact']:,.0f}",
            ratio(row["x_exact"]),
            ABSENT if row["fast"] is None else f"{row['fast']:,.0f}",
            ratio(row["x_fast"]),
            f"{row['fp16']:,.0f}",
        ]
        for row in bench["rows"]
    ]
    head = ["tokens/s", "exact", "x float16", "fast", "x float16", "float16 torch.matmul"]
    return [
        f"Shapes of {bench['shapes']}, random weights in {bench['format'].upper()}, "
        f"{bench['weights_gb']:.2f} GB, {_where(record)}. Between its products either side has the "
        "same kernels, but at batch 1 norms and gates of the exact side are within its products.",
        "",
        *grid(head, "lrrrrr", lines),
    ]


def of_gpus(path: Path) -> list[str]:
    """Tokens a second of one GPU and of several that share the model."""
    record = _read(path)
    if record is None or "bench on GPUs" not in record:
        return []
    bench = record["bench on GPUs"]
    lines = [
        [
            row["model"],
            row["case"],
            f"{row['one']:,.0f}",
            f"{row['all']:,.0f}",
            ratio(row["x"]),
            *(number(row["ms"][part]) for part in ("one", "all", "products", "sums")),
        ]
        for row in bench["rows"]
    ]
    head = ["tokens/s", "", "one GPU", f"{bench['gpus']} GPUs", "x", "ms, one", "ms, all"]
    return [
        f"Shapes of two models, random weights in {bench['format'].upper()}, shared by "
        f"{bench['gpus']} GPUs, {_where(record)}. Sums: {bench['sums']}. The last two columns are "
        "the products and the sums of a rank, each alone.",
        "",
        *grid([*head, "products", "sums"], "llrrrrrrr", lines),
    ]


def of_quality(path: Path) -> list[str]:
    """Perplexity of a real model, and its distance from the same weights in float32."""
    record = _read(path)
    if record is None or "quality" not in record:
        return []
    found = record["quality"]
    lines = []
    for row in found["rows"]:
        far = [f"{row['mean_kl']:.1e}", f"{row['kl_999']:.1e}", _percent(row)]
        base = row["side"] == FLOAT32
        lines.append([row["side"], f"{row['perplexity']:.3f}", *([""] * 3 if base else far)])
    head = ["products", "perplexity", "mean KL", "99.9 % KL", "same top token"]
    return [
        f"{found['file']}, {found['predictions']} predictions of {found['text']}, "
        f"{_where(record)}. KL divergence in nats, from the dequantized weights in float32.",
        "",
        *grid(head, "lrrrr", lines),
        *_llama_cpp(path.parents[1] / CPU, found["file"]),
    ]


def _llama_cpp(path: Path, model: str) -> list[str]:
    """llama.cpp's own distance, if it was measured with this model."""
    record = _read(path)
    if record is None or record["quality"]["file"] != model:
        return []
    found = record["quality"]
    return [
        line
        for row in found["rows"]
        if row["side"] == LLAMA_CPP
        for line in (
            "",
            f"llama.cpp itself, on a CPU and the first {found['predictions']} of these: mean KL "
            f"{row['mean_kl']:.1e}, 99.9 % KL {row['kl_999']:.1e}, same top token {_percent(row)}.",
        )
    ]


def _percent(row: Mapping[str, Any]) -> str:
    return f"{100 * row['same_top']:.1f} %"


def _read(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    record: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _where(record: Mapping[str, Any]) -> str:
    env = record["env"]
    power = env.get("power_limit_w")
    limit = f" @ {power:.0f} W" if power else ""
    sha = env["git"]["sha"]
    return f"on an {env['gpu']}{limit}, {env['utc'][:10]}" + (f", commit {sha}" if sha else "")
