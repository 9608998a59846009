"""Models with experts in the decoder: their products by the kernels, routers, what is refused.

Logits are compared with those of transformers' models in `test_architectures`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qformats.gguf_file import GGUFError, metadata
from results.measure.models import one_gpu as bench
from steps.decoder import files, operations, parallel
from steps.decoder import model as parts
from steps.decoder.compare import checks
from steps.decoder.model import step_products, torch_products
from steps.kernels.experts import few
from steps.nn import experts
from steps.product.experts import ExpertsChoice
from tests.decoder.test_between import launched_by_equal_answers
from tests.decoder.test_decoder import SMALL, reference

MIXED = SMALL | {"block_count": 1, "expert_feed_forward_length": 96}


@pytest.fixture(autouse=True)
def few_warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator takes as long as there are threads."""
    monkeypatch.setattr(few, "H200_SHAPES", ((2, 2),))


def tiny(tmp_path: Any, architecture: str = "qwen3moe", **changes: Any) -> Any:
    """Its experts may differ in type from its other matrices."""
    return files.write_tiny(tmp_path / "tiny.gguf", architecture=architecture, **MIXED | changes)


def test_a_token_by_the_kernels(kernels: Any, tmp_path: Any) -> None:
    path = tiny(tmp_path)
    ours, trusted, ids = files.load(path, step_products("cpu")), reference(path), torch.tensor([7])
    logits = ours.step(ids, ours.cache(1, 4)).double().numpy()
    names = [name for name, *_ in kernels.launched]
    assert names[2:] == ["few", "few", "weighted", "decode_bulk"], "gates and ups, downs, logits"
    off = checks.relative(logits, trusted.step(ids, trusted.cache(1, 4)).numpy())
    expected = checks.expected(trusted, [7], "exact")
    assert 0.3 * expected < off < checks.SAFETY * expected


@pytest.mark.parametrize("type_of_ups", ["q4_0", "q8_0"])
def test_experts_by_the_kernels(kernels: Any, tmp_path: Any, type_of_ups: str) -> None:
    """Gates and ups are one product, or two where their types differ."""
    path, name = tiny(tmp_path), "blk.0.ffn_up_exps.weight"
    other = tmp_path / "other.gguf"
    files.write_tiny(other, type_of_ups, architecture="qwen3moe", **MIXED)
    found, x = [], torch.randn((2, 64), generator=torch.Generator().manual_seed(0))
    ids, shares = torch.tensor([[3, 1], [0, 3]], dtype=torch.int32), torch.rand(2, 2)
    for make in (step_products("cpu"), torch_products(dtype=torch.float32)):
        file = files.Model(path)
        file.tensors[name] = files.Model(other).tensors[name]
        of = files.load(file, make).layers[0].mixture.experts
        found.append(of(x.to(of.input_dtype(2)), ids, shares).double().numpy())
        if isinstance(of, parts.StepExperts):
            count = 2 if type_of_ups == "q4_0" else 3
            assert len(of.choices(2, 2)) == count
            assert [one for one, *_ in kernels.launched].count("few") >= count - 1
    assert 1e-5 < checks.relative(*found) < 2e-3


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen2moe"])
def test_a_decoder_says_the_same_with_kernels(tmp_path: Any, architecture: str) -> None:
    """Routers by their kernels: in the launch of a norm, and behind the logits of many tokens."""
    path = tiny(tmp_path, architecture)
    launched = launched_by_equal_answers(path, 9)
    assert launched.count("choose_experts") == 1, "a prompt of 18 tokens"
    assert launched.count("route") == 2
    assert launched.count("add_and_norm") == 3 + 2 + 2, "first ones, last ones, and a prompt's"


def test_kernels_compiled_ahead_are_those_of_calls(
    kernels: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(parts, "Gpu", lambda: kernels)
    monkeypatch.setattr(
        parts.parallel_compile, "compile_ahead", lambda wanted, *_, **__: asked.extend(wanted)
    )
    monkeypatch.setattr(kernels, "runs", False)
    ours = files.load(tiny(tmp_path, block_count=2), step_products("cpu"))
    ours.compile_ahead([("exact", 2), ("exact", 40)], 2)
    of_experts = [one for one in asked if isinstance(one, ExpertsChoice)]
    assert len(of_experts) == 2 * 2, "layers are alike"
    later: list[ExpertsChoice] = []
    prepare = experts.prepare
    monkeypatch.setattr(
        experts, "prepare", lambda choice, types: later.append(choice) or prepare(choice, types)
    )
    for count in (2, 40):
        x = torch.zeros(count, 64, dtype=torch.float16)
        ids, shares = torch.zeros(count, 2, dtype=torch.int32), torch.zeros(count, 2)
        ours.layers[0].mixture.experts(x, ids, shares)
    assert of_experts == later


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"expert_count": None}, "lacks qwen3moe.expert_count: convert the model again"),
        ({"expert_used_count": 5}, "has 4 experts, and 5 of them for a token"),
        (
            {"expert_count": 8},
            r"ffn_gate_exps.weight has shape \[4, 96, 64\], and the file's keys say \[8, 96, 64\]",
        ),
        (
            {"expert_feed_forward_length": 128},
            r"ffn_gate_exps.weight has shape \[4, 96, 64\], and the file's keys say \[4, 128, 64\]",
        ),
        ({"expert_feed_forward_length": None}, "lacks qwen3moe.expert_feed_forward_length"),
    ],
)
def test_keys_that_disagree(tmp_path: Any, change: dict[str, Any], said: str) -> None:
    path = tiny(tmp_path)
    known = metadata(path) | {f"qwen3moe.{name}": value for name, value in change.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            files, "metadata", lambda path: {k: v for k, v in known.items() if v is not None}
        )
        with pytest.raises(GGUFError, match=said):
            files.load(path, torch_products())


def test_tensors_that_are_not_there_or_of_another_shape(tmp_path: Any) -> None:
    path = tiny(tmp_path, "qwen2moe")
    for name in ("gate_inp", "up_exps", "down_shexp", "gate_inp_shexp"):
        file = files.Model(path)
        del file.tensors[f"blk.0.ffn_{name}.weight"]
        with pytest.raises(
            GGUFError, match=rf"lacks blk.0.ffn_{name}.weight: it is not a complete"
        ):
            files.load(file, torch_products())
    file = files.Model(path)
    file.tensors["blk.0.ffn_gate_inp.weight"] = file.tensors["blk.0.attn_norm.weight"]
    with pytest.raises(GGUFError, match=r"gate_inp.weight has shape \[64\], and .* say \[4, 64\]"):
        files.load(file, torch_products())


def test_types_that_no_kernel_of_experts_takes(tmp_path: Any, kernels: Any) -> None:
    """Are refused in a sentence, or quantized again where that is asked for."""
    path = files.write_tiny(
        tmp_path / "floats.gguf", dequantized=True, architecture="qwen3moe", **MIXED
    )
    said = r"attn_q.weight is f32 and the kernels take .*: --requantize q8_0 quantizes it again"
    with pytest.raises(GGUFError, match=said):
        files.load(path, step_products("cpu"))
    file = files.Model(path)
    with pytest.raises(GGUFError, match=r"ffn_up_exps.weight is f32 and the kernels take q4_0, "):
        file.matrix("blk.0.ffn_up_exps.weight", (4, 96, 64), None, files.OF_EXPERTS)
    again = files.load(path, step_products("cpu"), requantize="q8_0")
    assert set(again.layers[0].mixture.experts.formats.values()) == {"q8_0"}
    assert "q2_k" in files.TAKEN
    assert "q2_k" not in files.OF_EXPERTS


def test_experts_are_not_shared_among_gpus() -> None:
    with pytest.raises(ValueError, match="128 experts a layer are not shared among GPUs: use one"):
        parallel.Share(parts.QWEN3_30B_A3B, 0, 2)


# --- the bench ------------------------------------------------------------------------------------


def test_experts_of_the_bench_are_the_same_on_either_side(kernels: Any, monkeypatch: Any) -> None:
    """Ours are packed rows of all experts below each other, gates and ups in turn; torch's are
    gates above ups."""
    of = parts.Config(1, 128, 128, 4, 2, 32, 300, experts=8, chosen=2)
    ours, theirs = bench.models(of, "q4_0", operations.PLAIN, torch.device("cpu"))
    mine, grouped = (one.layers[0].mixture.experts for one in (ours, theirs))
    monkeypatch.setattr(torch, "_grouped_mm", by_loop)
    x = torch.randn((1, 128), generator=torch.Generator().manual_seed(0)).half()
    ids, shares = torch.tensor([[7, 1]], dtype=torch.int32), torch.rand(1, 2)
    found = (one(x.to(one.input_dtype(1)), ids, shares) for one in (mine, grouped))
    assert checks.relative(*(one.double().numpy() for one in found)) < 2e-2  # bfloat16
    assert bench.bytes_of(mine) == 8 * 3 * 128 * 128 // 32 * 18 + 8 * 3 * 128 * 4


def by_loop(x: Any, w: Any, *, offs: Any) -> Any:
    """`torch._grouped_mm`, which some CPUs have not."""
    rows = torch.tensor_split(x, offs[:-1].long().cpu())
    return torch.cat([a @ b for a, b in zip(rows, w, strict=True)])
