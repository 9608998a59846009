"""Rows on several cores: the same bits as on one, and the same errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

from qformats import FILE_FORMATS, FORMATS, WEIGHT_FORMATS, quantize, threads
from qformats import format as format_module
from qformats.repack import byte_tiles, tiles
from tests.formats.test_file_formats import random_blocks

WRITTEN = [name for name in (*WEIGHT_FORMATS, *FILE_FORMATS) if FORMATS[name].written]


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores, and parts of so few rows that a small matrix has several."""
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "ROWS", 128)
    monkeypatch.setattr(format_module, "PARTS", (8, 512))


def matrix(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((n, k), dtype=np.float32)


@pytest.mark.parametrize("name", WRITTEN)
def test_quantizing_on_several_cores_gives_the_bits_of_one(name: str, four: None) -> None:
    x = matrix(300, 256)
    parts = quantize(x, name)
    rows = np.concatenate([quantize(x[i : i + 1], name) for i in range(len(x))])
    assert parts.tobytes() == rows.tobytes()


@pytest.mark.parametrize("pack", [tiles, byte_tiles])
@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, *FILE_FORMATS])
def test_packing_on_several_cores_gives_the_bits_of_one(pack, name: str, four: None) -> None:
    blocks = random_blocks(name, 300 * 512 // FORMATS[name].elements, finite=True).reshape(300, -1)
    if name == "mxfp4":
        blocks["e"] %= 200  # larger scales are refused
    parts, whole = pack(blocks), pack.__wrapped__(blocks)
    assert len(parts) == len(whole)
    for one, other in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def test_the_first_error_is_the_one_that_is_raised(four: None) -> None:
    x = matrix(300, 256)
    x[200, 5], x[50, 3] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"x is inf at element 3 of block \(50, 0\)"):
        quantize(x, "q4_0")


def test_an_error_names_the_row_of_the_whole(four: None) -> None:
    blocks = quantize(matrix(300, 64), "mxfp4")
    blocks["e"][260, 1] = 250
    with pytest.raises(ValueError, match=r"^block 1 of row 260 has a scale of 2\^122"):
        tiles(blocks)


def test_parts_are_in_order_and_on_as_many_threads_as_there_are_cores(four: None) -> None:
    seen: set[int] = set()
    together = threading.Barrier(4, timeout=30)

    def work(first: int, stop: int) -> tuple[int, int]:
        seen.add(threading.get_ident())
        together.wait()
        return first, stop

    assert threads.in_parts(work, 40, 10) == [(0, 10), (10, 20), (20, 30), (30, 40)]
    assert len(seen) == 4
    here = threads.in_parts(lambda *_: threading.get_ident(), 10, 10)
    assert here == [threading.get_ident()], "one part needs no thread"
    assert threads.in_parts(lambda *part: part, 0, 10) == []
    assert threads.in_parts(lambda *part: part, 5, 2) == [(0, 2), (2, 4), (4, 5)]


def test_parts_of_a_part_need_no_threads(four: None) -> None:
    """They would wait for threads that wait for them. Two parts leave two threads free, so that
    this test ends even so."""

    def work(first: int, stop: int) -> list[int]:
        own = threading.get_ident()
        return threads.in_parts(lambda *_: threading.get_ident() - own, 4, 1)

    assert threads.in_parts(work, 10, 5) == [[0, 0, 0, 0]] * 2


LATE = """
import threading
import numpy as np
from qformats import format as format_module, quantize, threads

threads.cores, format_module.PARTS = (lambda: 4), (8, 512)

def late():
    threading.main_thread().join()
    threading.Event().wait(0.2)  # until Python has told its pools to end
    print(quantize(np.ones((300, 256), np.float32), "q4_0").shape)

threading.Thread(target=late).start()
"""


def test_quantizing_goes_on_when_the_main_thread_has_ended() -> None:
    """No pool takes work then."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("(300, 8)\n", "")


def test_without_threads_the_parts_are_made_one_by_one(
    four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def map(self, *_: object) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_pool", lambda workers: Full())
    assert threads.in_parts(lambda *part: part, 5, 2) == [(0, 2), (2, 4), (4, 5)]

    def fails(first: int, stop: int) -> None:
        raise RuntimeError(first)

    with pytest.raises(RuntimeError, match=r"^0$"):
        threads.in_parts(fails, 5, 2)


def test_a_forked_process_has_threads_of_its_own(four: None) -> None:
    together = threading.Barrier(2, timeout=30)
    threads.in_parts(lambda *_: together.wait(), 2, 1)
    time.sleep(0.1)  # two threads wait for work now, and a child would count on them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads is forked
        child = os.fork()
    if child == 0:
        signal.alarm(20)  # without threads it would wait for good
        os._exit(threads.in_parts(lambda first, _: first, 2, 1)[1])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
