"""Tables of whole models, and of a layer of experts.

Their records lie beside a GPU's run: decoder.json (`make decoder BENCH=1`), decoder_experts.json
(with EXPERTS=1), decoder_gpus.json (with GPUS=2), smollm2.json (`make quality`) and experts.json
(`results.measure.experts`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from results.render.table import ABSENT, Column, Table, number, of_records, ratio

CPU: Final = Path("decoder", "compare", "quality_cpu.json")
"""In the folder of all results: the quality on a CPU, llama.cpp's among it."""
FLOAT32: Final = "float32"
LLAMA_CPP: Final = "llama.cpp, CPU"


def of_decoders(path: Path) -> Table | None:
    """Tokens a second of the decoder beside the same decoder on float16 products of torch: of a
    dense model, and of one with experts."""
    both = [_read(path.with_name(name), "bench") for name in (path.name, "decoder_experts.json")]
    found = [(bench, where) for bench, where in both if bench]
    sizes = "; ".join(
        f"{bench['shapes']}, {bench['weights_gb']:.2f} GB in {bench['format'].upper()}, {where}"
        for bench, where in found
    )
    if not found:
        return None
    return of_records(
        (
            _words("tokens/s", "shapes"),
            _words("", "case"),
            Column("exact", lambda row: f"{row['exact']:,.0f}"),
            Column("x float16", lambda row: ratio(row["x_exact"])),
            Column("fast", lambda row: f"{row['fast']:,.0f}" if row["fast"] else ABSENT),
            Column("x float16", lambda row: ratio(row["x_fast"])),
            Column("float16 torch.matmul", lambda row: f"{row['fp16']:,.0f}"),
        ),
        [{"shapes": bench["shapes"], **row} for bench, _ in found for row in bench["rows"]],
        f"Shapes of models, random weights: {sizes}. Between its products either side has the same "
        "kernels, but norms and gates of a dense model at batch 1 are within products of the exact "
        "side. Experts of the float16 side are torch's `_grouped_mm` in bfloat16.",
    )


def of_gpus(path: Path) -> Table | None:
    """Tokens a second of one GPU and of several that share the model."""
    bench, where = _read(path, "bench on GPUs")

    def ms(part: str) -> Callable[[Any], str]:
        return lambda row: number(row["ms"][part]) if part in row["ms"] else ""

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
        f"{bench['gpus']} GPUs, {where}. Sums: {bench['sums']}. The last two columns are times of "
        "a rank's products alone, and of those sums alone that have a launch of their own.",
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


def experts_in_short(path: Path) -> str:
    """The first layer of `of_experts` that random tokens chose, in a sentence; "" if none is."""
    run, where = _read(path)
    rows = [row for row in (run or {}).get("rows", ()) if row["routing"] == "random"]
    rows = [row for row in rows if row["layer"] == rows[0]["layer"]]
    if not rows:
        return ""
    one, counts = rows[0], ", ".join(str(row["tokens"]) for row in rows)
    return (
        f"Experts of {one['layer']} ({one['format'].upper()}, both products, {where}):\n"
        f"{', '.join(number(row['pair_us']) for row in rows)} us for {counts} tokens, "
        f"{', '.join(ratio(row['x_torch']) for row in rows)} as fast as torch's `_grouped_mm` in "
        "bfloat16."
    )


TABLES: Final = (
    ("Decoders", of_decoders, "decoder.json"),
    ("Two GPUs and more", of_gpus, "decoder_gpus.json"),
    ("How near a real model stays", of_quality, "smollm2.json"),
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
