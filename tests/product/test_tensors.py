"""Tensors of a GGUF file: problems of their own, multiplied by `gemm`, never copied on the way."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, dequantize, quantize
from qformats.gguf_file import tensors
from reference import PrequantizedProblem, Problem, check, limits, same_operands
from steps import gemm, plan
from steps.driver.machines import Simulator
from steps.product import gemm as gemm_module
from steps.registry import kernel_of, kernels
from tests.formats.test_gguf_file import CONTENT, write

N, K = 300, 1024
UP = "blk.0.ffn_up.weight"


def trained(n: int = N, k: int = K) -> np.ndarray:
    """Weights like those of a trained layer: small, each row of a size of its own, a few channels
    far larger than the others. float32[n, k]"""
    rng = np.random.default_rng(7)
    w = rng.standard_normal((n, k)) * 0.02 * rng.lognormal(0, 0.5, (n, 1))
    w[:, rng.choice(k, 3, replace=False)] *= 12
    return w.astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = dict(CONTENT)
    for name in WEIGHT_FORMATS:
        raw = quantize(trained(), name).view(np.uint8).reshape(N, -1)
        found[UP.replace("up", name)] = name, raw
    found[UP] = "q4_0", found[UP.replace("up", "q4_0")][1]
    return write(tmp_path_factory.mktemp("model") / "model.gguf", found)


def blocks(model: Path, name: str = UP) -> np.ndarray:
    return tensors(model)[name].array


# --- the problem ----------------------------------------------------------------------------------


def test_blocks_are_the_problem_and_a_alone_is_drawn(model: Path) -> None:
    held = blocks(model)
    one = PrequantizedProblem(5, held, "llm", 3)
    assert (one.shape, one.format) == ((5, N, K), "q4_0")
    assert np.shares_memory(one.blocks, held)
    assert not one.blocks.flags.writeable
    np.testing.assert_array_equal(one.a, Problem(5, N, K, "q4_0", "llm", 3).a)
    assert not one.knows_floats
    with pytest.raises(ValueError, match="not known"):
        _ = one.w


def test_two_matrices_of_one_shape_are_two_problems(model: Path) -> None:
    one, other = PrequantizedProblem(2, blocks(model)), PrequantizedProblem(2, blocks(model)[::-1])
    assert one != other
    assert len({one, other, one}) == 2


@pytest.mark.parametrize(
    ("m", "w", "distribution", "said"),
    [
        (0, (4, 2), "normal", "must be positive, got M=0"),
        (1, (4,), "normal", r"blocks \[N, K/32\], got the shape \[4\]"),
        (1, (4, 0), "normal", "must be positive, got M=1, N=4, K=0"),
        (1, (4, 2), "integer", "A alone is drawn, from one of uniform, normal, llm, got 'integer'"),
    ],
)
def test_blocks_that_are_no_problem(m: int, w: Any, distribution: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PrequantizedProblem(m, np.zeros(w, FORMATS["q4_0"].dtype), distribution)


def test_a_kernel_is_judged_by_its_operands_and_no_format_is(model: Path) -> None:
    one = PrequantizedProblem(40, blocks(model))
    right = same_operands(one.a, one.blocks)[0].astype(np.float32)
    verdict = check(right, one, "A16")
    assert verdict.ok
    assert verdict.nmse_float is None
    assert "against the same operands" in verdict.verdict
    assert "float product" not in verdict.verdict
    allowed = limits(one, "A16")
    assert (allowed.nmse_float, allowed.nmse_weights) == (None, None)
    assert not check(right * np.float32(1.001), one, "A16").ok
    other = PrequantizedProblem(40, blocks(model)[::-1])
    assert not check(right, other, "A16").ok, "another matrix of the same shape"


# --- gemm, pack and plan --------------------------------------------------------------------------


def test_a_tensor_is_multiplied_like_its_blocks(model: Path) -> None:
    tensor = tensors(model)["blk.0.q5_0"]
    a = Problem(2, *tensor.shape, "q5_0").a
    wanted = gemm(a, np.array(tensor.array), step=3, machine=Simulator())
    np.testing.assert_array_equal(gemm(a, tensor, step=3, machine=Simulator()), wanted)
    machine, out = Simulator(), np.empty_like(wanted)
    plan(2, tensor, step=3, machine=machine)(a, out)
    np.testing.assert_array_equal(out, wanted)
    handle = gemm_module.pack(tensor, step=3, machine=machine)
    assert (handle.format, handle.n, handle.k) == ("q5_0", *tensor.shape)
    np.testing.assert_array_equal(gemm(a, handle, machine=machine), wanted)
    exact = a.astype(np.float64) @ dequantize(tensor.array).astype(np.float64).T
    np.testing.assert_allclose(wanted, exact, atol=0.02 * np.abs(exact).max())


def test_a_tensor_that_no_kernel_takes(model: Path) -> None:
    found = tensors(model)
    for name in ("blk.0.f32", "blk.0.bf16", "positions"):
        said = f"{name} is {found[name].type}: w must hold blocks of q4_0, "
        for refused in (gemm, gemm_module.pack):
            arguments = [np.zeros((1, 32), np.float32)] if refused is gemm else []
            with pytest.raises(TypeError, match=said):
                refused(*arguments, found[name], machine=Simulator())
        with pytest.raises(TypeError, match=said):
            plan(1, found[name], machine=Simulator())
    for name in FILE_FORMATS:
        if not any(name in one.formats for one in kernels()):
            with pytest.raises(TypeError, match=rf"w must hold blocks of q4_0, .*, got {name}$"):
                gemm_module.pack(found[f"blk.0.{name}"], machine=Simulator())
    with pytest.raises(ValueError, match=r"shape \[N, K/32\], got 1"):
        gemm_module.pack(tensors(model)["blk.0.q4_0"].array[0], machine=Simulator())
    with pytest.raises(ValueError, match="got 3 dimensions"):
        gemm_module.pack(found["experts"], machine=Simulator())


# --- nothing is copied on the way -----------------------------------------------------------------


class Uploads(Simulator):
    """A machine that notes what is uploaded to it."""

    def __init__(self) -> None:
        super().__init__()
        self.uploaded: list[np.ndarray] = []

    def array(self, host: np.ndarray) -> np.ndarray:
        self.uploaded.append(host)
        return host


@pytest.mark.parametrize("number", [5, 14])
def test_other_packings_are_the_only_copy(model: Path, number: int, monkeypatch: Any) -> None:
    """They read the file where it is mapped, and what they make is what is uploaded."""
    read: list[np.ndarray] = []
    made: list[np.ndarray] = []

    def packed(w: np.ndarray) -> Any:
        read.append(w)
        made.extend(kernel_of(number).pack(w))
        return tuple(made)

    step = replace(kernel_of(number), pack=packed)
    monkeypatch.setattr(gemm_module, "kernel_of", lambda _: step)
    tensor, machine = tensors(model)[UP], Uploads()
    gemm_module.pack(tensor, step=number, machine=machine)
    assert [np.shares_memory(w, tensor.array) for w in read] == [True]
    assert [id(array) for array in machine.uploaded] == [id(array) for array in made]


def test_nothing_of_its_size_is_allocated_for_a_tensor(tmp_path: Path) -> None:
    """Looking for NaN takes a byte a block."""
    n, k = 1024, 8192
    raw = np.zeros((n, k // 32), FORMATS["q4_0"].dtype).view(np.uint8).reshape(n, -1)
    path = write(tmp_path / "large.gguf", {UP: ("q4_0", raw)})
    tensors(path)  # what is imported on the first use is not counted

    def peak(work: Any) -> int:
        tracemalloc.start()
        try:
            kept = work()
            assert kept is not None
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    packed = peak(lambda: gemm_module.pack(tensors(path)[UP], step=1, machine=Uploads()))
    assert packed < raw.nbytes // 8
    assert peak(lambda: np.array(tensors(path)[UP].array)) > raw.nbytes, "a copy would be seen"
