"""Baselines: recorded figures with their provenance, for the same GPU; cuBLAS without torch."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from qformats import FILE_FORMATS, WEIGHT_FORMATS
from reference import BENCH_SHAPES
from results.measure import cublas, torch_graphs
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
