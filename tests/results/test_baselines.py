"""Baselines: recorded figures with their provenance, for the same GPU; cuBLAS without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from qformats import FILE_FORMATS, WEIGHT_FORMATS
from reference import BENCH_SHAPES
from results.baselines import cublas, recorded
from results.measure import torch_graphs
from results.record.schema import RecordError, Run, in_order


def test_the_recorded_figures_are_llama_cpps_on_an_h200() -> None:
    found = recorded.recorded("NVIDIA H200", [(512, 4096, 4096)], ["q4_0", "q8_0"])
    assert [(p.format, p.us) for p in found] == [("q4_0", 92.8643), ("q8_0", 92.4852)]
    for peer in found:
        assert peer.peer == "ggml"
        assert not peer.same_run
        assert peer.commit == "fcc1489e"
        for part in ("llama-cpp-python 0.3.36", "2026-11-22", "float32 A to float32 C"):
            assert part in peer.source
    assert math.isclose(found[0].tflops, 185.0, rel_tol=1e-3)


def test_every_shape_of_the_matrix_has_a_recorded_figure() -> None:
    found = {(peer.format, peer.shape) for peer in recorded.recorded("NVIDIA H200")}
    assert {(name, shape) for name in WEIGHT_FORMATS for shape in BENCH_SHAPES} <= found


def test_no_figure_is_recorded_twice() -> None:
    found = recorded.recorded("NVIDIA H200")
    assert len({peer.key for peer in found}) == len(found) > 100
    assert {peer.format for peer in found} <= {*WEIGHT_FORMATS, *FILE_FORMATS, "f16"}
    from results.record.schema import Environment

    in_order(Run(env=Environment(), peers=found))


def test_another_gpu_has_no_recorded_figures() -> None:
    assert recorded.recorded("NVIDIA GeForce RTX 5070") == ()
    assert recorded.recorded(None) == ()


def test_figures_without_provenance_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"gpu": "G", "rows": []}))
    with pytest.raises(RecordError, match="need their provenance"):
        recorded.recorded("G", folder=tmp_path)


def test_without_torch_cublas_is_absent_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "torch_version", lambda: None)
    assert cublas.why_not() == "there is no torch with a GPU, through which cuBLAS is run"
    monkeypatch.setattr(cublas, "torch_version", lambda: "9.9")
    assert cublas.why_not() is None


def test_a_broken_torch_is_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    assert torch_graphs.torch_version() is None
