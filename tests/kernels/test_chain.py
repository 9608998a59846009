"""All layers of a token in one launch, against float64: in the simulator, where blocks wait for
each other. On a GPU the decoder's tests run it with shapes of Llama 3 8B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qformats import FORMATS, dequantize, quantize
from qformats.repack import tiles
from qformats.storage import storage_format
from reference import nmse
from steps.compile.compiler import machine_code, signature_of
from steps.compile.dry_run import Placeholder, packed_types
from steps.contract import Launch
from steps.driver.machines import Simulator
from steps.kernels.between import chain, polled
from steps.kernels.between.chain import Sizes
from steps.simulator.errors import Deadlock

EPSILON = 1e-5
EVERY = pytest.mark.every


class Layers:
    """Weights and inputs of two layers, and where blocks show each other what they have."""

    def __init__(self, name: str, sizes: Sizes, position: int = 5, layers: int = 2) -> None:
        rng = np.random.default_rng(1)
        self.name, self.sizes, self.layers, self.machine = name, sizes, layers, Simulator()
        width, hidden, k_out, n_qkv = sizes.width, sizes.hidden, sizes.k_out, sizes.n_qkv
        self.w, packed = [], []
        for n, k in ((n_qkv, width), (width, k_out), (2 * hidden, width), (width, hidden)):
            drawn = rng.standard_normal((layers, n, k)) / k**0.5
            blocks = [quantize(one.astype(np.float32), name) for one in drawn]
            self.w.append([dequantize(one).astype(np.float64) for one in blocks])
            packed.append([tiles(one) for one in blocks])
        self.weights, self.scales = (
            [np.concatenate([one[i].reshape(-1) for one in each]) for each in packed]
            for i in range(2)
        )
        self.weights = [one.view(np.uint8) for one in self.weights]
        self.norms = [rng.uniform(0.5, 1.5, layers * width).astype(np.float32) for _ in range(2)]
        self.x = rng.standard_normal(width).astype(np.float16)
        before = (rng.standard_normal(width).reshape(-1, 32) ** 2).sum(1)
        self.before = np.concatenate([[0], before]).astype(np.float32)
        self.h0 = 3 * rng.standard_normal(width).astype(np.float32)
        length, size = -(-(position + 1) // 8) * 8, sizes.size
        cache = rng.standard_normal((layers, 2 * sizes.kv, length, size)).astype(np.float16)
        cache[:, :, position:] = np.nan
        self.cache0, self.position = cache, np.array([position], np.int64)
        angles = rng.uniform(0, 6, (length, size // 2)).repeat(2, 1)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.sin[:, ::2] *= -1
        self.bias = None
        if sizes.biased:
            self.bias = rng.standard_normal(layers * n_qkv).astype(np.float32)
        self.of_heads = [rng.uniform(0.5, 1.5, layers * size).astype(np.float32) for _ in range(2)]

    def launch(self, blocks: int, warps: int) -> Launch:
        sizes, layers = self.sizes, self.layers
        width, parts = sizes.width, sizes.width // chain.ROWS
        self.h, self.cache = self.h0.copy(), self.cache0.copy()
        halves = width, sizes.hidden, width, sizes.n_qkv, sizes.k_out
        self.shown = [
            np.full(layers * n, polled.NOTHING, np.uint16).view(np.float16) for n in halves
        ]
        self.shown += [
            np.full(layers * n, 0xFFFFFFFF, np.uint32).view(np.float32) for n in (parts, 1 + parts)
        ]
        self.shown.append(np.full(chain.words_of(sizes, blocks), 0xFFFFFFFF, np.uint32))
        tables = self.cos.reshape(-1), self.sin.reshape(-1)
        attention = self.cache.reshape(-1), self.position, *tables
        attention += (*self.of_heads,) if sizes.normed else tables
        return chain.launch(
            storage_format(FORMATS[self.name]).name, sizes, layers, self.weights, self.scales,
            self.norms, (self.x, self.before, self.h), self.shown, attention, self.bias,
            (EPSILON, EPSILON), blocks, warps=warps,
        )  # fmt: skip

    def attended(self, layer: int, y: np.ndarray, cache: np.ndarray) -> np.ndarray:
        """In float64; the new key and value into the cache."""
        sizes, p = self.sizes, int(self.position[0])
        heads = y.reshape(-1, sizes.size)
        q, k, v = np.split(heads, [sizes.heads, sizes.heads + sizes.kv])
        if sizes.normed:
            q, k = (
                one
                / np.sqrt((one**2).mean(1, keepdims=True) + EPSILON)
                * weight[layer * sizes.size :][: sizes.size]
                for one, weight in zip((q, k), self.of_heads, strict=True)
            )
        q, k = (
            one * self.cos[p]
            + one.reshape(-1, sizes.size // 2, 2)[..., ::-1].reshape(one.shape) * self.sin[p]
            for one in (q, k)
        )
        cache[layer, :, p] = np.concatenate([k, v])
        keys, values = np.split(cache[layer, :, : p + 1], 2)
        each = sizes.heads // sizes.kv
        keys, values = keys.repeat(each, 0), values.repeat(each, 0)
        scores = np.einsum("hd,hpd->hp", q, keys) / sizes.size**0.5
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        return np.einsum("hp,hpd->hd", shares, values).reshape(-1)

    def check(self) -> None:
        """Outputs are float16 sums of float16 inputs; errors of one product go into the next."""

        def normed(h: np.ndarray, weight: np.ndarray) -> np.ndarray:
            return h / np.sqrt((h**2).mean() + EPSILON) * weight

        _, gates, x_next, y, a, _, left = (one.reshape(self.layers, -1) for one in self.shown[:7])
        h, x, cache = (one.astype(np.float64) for one in (self.h0, self.x, self.cache0))
        norms = [one.reshape(self.layers, -1) for one in self.norms]
        for layer in range(self.layers):
            qkv, out, gate_up, down = (one[layer] for one in self.w)
            of_y = qkv @ x
            if self.bias is not None:
                of_y += self.bias.reshape(self.layers, -1)[layer]
            assert nmse(y[layer], of_y) < 1e-6
            of_a = self.attended(layer, of_y, cache)
            assert nmse(a[layer], of_a) < 2e-6
            h += out @ of_a
            gate, up = np.split(gate_up @ normed(h, norms[0][layer]), 2)
            of_gates = gate / (1 + np.exp(-gate)) * up
            assert nmse(gates[layer], of_gates) < 4e-6
            h += down @ of_gates
            x = normed(h, norms[1][layer])
        assert nmse(self.h, h) < 2e-6
        s, *squares = left[-1].astype(np.float64)
        r = 1 / np.sqrt(sum(squares) / len(h) + EPSILON)
        assert nmse(x_next[-1].astype(np.float64) / s * r, x) < 4e-6
        p = int(self.position[0])
        assert nmse(self.cache[:, :, p], cache[:, :, p]) < 2e-6
        assert np.array_equal(self.cache[:, :, :p], self.cache0[:, :, :p])


@pytest.mark.parametrize(
    ("name", "sizes", "position", "blocks", "warps", "order"),
    [
        # two K tiles a chunk; positions are split
        ("q4_0", Sizes(256, 256, 4, 2, 64), 37, 4, 4, 0),
        # a warp has two parts of a row; one split; the first position
        ("q8_0", Sizes(128, 640, 2, 2, 64, biased=True, normed=True), 0, 10, 4, 0),
        ("q5_1", Sizes(256, 128, 4, 1, 128, normed=True), 21, 3, 8, -1),
    ],
)
def test_layers_of_a_token(
    name: str, sizes: Sizes, position: int, blocks: int, warps: int, order: int
) -> None:
    layers = Layers(name, sizes, position)
    layers.machine.order = order
    layers.machine.run(layers.launch(blocks, warps))
    layers.check()


SMALL = Sizes(128, 128, 2, 1, 64)


def test_blocks_that_are_not_there_are_missed() -> None:
    layers = Layers("q8_0", SMALL)
    alone = replace(layers.launch(2, 4), together=False)
    with pytest.raises(Deadlock, match="must all run at once"):
        layers.machine.run(alone)


def test_memory_of_the_launch_before_waits() -> None:
    """What that one stores is not read before the wait; keys and values are asked for earlier."""
    layers = Layers("q8_0", SMALL, position=3, layers=1)
    launch = layers.launch(2, 4)
    for array in (layers.x, layers.before, layers.h):
        layers.machine.follow(array)
    layers.machine.run(launch)
    layers.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 4112}, "multiples of 32 features and of 128 hidden ones"),
        ({"hidden": 14352}, "multiples of 32 features and of 128 hidden ones"),
        ({"heads": 33, "kv": 11}, "takes K in multiples of 256, not 4224"),
        ({"size": 32, "heads": 128}, "heads of 64, 128, 256 values, and up to 8 of queries to one"),
        ({"heads": 32, "kv": 3}, "not 32 to 3 of 128 values"),
        ({"blocks": 4}, "a chain of 4 blocks has no block for each of 8 heads"),
        ({"blocks": 32}, "up to 16 pairs of row tiles of a product, not 28"),
        ({"hidden": 49152, "blocks": 256}, "a chain needs a ring of 40 chunks of 4608 bytes"),
    ],
)
def test_layers_that_have_no_chain(change: dict[str, Any], said: str) -> None:
    llama = {"width": 4096, "hidden": 14336, "heads": 32, "kv": 8, "size": 128}
    assert chain.supports("q4_0", Sizes(**llama), 128)
    blocks = change.pop("blocks", 128)
    sizes = Sizes(**llama | change)
    with pytest.raises(ValueError, match=said):
        chain.chain_of("q4_0", sizes, blocks)
    assert not chain.supports("q4_0", sizes, blocks)


def test_unequal_shares_are_refused() -> None:
    """Of 2048 features 64 of 132 blocks would have a pair."""
    sizes = Sizes(2048, 8192, 16, 4, 128)
    how = chain.chain_of("q4_0", sizes, blocks=132)
    assert (how.even, how.odd) == (4, 1)
    assert not chain.supports("q4_0", sizes, blocks=132)


@pytest.mark.parametrize(
    "name", ["q4_0", *(pytest.param(n, marks=EVERY) for n in ("q5_1", "q8_0"))]
)
def test_machine_code(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nothing in local memory, which would be read behind the weights of the SM."""
    monkeypatch.setattr(chain, "shared_memory", lambda: 232448)

    def array(dtype: Any, size: int = 4096) -> Placeholder:
        return Placeholder(1 << 20, (size,), np.dtype(dtype))

    floats, halves, sizes = array(np.float32), array(np.float16), Sizes(4096, 14336, 32, 8, 128)
    scales = array(packed_types(tiles, name)[1][1])
    shown = [halves] * 5 + [floats] * 2 + [array(np.uint32)]
    cache = array(np.float16, 32 * 2 * sizes.kv * sizes.size * 256)
    launch = chain.launch(
        storage_format(FORMATS[name]).name, sizes, 32, [array(np.uint8)] * 4, [scales] * 4,
        [floats] * 2, (halves, array(np.float32, 129), floats), shown,
        (cache, array(np.int64), *[floats] * 4), None, (EPSILON, 0.0), 128,
    )  # fmt: skip
    code = machine_code(launch.kernel, signature_of(launch.args), "sm_90a")
    assert code.registers == 96, "640 threads of an SM"
    assert (code.stack_bytes, code.spill_store_bytes) == (0, 0)
    stream = code.sass[code.sass.index("HMMA") : code.sass.rindex("HMMA")]
    assert "LDG" not in stream
