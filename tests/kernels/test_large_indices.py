"""Arrays of more than 2^31 elements: the last block of a launch finds its operands at their end.

They are mapped and not filled, so that they take memory only where that block comes. An index that
is cut to 32 bits on its way is cut in the simulator, too.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from qformats import dequantize, quantize
from qformats.repack import prune
from reference import nmse
from steps import contract
from steps.blocks.chained import multiplies_twice
from steps.checks.cases import routing
from steps.contract import FLOATS, Family, Kernel, Launch, Work, array_dtype
from steps.driver.machines import Simulator
from steps.kernels import rows as embeddings
from steps.kernels.between import add_and_norm, argmax, attention, rotary, swiglu
from steps.kernels.parts.activations.layouts import inputs
from steps.product.choice import Choice
from steps.registry import ladder
from steps.simulator.launch import simulate
from steps.simulator.trace import Recorder
from tests.steps.works import ENGINEERED, label_of

pytestmark = pytest.mark.slow

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python does not name
LARGE = 2**31
ROWS = 3  # the last ones of A, which are not zero
FORMAT = "q8_0"

KERNELS = (*ladder(), *ENGINEERED)


def mapped(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that take no memory before they are stored to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, max(math.prod(shape) * np.dtype(dtype).itemsize, 1), flags=flags)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


class LastBlocks(Simulator):
    """Runs of each launch the blocks that come last along x: all of them for a pass over A, one for
    a product. `blocks`: how many."""

    blocks = 1

    def array(self, host: np.ndarray) -> np.ndarray:
        made = mapped(host.shape, host.dtype)
        assert not host.any()
        return made

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return mapped(shape, dtype)

    def run(self, launch: Launch) -> None:
        x, *others = launch.grid
        for first, *rest in product(range(x)[-self.blocks :], *map(range, others)):
            self.one(launch, (first, *rest, 0, 0)[:3])

    def last(self, launch: Launch) -> None:
        self.one(launch, tuple(extent - 1 for extent in (*launch.grid, 1, 1)[:3]))

    def one(self, launch: Launch, block: Any) -> None:
        simulate(
            launch.kernel,
            launch.grid,
            launch.block,
            launch.args,
            shared_bytes=launch.shared_bytes,
            trace=Recorder(block, ()),
        )


@pytest.fixture
def sms() -> Iterator[Any]:
    """Sizes kernels for a GPU of so many SMs."""
    yield lambda count: contract.pretend(count, contract.H200_SHARED)
    contract._pretended = None
    contract.multiprocessors.cache_clear()
    contract.shared_memory.cache_clear()


def last_block(choice: Choice, weights: Any, a: np.ndarray) -> np.ndarray:
    """What the last block of a product stores to C, of the last rows; zeros elsewhere."""
    machine, out = LastBlocks(), mapped((a.shape[0], choice.request.n), array_dtype(choice.writes))
    activations, own = choice.on(machine, weights, a, out)
    machine.blocks = ROWS
    for launch in activations.launches:
        machine.run(launch)
    machine.last(own)
    return out[-ROWS:]


def format_for(kernel: Kernel) -> str:
    return FORMAT if FORMAT in kernel.formats else kernel.formats[0]


def blocks_for(kernel: Kernel, rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Weights [n, k] as the kernel multiplies them."""
    blocks = quantize(_normal(rng, n, k), format_for(kernel))
    return prune(blocks) if kernel.accuracy == "pruned" else blocks


def require_some(c: np.ndarray, want: np.ndarray) -> None:
    """The outputs that are there are right."""
    there = c != 0
    assert np.count_nonzero(there) >= 2
    assert nmse(c[there], want[there]) < 1e-2, "what is found elsewhere has 1 or more"


def marks(kernel: Kernel, family: Family, dtype: str) -> tuple[pytest.MarkDecorator, ...]:
    """One kernel is tried with the pass that rounds float32 to float16; others read that too. The
    kernels of decode have the same addresses in both families."""
    rounds = dtype == "float32" and "float16" in inputs(kernel, family)
    other = kernel.number > 16 and family != kernel.families[kernel.number % len(kernel.families)]
    return (pytest.mark.every,) if (rounds and kernel.number != 14) or other else ()


WORKS = [
    pytest.param(
        kernel,
        family,
        dtype,
        id=f"{label_of(kernel)}-{family}-{dtype}",
        marks=marks(kernel, family, dtype),
    )
    for kernel in KERNELS
    for family in kernel.families
    for dtype in FLOATS[:2]
    if dtype in inputs(kernel, family)
]


# Lessons on experts go through ids one by one: through millions of them not in a simulator. The
# blocks of a lesson of chained products wait for each other, so no last block runs alone
@pytest.mark.parametrize(
    ("kernel", "family", "dtype"),
    [
        work
        for work in WORKS
        if routing(work.values[0], (1, 1, 32)) is None and not multiplies_twice(work.values[0])
    ],
)
def test_the_last_rows_of_a_large_a(kernel: Kernel, family: Family, dtype: str, sms: Any) -> None:
    """Of a large C, too, where CUDA launches a block for so many tokens."""
    rng, n = np.random.default_rng(0), 130  # 128-bit stores of C end before the last two columns
    for k in (128, 160, 288, 544, 2080):
        m = LARGE // k + ROWS
        sms(m if k == 128 else 132)  # blocks that share the tiles have one each, or share no tile
        choice = Choice.of_work(Work(kernel, family, format_for(kernel)), (m, n, k), dtype)
        a, blocks = mapped((m, k), array_dtype(dtype)), blocks_for(kernel, rng, n, k)
        a[-ROWS:] = _normal(rng, ROWS, k)
        try:
            c = last_block(choice, kernel.pack(blocks), a)
        except ValueError as error:
            if "CUDA launches at most" not in str(error):
                raise
        else:
            return require_some(c, a[-ROWS:].astype(np.float64) @ dequantize(blocks).T)
    raise AssertionError("no K is large enough")


TAIL = 256  # rows of W that are not zero


@pytest.mark.parametrize(
    ("kernel", "family", "dtype"),
    [
        work
        for work in WORKS
        if work.values[2] == inputs(*work.values[:2])[0] and not multiplies_twice(work.values[0])
    ],
)
def test_the_last_columns_of_a_large_w_and_c(
    kernel: Kernel, family: Family, dtype: str, sms: Any
) -> None:
    rng = np.random.default_rng(0)
    for k in (128, 4160):
        n = LARGE // k // TAIL * TAIL + TAIL
        m = LARGE // n + 1
        if routing(kernel, (m, n, k)) is not None:
            m = m // 8 * 8 + 9  # the last pair is the first of a group
        sms(n)
        a, blocks = mapped((m, k), array_dtype(dtype)), blocks_for(kernel, rng, 2 * TAIL, k)
        a[-ROWS:] = _normal(rng, ROWS, k)
        packed = zip(kernel.pack(blocks[TAIL:]), kernel.pack(blocks), strict=True)
        weights = [at_the_end(own, two, n, k) for own, two in packed]
        choice = Choice.of_work(Work(kernel, family, format_for(kernel)), (m, n, k), dtype)
        try:
            c = last_block(choice, weights, a)[:, -TAIL:]
        except ValueError as error:
            if "CUDA launches at most" not in str(error):
                raise
        else:
            return require_some(c, a[-ROWS:].astype(np.float64) @ dequantize(blocks[TAIL:]).T)
    raise AssertionError("no K is large enough")


def at_the_end(own: np.ndarray, two: np.ndarray, n: int, k: int) -> np.ndarray:
    """What a packing makes of W [n, k] that is zero but for its last `TAIL` rows. own, two: what it
    makes of these, and of as many others before them. Somewhere in it lies N."""
    if own.size == two.size:
        return own
    outer = next(
        count
        for count in range(1, k + 1)
        if not own.size % (count * TAIL)
        and np.array_equal(two.reshape(count, 2, -1)[:, 1].reshape(-1), own)
    )
    made = mapped((outer, n, own.size // (outer * TAIL)), own.dtype)
    made[:, -TAIL:] = own.reshape(outer, TAIL, -1)
    return made.reshape(-1)


def _normal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.standard_normal((rows, columns), dtype=np.float32)


# --- kernels between products: the last block does what it does of small arrays -------------------


def at_last(values: np.ndarray, *shape: int) -> np.ndarray:
    """A large array [*shape] whose last elements along the first axis are these values."""
    made = mapped(shape, values.dtype)
    made[-len(values) :] = values
    return made


@pytest.mark.parametrize("width", [64, 1024])
def test_swiglu_of_a_large_array(width: int) -> None:
    rng, m = np.random.default_rng(0), LARGE // width + 1
    y, want = _normal(rng, 1, 2 * width).astype(np.float16), np.zeros((1, width), np.float16)
    x = mapped((m, width), np.float16)
    Simulator().run(swiglu.launch(y, want))
    LastBlocks().last(swiglu.launch(at_last(y, m, 2 * width), x))
    assert want.any()
    np.testing.assert_array_equal(x[-1:], want)


def test_norms_of_a_large_array() -> None:
    rng, width = np.random.default_rng(0), 64
    m, parts = LARGE // width + 1, 70
    h, y, other = (_normal(rng, 1, width) for _ in range(3))
    weight = _normal(rng, 1, width)[0]
    large = [at_last(one, m, width) for one in (h, y, other)]
    x, norm = mapped((m, width), np.float16), mapped((m, 1 + parts), np.float32)
    want, of_norm = np.zeros((1, width), np.float16), np.zeros((1, 1 + parts), np.float32)
    Simulator().run(add_and_norm.launch(h, y, weight, 1e-5, want, other, of_norm))
    LastBlocks().last(add_and_norm.launch(large[0], large[1], weight, 1e-5, x, large[2], norm))
    for found, right in ((large[0], h), (x, want), (norm, of_norm)):
        assert right.any()
        np.testing.assert_array_equal(found[-1:], right)


@pytest.mark.parametrize("name", ["q5_1", "q8_0"])
def test_rows_of_a_large_table_and_prompt(name: str) -> None:
    rng, width = np.random.default_rng(0), 64
    count = LARGE // width * 2 + 1
    w = quantize(_normal(rng, 1, width), name).view(np.uint8).reshape(-1)
    want, rows = np.zeros((1, width), np.float32), mapped((count, width), np.float32)
    ids = at_last(np.array([count - 1]), count)
    Simulator().run(embeddings.launch(name, w, want, np.zeros(1, np.int64)))
    LastBlocks().last(embeddings.launch(name, at_last(w, count * w.size), rows, ids))
    assert want.any()
    np.testing.assert_array_equal(rows[-1:], want)


def test_the_largest_logit_of_many_tokens() -> None:
    m, machine = 65535, LastBlocks()
    logits, found = mapped((m, LARGE // m + 5), np.float32), mapped((m,), np.int64)
    logits[-1, 20001] = 1
    launch = argmax.launch(logits, found, machine)
    for part in range(launch.grid[0]):
        machine.one(launch, (part, m - 1, 0))
    assert found[-1] == 20001


@pytest.mark.parametrize(
    ("batch", "keys", "size", "length", "tokens"),
    [(3, 4, 64, 1 << 27, 2), (3, 1, 16, 1 << 30, 1 << 30)],
    ids=["cache", "prompt"],
)
def test_a_prompt_of_many_tokens_and_its_cache(
    batch: int, keys: int, size: int, length: int, tokens: int
) -> None:
    """3 * 8 * 2^27 rows of a cache; 3 * 2^30 tokens."""
    rng = np.random.default_rng(0)
    qkv = _normal(rng, 1, 3 * keys * size).astype(np.float16)
    cos, sin = (_normal(rng, 1, size) for _ in range(2))
    caches, want = np.zeros((1, 2 * keys, 1, size), np.float16), np.zeros_like(qkv[:, ::3])
    Simulator().run(rotary.launch(qkv, caches, np.zeros(1, np.int64), cos, sin, want))
    cache = mapped((batch, 2 * keys, length, size), np.float16)
    queries = mapped((batch * tokens, keys * size), np.float16)
    large = at_last(qkv, batch * tokens, qkv.size)
    tables = [at_last(one, length, size) for one in (cos, sin)]
    LastBlocks().last(rotary.launch(large, cache, np.array([length - tokens]), *tables, queries))
    assert want.any()
    np.testing.assert_array_equal(queries[-1:], want)
    np.testing.assert_array_equal(cache[-1, :, -1], caches[-1, :, -1])


SIZE = 64


def test_attention_of_many_sequences() -> None:
    """The last head of the last of 65535 sequences, the most that CUDA launches. Their cache has
    2.7 * 10^9 rows, and their queries more than 2^31 values."""
    batch, keys, length, p = 65535, 513, 40, 5
    rng, machine = np.random.default_rng(0), LastBlocks()
    qkv = _normal(rng, 3, SIZE).astype(np.float16)
    cos, sin = (_normal(rng, p + 1, SIZE) for _ in range(2))
    caches, want = np.zeros((1, 2, p + 1, SIZE), np.float16), np.zeros((1, SIZE), np.float32)
    caches[:, :, :p] = _normal(rng, 2 * p, SIZE).reshape(1, 2, p, SIZE)
    cache = mapped((batch, 2 * keys, length, SIZE), np.float16)
    cache[-1, keys - 1 :: keys, : p + 1] = caches
    large = mapped((batch, 3 * keys * SIZE), np.float16)
    large[-1].reshape(3, keys, SIZE)[:, -1] = qkv
    out, position = mapped((batch, keys * SIZE), np.float32), np.array([p])
    small = attention.launch(qkv.reshape(1, -1), caches, position, cos, sin, want, Simulator())
    Simulator().run(small)
    launch = attention.launch(large, cache, position, cos, sin, out, machine)
    machine.one(launch, (0, keys - 1, batch - 1))
    assert want.any()
    np.testing.assert_array_equal(out[-1, -SIZE:], want[0])
    np.testing.assert_array_equal(cache[-1, keys - 1 :: keys, p], caches[-1, :, p])


def test_attention_counts_the_values_of_a_head_in_32_bits() -> None:
    """Offsets from a head's first key to the key of a position."""
    length = LARGE // SIZE
    cache, tables = (
        mapped((1, 2, length, SIZE), np.float16),
        [mapped((length, SIZE), np.float32)] * 2,
    )
    qkv, out = np.zeros((1, 3 * SIZE), np.float16), np.zeros((1, SIZE), np.float32)
    with pytest.raises(ValueError, match=r"33554432 positions of 64 values .* 33554431 at most"):
        attention.launch(qkv, cache, np.zeros(1, np.int64), *tables, out, LastBlocks())
