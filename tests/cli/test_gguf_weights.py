"""Weights of a GGUF file: checked and timed by the command line, multiplied by `gemm`, and never
copied on the way."""

from __future__ import annotations

import json
import tracemalloc
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, dequantize, quantize
from qformats.gguf_file import tensors
from reference import PrequantizedProblem, Problem, check, limits, same_operands
from results.measure.products import Data, PartOf
from steps import find, gemm, ladder, plan
from steps.checks.run import Outcome, Outcomes
from steps.cli import gguf_weights, run
from steps.cli import main as cli
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
    broken = quantize(trained(2, 64), "q8_0")
    broken["d"][1, 0] = np.nan
    found["broken.weight"] = "q8_0", broken.view(np.uint8).reshape(2, -1)
    return write(tmp_path_factory.mktemp("model") / "model.gguf", found)


def blocks(model: Path, name: str = UP) -> np.ndarray:
    return tensors(model)[name].array


def one_sentence(text: str) -> bool:
    return text.count("\n") == 1 and text.endswith("\n") and "Traceback" not in text


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
    part = PartOf(3, N, K, "q4_0", data=Data(40, N, K, given=one))
    verdict = check(same_operands(part.a, part.blocks)[0].astype(np.float32), part, "A16")
    assert (verdict.ok, verdict.nmse_float) == (True, None)


# --- the command line -----------------------------------------------------------------------------


def test_every_family_multiplies_a_part_in_the_simulator(
    model: Path, monkeypatch: Any, capsys: Any
) -> None:
    seen: list[np.ndarray] = []

    def packed(w: np.ndarray) -> Any:
        seen.append(w)
        return find(3).pack(w)

    monkeypatch.setattr(run, "steps_of", lambda _: (replace(find(3), pack=packed),))
    monkeypatch.setattr(gguf_weights, "PART_SIZE", (2, 5, 64))
    options = ["--machine", "simulator", "--gguf", str(model), "--tensor", UP, "--dist", "llm"]
    assert cli.main(["check", "3", *options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["scheme"] for one in data["checks"]] == ["W4A16", "W4A8"]
    assert data["tensor"] == {
        "file": str(model),
        "tensor": UP,
        "format": "q4_0",
        "shape": [N, K],
        "multiplied": [2, 5, 64],
    }
    whole = quantize(trained(), "q4_0")
    assert seen
    assert all(w.tobytes() == whole[:5, :2].tobytes() for w in seen)
    assert cli.main(["check", "3", *options, "--m", "512"]) == 0
    title, _, head, _, row, _, *notes = capsys.readouterr().out.splitlines()
    assert f"on a part of {UP} of model.gguf, q4_0 [{N}, {K}]: " in title
    assert "rows 0 to 4 of 300, K 0 to 63 of 1024, 2 of 512 tokens" in title
    columns = [" ".join(cell.split()) for cell in head.split("  ") if cell.strip()]
    cells = dict(zip(columns, (c.strip() for c in row.split("  ") if c.strip()), strict=True))
    assert (cells["format"], cells["NMSE, product"], cells["verdict"]) == (
        "q4_0",
        "-",
        "ok, 1 case",
    )
    assert notes == list(gguf_weights.NOTES)


def test_a_gpu_checks_and_times_the_whole(
    model: Path, measured: list[Any], monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(gguf_weights, "PART_SIZE", (1, 1, 32))
    small = quantize(trained(6, 64), "q4_1")
    path = write(model.parent / "small.gguf", {UP: ("q4_1", small.view(np.uint8).reshape(6, -1))})
    command = ["run", "5", "--gguf", str(path), "--tensor", UP, "--m", "3"]
    assert cli.main(command) == 0
    (at,) = measured
    assert list(at) == [(3, 6, 64)]
    title, _, _, _, *lines = capsys.readouterr().out.splitlines()
    assert title == f"Pretended GPU, {UP} of small.gguf, q4_1 [6, 64], M=3"
    assert [line.split()[:4] for line in lines[:2]] == [
        ["4", "W4A8", "q4_1", "3x6x64"],
        ["5", "W4A8", "q4_1", "3x6x64"],
    ]
    assert all(line.endswith("ok, 1 case") for line in lines[:2])
    assert lines[2:] == list(gguf_weights.NOTES)
    assert cli.main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(row["M"], row["N"], row["K"]) for row in data["rows"]] == [(3, 6, 64)] * 2


def test_m_is_that_of_the_home_shape_where_none_is_asked_for(
    model: Path, measured: list[Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        run, "check_works", lambda works, *_: Outcomes([Outcome(work, 1) for work in works])
    )
    for step in (find(5), *(one for one in ladder() if one.branch == "decode")):
        assert cli.main(["run", str(step.number), "--gguf", str(model), "--tensor", UP]) == 0
        assert list(measured.pop()) == [(step.home_shapes[0][0], N, K)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tensor", "blk.0.ffn_upp.weight"], f"did you mean {UP} or "),
        (["--tensor", "zzz"], "model.gguf` lists them"),
        ([], "model.gguf needs --tensor: `python -m qformats tensors "),
        (["--tensor", "norm"], "norm has the shape [512]; weights are a matrix [N, K]"),
        (["--tensor", "blk.0.f32"], "blk.0.f32 is f32, and step 3 has no f32: it takes q4_0, "),
        (["--tensor", "broken.weight"], "be multiplied: w has d = nan in block 0 of row 1"),
        (["--tensor", UP, "--format", "q4_0"], "--format contradicts --gguf: a tensor has its own"),
        (["--tensor", UP, "--k", "32"], "--k contradicts --gguf"),
        (["--tensor", UP, "--dist", "integer"], "--dist integer contradicts --gguf: only A is"),
        (["--tensor", UP, "--scheme", "W8A16"], "no format asked for is W8A16: q4_0 is W4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_said_in_a_sentence(
    model: Path, arguments: list[str], said: str, capsys: Any
) -> None:
    assert cli.main(["run", "3", "--gguf", str(model), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert one_sentence(printed.err), printed.err
    assert said in printed.err


def test_a_file_that_is_none(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "model.txt").write_text("weights")
    for path, said in (("nowhere.gguf", "No such file"), ("model.txt", "is not a GGUF file")):
        assert cli.main(["run", "3", "--gguf", str(tmp_path / path), "--tensor", UP]) == 2
        sentence = capsys.readouterr().err
        assert one_sentence(sentence)
        assert said in sentence
    assert cli.main(["run", "3", "--tensor", UP]) == 2
    assert "needs --gguf, the file" in capsys.readouterr().err


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
    """Not by `pack`, nor by the command line: looking for NaN takes a byte a block."""
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

    options = {"format": [], "n": None, "k": None, "m": 3, "dist": None, "seed": 0}
    args = Namespace(**options, gguf=path, tensor=UP)
    for work in (
        lambda: gemm_module.pack(tensors(path)[UP], step=1, machine=Uploads()),
        lambda: gguf_weights.of(args, (find(1),), False).problem.blocks,
        lambda: gguf_weights.of(args, (find(1),), True).problem.blocks,
    ):
        assert peak(work) < raw.nbytes // 8
    assert peak(lambda: np.array(tensors(path)[UP].array)) > raw.nbytes, "a copy would be seen"
