"""Bounds of `--check`: what right products lose is inside, and not far; broken ones are outside.

Right products are emulated: torch, with operands rounded as the steps are judged by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qformats import FORMATS, quantize
from steps.decoder import files
from steps.decoder.compare import checks, stated_errors
from steps.decoder.compare.emulation import emulated_products
from steps.decoder.model import torch_products
from tests.decoder.smollm2 import smollm2
from tests.decoder.test_decoder import filled

ROUNDING = {("exact", "A16"): "exact", ("exact", "A8"): "Q8_1", ("fast", "A16"): "fast"}
PARAGRAPH = "The sea is everywhere the same, yet every coast believes that it has one of its own. "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> Path:
    return files.write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def off_by(trusted: Any, model: Any, ids: list[int]) -> float:
    return checks.relative(filled(model, ids), filled(trusted, ids))


@pytest.mark.parametrize(("accuracy", "family"), ROUNDING)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("q4_0", {}),
        ("q5_1", {"block_count": 1, "architecture": "qwen2"}),
        ("q8_0", {"block_count": 8, "architecture": "qwen3"}),
    ],
)
def test_right_products_are_inside_but_not_far(
    tmp_path: Path, name: str, changes: dict[str, Any], accuracy: str, family: str
) -> None:
    path = files.write_tiny(tmp_path / "tiny.gguf", name, **changes)
    trusted, ids = checks.reference(path), checks.prompt(files.WORDS, 48)
    expected = checks.expected(trusted, ids, ROUNDING[accuracy, family])
    off = off_by(trusted, files.load(path, emulated_products(accuracy, family)), ids)
    assert 0.7 * expected < off < 1.3 * expected
    assert stated_errors.SAFETY > 1.3


def broken(blocks: np.ndarray, how: str) -> np.ndarray:
    """A matrix as a wrong kernel might read it."""
    made = blocks.copy()
    if how == "one wrong scale":
        made["d"][len(made) // 2, 3] *= 4
    if how == "a block left out":  # of each row, the last
        for name in made.dtype.names or ():
            made[name][:, -1] = 0
        if "m" not in (made.dtype.names or ()):
            made["qs"][:, -1] = 0x88  # zeros of q4_0, whatever d is
    return made


@pytest.mark.parametrize("how", ["one wrong scale", "a block left out"])
@pytest.mark.parametrize("which", ["qkv", "out", "gate_up", "down"])
def test_a_broken_product_is_outside(tiny: Path, how: str, which: str) -> None:
    trusted, ids = checks.reference(tiny), checks.prompt(files.WORDS, 48)
    file = files.Model(tiny)
    names = {"qkv": "v", "out": "output"}
    name = f"blk.1.{'ffn' if which in ('gate_up', 'down') else 'attn'}_{names.get(which, which)}"
    tensor = file.tensors[f"{name.replace('gate_up', 'up')}.weight"]
    shape = tensor.shape
    right = tensor.array
    for accuracy in ("exact", "fast"):
        model = files.load(file, emulated_products(accuracy))
        wrong = broken(right, how)
        product = getattr(model.layers[1], which)
        first = {"qkv": 256 + 64, "gate_up": 512}.get(which, 0)
        one = emulated_products(accuracy)(wrong, False)
        product.weight[first : first + shape[0]] = one.weight
        if accuracy == "fast":
            product._int8[first : first + shape[0]] = one._int8
        off = off_by(trusted, model, ids)
        bound = stated_errors.SAFETY * checks.expected(trusted, ids, accuracy)
        # Requantized weights hide what one scale changes: less than rounding itself.
        assert (off > bound) or (accuracy == "fast" and how == "one wrong scale"), (off, bound)


@pytest.mark.parametrize("rounding", ["exact", "Q8_1", "fast"])
def test_what_one_product_is_off_by(rounding: str) -> None:
    """With an outlier channel in x, which sets the scale of a token."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 256)).astype(np.float32)
    x[:, 7] *= 12
    blocks = quantize(rng.standard_normal((300, 256)).astype(np.float32), "q4_0")
    accuracy = "fast" if rounding == "fast" else "exact"
    made = emulated_products(accuracy, "A8" if rounding == "Q8_1" else "A16")(blocks, False)
    exact = torch_products()(blocks, False)
    given = torch.from_numpy(x)
    off = checks.relative(made(given).double().numpy(), exact(given.double()).numpy())
    y = exact(given.double())
    stated = float(
        (stated_errors.variance(given.double(), exact.weight, y, rounding).mean()).sqrt()
    )
    assert 0.85 * stated < off * float(y.square().mean().sqrt()) < 1.15 * stated
    few = [given[:16].double(), exact.weight, y[:16]]
    assert torch.equal(stated_errors.variance(*few, "fast"), stated_errors.variance(*few, "exact"))


def test_rounding_to_16_bits_costs_what_is_stated() -> None:
    values = torch.from_numpy(2 ** np.random.default_rng(0).uniform(-6, 6, 100_000))
    off = checks.relative(values.half().double().numpy(), values.numpy())
    assert off == pytest.approx(stated_errors.HALF, rel=0.05)


def test_errors_are_expected_of_any_model_and_leave_it_as_it_was(tiny: Path) -> None:
    trusted, ids = checks.reference(tiny), checks.prompt(files.WORDS, 20)
    before = filled(trusted, ids)
    found = [checks.expected(trusted, ids, "exact", seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert found[0] == pytest.approx(found[2], rel=0.1)
    np.testing.assert_array_equal(filled(trusted, ids), before)


def test_half_of_a_product_in_another_format(tmp_path: Path) -> None:
    """Products of matrices of two types are two, each with its own error."""
    file = files.Model(files.write_tiny(tmp_path / "a.gguf", "q4_0"))
    other = files.Model(files.write_tiny(tmp_path / "b.gguf", "q8_0"))
    file.tensors["blk.0.attn_k.weight"] = other.tensors["blk.0.attn_k.weight"]
    trusted, ids = checks.reference(file), checks.prompt(files.WORDS, 20)
    assert FORMATS["q8_0"].dtype == file.tensors["blk.0.attn_k.weight"].array.dtype
    expected = checks.expected(trusted, ids, "exact")
    assert 0 < expected < off_by(trusted, files.load(file, emulated_products("fast")), ids)


@pytest.mark.slow
def test_a_real_model() -> None:
    """SmolLM2: 30 layers, outlier channels. A block left out of one of its 121 products is seen."""
    file = files.Model(smollm2())
    ids = file.vocabulary.ids(PARAGRAPH)
    trusted = checks.reference(file)
    right = filled(trusted, ids)
    for accuracy in ("exact", "fast"):
        model = files.load(file, emulated_products(accuracy))
        expected = checks.expected(trusted, ids, accuracy)
        assert len(ids) > 16, "more than decoding takes"
        assert 0.5 * expected < checks.relative(filled(model, ids), right) < 1.5 * expected
        if accuracy == "exact":
            wrong = broken(file.tensors["blk.14.ffn_down.weight"].array, "a block left out")
            model.layers[14].down = emulated_products()(wrong, False)
            assert checks.relative(filled(model, ids), right) > stated_errors.SAFETY * expected
