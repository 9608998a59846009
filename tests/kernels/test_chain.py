"""The products of a layer in one launch, against float64: in the simulator, where some blocks
wait for each other. On a GPU the decoder's tests run it with shapes of Llama 3 8B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import cuda

from qformats import FORMATS, dequantize, quantize
from qformats.repack import tiles
from qformats.storage import storage_format
from reference import nmse
from reference.drawn import random_blocks
from steps.contract import Launch
from steps.driver.machines import Simulator
from steps.kernels.between import chain
from steps.kernels.between.polled import NOTHING
from steps.simulator.errors import Deadlock

EPSILON = 1e-5
FILES = "q2_k", "q4_k", "q5_k", "q6_k"  # are not written here


class Layer:
    """A layer's weights and inputs, and where blocks show each other what they have. names: the
    format of all weights, or those of out, gates and ups, down, qkv, and of its last features."""

    def __init__(
        self, names: str, width: int, hidden: int, k_out: int, qkv: Sequence[int], biased: bool
    ) -> None:
        rng = np.random.default_rng(1)
        self.names, self.machine, n_qkv = names.split(), Simulator(), sum(qkv)
        self.w, self.qkv = [], qkv
        packed: list[Any] = []
        sizes = (width, k_out), (2 * hidden, width), (width, hidden), *((n, width) for n in qkv)
        if len(self.names) == 1:
            self.names *= len(sizes)
        for name, (n, k) in zip(self.names, sizes, strict=True):
            if name in FILES:
                blocks = random_blocks(rng, n, k, name)
            else:
                blocks = quantize((rng.standard_normal((n, k)) / k**0.5).astype(np.float32), name)
            self.w.append(dequantize(blocks).astype(np.float64))
            packed.append(tiles(blocks))
        self.weights = [np.ascontiguousarray(one).view(np.uint8).reshape(-1) for one, _ in packed]
        self.scales = [scales.reshape(-1) for _, scales in packed]
        self.norms = [rng.uniform(0.5, 1.5, width).astype(np.float32) for _ in range(2)]
        self.a = rng.standard_normal(k_out).astype(np.float16)
        self.h0 = 3 * rng.standard_normal(width).astype(np.float32)
        before = (rng.standard_normal(width).reshape(-1, 32) ** 2).sum(1)
        self.before = np.concatenate([[0], before]).astype(np.float32)
        self.biases = [rng.standard_normal(n).astype(np.float32) for n in qkv if biased]
        self.sizes = width, hidden, n_qkv
        self.empty()

    def empty(self) -> None:
        width, hidden, n_qkv = self.sizes
        self.x, self.gates, self.x_next = (
            np.full(n, NOTHING, np.uint16).view(np.float16) for n in (width, hidden, width)
        )
        parts = width // chain.ROWS
        self.squares, self.left = (
            np.full(n, 0xFFFFFFFF, np.uint32).view(np.float32) for n in (parts, 1 + parts)
        )
        self.h = np.full(width, 0xFFFFFFFF, np.uint32).view(np.float32)
        self.y = np.zeros(n_qkv, np.float16) if n_qkv else None

    def launch(self, blocks: int, warps: int, waits: bool = True) -> Launch:
        place = (
            self.a, self.h0, self.before, self.x, self.gates, self.x_next, self.squares, self.left,
            self.h,
        )  # fmt: skip
        names = [storage_format(FORMATS[name]).name for name in self.names]
        operands = self.weights, self.scales, self.norms, place, self.y, self.biases, self.qkv
        rest = EPSILON, blocks
        return chain.launch(
            tuple(sorted({*names})), names, *operands, *rest, warps=warps, waits=waits
        )

    def check(self) -> None:
        """Outputs are float16 sums of float16 inputs; errors of one product go into the next."""

        def normed(h: np.ndarray, weight: np.ndarray) -> np.ndarray:
            return h / np.sqrt((h**2).mean() + EPSILON) * weight

        out, gate_up, down, *qkv = self.w
        h = self.h0 + out @ self.a.astype(np.float64)
        gate, up = np.split(gate_up @ normed(h, self.norms[0]), 2)
        gates = gate / (1 + np.exp(-gate)) * up
        h += down @ gates
        x = normed(h, self.norms[1])
        assert nmse(self.gates, gates) < 1e-6
        assert nmse(self.h, h) < 1e-6
        s, *squares = self.left.astype(np.float64)
        r = 1 / np.sqrt(sum(squares) / len(h) + EPSILON)
        assert nmse(self.x_next.astype(np.float64) / s * r, x) < 1e-6
        if self.y is not None:
            y = np.concatenate(qkv) @ x + (np.concatenate(self.biases) if self.biases else 0)
            assert nmse(self.y, y) < 1e-6


@pytest.mark.parametrize(
    ("names", "sizes", "biased", "blocks", "warps", "order"),
    [
        ("q4_0", (256, 256, 256, (128,)), False, 2, 16, 0),  # two K tiles a chunk
        ("q8_0", (128, 640, 128, (96,)), True, 10, 4, 0),  # a warp has two parts of a row
        ("q5_1", (256, 128, 512, ()), False, 3, 8, -1),  # the last layer; the first part is longer
        ("mxfp4", (256, 256, 256, (128,)), False, 2, 16, 0),  # no offsets
        ("q2_k", (256, 256, 256, (96,)), False, 2, 8, 0),  # scales of 16 K, and minima
        # as in a Q4_K_M; a block has a pair of either part of qkv, another one two of the first
        ("q4_k q4_k q6_k q4_k q6_k", (256, 256, 256, (96, 32)), True, 2, 8, 0),
        ("q6_k q5_k q4_k", (256, 256, 512, ()), False, 2, 8, 0),  # three formats in a kernel
        ("q4_0 mxfp4 q4_0 mxfp4", (256, 256, 256, (64,)), False, 3, 8, -1),
    ],
)
def test_products_of_a_layer(
    names: str, sizes: tuple[Any, ...], biased: bool, blocks: int, warps: int, order: int
) -> None:
    width, hidden, k_out, qkv = sizes
    layer = Layer(names, width, hidden, k_out, qkv, biased)
    layer.machine.order = order
    layer.machine.run(layer.launch(blocks, warps))
    layer.check()


def test_blocks_that_are_not_there_are_missed() -> None:
    layer = Layer("q8_0", 128, 128, 128, (), False)
    alone = replace(layer.launch(2, 4), together=False)
    with pytest.raises(Deadlock, match="must all run at once"):
        layer.machine.run(alone)


def test_memory_of_the_launch_before_waits() -> None:
    """What that one stores is not read before the wait."""
    layer = Layer("q8_0", 128, 128, 128, (), False)
    layer.machine.follow(layer.a)
    layer.machine.follow(layer.h0)
    layer.machine.run(layer.launch(2, 4))
    layer.check()


def test_a_chain_need_not_wait() -> None:
    """Where what is before it was polled."""
    layer = Layer("q8_0", 128, 128, 128, (64,), False)
    layer.machine.run(layer.launch(2, 4, waits=False))
    layer.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 4112}, "multiples of 32 features and of 128 hidden ones"),
        ({"hidden": 14352}, "multiples of 32 features and of 128 hidden ones"),
        ({"k_out": 4224}, "takes K in multiples of 256, not 4224"),
        ({"blocks": 32}, "up to 16 pairs of row tiles of a product, not 28"),
        ({"hidden": 49152, "blocks": 256}, "a chain needs a ring of 24 chunks of 4608 bytes"),
    ],
)
def test_layers_that_have_no_chain(change: dict[str, Any], said: str) -> None:
    llama: dict[str, Any] = {
        "width": 4096,
        "hidden": 14336,
        "k_out": 4096,
        "qkv": (6144,),
        "blocks": 128,
    }
    assert chain.supports(("q4_0",), **llama, biased=False)
    assert chain.supports(("c6", "q4_1"), **llama, biased=False), "a Q4_K_M"
    assert not chain.supports(("c6", "q4_1", "q5_1"), **llama, biased=False), "three formats"
    with pytest.raises(ValueError, match=said):
        chain.chain_of(("q4_0",), **llama | change, biased=False)
    assert not chain.supports(("q4_0",), **llama | change, biased=False)


def test_long_chunks_beside_short_ones() -> None:
    """Queries, keys and values share a turn of the warps, in which all chunks have as many K."""
    assert chain.kinds_of(("q4_0", "q4_1")) == (("q4_0", 2), ("q4_1", 2))
    assert chain.kinds_of(("c6", "q4_1")) == (("c6", 1), ("q4_1", 1), ("q4_1", 2))
    found = []
    for last, qkv in (("q4_k", (128,)), ("q4_k q6_k", (96, 32))):
        *_, kinds, _ = Layer(f"q4_k q4_k q6_k {last}", 256, 256, 256, qkv, False).launch(2, 8).args
        found.append(kinds)
    assert found == [(2, 2, 0, 2, 2), (2, 2, 0, 1, 0)]


def test_unequal_shares_are_refused() -> None:
    """Of 2048 features 64 of 132 blocks would have a pair."""
    sizes: dict[str, Any] = {
        "width": 2048,
        "hidden": 8192,
        "k_out": 2048,
        "qkv": (3072,),
        "biased": False,
    }
    how = chain.chain_of(("q4_0",), **sizes, blocks=132)
    assert (how.even, how.odd) == (1, 4)
    assert not chain.supports(("q4_0",), **sizes, blocks=132)


@pytest.mark.parametrize(
    ("cc", "mps", "runs"), [((9, 0), 0, True), ((9, 0), 1, False), ((8, 0), 0, False)]
)
def test_a_chain_runs_where_no_process_shares_its_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, cc: tuple[int, int], mps: int, runs: bool
) -> None:
    device = SimpleNamespace(compute_capability=cc, MPS_ENABLED=mps)
    monkeypatch.setattr(chain, "why_no_gpu", lambda: None)
    monkeypatch.setattr(cuda, "get_current_device", lambda: device)
    assert chain.runs_here.__wrapped__() == runs
