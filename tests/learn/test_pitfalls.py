"""Tests of the tests: each known bug is caught, by the layers that its story names."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from qformats import FORMATS
from reference import Q81, Problem
from steps.cli import main as cli
from steps.cli import pitfalls as command
from steps.compile.compiler import machine_code, signature_of
from steps.learn.pitfalls import Finding, Pitfall, examine, pitfalls
from steps.learn.pitfalls import p05_qh_interleaved_twice as p05
from steps.learn.pitfalls.p07_misaligned_load import wrong as misaligned
from steps.learn.pitfalls.right import kernel, q4_0

MUSEUM = pitfalls()

# number -> the wrong value on the golden block (141; Q5_0: 342), and what exactly catches it
SIGNATURES = {
    1: (125, {"golden value", "exact", "bound", "nmse"}),
    2: (157, {"golden value", "exact", "bound", "nmse"}),
    3: (85, {"golden value", "exact", "bound", "nmse"}),
    4: (214, {"golden value", "exact", "bound", "nmse"}),
    5: (342, {"golden bytes"}),
    6: (64, {"golden value", "exact", "bound", "nmse"}),
    7: (math.nan, {"misaligned"}),
    8: (2189, {"golden value", "exact", "bound", "nmse"}),
    9: (141, {"race"}),
    10: (141, {"nan", "bound", "nmse", "activations"}),
    11: (math.nan, {"golden value", "nan", "exact", "bound", "nmse"}),
    12: (math.nan, {"golden value", "nan", "exact", "bound", "nmse"}),
}


@pytest.fixture(scope="module")
def findings() -> dict[int, Finding]:
    return {pitfall.number: examine(pitfall) for pitfall in MUSEUM}


def test_the_museum_is_complete() -> None:
    assert [pitfall.number for pitfall in MUSEUM] == list(SIGNATURES) == list(range(1, 13))
    assert len({pitfall.title for pitfall in MUSEUM}) == 12


@pytest.mark.parametrize("pitfall", MUSEUM, ids=lambda p: f"{p.number}-{p.title}")
def test_each_bug_is_caught_as_its_story_says(
    pitfall: Pitfall, findings: dict[int, Finding]
) -> None:
    finding = findings[pitfall.number]
    value, layers = SIGNATURES[pitfall.number]
    assert finding.caught, finding.layers
    assert finding.golden == pytest.approx(value, abs=0, nan_ok=True)
    assert set(finding.layers) == layers
    assert set(pitfall.caught_by) <= layers
    assert finding.complaints == {}, "the right one must pass the same checks"
    if {"misaligned", "race"} & layers:  # the simulator stops there
        assert math.isnan(finding.nmse)
    elif "nan" in layers:
        assert finding.nmse == math.inf
    else:  # far from any limit, or what no comparison with itself can see
        assert finding.nmse > 1 if "nmse" in layers else finding.nmse < 1e-11


def test_layers_name_the_place(findings: dict[int, Finding]) -> None:
    named = r"w: index 2 is byte 2.*p07_misaligned_load\.py"
    assert re.match(named, findings[7].layers["misaligned"])
    named = r"a load of byte \d+ of scales, to which thread \d+ stores: a barrier is missing"
    assert re.search(named, findings[9].layers["race"]), "lanes in ascending order"


def test_a_codec_wrong_on_both_sides_is_only_seen_from_outside() -> None:
    x = Problem(1, 64, 1024, "q5_0", "normal").w
    ours, theirs = p05.quantize(x), FORMATS["q5_0"].quantize(x)
    assert ours["qs"].tobytes() == theirs["qs"].tobytes()
    assert ours["qh"].tobytes() != theirs["qh"].tobytes()
    gguf = pytest.importorskip("gguf")
    written = gguf.quants.quantize(p05.GOLDEN_VALUES[None], gguf.GGMLQuantizationType.Q5_0)
    assert (
        written.tobytes()
        == p05.GOLDEN_BYTES
        == FORMATS["q5_0"].quantize(p05.GOLDEN_VALUES).tobytes()
    )


def test_a_bug_that_gets_through_fails_the_museum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The museum itself must not be a checker that everything passes."""
    harmless = replace(MUSEUM[0], wrong=MUSEUM[0].right)
    elsewhere = replace(MUSEUM[1], golden=1.0)
    broken = replace(MUSEUM[2], right=MUSEUM[2].wrong)
    other_layer = replace(MUSEUM[3], caught_by=("misaligned",))
    for pitfall in (harmless, elsewhere, broken, other_layer):
        assert not examine(pitfall).caught
    monkeypatch.setattr(command, "pitfalls", lambda: (harmless, MUSEUM[11]))
    assert cli.main(["pitfalls"]) == 1
    printed = capsys.readouterr()
    assert "NOT CAUGHT" in printed.out
    assert printed.err == "not caught as its story says: pitfall 1\n"


def test_exhibits_are_real_kernels() -> None:
    """They compile for a GPU, too."""
    problem = Problem(5, 7, 96, "q4_0")
    q81 = Q81.of_values(problem.a)
    w = problem.blocks.view(np.uint8).reshape(7, -1)
    types = signature_of((w, q81.q, q81.d, q81.s, np.zeros((5, 7), np.float32)))
    right, wrong = (machine_code(one, types).instructions for one in (kernel(q4_0), misaligned))
    assert wrong["LDG.E"] > right["LDG.E"]  # the 4-byte loads that would trap


def test_the_command_prints_text(
    findings: dict[int, Finding],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a pipe without colours."""
    monkeypatch.setattr(command, "examine", lambda pitfall: findings[pitfall.number])
    assert cli.main(["pitfalls"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert all(len(line) <= 120 for line in said.splitlines())
    for pitfall in MUSEUM:
        assert f"\n{pitfall.number}. {pitfall.title}\n" in said
