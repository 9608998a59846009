"""The command `trace`: its table, its page, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steps.cli.main import main


def trace(*arguments: str) -> int:
    return main(["trace", *arguments])


def test_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "trace.html"
    assert trace("1", "--k", "160", "--m", "16", "--n", "32", "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "w4a16_naive (step 1 W4A16 q4_0) at 16x32x160, one block of 2 x 1" in said
    rows = [line.split() for line in said.splitlines() if re.match(r"\s+\d+  ", line)]
    # line, source ..., warp, kind, array, space, bytes, requests, sectors per request, conflicts
    loads = {(row[-6], int(row[-4])): row for row in rows}
    assert loads["a", 4][-3:] == ["160", "2", "-"], "two rows of A, a word of each for 16 lanes"
    assert float(loads["w", 1][-2]) > 8, "a byte of each of 16 rows of W"
    assert loads["c", 4][-2] == "4", "two times 64 bytes"
    html = out.read_text(encoding="utf-8")
    assert html.count("<svg") == len(rows) == 5
    assert "script" not in html


def test_a_block_of_256_weights_is_deep_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--m", "16", "--n", "32", "--out", str(tmp_path / "trace.html"))
    assert trace("1", "--format", "q4_k", *size) == 0
    assert "at 16x32x256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1", "--line", "3"], "line 3 of step01_naive_w4a16.py loads and stores nothing here"),
        (
            ["17", "--line", "3"],
            "line 3 of step17_few_tokens.py loads and stores nothing here; these do: ",
        ),
        (["1", "--warp", "8"], "a block of 256 threads has warps 0 to 7, no 8"),
        (["1", "--k", "33"], "K=33 is not a multiple of the block of 32"),
        (["1", "--m", "9", "--n", "99999", "--k", "99968"], "= 9998499735 numbers are too many"),
        (["1", "2"], "name one STEP, such as 4"),
        (["99"], "there is no step 99"),
    ],
)
def test_one_sentence_where_it_cannot(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = [] if "--k" in arguments else ["--m", "16", "--n", "32", "--k", "64"]
    try:
        code = trace(*arguments, *size)
    except SystemExit as error:  # argparse's own
        code = error.code
    assert code == 2
    heard = capsys.readouterr().err
    assert said in heard
    assert len(heard.strip().splitlines()) == 1
