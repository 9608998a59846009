"""Peers: given figures with their provenance, for the same GPU only."""

from __future__ import annotations

import json
import math

import pytest

from results.baselines import peers
from results.record.schema import RecordError


def test_the_given_figures_are_llama_cpps_on_an_h200():
    found = peers.given_peers("NVIDIA H200", [(512, 4096, 4096)], ["q4_0", "q8_0"])
    assert [(p.format, p.us) for p in found] == [("q4_0", 93.47), ("q8_0", 90.76)]
    for peer in found:
        assert peer.peer == "ggml"
        assert not peer.same_run
        assert "ggml d99724f2" in peer.source
        assert "results/peers/h200-ggml.json" in peer.source
    assert math.isclose(found[0].tflops, 183.8, rel_tol=1e-3)


def test_another_gpu_has_no_given_figures():
    assert peers.given_peers("NVIDIA GeForce RTX 5070") == ()
    assert peers.given_peers(None) == ()


def test_times_and_tflops_of_the_given_file_agree():
    for path in peers.GIVEN.glob("*.json"):
        data = json.loads(path.read_text())
        for row in data["rows"]:
            tflops = 2 * row["M"] * row["N"] * row["K"] / row["us"] * 1e-6
            assert math.isclose(tflops, row["tflops"], rel_tol=0.02, abs_tol=0.06), row


def test_figures_without_provenance_are_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"gpu": "G", "rows": []}))
    with pytest.raises(RecordError, match="need their provenance"):
        peers.given_peers("G", folder=tmp_path)


def test_without_torch_cublas_is_absent_not_an_error(monkeypatch):
    monkeypatch.setattr(peers, "torch_version", lambda: None)
    assert peers.cublas_fp16([(1, 32, 32)]) == ()
