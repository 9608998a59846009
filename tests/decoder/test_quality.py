"""Perplexity and KL divergence: of distributions that are known, and of a tiny model end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from steps.cli import language_model
from steps.cli.main import main
from steps.decoder import files
from steps.decoder.compare import checks, quality
from steps.decoder.compare.emulation import emulated_products
from steps.decoder.compare.quality import Quality, Tally
from tests.decoder.test_decoder import SMALL


def test_the_perplexity_of_uniform_logits_is_the_size_of_the_vocabulary() -> None:
    tally = Tally()
    tally.add(torch.full((8, 50), 3.25), [1, 7, 3, 4, 9, 0, 49, 2])
    row = tally.quality("float32")
    assert row.perplexity == pytest.approx(50)
    assert (row.mean_kl, row.kl_999, row.same_top) == (0, 0, 1)
    assert len(tally.lost) == 3, "the second half, but the last: no token follows"


def test_the_perplexity_of_what_is_known() -> None:
    """Behind positions 2 and 3 of 5 the tokens that follow have probability 1/2 and 1/8."""
    shares = torch.tensor(
        [[0.25, 0.25, 0.5], [0.9, 0.05, 0.05], [0.5, 0.25, 0.25], [0.75, 0.125, 0.125]]
    )
    logits = torch.cat([shares, torch.ones(1, 3)]).log() + 5
    tally = Tally()
    tally.add(logits, [0, 1, 2, 0, 2])
    assert tally.quality("float32").perplexity == pytest.approx((2 * 8) ** 0.5)


def test_divergences_of_known_distributions() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    logits = [torch.stack([one] * 4).log() for one in (p, q)]
    ids = [0, 1, 2, 0]
    first, second = Tally(), Tally()
    base = first.add(logits[0], ids)
    second.add(logits[1], ids, base)
    row = second.quality("other")
    assert row.mean_kl == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert row.mean_kl == pytest.approx(row.kl_999)
    assert row.same_top == 0
    assert row.perplexity == pytest.approx(4)


def test_999_of_1000_are_below_the_quantile() -> None:
    tally = Tally()
    tally.divergences = [*np.linspace(0, 1, 1001)]
    tally.lost, tally.same = [0.0], [True, False, True, True]
    row = tally.quality("other")
    assert row.kl_999 == pytest.approx(0.999)
    assert row.same_top == 0.75
    assert row.mean_kl == pytest.approx(0.5)


def test_nan_is_told() -> None:
    tally = Tally()
    base = tally.add(torch.zeros(4, 3), [0, 1, 2, 0])
    other = Tally()
    other.add(torch.full((4, 3), torch.nan), [0, 1, 2, 0], base)
    assert math.isnan(other.quality("other").mean_kl)


def test_what_a_model_says_is_impossible() -> None:
    """Every token that follows is 1000 less likely than the likeliest, in logarithms."""
    tally = Tally()
    logits = torch.zeros(4, 3)
    logits[:, 0] = 1000
    tally.add(logits, [1, 1, 1, 1])
    assert tally.quality("float32").perplexity == math.inf


def test_chunks() -> None:
    ids = list(range(100, 1200))
    whole = quality.chunks(ids, None)
    assert whole == [ids[:512], ids[512:1024]], "what is left over is no chunk"
    assert quality.chunks(ids, 1)[1] == [1, *ids[513:1024]]
    with pytest.raises(ValueError, match="text has 511 tokens and a chunk 512: give a longer"):
        quality.chunks(ids[:511], None)


def test_a_tiny_model(tmp_path: Path) -> None:
    """Products that round less are nearer to float32; float32 itself has no distance."""
    file = files.Model(files.write_tiny(tmp_path / "tiny.gguf"))
    parts = [checks.prompt(files.WORDS, 64, seed) for seed in range(3)]
    names = {"exact": ("exact", "A16"), "Q8_1": ("exact", "A8"), "fast": ("fast", "A16")}
    makers = [(name, emulated_products(*how)) for name, how in names.items()]
    told: list[str] = []
    rows = quality.measure(parts, quality.sides(file, makers, device="cpu"), told.append)
    assert [row.side for row in rows] == ["float32", *names]
    assert len(told) == 4
    float32, exact, q8_1, fast = rows
    assert (float32.mean_kl, float32.same_top) == (0, 1)
    assert 1e-9 < exact.mean_kl < 1e-5 < q8_1.mean_kl < fast.mean_kl < 0.05
    assert exact.kl_999 > exact.mean_kl
    assert exact.same_top >= q8_1.same_top >= fast.same_top > 0.9
    assert all(abs(row.perplexity / float32.perplexity - 1) < 0.05 for row in rows)
    # The logits of float32 are those of the trusted model.
    trusted, total = checks.reference(file), []
    for ids in parts:
        logits = trusted.prefill(torch.tensor([ids]), trusted.cache(1, 64), every=True)[0]
        lost = torch.nn.functional.cross_entropy(logits[32:-1], torch.tensor(ids[33:]))
        total.append(float(lost))
    assert float32.perplexity == pytest.approx(math.exp(np.mean(total)), rel=1e-4)


def test_llama_cpp_is_a_side(tmp_path: Path, monkeypatch: Any) -> None:
    """With another decoder in its place, whose logits are those of float32, twice as far apart."""
    file = files.Model(files.write_tiny(tmp_path / "tiny.gguf", **SMALL))

    class Other:
        def __init__(self, path: str, **options: Any) -> None:
            self.model = quality.logits_of(checks.reference(path))
            assert options["logits_all"]
            self.scores = np.zeros((quality.CONTEXT, files.WORDS), np.float32)
            self.count = 99

        def reset(self) -> None:
            self.count = 0

        def eval(self, ids: list[int]) -> None:
            assert self.count == 0
            self.scores[: len(ids)] = 2 * self.model(ids)

    monkeypatch.setattr(quality, "import_module", lambda name: SimpleNamespace(Llama=Other))
    parts = [checks.prompt(files.WORDS, 20)]
    made = quality.sides(file, [], device="cpu", llama_cpp=True)
    float32, other = quality.measure(parts, made)
    assert other.side == "llama.cpp, CPU"
    assert other.mean_kl > 0.01
    assert other.same_top == 1
    assert float32.mean_kl == 0


def test_what_is_said_of_a_row() -> None:
    rows = [
        Quality("float32", 20.0, 0.0, 0.0, 1.0),
        Quality("fast", 20.5, 1.25e-3, 0.02, 0.985, "15 A8"),
    ]
    cells = [[column.of(row) for column in language_model.QUALITY] for row in rows]
    assert cells[0] == ["float32", "20.0000", "", "", "", ""]
    assert cells[1] == ["fast", "20.5000", "1.25e-03", "2.00e-02", "98.50%", "15 A8"]
    assert quality.sentence(rows[0]) == "float32: perplexity 20.0000"
    assert "99.9 % below 2.00e-02, same top token 98.50%" in quality.sentence(rows[1])


def test_the_command(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    path = files.write_tiny(tmp_path / "[bold]\x1b[2J.gguf", **SMALL)
    text, there = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("the hat on that hen and the ant " * 6)
    monkeypatch.setattr(quality, "CONTEXT", 64)
    rest = ["--reference", "--text", str(text), "--json", str(there)]
    rest += ["--chunks", "1"]
    assert main(["quality", str(path), *rest]) == 0
    shown = capsys.readouterr()
    found = json.loads(there.read_text())["quality"]
    assert [row["side"] for row in found["rows"]] == [
        "float32",
        *(f"{name}, emulated" for name in ("exact", "fast", "exact, Q8_1")),
    ]
    assert (found["chunks"], found["predictions"]) == (1, 31)
    assert found["rows"][1]["mean_kl"] < found["rows"][3]["mean_kl"] < found["rows"][2]["mean_kl"]
    title, *lines = shown.out.splitlines()
    assert title == r"[bold]\x1b[2J.gguf, text.txt: 31 predictions", "no markup, no command"
    assert len(lines) == 3 + len(found["rows"])
    assert shown.err.count("perplexity") == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "torch finds no CUDA GPU: use one, or --reference"),
        (["--reference", "--text", "nowhere.txt"], "No such file"),
        (["--reference", "--text", "{path}"], "is no text in UTF-8"),
        (["--reference", "--text", "{short}"], "tokens and a chunk 512: give a long"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: Any, monkeypatch: Any, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = files.write_tiny(tmp_path / "tiny.gguf", **SMALL)
    short = tmp_path / "short.txt"
    short.write_text("the hat")
    given = [one.format(path=path, short=short) for one in arguments]
    assert main(["quality", str(path), *given]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def test_without_llama_cpp_it_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs llama.cpp: pip install llama-cpp"):
        quality.logits_of_llama_cpp(tmp_path / "a.gguf")


def test_a_context_that_is_shorter_than_a_chunk(tmp_path: Path, capsys: Any) -> None:
    for context, status in ((511, 2), (512, 0)):
        path = files.write_tiny(tmp_path / "tiny.gguf", **SMALL | {"context_length": context})
        assert main(["quality", str(path), "--reference", "--chunks", "1"]) == status
        if status:
            told = "511 tokens and 1 more are asked for, and the model's context is 511: give fewer"
            assert told in capsys.readouterr().err


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_products_by_the_steps_are_as_near_as_emulated_ones(cuda: Any, tmp_path: Path) -> None:
    from steps.decoder.model import step_products

    file = files.Model(files.write_tiny(tmp_path / "tiny.gguf"))
    # whole chunks: with fewer tokens an exact step may be the faster one, also for fast products
    parts = [checks.prompt(files.WORDS, quality.CONTEXT, seed) for seed in range(2)]
    names = {"exact": ("exact", "A16"), "Q8_1": ("exact", "A8"), "fast": ("fast", None)}
    found = {}
    for device, maker in (("cpu", emulated_products), ("cuda", None)):
        makers = [
            (name, maker(how, family or "A16") if maker else step_products("cuda", how, family))
            for name, (how, family) in names.items()
        ]
        found[device] = quality.measure(parts, quality.sides(file, makers, device=device))
    for emulated, measured in zip(found["cpu"][1:], found["cuda"][1:], strict=True):
        assert 0.3 < measured.mean_kl / emulated.mean_kl < 3, measured
