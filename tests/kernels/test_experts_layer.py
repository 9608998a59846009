"""Layers with experts at one token in the simulator: attention and `steps.kernels.experts.layer`.
Values against float64, thread blocks that wait for each other, and machine code."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, quantize
from qformats.repack import tiles
from steps.compile.compiler import machine_code, signature_of
from steps.contract import Launch
from steps.driver.machines import Simulator
from steps.kernels.between import attention
from steps.kernels.experts import layer
from steps.kernels.parts.exchange import PATIENCE
from steps.simulator.errors import SimulatorError
from steps.simulator.launch import simulate

SLOW = pytest.mark.slow
EPSILON = 1e-6
NMSE = 5e-7
"""Of what is rounded to float16 a few times, on the way through two layers."""


@dataclass
class Sizes:
    """Of a small model. blocks, warps: of a layer's launch."""

    name: str = "q4_0"
    width: int = 256
    kv: int = 1
    queries: int = 4
    head: int = 64
    inner: int = 128
    experts: int = 8
    chosen: int = 2
    normed: bool = True
    blocks: int = 2
    warps: int = 2

    @property
    def heads(self) -> int:
        return self.kv * self.queries * self.head

    @property
    def features(self) -> int:
        return self.heads + 2 * self.kv * self.head

    @property
    def shape(self) -> layer.LayerShape:
        return layer.shape_of(
            (self.name,) * 4, self.width, self.heads, self.inner, self.experts, self.chosen,
            self.normed, self.features, self.blocks, self.warps,
        )  # fmt: skip


class Model:
    """Random layers, and what is right of them in float64."""

    def __init__(self, of: Sizes, count: int = 2, past: int = 20, length: int = 128) -> None:
        self.of, self.count, self.past = of, count, past
        self.rng = np.random.default_rng(of.width + of.chosen)
        self.words = np.zeros((1, of.shape.words), np.uint32)
        self.layers = [self._layer(length) for _ in range(count)]
        self.norm = self._norm()
        self.position = np.array([past], np.int64)
        self.tables = (
            np.ones((length, of.head), np.float32),
            np.zeros((length, of.head), np.float32),
        )

    def _weights(self, *shape: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """Values [.., N, K] and packed arrays, of several matrices one after another."""
        w = (
            (self.rng.standard_normal(shape) * shape[-1] ** -0.5)
            .astype(np.float32)
            .reshape(-1, *shape[-2:])
        )
        blocks = [quantize(one, self.of.name) for one in w]
        values = np.stack([FORMATS[self.of.name].dequantize(one) for one in blocks])
        packed = [tiles(one) for one in blocks]
        arrays = tuple(np.concatenate([one[i].reshape(-1) for one in packed]) for i in range(2))
        return values.astype(np.float64).reshape(shape), arrays

    def _norm(self) -> np.ndarray:
        return self.rng.uniform(0.5, 1.5, self.of.width).astype(np.float32)

    def _layer(self, length: int) -> dict[str, Any]:
        of = self.of
        sizes = {
            "out": (of.width, of.heads), "qkv": (of.features, of.width),
            "gates": (of.experts, 2 * of.inner, of.width),
            "downs": (of.experts, of.width, of.inner),
        }  # fmt: skip
        made: dict[str, Any] = {name: self._weights(*shape) for name, shape in sizes.items()}
        made["router"] = self.rng.standard_normal((of.experts, of.width)).astype(np.float32) / 16
        made["norms"] = self._norm(), self._norm()
        cache = self.rng.standard_normal((1, 2 * of.kv, length, of.head))
        return made | {"cache": cache.astype(np.float16)}

    def launches(self, index: int, qkv: Any, h: Any, patience: int = PATIENCE) -> list[Launch]:
        of, here, shape = self.of, self.layers[index], self.of.shape
        then = self.layers[min(index + 1, self.count - 1)]
        places = attention.Shown(None if index == 0 else shape.shown[-1], shape.shown[0])
        numbers = index, self.count
        attend = attention.launch_shown(
            qkv if index == 0 else None, here["cache"], self.position, *self.tables, self.words,
            places, of.heads, *numbers, Simulator(), None, patience,
        )  # fmt: skip
        products = [here[name][1] for name in ("out", "gates", "downs")]
        after = self.norm if index == self.count - 1 else then["norms"][0]
        given = h, here["norms"][1], after, here["router"], self.words, EPSILON, *numbers, patience
        return [attend, layer.launch(shape, [*products, then["qkv"][1]], *given)]

    def token(self, order: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(the residual behind the last layer, what it must be)."""
        h = self.rng.standard_normal((1, self.of.width)).astype(np.float32)
        right = h[0].astype(np.float64)
        first = self.layers[0]
        qkv = normed(right, first["norms"][0]) @ first["qkv"][0].T
        given = qkv.astype(np.float16)[None]
        for index in range(self.count):
            right = right + self.attended(index, qkv) @ self.layers[index]["out"][0].T
            for launch in self.launches(index, given, h):
                run(launch, order)
            right = right + self.mixed(index, right)
            then = self.layers[min(index + 1, self.count - 1)]
            qkv = normed(right, then["norms"][0]) @ then["qkv"][0].T
        self.position += 1
        return h[0].astype(np.float64), right

    def attended(self, index: int, qkv: np.ndarray) -> np.ndarray:
        of, p = self.of, int(self.position[0])
        keys, values = np.split(self.layers[index]["cache"][0, :, : p + 1].astype(np.float64), 2)
        q, k, v = np.split(qkv, [of.heads, of.heads + of.kv * of.head])
        keys[:, p], values[:, p] = k.reshape(of.kv, -1), v.reshape(of.kv, -1)
        scores = np.einsum("gqd,gld->gql", q.reshape(of.kv, of.queries, -1), keys) * of.head**-0.5
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return np.einsum("gql,gld->gqd", shares, values).reshape(-1)

    def mixed(self, index: int, h: np.ndarray) -> np.ndarray:
        here = self.layers[index]
        x = normed(h, here["norms"][1])
        logits = here["router"].astype(np.float64) @ x
        ids = np.argsort(-logits, kind="stable")[: self.of.chosen]
        shares = np.exp(logits - logits.max())
        shares /= shares[ids].sum() if self.of.normed else shares.sum()
        y = np.zeros_like(h)
        for e in ids:
            gate, up = np.moveaxis((here["gates"][0][e] @ x).reshape(-1, 2, 16), 1, 0)
            y += shares[e] * (here["downs"][0][e] @ (gate / (1 + np.exp(-gate)) * up).reshape(-1))
        return y


def normed(h: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(h / np.sqrt((h**2).mean() + EPSILON) * weight)


def run(launch: Launch, order: int = 0, together: bool = True) -> None:
    simulate(
        launch.kernel, launch.grid, launch.block, launch.args, order=order,
        shared_bytes=launch.shared_bytes, resident=prod(launch.grid) if together else 1,
    )  # fmt: skip


@pytest.mark.parametrize(("of", "order"), [
    (Sizes(), 0),
    pytest.param(Sizes(normed=False, chosen=4, experts=16, blocks=4), 1, marks=SLOW),
    pytest.param(Sizes("q5_1", kv=2, queries=8, warps=3), -1, marks=SLOW),
    pytest.param(Sizes("q8_0", width=512, chosen=8, blocks=4), 2, marks=SLOW),
])  # fmt: skip
def test_two_layers(of: Sizes, order: int) -> None:
    """Of one token; in the simulator each launch ends before the next one begins."""
    model = Model(of)
    found, right = model.token(order)
    assert ((found - right) ** 2).sum() < NMSE * (right**2).sum()
    assert model.words[0, 0] == 1, "tokens are counted"


@SLOW
def test_the_next_token_takes_nothing_from_the_one_before() -> None:
    model = Model(Sizes(), 1)
    for tokens in (1, 2):
        found, right = model.token()
        assert ((found - right) ** 2).sum() < NMSE * (right**2).sum()
        assert model.words[0, 0] == tokens


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    model = Model(Sizes(), 1)
    model.layers[0]["router"][:] = 0
    found, right = model.token()
    assert ((found - right) ** 2).sum() < NMSE * (right**2).sum()


def test_a_block_that_waits_in_vain_ends_the_launch() -> None:
    """Thread blocks one after another: the first one's patience ends."""
    model, h = Model(Sizes(), 1), np.ones((1, 256), np.float32)
    qkv = np.ones((1, model.of.features), np.float16)
    attend, behind = model.launches(0, qkv, h, 2)
    run(attend)
    with pytest.raises(SimulatorError, match=r"the kernel gives up \(trap\)"):
        run(behind, together=False)


@pytest.mark.parametrize(("change", "said"), [
    ({"width": 2176, "blocks": 136}, "width is 2176: it must be a multiple of 256"),
    ({"experts": 12}, "experts is 12: it must be a multiple of 8"),
    ({"chosen": 3}, "chosen is 3: it must be a multiple of 2"),
    ({"chosen": 10}, "a token has 10 experts of 8: 32 at most"),
    ({"blocks": 64}, "64 thread blocks have fewer gates than one row tile each"),
    ({"inner": 2048}, r"a layer takes \d+ bytes of shared memory, and there are \d+"),
])  # fmt: skip
def test_sizes_without_a_kernel(change: dict[str, int], said: str) -> None:
    assert layer.why_not(Sizes().shape) is None
    found = layer.why_not(replace(Sizes(), **change).shape)
    assert found is not None

    assert re.fullmatch(said, found)


def qwen() -> Sizes:
    """Qwen3 30B-A3B."""
    return Sizes("q4_0", 2048, 4, 8, 128, 768, 128, 8, True, 128, 16)


@pytest.mark.xdist_group("experts_layer")
def test_machine_code() -> None:
    """Nothing spilled, no atomics and no fences; and polls past the L1."""
    of = qwen()
    assert layer.why_not(of.shape) is None
    packed = np.zeros(16, np.uint8), np.zeros(16, np.float32)
    full = np.zeros(of.width, np.float32)
    words, router = np.zeros((1, of.shape.words), np.uint32), np.zeros((128, 2048), np.float32)
    given = full[None], full, full, router, words, EPSILON, 1, 48
    launch = layer.launch(of.shape, [packed] * 4, *given)
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert (code.stack_bytes, code.spill_store_bytes, code.spill_load_bytes) == (0, 0, 0)
    assert code.registers <= 65536 // launch.block[0]
    assert not code.count(
        "LDL", "STL", "DADD", "DMUL", "DFMA", "MEMBAR.SC", "MEMBAR.ALL.GPU", "ATOM"
    )
    assert code.count("LDG.E.128.STRONG.GPU") >= 4
    assert code.count("STG.E.64.STRONG.GPU") >= 4
    assert not code.warnings
