"""`python -m steps warm` and `cache`: kernels compiled before they are needed, and kept."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qformats import quantize
from steps.cli import main as cli
from steps.cli import warm
from steps.compile import compiler as compiling
from steps.compile import kernel_cache, parallel_compile
from steps.compile.kernel_cache import CompiledKernel
from steps.product.choice import Request, choose
from tests.cli.typed import typed
from tests.formats.test_gguf_file import write

FORMATS = ("q4_0", "q8_0")
HOPPER = SimpleNamespace(name="sm_90a", cc=(9, 0), sms=132)
SMALL = ["--n", "64", "--k", "256", "--format", "q4_0", "--m", "1", "--dtype", "float32"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "kernels"))
    monkeypatch.setattr(kernel_cache, "_known", type(kernel_cache._known)())
    return tmp_path / "kernels"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(kernel, architecture) of what was compiled, here; no compiler runs."""
    asked: list[tuple[str, str]] = []

    def compile_kernel(kernel: Any, signature: Any, arch: str) -> CompiledKernel:
        asked.append((kernel.__name__, arch))
        return CompiledKernel("entry", b"cubin", False)

    monkeypatch.setattr(compiling, "compile_kernel", compile_kernel)
    monkeypatch.setattr(parallel_compile.os, "sched_getaffinity", lambda _: {0})
    return asked


@pytest.mark.slow
def test_what_is_warm_is_not_compiled_again(folder: Path, capsys: Any) -> None:
    """By another process: this one knows no kernel of the first."""
    command = ("warm", *SMALL, "--arch", "sm_80")
    first = typed(*command)
    assert (first.returncode, first.stderr) == (0, ""), "no progress in a pipe"
    made = len(list(folder.glob("*.kernel")))
    assert first.stdout.startswith(f"compiled {made} kernels for sm_80 in ")
    assert made > 0
    assert cli.main([*command]) == 0
    assert capsys.readouterr().out.startswith("compiled 0 kernels")


def test_a_model_of_a_file_is_warmed(folder: Path, made: Any, tmp_path: Path, capsys: Any) -> None:
    w = np.ones((64, 256), np.float32)
    matrices = {name: (name, quantize(w, name).view(np.uint8).reshape(64, -1)) for name in FORMATS}
    more = {"again": matrices["q4_0"], "norm": ("f32", np.ones(256, np.float32))}
    path = write(tmp_path / "model.gguf", {**matrices, **more})
    assert cli.main(["warm", "--gguf", str(path), "--m", "1", "64", "--arch", "sm_90a"]) == 0
    assert {arch for _, arch in made} == {"sm_90a"}
    assert len(made) == len(list(folder.iterdir()))
    assert capsys.readouterr().out.startswith(f"compiled {len(made)} kernels for sm_90a in ")
    for name in FORMATS:
        for dtype in ("float32", "float16", "bfloat16"):
            wanted = Request(name, 64, 64, 256, dtype, dtype, layouts=("tiles",), caller_casts=True)
            assert parallel_compile.missing_kernels([choose(wanted, HOPPER)], (9, 0)) == {}
    assert cli.main(["warm", "--gguf", str(path), "--m", "1", "64", "--arch", "sm_90a"]) == 0
    assert capsys.readouterr().out.startswith("compiled 0 kernels")


def test_layers_with_a_bias_have_kernels_of_their_own(tmp_path: Path) -> None:
    w = quantize(np.ones((64, 256), np.float32), "q4_0").view(np.uint8).reshape(64, -1)
    biased = {"q.weight": ("q4_0", w), "q.bias": ("f32", np.ones(64, np.float32))}
    path = write(tmp_path / "model.gguf", biased)
    args = Namespace(gguf=path, format=[], n=None, k=None, bias=False)
    assert warm._weights(args) == [("q4_0", 64, 256, True)]
    for m in (1, 64):
        plain, more = (
            list(warm.products([("q4_0", 64, 256, bias)], [m], ["float16"], "exact", HOPPER))
            for bias in (False, True)
        )
        assert {one.bias for one in more} == {None, "float16", "float32"}
        kernels = (parallel_compile.missing_kernels(one, (9, 0)) for one in (plain, more))
        assert set(next(kernels)) < set(next(kernels))


def test_few_tokens_stand_for_all() -> None:
    """Every kernel of a model's products at any M up to 512 is among those of `TOKENS`."""

    def kernels(tokens: Any) -> set[Any]:
        weights = [("q4_0", n, k, True) for n, k in ((4096, 4096), (1024, 4096), (4096, 14336))]
        wanted = warm.products(weights, tokens, ["float16"], "exact", HOPPER)
        return set(parallel_compile.missing_kernels(wanted, (9, 0)))

    assert kernels(range(1, 513, 5)) <= kernels(warm.TOKENS)


def test_a_kernel_that_fails_is_said(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    def compile_kernel(*_: Any) -> CompiledKernel:
        raise RuntimeError("ptxas\nfailed")

    monkeypatch.setattr(compiling, "compile_kernel", compile_kernel)
    monkeypatch.setattr(parallel_compile.os, "sched_getaffinity", lambda _: {0})
    assert cli.main(["warm", *SMALL, "--arch", "sm_80"]) == 1
    printed = capsys.readouterr()
    assert ": ptxas failed\n" in printed.err
    assert printed.out.startswith("compiled 0 kernels for sm_80 in ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--arch", "sm_90a"], "name a model with --gguf, or weights with --n and --k"),
        (["--arch", "sm_90a", "--n", "64"], "name a model with --gguf, or weights with"),
        (["--arch", "sm_90a", "--n", "64", "--k", "40"], "K=40 is not a multiple .* use 64"),
        (
            ["--arch", "sm_90a", "--gguf", "x", "--n", "64"],
            "--n, --k and --bias contradict",
        ),
        (["--arch", "sm_90a", "--gguf", "nowhere.gguf"], "No such file"),
        (["--arch", "sm_60", *SMALL], "it must be sm_75 or a later one"),
    ],
)
def test_what_cannot_be_warmed_is_one_sentence(
    arguments: list[str], sentence: str, folder: Path, capsys: Any
) -> None:
    assert cli.main(["warm", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(sentence, error)


def test_without_a_cache_nothing_is_warmed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv(kernel_cache.VARIABLE, "off")
    assert cli.main(["warm", *SMALL, "--arch", "sm_80"]) == 2
    assert "compiled kernels are not kept: LADDER_CACHE is off" in capsys.readouterr().err
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == "compiled kernels are not kept: LADDER_CACHE is off\n"


def test_the_cache_is_shown_and_cleared(folder: Path, made: Any, capsys: Any) -> None:
    assert cli.main(["cache"]) == 0
    assert capsys.readouterr().out == f"no compiled kernels in {folder}\n"
    assert cli.main(["warm", *SMALL, "--arch", "sm_80"]) == 0
    capsys.readouterr()
    assert cli.main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert f"{len(made)} compiled kernels in {folder}" in shown
    for name, arch in made:
        assert any(name in line and arch in line for line in shown.splitlines())
    assert cli.main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"removed {len(made)} files from {folder}\n"
    assert list(folder.iterdir()) == []
