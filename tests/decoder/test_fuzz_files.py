"""Thousands of changed files through the whole decoder (`tests.decoder.fuzz_files`), in a process
of their own: one that ends takes no other test with it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from steps.cli import main as command_line
from tests.decoder import fuzz_files

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "count"), [(0, 800), pytest.param(1, 2000, marks=pytest.mark.every)]
)
def test_changed_files_give_an_answer_or_a_sentence(seed: int, count: int) -> None:
    command = [sys.executable, "-m", "tests.decoder.fuzz_files"]
    command += ["--seed", str(seed), "--count", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    last = re.findall(r"[0-9]+:[0-9]+", done.stderr)[-1:]
    assert done.returncode == 0, f"{done.stdout}\nat {last}: {done.stderr[-2000:]}"
    outcomes = {
        what: int(count) for count, what in re.findall(r"^ *(\d+) (\S.*)$", done.stdout, re.M)
    }
    assert outcomes[fuzz_files.ANSWER] > count / 10, "changes are small enough to reach the end"
    assert len(outcomes) > 150, "and each sentence is reached"


@pytest.mark.parametrize(
    ("said", "status", "wrong"),
    [
        (("an answer", ""), 0, ""),
        (("an\n\tanswer", "[ready]\n"), 0, ""),
        (("", "[ready]\nm.gguf: is damaged\n"), 2, ""),
        (("\x1b[2J", ""), 0, "a command to the terminal"),
        (("", "m.gguf: \u202e\n"), 2, "a command to the terminal"),
        (("", "one\ntwo\n"), 2, "2 lines"),
        (("", ""), 2, "0 lines"),
        (("", "Traceback\n"), 1, "status 1"),
    ],
)
def test_what_is_wrong(monkeypatch: Any, said: tuple[str, str], status: int, wrong: str) -> None:
    def main(argv: list[str]) -> int:
        for text, stream in zip(said, (sys.stdout, sys.stderr), strict=True):
            stream.write(text)
        return status

    monkeypatch.setattr(command_line, "main", main)
    monkeypatch.setattr(fuzz_files, "packed_for_a_gpu", lambda path: None)
    assert fuzz_files.wrong_with(["decoder", "m.gguf"])[0] == wrong


@pytest.mark.parametrize("error", [KeyError("a"), SystemExit(1), MemoryError(), TypeError("b")])
def test_errors_are_wrong(monkeypatch: Any, error: BaseException) -> None:
    def raises(_: Any) -> int:
        raise error

    monkeypatch.setattr(command_line, "main", raises)
    assert fuzz_files.wrong_with(["decoder", "m.gguf"])[0].startswith(type(error).__name__)
    monkeypatch.setattr(command_line, "main", lambda _: 0)
    monkeypatch.setattr(fuzz_files, "packed_for_a_gpu", raises)
    assert fuzz_files.wrong_with(["decoder", "m.gguf"])[0].startswith(type(error).__name__)


def test_what_takes_long_is_wrong(monkeypatch: Any) -> None:
    monkeypatch.setattr(command_line, "main", lambda _: time.sleep(60))
    before = signal.signal(signal.SIGALRM, fuzz_files._too_long)
    try:
        assert fuzz_files.wrong_with(["decoder", "m.gguf"], 0.1)[0] == "more than 0.1 s"
    finally:
        signal.signal(signal.SIGALRM, before)
