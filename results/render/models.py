"""Tables of whole models: one of transformers, the decoder's, how near a real one stays; of layers.

Their records lie beside a GPU's run: decoder.json (`make decoder BENCH=1`), decoder_experts.json
(with EXPERTS=1), decoder_gpus.json (with GPUS=2), smollm2.json (`make quality`), gguf.json
(`python -m results.measure.models.transformers_gguf`), and transformers.json, measured once by code
that is in git history (commit a939d511: results/measure/transformers_llama.py). So do
gradients.json and experts.json, of single layers (`results.measure.gradients` and `.experts`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from results.render.rows import spread
from results.render.table import ABSENT, Column, Table, number, of_records, ratio

CPU: Final = Path("decoder", "compare", "quality_cpu.json")
"""In the folder of all results: the quality on a CPU, llama.cpp's among it."""
FLOAT32: Final = "float32"
LLAMA_CPP: Final = "llama.cpp, CPU"


def of_transformers(path: Path) -> Table | None:
    """A model of torch by `quantize_model`; None where it was not measured."""
    run, where = _read(path)
    if run is None:
        return None
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    facts = "; ".join(f"{what}: {value:.3g}" for what, value in run["facts"].items())
    return of_records(
        (
            _words("case", "case"),
            _words("side", "side"),
            Column("time", lambda row: f"{number(row['ms'])} ms"),
            Column("20-80 %", lambda row: spread(row["p20_ms"], row["p80_ms"])),
            Column("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
            Column("x bfloat16", lambda row: ratio(row["x_bfloat16"])),
            Column("first call", lambda row: f"{number(row['first_s'])} s"),
        ),
        run["rows"],
        f"{run['model']}, {versions}, {where}. Wall time of a call; the first one compiles.",
        (f"{facts}.",),
    )


def of_gguf(path: Path) -> Table | None:
    """`generate` of transformers with a GGUF file, as it loads it and after `use_gguf`."""
    rows, where = _read(path, "rows")
    if rows is None:
        return None

    def rate(way: str, mode: str) -> Callable[[Any], str]:
        return lambda row: f"{row[way][mode]['tokens_s']:,.0f}"

    def columns(side: str, way: str) -> Iterator[Column]:
        yield Column(f"{side}, eager", rate(way, "eager"))
        yield Column("compiled", rate(way, "compiled"))
        yield Column("MB", lambda row: f"{row[way]['bytes'] / 1e6:,.0f}")

    def cold(row: Any) -> str:
        return " and ".join(f"{number(one)} s" for one in row["blocks"].get("cold", ())) or ABSENT

    first, random = rows[0], any(one["name"].startswith("random") for one in rows)
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return of_records(
        (
            _words("tokens/s", "file"),
            *columns(f"{first['dtype']} weights", "transformers"),
            *columns("use_gguf", "blocks"),
            *(
                [Column("first prefill, tokens", cold)]
                if any("cold" in one["blocks"] for one in rows)
                else []
            ),
        ),
        rows,
        f"`generate`, {first['tokens']} tokens after {first['prompt']}, {versions}, {where}."
        + " Weights are random, in the shapes of these models." * random
        + " MB: weights on the GPU.",
    )


def of_decoder(path: Path) -> Table | None:
    """Tokens a second of the decoder beside the same decoder on float16 products of torch."""
    bench, where = _read(path, "bench")
    mixed = bench and any(one.startswith("experts") for one in bench["choices"])
    differ = (
        "kernels. Experts of the float16 side are torch's `_grouped_mm` in bfloat16."
        if mixed
        else "kernels, but at batch 1 norms and gates of the exact side are within its products."
    )
    return bench and of_records(
        (
            _words("tokens/s", "case"),
            Column("exact", lambda row: f"{row['exact']:,.0f}"),
            Column("x float16", lambda row: ratio(row["x_exact"])),
            Column("fast", lambda row: f"{row['fast']:,.0f}" if row["fast"] else ABSENT),
            Column("x float16", lambda row: ratio(row["x_fast"])),
            Column("float16 torch.matmul", lambda row: f"{row['fp16']:,.0f}"),
        ),
        bench["rows"],
        f"Shapes of {bench['shapes']}, random weights in {bench['format'].upper()}, "
        f"{bench['weights_gb']:.2f} GB, {where}. Between its products either side has the same "
        + differ,
    )


def of_gpus(path: Path) -> Table | None:
    """Tokens a second of one GPU and of several that share the model."""
    bench, where = _read(path, "bench on GPUs")

    def ms(part: str) -> Callable[[Any], str]:
        return lambda row: number(row["ms"][part])

    return bench and of_records(
        (
            _words("tokens/s", "model"),
            _words("", "case"),
            Column("one GPU", lambda row: f"{row['one']:,.0f}"),
            Column(f"{bench['gpus']} GPUs", lambda row: f"{row['all']:,.0f}"),
            Column("x", lambda row: ratio(row["x"])),
            Column("ms, one", ms("one")),
            Column("ms, all", ms("all")),
            Column("products", ms("products")),
            Column("sums", ms("sums")),
        ),
        bench["rows"],
        f"Shapes of two models, random weights in {bench['format'].upper()}, shared by "
        f"{bench['gpus']} GPUs, {where}. Sums: {bench['sums']}. The last two columns are "
        "the products and the sums of a rank, each alone.",
    )


def of_quality(path: Path) -> Table | None:
    """Perplexity of a real model, and its distance from the same weights in float32."""
    found, where = _read(path, "quality")
    if not found:
        return None

    def far(text: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda row: "" if row["side"] == FLOAT32 else text(row)

    theirs, _ = _read(path.parents[1] / CPU, "quality")
    notes = [
        f"llama.cpp itself, on a CPU and the first {theirs['predictions']} of these: mean KL "
        f"{row['mean_kl']:.1e}, 99.9 % KL {row['kl_999']:.1e}, same top token "
        f"{100 * row['same_top']:.1f} %."
        for row in (theirs["rows"] if theirs and theirs["file"] == found["file"] else ())
        if row["side"] == LLAMA_CPP
    ]
    return of_records(
        (
            _words("products", "side"),
            Column("perplexity", lambda row: f"{row['perplexity']:.3f}"),
            Column("mean KL", far(lambda row: f"{row['mean_kl']:.1e}")),
            Column("99.9 % KL", far(lambda row: f"{row['kl_999']:.1e}")),
            Column("same top token", far(lambda row: f"{100 * row['same_top']:.1f} %")),
        ),
        found["rows"],
        f"{found['file']}, {found['predictions']} predictions of {found['text']}, "
        f"{where}. KL divergence in nats, from the dequantized weights in float32.",
        notes,
    )


def of_gradients(path: Path) -> Table | None:
    """The gradient of x beside torch's, in bfloat16: a row for each size, formats side by side."""
    run, where = _read(path)
    if run is None:
        return None
    sizes: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in run["rows"]:
        if row["dtype"] == "bfloat16":
            sizes.setdefault((row["M"], row["N"], row["K"]), {})[row["format"]] = row
    formats = list(next(iter(sizes.values())))

    def told(name: str, what: str) -> Callable[[Any], str]:
        def text(rows: Any) -> str:
            one = rows[name][what]
            return f"{number(one['us'])} ({ratio(one['x_torch'])})"

        return text

    first = formats[0]
    return of_records(
        (
            Column("M", lambda rows: f"{rows[first]['M']}"),
            Column("N x K", lambda rows: f"{rows[first]['N']} x {rows[first]['K']}", words=True),
            Column("torch.matmul", lambda rows: number(rows[first]["gradient"]["torch_us"])),
            *(Column(name, told(name, "gradient")) for name in formats),
            Column("y and dX, torch", lambda rows: number(rows[first]["step"]["torch_us"])),
            *(Column(name, told(name, "step")) for name in formats),
        ),
        list(sizes.values()),
        f"dX = dY @ W of a QuantLinear in bfloat16, in us and beside torch with bfloat16 weights, "
        f"{where}. On the right with the product before it.",
    )


ROUTINGS: Final = {"random": "", "zipf": ", by Zipf's law", "same": ", all the same experts"}
"""How tokens choose experts, beside their number."""


def of_experts(path: Path) -> Table | None:
    """A layer of experts beside torch's grouped products: a row for each count of tokens, and how
    they choose."""
    run, where = _read(path)
    if run is None:
        return None
    counts: dict[tuple[int, str], dict[str, Any]] = {}
    for row in run["rows"]:
        counts.setdefault((row["tokens"], row["routing"]), {})[row["layer"]] = row
    layers = next(iter(counts.values()))

    def told(name: str) -> Callable[[Any], str]:
        def cell(rows: Any) -> str:
            row = rows[name]
            text = f"{number(row['pair_us'])} ({ratio(row['x_torch'])})"
            if "fast_x_torch" in row:
                text += f", fast {number(row['fast_us'])} ({ratio(row['fast_x_torch'])})"
            return text

        return cell

    def tokens(rows: Any) -> str:
        one = next(iter(rows.values()))
        return f"{one['tokens']}{ROUTINGS[one['routing']]}"

    sizes = "; ".join(
        f"{name}: {one['experts']} of {one['hidden']} x {one['inner']}, {one['chosen']} a token, "
        f"{one['format'].upper()}"
        for name, one in layers.items()
    )
    return of_records(
        (Column("tokens", tokens), *(Column(name, told(name)) for name in layers)),
        list(counts.values()),
        f"Both products of a layer of experts, {next(iter(layers.values()))['dtype']} in and out, "
        "in us and beside `torch._grouped_mm` of bfloat16 on rows that are sorted already, "
        f"{where}. {sizes}.",
    )


TABLES: Final = (
    ("A model of transformers", of_transformers, "transformers.json"),
    ("GGUF files in transformers", of_gguf, "gguf.json"),
    ("A decoder", of_decoder, "decoder.json"),
    ("A decoder with experts", of_decoder, "decoder_experts.json"),
    ("Two GPUs and more", of_gpus, "decoder_gpus.json"),
    ("How near a real model stays", of_quality, "smollm2.json"),
    ("Gradients of x", of_gradients, "gradients.json"),
    ("Mixtures of experts", of_experts, "experts.json"),
)
"""(its title, the table, the file beside run.json)."""


def _words(heading: str, key: str) -> Column:
    return Column(heading, lambda row: str(row[key]), words=True)


def _read(path: Path, part: str = "") -> tuple[Any, str]:
    """A part of a record, or all of it, and on which GPU and when it was measured; None where it
    was not."""
    record: Mapping[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if part not in ("", *record) or not record:
        return None, ""
    env = record["env"]
    power, sha = env.get("power_limit_w"), env["git"]["sha"]
    limit = f" @ {power:.0f} W" if power else ""
    commit = f", commit {sha}" if sha else ""
    return record[part] if part else record, f"on an {env['gpu']}{limit}, {env['utc'][:10]}{commit}"
