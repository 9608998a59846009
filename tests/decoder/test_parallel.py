"""A model on several ranks has the logits of one: processes on the CPU, over gloo."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qformats import quantize
from results.measure.models import one_gpu as bench
from results.measure.models import several_gpus as bench_parallel
from steps.cli.main import main
from steps.decoder import files, operations, parallel
from steps.decoder.model import Config, embedding_of, step_products
from steps.nn import all_reduce
from tests.decoder import parallel_cases
from tests.nn.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"block_count": 2, "embedding_length": 256, "feed_forward_length": 288}
LARGER = {
    **{"block_count": 3, "embedding_length": 1024, "feed_forward_length": 2048},
    **{"attention.head_count": 16, "attention.head_count_kv": 4},
}
NINE = {"embedding_length": 288, "attention.head_count": 9, "attention.head_count_kv": 3}
MODELS: list[tuple[int, str, str, dict[str, Any]]] = [
    (4, "llama", "q4_0", {}),  # two heads of keys and values, of which two ranks share each
    (4, "qwen2", "q5_1", {"attention.head_count_kv": 4}),  # biases
    (4, "qwen3", "q8_0", {"attention.head_count_kv": 8, "attention.key_length": 64}),
    (2, "llama", "q4_1", NINE),  # one rank has twice as many heads as the other
]
"""The most ranks, architecture, format, and sizes that are not those of `SMALL`."""


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("count", [2, 4])
def test_logits_are_those_of_one_process(tmp_path: Any, count: int) -> None:
    """288 hidden features are nine blocks, which neither number of ranks divides."""
    paths = []
    for most, kind, name, changes in MODELS:
        if count <= most:
            path, rest = tmp_path / f"{kind}-{name}.gguf", SMALL | changes
            paths.append(path)
            files.write_tiny(path, name, architecture=kind, tied=kind == "qwen2", **rest)
    found = run_on_ranks(count, parallel_cases.models, tmp_path, paths)
    for path, *of_ranks in zip(paths, *found, strict=True):
        right, tokens = parallel_cases.logits_of(path, torch.float64)
        size = right.square().mean().sqrt()
        for exact, rounded, chosen in of_ranks:
            assert (exact - right).abs().max() < 1e-9 * size, path
            assert 0 < (rounded - right).abs().max() < 1e-4 * size, path
            assert torch.equal(chosen, tokens)
            assert torch.equal(rounded, of_ranks[0][1]), "ranks have the same bits"


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_sums_and_logits_are_of_all_ranks(tmp_path: Any) -> None:
    for found in run_on_ranks(2, parallel_cases.joined, tmp_path):
        wide, wanted = found["wide"]
        assert wide == wanted > 0
        for one, dtype in zip(found["sum"], (torch.float32, torch.float16), strict=True):
            assert one.dtype == dtype
            assert one.tolist() == [[2 * i + 100 for i in range(8)]] * 3
        assert found["gathered"].tolist() == [[0, 1, 2, 3, 100, 101, 102]] * 3
        assert found["gathered"].is_contiguous()
        assert found["first"] == "said by 0"


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_prompt_goes_through_the_layers_in_halves_where_sums_travel(tmp_path: Any) -> None:
    """Seven tokens, in whole tiles of two first; the tokens that follow are one part each."""
    paths = []
    for _, kind, name, changes in MODELS[:3]:
        paths.append(tmp_path / f"{kind}-{name}.gguf")
        files.write_tiny(paths[-1], name, architecture=kind, **SMALL | changes)
    for path, *of_ranks in zip(
        paths, *run_on_ranks(2, parallel_cases.halved, tmp_path, paths), strict=True
    ):
        right, tokens = parallel_cases.logits_of(path, torch.float64)
        for logits, chosen, sizes in of_ranks:
            assert (logits - right).abs().max() < 1e-9 * right.square().mean().sqrt(), path
            assert torch.equal(chosen, tokens)
            assert sizes[:8] == [4, 3] * 4, "two sums in each of two layers"


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_two_sums_may_be_on_their_way(tmp_path: Any) -> None:
    for found in run_on_ranks(2, parallel_cases.begun, tmp_path):
        assert len(found) == 4 * 3 * 2
        for y, right in found:
            assert torch.equal(y, right)


@pytest.mark.parametrize(
    ("sequences", "tokens", "parts"),
    [
        (1, 4096, [2048, 2048]), (1, 1100, [640, 460]), (1, 511, [511]), (1, 512, [256, 256]),
        (8, 64, [64]), (8, 200, [128, 72]), (600, 1, [1]), (1, 9000, [9000]),
    ],
)  # fmt: skip
def test_halves_are_whole_tiles(sequences: int, tokens: int, parts: list[int]) -> None:
    """Not of too few tokens, nor where a half is too large for an exchange."""

    def travels(count: int) -> bool:
        return count <= 4096 * 4096

    product = SimpleNamespace(wide=0)
    sums = SimpleNamespace(travels=travels)
    summed = parallel.Summed.__new__(parallel.Summed)
    torch.nn.Module.__init__(summed)
    summed.sums, summed.n, summed.product = sums, 4096, product  # type: ignore[assignment]
    assert summed.parts(sequences, tokens) == parts


def test_sums_of_few_tokens_are_of_float32(kernels: Any, monkeypatch: Any) -> None:
    """Products write it so, and those compiled ahead are the same."""
    monkeypatch.setattr(all_reduce, "ONE_SHOT", 4 * 64 * 8)
    product = step_products("cpu")(
        bench.random_blocks("q4_0", 64, 96, np.random.default_rng(0)), False
    )
    summed = parallel.Summed(product, lambda y: y, 64)
    for m, dtype in ((1, torch.float32), (8, torch.float32), (9, torch.float16)):
        assert summed.input_dtype(m) == torch.float16
        y = summed(torch.ones(m, 96, dtype=torch.float16))
        assert y.dtype == dtype
        assert str(dtype) == f"torch.{product.choice(m).writes}"
        gated = torch.ones(m, 192, dtype=torch.float16)
        assert summed.after_swiglu(gated, operations.swiglu).dtype == dtype


# --- shares ---------------------------------------------------------------------------------------


def config(heads: int = 8, kv: int = 2, hidden: int = 288, vocabulary: int = 7) -> Config:
    return Config(1, 256, hidden, heads, kv, 32, vocabulary)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_row_and_column_is_somebodys(ranks: int) -> None:
    rng = np.random.default_rng(0)
    rows = {"attn_q": 256, "attn_k": 64, "attn_v": 64, "ffn_gate": 288, "ffn_up": 288, "output": 7}
    shares = [parallel.Share(config(), rank, ranks) for rank in range(ranks)]
    for name, n in rows.items():
        whole = rng.integers(1, 99, (n, 3))
        parts = [one.of(f"blk.0.{name}.weight", whole) for one in shares]
        if name in ("attn_k", "attn_v") and ranks > 2:
            parts = parts[:: ranks // 2]  # two heads: several ranks have the same one
        joined = np.concatenate(parts)
        np.testing.assert_array_equal(joined[:n], whole)
        assert not joined[n:].any(), "logits that there are not"
        assert name != "output" or len({len(one) for one in parts}) == 1, "to be gathered"
    for name, k in (("attn_output", 256), ("ffn_down", 288)):
        blocks = quantize(rng.standard_normal((5, k), dtype=np.float32), "q4_0")
        parts = [one.of(f"blk.0.{name}.weight", blocks) for one in shares]
        np.testing.assert_array_equal(np.concatenate(parts, 1), blocks)
        assert {len(one) for one in parts} == {5}
        bias = rng.standard_normal(5)
        added = sum(one.of(f"blk.0.{name}.bias", bias) for one in shares)
        np.testing.assert_array_equal(added, bias)
    sizes = [one.config for one in shares]
    assert {one.heads for one in sizes} == {8 // ranks}
    assert {one.kv_heads for one in sizes} == {max(1, 2 // ranks)}
    assert sum(one.hidden for one in sizes) == 288
    assert {one.vocabulary for one in sizes} == {7}


def test_ranks_may_have_one_head_of_keys_more() -> None:
    """A small model with 9 heads, three to each of keys and values, on two ranks."""
    first, second = (parallel.Share(config(9, 3), rank, 2) for rank in range(2))
    assert (first.config.heads, first.config.kv_heads) == (3, 1)
    assert (second.config.heads, second.config.kv_heads) == (6, 2)
    assert first.ranges["attn_q"] == first.ranges["attn_output"] == (0, 96)
    assert second.ranges["attn_q"] == second.ranges["attn_output"] == (96, 288)
    assert (first.ranges["attn_k"], second.ranges["attn_v"]) == ((0, 32), (32, 96))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (
            lambda: parallel.Share(config(9, 3), 0, 4),
            "4 GPUs cannot share 9 heads and 3 .*: use 1, 2, 3 or 9",
        ),
        (lambda: parallel.Share(config(12, 6), 0, 8), "8 GPUs cannot share 12 heads and 6"),
        (lambda: parallel.Share(config(hidden=96), 0, 4), "96 hidden features in blocks of 32 are"),
        (lambda: parallel.Share(config(), 0, 2, 256), "288 hidden features in blocks of 256 are"),
        (
            lambda: parallel.Share(config(), 1, 8).of("blk.0.attn_output.weight", np.ones((4, 1))),
            "blk.0.attn_output.weight has blocks of 256, and GPU 1 of 8 .* 32 to 63: use fewer",
        ),
    ],
)
def test_what_gpus_cannot_share(made: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        made()


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_the_command_line_starts_ranks(tmp_path: Any) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", **SMALL)
    command = [sys.executable, "-m", "steps", "decoder", str(path), "--reference", "--ids", "1,5"]
    command += ["--tokens", "3"]
    alone, shared = (
        subprocess.run(
            [*command, *more], capture_output=True, text=True, cwd=ROOT, timeout=600, check=False
        )
        for more in ([], ["--gpus", "2"])
    )  # fmt: skip
    assert (shared.returncode, shared.stdout) == (0, alone.stdout), shared.stderr
    assert len(alone.stdout.split()) == 3


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--gpus", "3"], "3 GPUs cannot share 8 heads and 2 of keys and values: use 1, 2, 4 or 8"),
        (["--gpus", "1"], "--gpus 1: name 2 or more, or none"),
    ],
)
def test_what_is_refused(
    tmp_path: Any, capsys: Any, monkeypatch: Any, more: list[str], told: str
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    path = files.write_tiny(tmp_path / "tiny.gguf", **SMALL)
    assert main(["decoder", str(path), "--reference", *more]) == 2
    _, err = capsys.readouterr()
    assert told in err
    assert len(err.splitlines()) == 1


def test_fewer_gpus_than_asked_for_are_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"--gpus 2: torch finds 1 on"):
        parallel.start("steps", [], 2, on_gpu=True)


def test_questions_are_typed_at_the_first_rank(monkeypatch: Any) -> None:
    here = parallel.Ranks(0, 2, torch.device("cpu"))
    monkeypatch.setattr(parallel.Ranks, "of_first", lambda self, value: value)
    monkeypatch.setattr("builtins.input", lambda asks: f"{asks}hello")
    assert here.typed("> ") == "> hello"

    def ended(asks: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", ended)
    with pytest.raises(EOFError):
        here.typed()


# --- the bench ------------------------------------------------------------------------------------


def test_a_row_compares_rounds_and_says_where_time_goes() -> None:
    took = ([4.0, 6.0, 8.0], [2.0, 4.0, 2.0])
    parts = {"products": [0.5, 0.7, 0.6], "sums": [0.1, 0.3, 0.2]}
    one = bench_parallel.row("Llama 3 8B", "prefill 4096", 2, 120, 10, took, parts)
    assert (one["one"], one["all"], one["x"], one["rounds"]) == (20, 60, 2, 3)
    assert one["ms"] == {"one": 600, "all": 200, "products": 600, "sums": 200}
    said = bench_parallel.line(one)
    assert "2 GPUs 60 tokens/s, 2.00x of one with 20; ms one 600 all 200 products 600" in said


def test_one_gpu_and_all_take_turns(monkeypatch: Any) -> None:
    ran: list[str] = []
    monkeypatch.setattr(bench, "seconds", lambda work: work() or len(ran))
    wait = lambda: ran.append("wait")  # noqa: E731
    works = [lambda: ran.append("one"), lambda: ran.append("all")]
    one, every = bench.in_turn(works, 3, wait)
    turns = [("all", "one"), ("one", "all")] * 2
    assert [name for name in ran if name != "wait"] == [name for turn in turns for name in turn]
    assert ran[::2] == ["wait"] * 8, "every rank waits before each"
    assert (len(one), len(every)) == (3, 3)
    ran.clear()
    one, every = bench.in_turn((None, works[1]), 2, wait)
    assert [math.isnan(each) for each in (*one, *every)] == [True, True, False, False]
    assert ran.count("wait") == 6


def test_a_ranks_model_of_random_weights_has_its_shapes(monkeypatch: Any, host: Any) -> None:
    """Two ranks have half of each matrix, and of the vocabulary, rounded up."""
    plain, cpu = torch.device, torch.device("cpu")
    monkeypatch.setattr(
        torch, "device", lambda *names: cpu if names == ("cuda",) else plain(*names)
    )
    monkeypatch.setattr(parallel.Ranks, "sums", SimpleNamespace(how="fake"), raising=True)
    monkeypatch.setattr(parallel.Ranks, "group", None)
    sizes = config(kv=2, hidden=256, vocabulary=1001)
    embedding = embedding_of(np.zeros((4, 256), np.float32), "cpu")
    rest = sizes, "q4_0", operations.PLAIN, embedding
    for ranks, part in ((None, 1), (parallel.Ranks(1, 2, cpu), 2)):
        made = bench_parallel.model(*rest, ranks)
        found = [
            (one.n, one.k)
            for product in made.products
            for one in getattr(product, "products", [product])
        ]
        assert found == [
            (384 // part, 256),
            (256, 256 // part),
            (512 // part, 256),
            (256, 256 // part),
            (-(-1001 // part), 256),
        ]
        assert made.config.heads == 8 // part
        assert isinstance(made.layers[0].out, parallel.Summed) == (part == 2)
        assert isinstance(made.output, parallel.Gathered) == (part == 2)
        assert list(made.output.products[0].packed if part == 2 else made.output.packed) == list(
            made.layers[0].qkv.packed
        )
        assert len(made.layers[0].qkv.packed) == 1, "what fast steps read is not packed"


@pytest.mark.gpu
@pytest.mark.xdist_group("ranks")
def test_sums_within_products_on_two_gpus(tmp_path: Any) -> None:
    """Both GPUs have the same bits, and those of sums that are launches within the rounding of x;
    so for hundreds of tokens, in a graph, that follow one another."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    path = files.write_tiny(tmp_path / "tiny.gguf", **LARGER)
    kinds = "cpu:gloo,cuda:nccl"
    first, second = run_on_ranks(2, parallel_cases.on_two_gpus, tmp_path, path, backend=kinds)
    for batch, found in first.items():
        assert found["taken"] == 2 * LARGER["block_count"]
        for case in ("within", "launched"):
            assert torch.equal(found[case], second[batch][case]), (batch, case)
        right = found["launched"]
        torch.testing.assert_close(
            found["within"], right, atol=2e-2 * float(right.std()), rtol=0, msg=f"batch {batch}"
        )
        assert torch.equal(found["again"], found["within"]), "the same bits again"


@pytest.mark.gpu
def test_right_and_measured_on_two_gpus(tmp_path: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    there = tmp_path / "found.json"
    command = [sys.executable, "-m", "steps", "decoder", "--check", "--gpus", "2"]
    command += ["--tokens", "16", "--json", str(there)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right:") == 2, done.stdout
