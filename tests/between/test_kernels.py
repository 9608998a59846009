"""The kernels between products against float64, in the simulator, in several orders of lanes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from qformats import WEIGHT_FORMATS
from steps.api.machines import Simulator
from steps.between import add_and_norm, attention
from tests.between.problems import (
    Heads,
    argmax_problem,
    attention_problem,
    embedding_problem,
    norm_problem,
    rotary_problem,
    swiglu_problem,
)

ORDERS = (0, -1, 1, 2)


@pytest.mark.parametrize(
    ("m", "width"), [(1, 4096), (3, 64), (16, 96), (2, 8), (1, 264), (2, 520), (1, 1032), (3, 2048)]
)
def test_norms(m: int, width: int) -> None:
    norm_problem(m, width, "float16", "float16", m).run(Simulator(ORDERS[m % 4]))


@pytest.mark.parametrize(
    ("of_y", "of_x"), [*product((None, "float32", "float16", "bfloat16"), ("float32", "bfloat16"))]
)
def test_norms_of_every_dtype(of_y: str | None, of_x: str) -> None:
    norm_problem(2, 72, of_y, of_x).run(Simulator(1))


@pytest.mark.parametrize("of_y", ["float32", "float16", "bfloat16"])
def test_norms_of_a_sum_of_two_terms(of_y: str) -> None:
    norm_problem(3, 264, of_y, "float16", two=True).run(Simulator(2))


def test_rows_wider_than_threads_hold_twice() -> None:
    assert add_and_norm.row_threads(4096) == (256, 2)
    assert add_and_norm.row_threads(16384) == (1024, 2)
    assert add_and_norm.row_threads(20480) == (1024, 3)
    norm_problem(1, 20480, "float16", "float16").run(Simulator())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("in_y", [False, True])
def test_a_spoiled_row_spoils_no_other(value: float, in_y: bool) -> None:
    def spoil(h: np.ndarray, y: np.ndarray | None) -> None:
        assert y is not None
        (y if in_y else h)[1, 5] = value

    problem = norm_problem(3, 128, "float32", "float32", spoil=spoil)
    problem.run(Simulator(), verify=False)
    x = problem.outputs[1].array
    assert np.isfinite(x[[0, 2]]).all()
    # the squares of 1e30 are infinite: the row is zero, as it is in torch
    assert (x[1] == 0).all() if value == 1e30 else np.isnan(x[1, 5])


@pytest.mark.parametrize(("m", "width"), [(1, 2048), (3, 8), (16, 96), (2, 1032)])
@pytest.mark.parametrize("of_x", ["float16", "float32"])
def test_gates(m: int, width: int, of_x: str) -> None:
    swiglu_problem(m, width, "float16", of_x, m).run(Simulator(ORDERS[m % 4]))


@pytest.mark.parametrize(
    ("of_y", "of_x"), [*product(("float32", "bfloat16"), ("float16", "float32", "bfloat16"))]
)
def test_gates_of_every_dtype(of_y: str, of_x: str) -> None:
    swiglu_problem(2, 40, of_y, of_x).run(Simulator(2))


def test_gates_at_the_ends_of_floats() -> None:
    gates = [np.inf, -np.inf, np.nan, 1e30, -1e30, 200, -200, 0.0]
    ups = [1, 1, 1, -2, 1, np.inf, 3, np.nan]

    def spoil(y: np.ndarray) -> None:
        y[0, :8], y[0, 8:] = gates, ups

    swiglu_problem(1, 8, "float32", "float32", spoil=spoil).run(Simulator())


POSITIONS = (0, 1, 127, 128, 700)
SHAPES = [
    (1, 2, 1, 64),
    (2, 2, 2, 128),
    (1, 4, 1, 128),
    (1, 8, 1, 64),
    (2, 7, 1, 16),
    (1, 3, 1, 256),
]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("shape", [(1, 2, 1, 64), (1, 1, 1, 128)])
def test_attention_at_positions(shape: tuple[int, ...], position: int) -> None:
    of = Heads(*shape, 768, position)
    attention_problem(of).run(Simulator(ORDERS[position % 4]))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_heads(shape: tuple[int, ...]) -> None:
    attention_problem(Heads(*shape, 256, 65), of_out="float16").run(Simulator(3))


@pytest.mark.parametrize(
    ("of_qkv", "of_out", "normed"),
    [("float32", "float16", False), ("bfloat16", "bfloat16", True), ("float16", "float32", True)],
)
def test_attention_of_every_dtype(of_qkv: str, of_out: str, normed: bool) -> None:
    attention_problem(Heads(1, 4, 2, 64, 256, 90), of_qkv, of_out, normed).run(Simulator(1))


def test_attention_again_finds_its_counters_at_zero() -> None:
    """Of a launch that follows at once; partial sums are what the first one left."""
    attention_problem(Heads(1, 2, 2, 64, 128, 100)).run(Simulator(2), rounds=3)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16])
def test_attention_in_any_number_of_splits(monkeypatch: Any, splits: int) -> None:
    monkeypatch.setattr(attention, "split_count", lambda *_: splits)
    for position in (31, 32, 33, 100):
        attention_problem(Heads(1, 2, 1, 64, 128, position)).run(Simulator(splits))


@pytest.mark.parametrize(
    ("what", "value"), [("key", np.nan), ("value", np.nan), ("value", np.inf), ("query", np.nan)]
)
def test_what_is_not_a_number_stays_in_its_sequence_and_head(what: str, value: float) -> None:
    of = Heads(2, 4, 2, 64, 256, 30)

    def spoil(qkv: np.ndarray, cache: np.ndarray) -> None:
        if what == "query":
            qkv[1, 2 * 64 + 3] = value  # of head 2, which has the keys of head 1
        else:
            cache[1, 1 if what == "key" else 3, 20, 3] = value

    problem = attention_problem(of, spoil=spoil)
    problem.run(Simulator(), verify=False)
    out = problem.outputs[1].array.reshape(2, 4, 64)
    spoiled = ~np.isfinite(out)
    assert spoiled[1, 2].any()
    assert not spoiled[0].any()
    assert not spoiled[1, :2].any()
    if what == "query":
        assert not spoiled[1, 3].any()


def test_heads_that_no_kernel_takes_are_refused() -> None:
    problem = attention_problem(Heads(1, 9, 1, 64, 256, 0))
    with pytest.raises(ValueError, match="up to 8 of queries to one of keys, not 9 to 1 of 64"):
        problem.make(Simulator())
    assert not attention.supports(4, 4, 80)
    assert not attention.supports(7, 2, 64)


@pytest.mark.parametrize(
    ("batch", "kv", "length", "splits"),
    [(1, 8, 4096, 16), (1, 8, 512, 4), (1, 8, 64, 1), (4, 8, 4096, 4), (16, 8, 4096, 1)],
)
def test_splits_fill_the_gpu(batch: int, kv: int, length: int, splits: int) -> None:
    assert attention.split_count(batch, kv, length) == splits


@pytest.mark.parametrize(
    ("of", "tokens", "of_qkv", "normed"),
    [
        (Heads(2, 4, 2, 64, 16, 0), 3, "float16", False),
        (Heads(1, 3, 1, 128, 8, 2), 5, "float16", True),
        (Heads(1, 3, 3, 16, 8, 0), 7, "float32", False),
        (Heads(1, 2, 1, 256, 8, 1), 2, "bfloat16", True),
    ],
)
def test_prompts_are_rotated(of: Heads, tokens: int, of_qkv: str, normed: bool) -> None:
    rotary_problem(of, tokens, of_qkv, normed).run(Simulator(tokens))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("width", [32, 1056])
def test_embeddings_of_every_format(name: str, width: int) -> None:
    embedding_problem(name, [3, 39, 0, 3], width).run(Simulator(1))


@pytest.mark.parametrize(("m", "count"), [(1, 1), (3, 77), (2, 4096), (1, 4100), (2, 20001)])
def test_the_largest_logit_is_found(m: int, count: int) -> None:
    argmax_problem(m, count).run(Simulator(ORDERS[m % 4]), rounds=2)


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ({5: 7.0, 4090: 7.0, 9000: 7.0}, 5),
        ({8000: np.inf, 3: 9.0}, 8000),
        ({8000: np.nan, 3: np.inf, 9500: -np.nan}, 8000),
        (dict.fromkeys(range(10000), -np.inf), 0),
        ({i: -0.0 if i < 4000 else 0.0 for i in range(10000)}, 0),
    ],
)
def test_the_first_of_equal_logits_is_the_largest(values: dict[int, float], largest: int) -> None:
    """And NaN is above all, as in NumPy and torch."""

    def spoil(logits: np.ndarray) -> None:
        logits[0, list(values)] = list(values.values())
        assert logits[0].argmax() == largest

    argmax_problem(1, 10000, spoil).run(Simulator(2))
