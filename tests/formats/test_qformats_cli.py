"""`python -m qformats` as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qformats import FORMATS
from qformats.__main__ import main
from qformats.draw import COLOUR, draw

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


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["draw", "q9_k"], "no format is called 'q9_k'; there are q4_0, q4_1"),
        (["tensors"], "the following arguments are required: file"),
        ([], "the following arguments are required: draw|tensors"),
        (["paint"], "invalid choice: 'paint'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(capsys, argv, sentence):
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
