"""`python -m qformats` as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qformats import FORMATS, quantize
from qformats.__main__ import main
from qformats.draw import COLOUR, draw, show

ROOT = Path(__file__).parents[2]


def run(capsys, *argv):
    """Exit status, stdout and stderr of one command."""
    try:
        status = main(argv)
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    return status, out, err


def typed(*argv, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "qformats", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **kwargs,
    )


def test_draw_in_a_pipe():
    done = typed("draw", "q5_1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == draw(FORMATS["q5_1"]) + "\n"


def test_an_error_in_a_pipe_is_one_sentence():
    done = typed("draw", "q9_9")
    assert (done.returncode, done.stdout) == (2, "")
    sentence = f"no format is called 'q9_9'; there are {', '.join(FORMATS)}"
    assert done.stderr == f"python -m qformats draw: {sentence}\n"


def test_a_reader_that_stops_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "qformats", "draw"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_draw_without_names_draws_all(capsys):
    status, out, err = run(capsys, "draw")
    assert (status, err) == (0, "")
    assert out == "\n\n\n".join(draw(fmt) for fmt in FORMATS.values()) + "\n"


def test_a_terminal_gets_colour_unless_told_not_to(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(capsys, "draw", "q4_0")[1] == draw(FORMATS["q4_0"], COLOUR) + "\n"
    monkeypatch.setenv("NO_COLOR", "1")
    out = run(capsys, "draw", "q4_0")[1]
    assert "\x1b" not in out
    assert "┌" in out
    monkeypatch.setenv("TERM", "dumb")
    assert run(capsys, "draw", "q4_0")[1].isascii()


def test_show_a_seeded_row(capsys):
    status, out, err = run(capsys, "show", "q4_1", "--seed", "3", "--block", "5")
    assert (status, err) == (0, "")
    assert "q4_1   block 5 of a normal row of 4096, seed 3" in out
    assert run(capsys, "show", "q4_1", "--seed", "3", "--block", "5")[1] == out
    assert run(capsys, "show", "q4_1", "--seed", "4", "--block", "5")[1] != out
    assert run(capsys, "show", "q4_1", "--seed", "3", "--block", "6")[1] != out


def test_show_typed_values(capsys):
    status, out, err = run(capsys, "show", "q8_0", "1", "-2", "-1e-3", "+.5", "-.25")
    assert (status, err) == (0, "")
    x = np.zeros(32, np.float32)
    x[:5] = 1, -2, -1e-3, 0.5, -0.25
    assert out == show(quantize(x, "q8_0"), x, "5 values from the command line") + "\n"


def test_show_values_of_a_file(capsys, tmp_path):
    x = np.random.default_rng(0).standard_normal((3, 4, 96)).astype(np.float32)
    path = tmp_path / "x.npy"
    np.save(path, x)
    status, out, err = run(
        capsys, "show", "q5_0", "--file", str(path), "--row", "6", "--block", "2"
    )
    assert (status, err) == (0, "")
    chosen = x[1, 2, 64:]
    assert out == show(quantize(chosen, "q5_0"), chosen, f"block 2 of row 6 of {path}") + "\n"


def test_show_a_k_quant_of_a_file(capsys, tmp_path):
    blocks = np.zeros((2, 3), FORMATS["q5_k"].dtype)
    blocks["d"][1, 2], blocks["qs"][1, 2] = 0.5, 0x21
    path = tmp_path / "blocks.npy"
    np.save(path, blocks)
    status, out, err = run(capsys, "show", "-", "--file", str(path), "--row", "1", "--block", "2")
    assert (status, err) == (0, "")
    assert out == show(blocks[1, 2:], None, f"block 2 of row 1 of {path}") + "\n"
    assert out.count("\n") > 128  # two elements a line


def test_show_blocks_of_a_file(capsys, tmp_path):
    blocks = quantize(np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32), "q5_1")
    path = tmp_path / "blocks.npy"
    np.save(path, blocks)
    for name in ("-", "q5_1"):
        status, out, err = run(capsys, "show", name, "--file", str(path), "--row", "2")
        assert (status, err) == (0, "")
        assert out == show(blocks[2, :1], None, f"block 0 of row 2 of {path}") + "\n"
    status, out, err = run(capsys, "show", "q4_0", "--file", str(path))
    assert (status, out) == (2, "")
    assert err == f"python -m qformats show: {path} holds q5_1 blocks, not q4_0\n"


@pytest.fixture
def files(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((2, 64), np.float32))
    np.save(tmp_path / "empty.npy", np.ones((0, 32), np.float32))
    np.save(tmp_path / "scalar.npy", np.float32(1))
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    np.savez(tmp_path / "two.npz", a=np.ones(32), b=np.ones(32))
    np.save(tmp_path / "pairs.npy", np.ones(32, [("a", "f4"), ("b", "f4")]))
    (tmp_path / "text.npy").write_text("not an array")
    (tmp_path / "nothing.npy").write_text("")
    return tmp_path


REFUSED = {
    "no such format": (["show", "q9_k"], "no format is called 'q9_k'"),
    "read only": (["show", "q3_k"], "q3_k blocks are read here, not written"),
    "no format": (["show"], "the following arguments are required: format"),
    "no command": ([], "the following arguments are required: draw|show|tensors"),
    "unknown command": (["paint"], "invalid choice: 'paint'"),
    "not a number": (["show", "q4_0", "1", "two"], "value 1 is 'two', which is not a number"),
    "too many": (["show", "q4_0", *"1" * 33], "33 values were given, and a block holds 32"),
    "NaN": (["show", "q4_0", "0", "nan"], "x is nan at element 1 of block 0"),
    "block": (["show", "q4_0", "--block", "128"], "--block 128 is outside 0..127 of a row"),
    "row of nothing": (["show", "q4_0", "--row", "1"], "--row 1 needs --file"),
    "seed": (["show", "q4_0", "--seed", "-1"], "--seed is -1; a seed is 0 or more"),
    "both": (["show", "q4_0", "1", "--file", "x.npy"], "give values or --file, not both"),
    "no file": (["show", "q4_0", "--file", "missing.npy"], "No such file"),
    "row": (["show", "q4_0", "--file", "x.npy", "--row", "2"], "--row 2 is outside 0..1 of x.npy"),
    "file block": (
        ["show", "q4_0", "--file", "x.npy", "--block", "2"],
        "--block 2 is outside 0..1",
    ),
    "empty": (["show", "q4_0", "--file", "empty.npy"], "empty.npy has shape (0, 32); at least"),
    "scalar": (["show", "q4_0", "--file", "scalar.npy"], "scalar.npy has shape ()"),
    "objects": (["show", "q4_0", "--file", "objects.npy"], "objects.npy is not a .npy file of"),
    "archive": (["show", "q4_0", "--file", "two.npz"], "two.npz holds several arrays"),
    "records": (["show", "-", "--file", "pairs.npy"], "is no block format"),
    "text": (["show", "q4_0", "--file", "text.npy"], "text.npy is not a .npy file"),
    "no bytes": (["show", "q4_0", "--file", "nothing.npy"], "nothing.npy is not a .npy file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_said_in_one_sentence(capsys, monkeypatch, files, case):
    argv, sentence = REFUSED[case]
    monkeypatch.chdir(files)
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.startswith("python -m qformats")
    assert err.count("\n") == 1


def test_nothing_but_numpy_is_imported():
    """The formats are usable without Numba or a GPU, and importing them stays cheap."""
    code = "import sys, qformats, qformats.repack, qformats.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"numba", "steps", "matplotlib", "rich", "gguf"} & set(done.stdout.split())
