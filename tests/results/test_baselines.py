"""Baselines: recorded figures with their provenance, for the same GPU; cuBLAS without torch."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from qformats import FILE_FORMATS, WEIGHT_FORMATS
from reference import BENCH_SHAPES
from results.measure import cublas, humming, torch_graphs
from results.record import store
from results.record.codec import RecordError


def test_every_shape_of_the_matrix_has_one_recorded_figure_with_its_provenance() -> None:
    """On this GPU and no other."""
    found = store.recorded("NVIDIA H200")
    shapes = {(peer.format, peer.shape) for peer in found if peer.peer == "ggml"}
    assert {(name, shape) for name in WEIGHT_FORMATS for shape in BENCH_SHAPES} <= shapes
    assert len({peer.key for peer in found}) == len(found)
    known = {*WEIGHT_FORMATS, *FILE_FORMATS, "f16", "int4_group32"}
    assert {peer.format for peer in found} <= known
    for peer in found:
        assert not peer.same_run
        assert re.search(r"\d\.\d|[0-9a-f]{8}", peer.source), "its version"
        assert re.search(r"; 20\d\d-\d\d-\d\d; .*\(h200-[\w-]+\.json\)$", peer.source)
    (one,) = (p for p in found if p.key == ("ggml", "q4_0", (512, 4096, 4096)))
    assert (one.us, one.commit) == (92.8643, "fcc1489e")
    assert one.tflops == pytest.approx(185.0, rel=1e-3)
    assert store.recorded("NVIDIA GeForce RTX 5070") == store.recorded(None) == []


def test_humming_is_called_as_it_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layer by a stand-in, whose signature is that of humming-kernels 0.1.19."""

    class Layer:
        def __init__(
            self,
            shape_n: int,
            shape_k: int,
            weight_config: Any,
            input_config: Any,
            torch_dtype: Any,
        ) -> None:
            self.told = (shape_n, shape_k, weight_config, input_config, torch_dtype)
            self.did: list[Any] = []

        def cuda(self) -> Layer:
            self.did.append("cuda")
            return self

        def load_from_unquantized(self, weights: Any) -> None:
            self.did.append(weights)

        def transform(self) -> None:
            self.did.append("transform")

    package = ModuleType("humming.layer")
    package.HummingLayer = Layer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", package)
    weights = SimpleNamespace(shape=(6, 64), dtype="float16")
    a16, a8 = (humming.layer(name, weights) for name in (humming.W4A16, humming.W4A8))
    grouped = {"dtype": "int4", "group_size": 32}
    assert a16.told == (6, 64, grouped, {"dtype": "float16"}, "float16")
    assert a8.told == (6, 64, {"dtype": "int4"}, {"dtype": "int8"}, "float16")
    assert a16.did == ["cuda", weights, "transform"]


def test_humming_is_absent_with_a_sentence_and_named_by_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(humming.metadata, "version", absent)
    assert humming.why_not() == "humming-kernels is not installed"
    monkeypatch.setattr(humming.metadata, "version", lambda name: f"9.9 of {name}")
    assert humming.why_not() is None
    peer = humming.peer(humming.W4A8, (2, 4, 6), 7.0)
    assert (peer.peer, peer.format, peer.shape, peer.us) == (
        *("humming_w4a8", "int4_row"),
        *((2, 4, 6), 7.0),
    )
    assert peer.same_run
    assert "humming-kernels 9.9 of humming-kernels" in peer.source


def test_figures_without_provenance_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"gpu": "G", "rows": []}))
    with pytest.raises(RecordError, match="need their provenance"):
        store.recorded("G", folder=tmp_path)


def test_without_torch_cublas_is_absent_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "torch_version", lambda: None)
    assert cublas.why_not() == "there is no torch with a GPU, through which cuBLAS is run"
    monkeypatch.setattr(cublas, "torch_version", lambda: "9.9")
    assert cublas.why_not() is None


def test_a_broken_torch_is_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    assert torch_graphs.torch_version() is None
