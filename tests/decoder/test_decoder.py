"""The decoder of GGUF files: its arithmetic, its products by the kernels, what it refuses.

Its logits are compared with those of transformers in `test_architectures`.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qformats import dequantize
from qformats.gguf_file import GGUFError, metadata
from results.measure.models import one_gpu as bench
from steps.checks.select import UsageError
from steps.cli import language_model
from steps.cli.main import main
from steps.compile.compiler import signature_of
from steps.decoder import files, kernel_operations, operations
from steps.decoder import model as parts
from steps.decoder.compare import checks
from steps.decoder.model import generate, step_products, torch_products
from steps.kernels.parts.activations.layouts import GATED
from steps.registry import kernel_of
from tests.decoder import gguf_bytes

SMALL = {
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
}


@pytest.fixture
def tiny(tmp_path: Any) -> Any:
    return files.write_tiny(tmp_path / "tiny.gguf", **SMALL)


def reference(path: Any) -> Any:
    """Products and the rest in float64."""
    return files.load(
        path,
        torch_products(),
        requantize="float32",
        residual_dtype=torch.float64,
        cache_dtype=torch.float64,
    )


def filled(model: Any, ids: list[int]) -> np.ndarray:
    """Logits behind each token, by one pass over all."""
    given = torch.tensor([ids])
    logits = model.prefill(given, model.cache(1, len(ids)), every=True)
    return logits[0].double().numpy()


# --- the arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", files.ARCHITECTURES)
def test_a_token_at_a_time_is_all_at_once(tmp_path: Any, architecture: str) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", architecture=architecture, **SMALL)
    model, count = reference(path), 4
    ids = torch.tensor([checks.prompt(files.WORDS, 7, seed) for seed in range(3)])
    tokens, kept = generate(model, ids, count, keep=True)
    assert tokens.shape == (3, count)
    for one, given, at in zip(tokens, ids, range(3), strict=True):
        logits = filled(model, [*given.tolist(), *one.tolist()])[6:-1]
        np.testing.assert_allclose(np.stack([step[at] for step in kept]), logits, atol=1e-9)
        assert one.tolist() == logits.argmax(-1).tolist()


def test_a_cache_begins_anew(tiny: Any) -> None:
    model = reference(tiny)
    cache = model.cache(1, 20)
    first = model.prefill(torch.tensor([[1, 2, 3]]), cache)
    model.prefill(torch.tensor([[9, 8, 7, 6, 5]]), cache)
    assert int(cache.position) == 5
    assert torch.equal(model.prefill(torch.tensor([[1, 2, 3]]), cache), first)
    model.step(torch.tensor([4]), cache)
    assert int(cache.position) == 4


def test_parts_of_a_head_may_stay_and_angles_be_divided() -> None:
    config = parts.Config(1, 64, 96, 4, 2, 16, 288, rotated=8, base=100.0)
    turned = parts.rotary_frequencies(config)
    np.testing.assert_allclose(turned[:4], 100.0 ** (-np.arange(4) / 4))
    assert not turned[4:].any()
    np.testing.assert_allclose(
        parts.rotary_frequencies(config, np.full(4, 2.0))[:4], turned[:4] / 2
    )


def test_an_embedding_is_the_blocks_or_the_floats_of_a_file() -> None:
    table = bench.random_blocks("q4_1", 11, 64, np.random.default_rng(1))
    values, ids = dequantize(table), torch.tensor([[3, 10, 0], [5, 5, 1]])
    for given in (table, values, values.astype(np.float16)):
        made = parts.embedding_of(given, "cpu")
        rows = dequantize(given) if given is table else given
        np.testing.assert_array_equal(made(ids).numpy(), rows[ids.numpy()])
        assert sum(one.nbytes for one in made.state_dict().values()) <= given.nbytes + 32


# --- the products ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param("q4_0", marks=pytest.mark.every), "q5_1"])
def test_products_by_the_kernels(kernels: Any, tmp_path: Any, name: str) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", name, **SMALL | {"block_count": 1})
    ours, ids = files.load(path, step_products("cpu")), checks.prompt(files.WORDS, 3)
    tokens, kept = generate(ours, torch.tensor([ids]), 2, keep=True)
    assert [one.dtype for one in kept] == [torch.float32] * 2
    products = 5  # queries, keys and values are one, as are gate and up
    names = [name for name, *_ in kernels.launched if name != "gated_to_rows"]
    assert len(names) == 3 * products, "so few tokens need no pass but that which computes gates"
    trusted, whole = reference(path), [*ids, *tokens[0].tolist()]
    off = checks.relative(torch.cat(kept).double().numpy(), filled(trusted, whole)[2:-1])
    expected = checks.expected(trusted, whole, "exact")
    assert 0.3 * expected < off < checks.SAFETY * expected
    prepared = len(parts.operator._prepared)
    assert prepared == 2 * products - 1, "for 3 tokens and for 1, but logits for 1 alone"


def test_counters_are_zeroed_once(kernels: Any, monkeypatch: Any) -> None:
    """Sums that thread blocks hand each other: what must be zero is left so, call after call."""
    k, n, rng = 1056, 20, np.random.default_rng(0)
    blocks = bench.random_blocks("q4_0", n, k, rng)
    product = step_products("cpu")(blocks, False)
    x = torch.from_numpy(rng.standard_normal((40, k), dtype=np.float32)).half()
    assert product.input_dtype(40) is x.dtype
    first = product(x)
    assert parts.operator._counters, "blocks share tiles"
    assert first.dtype == torch.float16
    monkeypatch.setattr(torch, "zeros", None)  # nothing is zeroed anew
    assert torch.equal(product(x), first)
    right = x.double().numpy() @ dequantize(blocks).astype(np.float64).T
    assert checks.relative(first.double().numpy(), right) < 1e-3


def test_gates_are_computed_in_the_pass_where_there_is_one(kernels: Any) -> None:
    """What the function between the products makes, else, up to float16."""
    k, n, rng, called = 96, 20, np.random.default_rng(0), []
    product = step_products("cpu")(bench.random_blocks("q4_0", n, k, rng), False)

    def gate(y: Any, dtype: Any) -> Any:
        called.append(dtype)
        return operations.PLAIN.swiglu(y, dtype)

    y = torch.from_numpy(rng.standard_normal((65, 2 * k), dtype=np.float32)).half()
    found = product.after_swiglu(y, gate)
    assert called == []
    assert "gated_to_rows" in [name for name, *_ in kernels.launched]
    assert checks.relative(*(x.double().numpy() for x in (found, product(gate(y, y.dtype))))) < 1e-3
    fast = step_products("cpu", "fast")(bench.random_blocks("q4_0", n, k, rng), False)
    called.clear()
    found = fast.after_swiglu(y, gate)
    # int8 with a scale per token has no such pass
    in_pass = fast.choice(65, GATED).reading.source == GATED
    assert called == ([] if in_pass else [torch.float16])
    assert torch.equal(found, fast(operations.PLAIN.swiglu(y, torch.float16)))


def test_kernels_compiled_ahead_are_those_of_calls(
    kernels: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(parts, "Gpu", lambda: kernels)
    monkeypatch.setattr(
        parts.parallel_compile,
        "compile_ahead",
        lambda wanted, *_, report: asked.extend(wanted) or report(7, 7) or 7,
    )
    ours = files.load(tiny, step_products("cpu", "fast"))
    ours.set_accuracy("exact")
    told: list[Any] = []
    cases = [("exact", 2), ("fast", 40)]
    assert ours.compile_ahead(cases, 2, report=lambda *each: told.append(each)) == 7
    assert told == [(7, 7)]
    assert ours.output.accuracy == "exact"
    found = {(one.kernel, signature_of(one.args)) for each in asked for one in each.launches()}
    for accuracy, m, of_output in (("exact", 2, 2), ("fast", 40, 1)):
        ours.set_accuracy(accuracy)
        made = [one.choice(m) for layer in ours.layers for one in layer.products[:-1]]
        made += [layer.down.choice(m, GATED) for layer in ours.layers]
        for choice in (*made, ours.output.choice(of_output)):
            for launch in choice.launches():
                assert (launch.kernel, signature_of(launch.args)) in found
    assert len(asked) == len({str(each) for each in asked}) < 2 * len(list(ours.products))


def test_an_accuracy_may_be_asked_for_later(kernels: Any, tiny: Any) -> None:
    ours = files.load(tiny, step_products("cpu", "fast"))
    product = ours.layers[0].gate_up
    assert sorted(product.packed) == ["byte_tiles", "tiles"]
    ours.set_accuracy("exact")
    assert product.choice(512).kernel.accuracy == "exact"
    ours.set_accuracy("fast")
    assert product.choice(512).kernel.accuracy == "fast"


def test_matrices_of_one_type_are_one_product(tmp_path: Any) -> None:
    path = files.write_tiny(tmp_path / "a.gguf", "q4_1", **SMALL)
    file = files.Model(path)
    q, k, v = (f"blk.0.attn_{one}.weight" for one in "qkv")
    (joined,) = file.matrices((q, k, v), (64, 32, 32), 64, None)
    assert joined.shape == (128, 2)
    np.testing.assert_array_equal(joined[64:96], file.tensors[k].array)
    other = files.Model(files.write_tiny(tmp_path / "b.gguf", "q8_0", **SMALL))
    file.tensors[k] = other.tensors[k]
    three = file.matrices((q, k, v), (64, 32, 32), 64, None)
    assert [len(one) for one in three] == [64, 32, 32]
    together = parts.Concatenated([torch_products()(one, False) for one in three])
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 64)))
    wanted = x.numpy() @ np.concatenate([file.tensors[one].values() for one in (q, k, v)]).T
    np.testing.assert_allclose(together(x).numpy(), wanted)


def test_other_types_are_quantized_anew_where_asked(tmp_path: Any) -> None:
    path = files.write_tiny(tmp_path / "floats.gguf", "q8_0", dequantized=True, **SMALL)
    name, shape = "blk.0.ffn_down.weight", (64, 96)
    file = files.Model(path)
    with pytest.raises(GGUFError, match=r"ffn_down.weight is f32 and .* --requantize q8_0"):
        file.matrices((name,), shape[:1], shape[1], None)
    (again,) = file.matrices((name,), shape[:1], shape[1], "q8_0")
    (floats,) = file.matrices((name,), shape[:1], shape[1], "float32")
    np.testing.assert_allclose(dequantize(again), floats, atol=1e-6)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "gemma"}, "'gemma': those supported are llama, qwen2, qwen2moe"),
        ({"expert_count": 8}, "8 experts, which no llama known .* are qwen2moe, qwen3moe"),
        (
            {"feed_forward_length": 128},
            r"blk.0.ffn_gate.weight has shape \[96, 64\], and the file's keys say \[128, 64\]",
        ),
        ({"block_count": 3}, "lacks blk.2.attn_norm.weight: it is not a complete llama"),
        ({"embedding_length": None}, "lacks llama.embedding_length"),
        ({"rope.scaling.type": "longrope"}, r"scaling 'longrope': those supported are none, lin"),
    ],
)
def test_what_is_no_llama(tmp_path: Any, tiny: Any, change: dict[str, Any], said: str) -> None:
    if "architecture" in change:
        path = files.write_tiny(tmp_path / "other.gguf", **change, **SMALL)
        with pytest.raises(GGUFError, match=said):
            files.Model(path)
        return
    keys = {f"llama.{name}": value for name, value in change.items()}
    known = metadata(tiny) | keys
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            files, "metadata", lambda path: {k: v for k, v in known.items() if v is not None}
        )
        with pytest.raises(GGUFError, match=said):
            files.load(tiny, torch_products())


# --- comparisons ----------------------------------------------------------------------------------


def test_the_first_difference_is_explained_by_its_margin() -> None:
    logits = np.array([[0.0, 5, 1], [2, 1.9, 0], [0, 0, 9]])
    off = np.array([[0.1, 0.1, 0.1], [-0.06, 0.05, 0], [0, 0, 0]])
    assert checks.first_difference([1, 0, 2], [1, 0, 2], logits, off) is None
    found = checks.first_difference([1, 1, 2], [1, 0, 0], logits, off)
    assert found is not None
    assert (found["step"], found["tokens"], found["explained"]) == (1, [1, 0], True)
    assert found["margin"] == pytest.approx(0.1)
    assert found["both_off_by"] == pytest.approx(0.11)
    wrong = checks.first_difference([0, 1, 2], [1, 0, 0], logits, off)
    assert wrong is not None
    assert not wrong["explained"]


# --- the bench ------------------------------------------------------------------------------------


def test_repeated_rows_are_packed_as_if_they_were_all_drawn() -> None:
    n, k, first = 2000, 160, 3
    for name in ("q4_0", "q5_1"):
        blocks = bench.random_blocks(name, bench.DRAWN, k, np.random.default_rng(2))
        turned = np.concatenate([blocks, blocks, blocks])[first * bench.ROWS :][:2048]
        for step in (kernel_of(14), kernel_of(15)):
            for one, whole in zip(step.pack(blocks), step.pack(turned), strict=True):
                made = bench._repeated(torch.from_numpy(one), 8, 16, first)
                np.testing.assert_array_equal(made.numpy(), whole)
        half = torch.from_numpy(dequantize(blocks)).half()
        drawn = bench.Drawn(name, k, {}, half)
        np.testing.assert_array_equal(
            drawn.plain(n, first).weight.numpy(), dequantize(turned[:n]).astype(np.float16)
        )


def test_rounds_are_in_turn_and_ratios_those_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    sides = [lambda i=i: order.append(i) for i in range(3)]
    clock = iter(range(1, 100))
    monkeypatch.setattr(bench, "seconds", lambda work: work() or float(next(clock)))
    took = bench.in_turn(sides, 3)
    assert [len(one) for one in took] == [3, 3, 3]
    assert order[:3] == [2, 0, 1], "does not count"
    assert {order[i] for i in (3, 6, 9)} == {0, 1, 2}, "each begins once"
    took = {"exact": [1.0, 2, 4], "fp16": [3.0, 4, 4], "fast": [0.5, 1, 2]}
    one = bench.row("prefill 512", 100, 10, took, {"exact": [1.0], "fp16": [2.0], "fast": [0.5]})
    assert one["ms"] == {"exact": 200, "fp16": 400, "fast": 100}
    assert one["products_ms"] == {"exact": 1000, "fp16": 2000, "fast": 500}
    assert (one["exact"], one["fp16"], one["fast"]) == (50, 25, 100)
    assert (one["x_exact"], one["x_fast"]) == (2, 4)
    assert "exact 50 tokens/s (2.00x), fast 100 (4.00x), fp16 torch 25" in bench.line(one)


# --- the command line -----------------------------------------------------------------------------


def said(capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    try:
        status = main(["decoder", *map(str, arguments)])
    except SystemExit as error:
        status = int(error.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_tokens_of_a_file(tiny: Any, tmp_path: Any, capsys: Any) -> None:
    there = tmp_path / "found.json"
    status, out, err = said(
        capsys, tiny, "--reference", "--ids", "1,5", "--tokens", 4, "--json", there
    )
    assert status == 0, err
    tokens = [int(word) for word in out.splitlines()[-1].split()]
    logits = filled(reference(tiny), [1, 5, *tokens])
    assert tokens == logits[1:-1].argmax(-1).tolist()
    written = json.loads(there.read_text())
    assert written["tokens"] == tokens
    assert written["versions"]["torch"] == torch.__version__
    _, out, _ = said(capsys, tiny, "--reference", "--prompt", "the", "--tokens", 1)
    assert out.startswith("the")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name a model: make chat GGUF=model.gguf"),
        (["{tiny}", "--top-p", "0.5"], "--top-p is for drawn tokens: give --temperature too"),
        (["{tiny}", "--temperature", "-1", "--reference"], "temperature is -1 and top-p 1: the f"),
        (["--ids", "1,x"], "'1,x' is not a list of tokens like 1,2,3"),
        (["--tokens", "0"], "'0' is not a positive whole number"),
        (["{tiny}", "--reference", "--ids", "1", "--prompt", "a"], "--prompt or --ids, not both"),
        (
            ["{tiny}", "--reference", "--check"],
            "--check and --bench run on a GPU: leave --reference",
        ),
        (
            ["{tiny}", "--reference", "--json", "no/a.json"],
            "name a file, in a folder that is there",
        ),
        (["{tiny}", "--reference", "--ids", "300"], "has 300 and .* tokens 0 to 287: give tokens"),
        (["{tiny}", "--reference", "--prompt", "the " * 1000], "and the model's context is 1024"),
        (["nowhere.gguf", "--reference"], "No such file"),
    ],
)
def test_what_is_refused(tiny: Any, capsys: Any, arguments: list[str], told: str) -> None:
    status, out, err = said(capsys, *(one.format(tiny=tiny) for one in arguments))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(told, err), err


def test_a_check_is_within_the_model_and_says_what_is_wrong(
    tiny: Any, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel_operations, "chosen", lambda *_, **__: operations.PLAIN)
    for more, told in (
        (["--ids", "1,288"], "--ids has 288 and .* has tokens 0 to 287"),
        (["--tokens", "999"], "192 tokens and 999 more are asked for"),
    ):
        status, _, err = said(capsys, tiny, "--check", *more)
        assert status == 2
        assert re.search(told, err), err
    found = {
        "accuracy": "exact",
        "steps": 64,
        "bound": 0.03,
        "rms_difference_of_prompt": 0.2,
        "rms_difference_of_steps": 0.1,
        "first_difference": {"step": 3, "margin": 1.5, "both_off_by": 0.25},
        "right": False,
    }
    monkeypatch.setattr(checks, "against_torch", lambda *_, **__: found)
    status, out, _ = said(capsys, tiny, "--check")
    assert status == 1
    assert out.splitlines()[0] == (
        "tiny.gguf, exact: WRONG: the error of the logits is 0.2 of their root mean square (bound "
        "0.03), tokens differ from step 3 on, where the two logits are 1.5 apart and their errors "
        "add up to 0.25"
    )


def test_a_split_file_answers_as_the_whole(tiny: Any, tmp_path: Any, capsys: Any) -> None:
    whole, first = gguf_bytes.read(tiny), tmp_path / "m-00001-of-00002.gguf"
    for i, some in enumerate((whole.tensors[:9], whole.tensors[9:])):
        facts = {"split.no": (2, i), "split.count": (2, 2)}
        part = replace(whole, tensors=some, keys=facts | (whole.keys if i == 0 else {}))
        first.with_name(f"m-{i + 1:05d}-of-00002.gguf").write_bytes(part.bytes())
    found = [said(capsys, one, "--reference", "--tokens", 5) for one in (tiny, first)]
    assert found[0] == found[1]
    assert found[0][0] == 0


ESCAPE = "\x1b]0;owned\x07\r\x9b2J"


def test_no_file_commands_the_terminal(tiny: Any, tmp_path: Any, capsys: Any) -> None:
    """An answer, a name, a value and a file's name; JSON has what there is."""
    file, path, there = gguf_bytes.read(tiny), tmp_path / "m.gguf", tmp_path / "found.json"
    _, (kind, words) = file.keys["tokenizer.ggml.tokens"]
    words = [*words[:270], ESCAPE, "\n\t", *words[272:]]
    likely = np.zeros(len(words), np.float32)
    likely[[270, 271]] = 1e6, 1e6
    last = gguf_bytes.Tensor("output.bias", (len(words),), 0, likely.tobytes())
    answers = replace(file, tensors=(*file.tensors, last))
    answers = answers.with_keys({"tokenizer.ggml.tokens": gguf_bytes.array(kind, words)})
    path.write_bytes(answers.bytes())
    status, out, err = said(
        capsys, path, "--reference", "--prompt", "the", "--tokens", 2, "--json", there
    )
    assert status == 0, err
    tokens = json.loads(there.read_text())["tokens"]
    assert set(tokens) <= {270, 271}
    shown = {270: r"\x1b]0;owned\x07\r\x9b2J", 271: "\n\t"}
    assert out == "the" + "".join(shown[one] for one in tokens) + "\n"
    assert json.loads(there.read_text())["text"] == "the" + "".join(words[one] for one in tokens)
    other = gguf_bytes.Tensor(ESCAPE, (1,), 0, bytes(4))
    for bad, name in (
        (replace(file, tensors=(*file.tensors, other)), "m.gguf"),
        (file.with_keys({"llama.expert_count": (gguf_bytes.STRING, ESCAPE)}), "m.gguf"),
        (file.with_keys({"general.architecture": (gguf_bytes.STRING, ESCAPE)}), "m.gguf"),
        (file.with_keys({"llama.block_count": (gguf_bytes.U32, 3)}), "\x1b]0;owned\x07.gguf"),
    ):
        (tmp_path / name).write_bytes(bad.bytes())
        status, out, err = said(capsys, tmp_path / name, "--reference")
        assert (status, out) == (2, "")
        assert r"\x1b]0;owned" in err
        assert err.removesuffix("\n").isprintable()


OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB of "
    "which 10.19 MiB is free. Including non-PyTorch memory, this process has 7.7 GiB"
)
ON_CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError(OUT_OF_MEMORY), "7.79 GiB of which 10.19 MiB is free."),
        (RuntimeError(ON_CPU), "can't allocate memory: you tried to allocate 8 bytes."),
        (MemoryError(), "no more is left"),
    ],
)
def test_a_model_that_memory_does_not_hold(
    tiny: Any, capsys: Any, monkeypatch: Any, error: Exception, told: str
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(files, "load", load)
    status, _, err = said(capsys, tiny, "--reference")
    assert status == 2
    assert err.startswith(f"python -m steps decoder: {tiny} takes more memory than there is: ")
    assert err.endswith(f"{told}\n")
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        said(capsys, tiny, "--reference")


@pytest.mark.parametrize(
    "told",
    [
        "CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in",
        "loading decode_bulk is not possible on this GPU: CUDA_ERROR_LAUNCH_FAILED",
    ],
)
def test_a_kernel_that_gives_up(tiny: Any, capsys: Any, monkeypatch: Any, told: str) -> None:
    """It has waited; one that traps at once has another fault."""

    def load(*_: Any, **__: Any) -> Any:
        raise RuntimeError(told)

    monkeypatch.setattr(files, "load", load)
    monkeypatch.setattr(language_model, "_said_at", time.perf_counter() - 31)
    status, _, err = said(capsys, tiny, "--reference")
    assert status == 2
    assert err.startswith("python -m steps decoder: the GPU ended a launch 31 s after ")
    assert err.count("\n") == 1
    monkeypatch.setattr(language_model, "_said_at", time.perf_counter() - 2)
    with pytest.raises(RuntimeError, match=r"LAUNCH_FAILED|launch failure"):
        said(capsys, tiny, "--reference")


def test_what_is_told_has_no_commands(capsys: Any) -> None:
    language_model._tell(f"{ESCAPE}.gguf, ready")
    assert capsys.readouterr().err == "[\\x1b]0;owned\\x07\\r\\x9b2J.gguf, ready]\n"


def test_a_usage_error_has_no_commands() -> None:
    assert str(UsageError(f"no\ntensor {ESCAPE}")) == (
        r"no tensor \x1b]0;owned\x07 \x9b2J"  # \r is a space between words
    )


def test_without_a_gpu_it_says_so(tiny: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in ([tiny], ["--bench"], ["--check"]):
        status, _, err = said(capsys, *arguments)
        assert status == 2
        assert "torch finds no CUDA GPU: use one, or --reference" in err


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["plain", "kernels"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen2moe", "qwen3moe"])
@pytest.mark.parametrize("accuracy", ["exact", "fast"])
def test_right_on_a_gpu(
    cuda: Any, tmp_path: Any, how: str, architecture: str, accuracy: str
) -> None:
    """In a CUDA graph, against torch in float64."""
    path = files.write_tiny(tmp_path / "tiny.gguf", architecture=architecture)
    ids, do = checks.prompt(files.WORDS), kernel_operations.chosen(how)
    found = checks.against_torch(path, ids, accuracy=accuracy, operations=do)
    assert found["right"], found


@pytest.mark.gpu
def test_a_small_bench_on_a_gpu(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PROMPTS", (64, 300))
    monkeypatch.setattr(
        bench, "ROUNDS", {"decode": 2, "prefill 64": 2, "prefill 300": 2, "products": 2}
    )
    config = parts.Config(2, 256, 512, 8, 2, 32, 1000)
    found = bench.measure(operations.PLAIN, config=config)
    assert len(found["rows"]) == 4
    mixed = replace(config, hidden=128, experts=8, chosen=2)
    of_experts = bench.measure(operations.PLAIN, config=mixed)
    assert len(of_experts["rows"]) == 4
    assert sum(one.startswith("experts") for one in of_experts["choices"]) == 4 * 2
    for name, off in found["rms_difference_of_logits_from_fp16"].items():
        assert off < {"exact": 0.005, "fast": 0.1}[name.split()[-1]], name
