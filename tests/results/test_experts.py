"""What is measured of experts: routings, requests, bytes."""

from __future__ import annotations

import numpy as np
import pytest

from results.measure.experts import LAYERS, ROUTINGS, Layer, requests_of, routed
from steps.driver.machines import Simulator
from steps.product.experts import choose, require_product

LAYER = Layer(16, 4, 256, 128, "q4_0")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_has_experts_of_its_own_choice(routing: str) -> None:
    ids = routed(LAYER, 400, routing, np.random.default_rng(0))
    assert (ids.shape, ids.dtype) == ((400, 4), np.int64)
    assert ids.flags.c_contiguous
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = np.sort(np.bincount(ids.reshape(-1), minlength=16))[::-1]
    assert ids.min() >= 0
    if routing == "same":
        assert (counts > 0).sum() == 4
    else:
        assert (counts[0] > 3 * counts[-1]) == (routing == "zipf")


@pytest.mark.parametrize("name", LAYERS)
def test_a_pair_is_what_a_layer_multiplies(name: str) -> None:
    layer = LAYERS[name]
    up, down = requests_of(layer, 4, "bfloat16")
    assert up.out_shape == (4, layer.chosen, layer.inner)
    assert (down.a_rows, down.k) == (4 * layer.chosen, layer.inner)
    assert down.out_shape == (4, layer.hidden)
    for request in (up, down):
        require_product(request)
        assert choose(request, Simulator()).kernel.name == "few"


def test_bytes_of_experts() -> None:
    """3 x 256 x 128 weights of 4.5 bits each."""
    assert LAYER.bytes_of(1) == 3 * 256 * 128 * 18 // 32
    assert LAYER.bytes_of(5) == 5 * LAYER.bytes_of(1)
