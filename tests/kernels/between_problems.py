"""Problems for the kernels between products: arrays, what is right in float64, and how far off a
result may be. Outputs lie between guard bands and begin as NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from qformats.repack import tiles
from reference import Problem as Product
from reference.bfloat16 import bfloat16_bits, bfloat16_values
from reference.limits import bound as product_bound
from reference.operands import Halves
from reference.product import same_operands
from steps.contract import Launch, array_dtype
from steps.driver.machines import Simulator
from steps.kernels.between import (
    add_and_norm,
    argmax,
    attention,
    deferred_norm,
    gated_product,
    rotary,
    router,
    swiglu,
)
from steps.kernels.parts.exchange import HEAD

U: Final = 2.0**-24
"""Half a last place of float32."""
RSQRT: Final = 2.0**-22.9
EXP2: Final = 2.0**-19
"""Of a share: exponents of up to 16, rounded, two exponentials and a reciprocal."""
HALF: Final = 2.0**-11
TINY: Final = 2.0**-25
"""Half a last place of float16, of itself and where it is subnormal."""
ROUNDING: Final = {
    "float32": (0.0, 0.0),
    "float16": (HALF, TINY),
    "bfloat16": (2.0**-8, 2.0**-134),
}
"""Of an output: of itself, and where it is subnormal."""
GUARD: Final = 64


def of_dtype(values: np.ndarray, name: str) -> np.ndarray:
    """Rounded to a dtype, as arrays have it."""
    if name == "bfloat16":
        return np.ascontiguousarray(bfloat16_bits(values.astype(np.float32)))
    return values.astype(name)


def as_floats(array: np.ndarray) -> np.ndarray:
    """float64 of an array of any of these dtypes."""
    values = bfloat16_values(array) if array.dtype == np.uint16 else array
    return np.asarray(values, np.float64)


class Output:
    """An array between guard bands, of NaN at first. `check` says that the bands are whole."""

    def __init__(self, shape: tuple[int, ...], name: str) -> None:
        dtype = array_dtype(name)
        self._all = np.full((int(np.prod(shape)) + 2 * GUARD) * dtype.itemsize, 0xFF, np.uint8)
        self._whole = self._all.view(dtype)
        self.array = self._whole[GUARD:-GUARD].reshape(shape)

    def check(self) -> None:
        size = GUARD * self.array.dtype.itemsize
        around = np.concatenate([self._all[:size], self._all[-size:]])
        assert (around == 0xFF).all(), "a guard band changed"


def close(found: np.ndarray, right: np.ndarray, bound: np.ndarray, name: str) -> None:
    """Everything is within the bound and the rounding of its dtype; NaN only where it is right."""
    relative, least = ROUNDING[name]
    found = as_floats(found)
    same = (found == right) | (np.isnan(found) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        allowed = bound + relative * (np.abs(right) + bound) + least
        off = np.abs(found - right)
        worst = np.nanmax(np.where(same, 0, off / allowed), initial=0)
        assert (same | (off <= allowed)).all(), f"{worst} times the bound"


@dataclass
class Problem:
    """A launch and what it must do. inputs: arrays that must come back as they are. behind: what is
    launched behind the launch, if not the same once more."""

    make: Callable[[Any], Launch]
    check: Callable[[], None]
    outputs: list[Output]
    inputs: list[np.ndarray] = field(default_factory=list)
    behind: Callable[[Launch], list[Launch]] = lambda launch: [launch]

    def run(self, machine: Simulator, rounds: int = 1, verify: bool = True) -> None:
        """Launch, and launch again, one right behind the other."""
        before = [one.copy() for one in self.inputs]
        launch = self.make(machine)
        machine.run(launch)
        for _ in range(1, rounds):
            for then in self.behind(launch):
                machine.run(then)
        for one, was in zip(self.inputs, before, strict=True):
            assert one.tobytes() == was.tobytes(), "an input changed"
        for output in self.outputs:
            output.check()
        if verify:
            self.check()


def norm_problem(
    m: int, width: int, of_y: str | None, of_x: str, seed: int = 0,
    spoil: Callable[[np.ndarray, np.ndarray | None], None] = lambda h, y: None,
    two: bool = False, parts: int = 0,
) -> Problem:  # fmt: skip
    """h += y and its norm. spoil(h, y) changes the operands first. two: y has a second term. parts:
    of what it leaves for norms that are deferred."""
    rng = np.random.default_rng(seed)
    residual, x = Output((m, width), "float32"), Output((m, width), of_x)
    h = residual.array
    h[:] = rng.standard_normal((m, width)) * 10.0 ** rng.uniform(-3, 3, (m, 1))
    y = of_dtype(rng.standard_normal((m, width)), of_y) if of_y else None
    weight, epsilon = rng.standard_normal(width).astype(np.float32), 1e-5
    other = of_dtype(rng.standard_normal((m, width)), of_y) if two and of_y else None
    left = Output((m, 1 + parts), "float32")
    spoil(h, y)
    before = h.copy()

    def check() -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            term = 0 if y is None else as_floats(y).astype(np.float32)
            wanted = before + (term if other is None else term + as_floats(other).astype("f4"))
            np.testing.assert_array_equal(h, wanted)
            r = wanted.astype(np.float64)
            right = r / np.sqrt((r**2).mean(-1, keepdims=True) + np.float32(epsilon)) * weight
        threads, chunks = add_and_norm.row_threads(width)
        depth = 8 * chunks + 5 + threads // 32 + 4
        bound = np.abs(right) * (depth * U + RSQRT + 4 * U)
        finite = np.isfinite(r).all(-1)
        assert np.isnan(as_floats(x.array)[~finite][:, : width // 2]).all() or finite.all()
        close(x.array[finite], right[finite], bound[finite], of_x)
        if parts:
            assert (left.array[:, 2:] == 0).all()
            squares = (r**2).sum(-1)
            close(left.array[:, 1], squares, squares * depth * U, "float32")
            s = factor(left.array, width, epsilon)
            close(left.array[:, 0], s, s * (RSQRT + 4 * U), "float32")

    inputs = [weight, *(one for one in (y, other) if one is not None)]
    return Problem(
        lambda machine: add_and_norm.launch(
            h, y, weight, epsilon, x.array, other, left.array if parts else None
        ),
        check, [residual, x, left], inputs,
    )  # fmt: skip


EPSILON: Final = 1e-5


@dataclass(frozen=True)
class Matrix:
    """A product of M tokens, with a bias or without: its operands, y in float64 and how far off a
    sum may be."""

    m: int
    n: int
    k: int
    format: str
    distribution: str = "normal"
    bias: str | None = None

    def __post_init__(self) -> None:
        made = Product(self.m, self.n, self.k, self.format, self.distribution, input="float16")
        bias = np.random.default_rng(self.n).integers(-4, 5, self.n)
        added = (of_dtype(bias, self.bias),) if self.bias else ()
        blocks, used = made.blocks, Halves.of_values(made.a)
        y, magnitude = same_operands(used, blocks)
        set_once = partial(object.__setattr__, self)
        set_once("a", of_dtype(made.a, "float16"))
        set_once("weights", (*map(np.array, tiles(blocks)), *added))
        set_once("y", y)
        set_once("off", product_bound("A16", self.k, magnitude, "f16_weights"))
        set_once("added", bias.astype(np.float64) if self.bias else np.zeros(self.n))


def norm_before(
    m: int, parts: int, width: int, seed: int = 0, r: float | None = None
) -> np.ndarray:
    """What a norm has left, [m, 1 + parts]: s, and sums of squares, random ones or such that its
    factor is `r`."""
    rng = np.random.default_rng(seed)
    norm = rng.uniform(0.1, 2.0, (m, 1 + parts)).astype(np.float32)
    if r is not None:
        norm[:, 0], norm[:, 1:] = 0.5, 0
        norm[:, 1 + rng.integers(parts)] = width / r**2
    return norm


def factor(norm: np.ndarray, width: int, epsilon: float) -> np.ndarray:
    """r, [m], in float64."""
    squares = norm[:, 1:].astype(np.float64).sum(-1)
    return np.asarray(1 / np.sqrt(squares / width + np.float32(epsilon)))


def residual_problem(
    of: Any, parts: int = 5, exact: bool = False,
    spoil: Callable[[np.ndarray, np.ndarray], None] = lambda a, h: None, shared: bool = False,
) -> Problem:  # fmt: skip
    """The product before a norm. exact: r of the norm before is a power of two, and epsilon 0, so
    that with small integers h and x have no rounding but that of x to float16. shared: with another
    GPU, whose terms of y have come."""
    rng, m, n = np.random.default_rng(of.m), of.m, of.n
    epsilon = 0.0 if exact else EPSILON
    before = norm_before(m, parts, n, of.m, 0.25 if exact else None)
    blocks = deferred_norm.partial_sums(FORMATS[of.format], m, n, of.k)
    residual, x = Output((m, n), "float32"), Output((m, n), "float16")
    after = Output((m, 1 + blocks), "float32")
    h, a = residual.array, of.a.copy()
    h[:] = rng.integers(-9, 10, (m, n)) if exact else 3 * rng.standard_normal((m, n))
    weight = rng.standard_normal(n).astype(np.float32)
    if exact:
        weight[:] = rng.choice([-2.0, 0.5, 1.0], n)
    spoil(a, h)
    was, places, other = h.copy(), [], np.zeros((m, n), np.float32)
    if shared:
        other[:] = rng.integers(-9, 10, (m, n)) if exact else 3 * rng.standard_normal((m, n))
        places = [Output(m * n, "float32"), Output(m * n, "float32")]
        places[0].array[:] = other.ravel()

    def check() -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            right, off = was + (of.y + of.added + other), of.off
            if shared:
                arriving, sent = (one.array for one in places)
                assert (arriving.view(np.uint32) == deferred_norm.NOTHING).all()
                close(sent.reshape(m, n), of.y + of.added, off, "float32")
                off = off + 2 * U * np.abs(other)
            s, by = deferred_norm.ROOM * factor(before, n, epsilon)[:, None], h.astype(np.float64)
            if exact:
                np.testing.assert_array_equal(h, right)
                np.testing.assert_array_equal(x.array, (right * s * weight).astype(np.float16))
                np.testing.assert_array_equal(after.array[:, :1], s)
            close(h, right, off + 4 * U * (np.abs(right) + np.abs(was)), "float32")
            depth = 8 * U + RSQRT + (parts + 8) * U
            close(after.array[:, 0], s[:, 0], s[:, 0] * depth, "float32")
            # what follows is of h as it is now
            close(x.array, by * s * weight, np.abs(by * s * weight) * depth, "float16")
            squares = (by**2).sum(-1)
            found = after.array[:, 1:].astype(np.float64).sum(-1)
            close(found, squares, squares * (n + 8) * U, "float32")
            rows = -(-n // 16)
            each = -(-rows // blocks) * 16
            for block in range(blocks):
                part = (by[:, block * each : (block + 1) * each] ** 2).sum(-1)
                close(after.array[:, 1 + block], part, part * (n + 8) * U, "float32")

    return Problem(
        lambda machine: deferred_norm.launch_residual(
            FORMATS[of.format], of.weights, a, h, weight, before, epsilon, after.array, x.array,
            *(one.array for one in places),
        ),
        check, [residual, x, after, *places], [a, weight, before, *of.weights],
    )  # fmt: skip


def normed_problem(
    of: Any, of_out: str = "float16", parts: int = 5, exact: bool = False
) -> Problem:
    """The product after a norm."""
    m, epsilon = of.m, 0.0 if exact else EPSILON
    norm, out = (
        norm_before(m, parts, of.k, of.m, 0.25 if exact else None),
        Output((m, of.n), of_out),
    )

    def check() -> None:
        by = (factor(norm, of.k, epsilon) / norm[:, 0])[:, None]
        right = of.y * by + of.added
        if exact:
            np.testing.assert_array_equal(out.array, right)
        bound = of.off * by + np.abs(of.y * by) * (RSQRT + (parts + 12) * U)
        close(out.array, right, bound + 4 * U * np.abs(right), of_out)

    return Problem(
        lambda machine: deferred_norm.launch_normed(
            FORMATS[of.format], of.weights, of.a, norm, epsilon, out.array
        ),
        check, [out], [of.a, norm, *of.weights],
    )  # fmt: skip


def gated_problem(of: Any, parts: int = 5) -> Problem:
    """The product of gates and ups after a norm, of a `Matrix` of both."""
    m, hidden = of.m, of.n // 2
    norm, out = norm_before(m, parts, of.k, of.m), Output((m, hidden), "float16")
    norm[:, 1:] *= of.k  # so that float16 holds all of x

    def check() -> None:
        by = (factor(norm, of.k, EPSILON) / norm[:, 0])[:, None]
        right, off = of.y * by, of.off * by + np.abs(of.y * by) * (RSQRT + (parts + 12) * U)
        gate, up, off_gate, off_up = *np.split(right, 2, -1), *np.split(off, 2, -1)
        silu = gate / (1 + np.exp(-gate))
        off_silu = 1.1 * off_gate + np.abs(silu) * (np.abs(gate) * 2.0**-22 + 2.0**-20)
        bound = off_silu * (np.abs(up) + off_up) + np.abs(silu) * off_up
        close(out.array, silu * up, bound, "float16")

    return Problem(
        lambda machine: gated_product.launch(
            FORMATS[of.format], of.weights, of.a, norm, EPSILON, out.array
        ),
        check, [out], [of.a, norm, *of.weights],
    )  # fmt: skip


def swiglu_problem(
    m: int, width: int, of_y: str, of_x: str, seed: int = 0,
    spoil: Callable[[np.ndarray], None] = lambda y: None,
) -> Problem:  # fmt: skip
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((m, 2 * width)) * 10.0 ** rng.uniform(-4, 1.5, (m, 2 * width))
    y, x = of_dtype(values, of_y), Output((m, width), of_x)
    spoil(y)

    def check() -> None:
        gate, up = as_floats(y)[:, :width], as_floats(y)[:, width:]
        with np.errstate(over="ignore", invalid="ignore"):
            right = gate / (1 + np.exp(-gate)) * up
            # e^-gate is off by the rounding of its exponent, which beyond 128 no float32 has
            bound = np.abs(right) * (np.minimum(np.abs(gate), 128) * 2.0**-22 + 2.0**-20)
            bound += 1e-36 * (1 + np.abs(up))
        if of_x == "float16":  # which ends there
            right = np.where(np.abs(right) >= 65520, np.copysign(np.inf, right), right)
        close(x.array, right, bound, of_x)

    return Problem(lambda machine: swiglu.launch(y, x.array), check, [x], [y])


@dataclass(frozen=True)
class Heads:
    """Shapes of attention: sequences, heads of queries and of keys, their size, positions."""

    batch: int
    heads: int
    kv: int
    size: int
    length: int
    position: int


def tables(length: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of each position, as a decoder has them."""
    frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
    angles = np.arange(length)[:, None] * frequencies.repeat(2)
    sin = np.sin(angles) * np.tile([-1, 1], size // 2)
    return np.cos(angles).astype(np.float32), sin.astype(np.float32)


def swapped(x: np.ndarray) -> np.ndarray:
    """Neighbours have changed places."""
    return x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)


def attention_problem(
    of: Heads, of_qkv: str = "float16", of_out: str = "float32", normed: bool = False,
    seed: int = 0,
    spoil: Callable[[np.ndarray, np.ndarray], None] = lambda qkv, cache: None, shown: bool = False,
    polled: bool = False,
) -> Problem:  # fmt: skip
    """What lies behind the position in the cache is NaN. spoil(qkv, cache) changes them first.
    shown: as words of two float16 and a tag, qkv of the launch before, and the output. polled: as
    `attention.launch` takes it."""
    rng, p = np.random.default_rng(seed), of.position
    qkv = of_dtype(rng.standard_normal((of.batch, (of.heads + 2 * of.kv) * of.size)), of_qkv)
    kept, out = (
        Output((of.batch, 2 * of.kv, of.length, of.size), "float16"),
        Output((of.batch, of.heads * of.size), of_out),
    )
    cache = kept.array
    cache[:, :, :p] = rng.standard_normal((of.batch, 2 * of.kv, p, of.size))
    spoil(qkv, cache)
    before = cache.copy()
    cos, sin = tables(of.length, of.size)
    weights = 1 + 0.1 * rng.standard_normal((2, of.size)).astype(np.float32)
    head_norms = (weights[0].copy(), weights[1].copy(), 1e-6) if normed else None
    places = attention.Shown(HEAD, HEAD + qkv.size)
    words = np.zeros((1, places.out_at + out.array.size), np.uint32)
    pairs = words.view(np.uint64)[0]  # word 0 counts tokens: 0
    if shown:
        pairs[places.qkv_at // 2 : places.out_at // 2] = np.uint64(1 << 32) | qkv.view(np.uint32)

    def check() -> None:
        if shown:
            own = pairs[places.out_at // 2 :]
            assert (own >> 32 == 2).all(), "of another launch"
            out.array[:] = (own & 0xFFFFFFFF).astype(np.uint32).view(np.float16)
        x = as_floats(qkv).reshape(of.batch, of.heads + 2 * of.kv, of.size)
        q, k, v = np.split(x, [of.heads, of.heads + of.kv], 1)
        if head_norms is not None:
            q, k = (
                one / np.sqrt((one**2).mean(-1, keepdims=True) + np.float32(1e-6)) * weight
                for one, weight in zip((q, k), head_norms[:2], strict=True)
            )
        rotated = [one * cos[p] + swapped(one) * sin[p] for one in (q, k)]
        sizes = [np.abs(one * cos[p]) + np.abs(swapped(one) * sin[p]) for one in (q, k)]
        of_norm = (of.size + 6) * U + RSQRT if normed else 0.0
        # the cache: the new key and value, and nothing else
        new = cache[:, :, p].astype(np.float64)
        close(cache[:, : of.kv, p], rotated[1], sizes[1] * (4 * U + of_norm), "float16")
        close(cache[:, of.kv :, p], v, np.zeros_like(v), "float16")
        others = np.delete(cache, p, 2).tobytes(), np.delete(before, p, 2).tobytes()
        assert others[0] == others[1], "the cache changed at another position"
        # attention over what is in the cache now
        keys, values = (
            np.concatenate([before[:, :, :p].astype(np.float64), new[:, :, None]], 2)[:, :, None]
            .reshape(of.batch, 2, of.kv, 1, p + 1, of.size)
            .swapaxes(0, 1)
        )
        each = of.batch, of.kv, of.heads // of.kv, 1, of.size
        q, size_of_q = rotated[0].reshape(each), sizes[0].reshape(each)
        with np.errstate(invalid="ignore", over="ignore"):
            scores = (q * keys).sum(-1) / of.size**0.5
            error = (size_of_q * np.abs(keys)).sum(-1) / of.size**0.5
            error = error * ((of.size + 12) * U + of_norm + HALF) + np.abs(scores) * 4 * U
            error = error + TINY * np.abs(keys).sum(-1)  # of queries in float16
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            right = (shares[..., None] * values).sum(-2)
            size = (shares[..., None] * np.abs(values)).sum(-2)
        # a share is off by the errors of its score and of the largest, and by exp2 and sums
        relative = np.expm1(4 * error.max(-1, initial=0))[..., None] + (p + 64) * 2 * U + 2.0**-20
        bound = size * (relative + HALF) + TINY * np.abs(values).sum(-2)  # of shares in float16
        bound = bound.reshape(out.array.shape)
        close(out.array, right.reshape(out.array.shape), bound, of_out)

    position = np.array([p])

    of_cache, inputs = (position, cos, sin), [qkv, position, cos, sin]

    def make(machine: Any) -> Launch:
        if shown:
            numbers = of.heads * of.size, 1, 2
            given = cache, *of_cache, words, places, *numbers, machine, head_norms
            return attention.launch_shown(None, *given)
        return attention.launch(qkv, cache, *of_cache, out.array, machine, head_norms, polled)

    def behind(launch: Launch) -> list[Launch]:
        """That of another layer with the same scratch memory, and what waits for its end alone."""
        if not shown and not polled:
            return [launch]
        others = {id(one): one.copy() for one in (words, cache, out.array)}
        args = tuple(others.get(id(one), one) for one in launch.args)
        last = attention.launch(qkv, cache, *of_cache, out.array, Simulator(), head_norms)
        return [replace(launch, args=args), last]

    return Problem(make, check, [kept, out], inputs, behind)


def rotary_problem(
    of: Heads, tokens: int, of_qkv: str = "float16", normed: bool = False
) -> Problem:
    """A prompt of so many tokens, from `of.position` on."""
    rng, kv, first = np.random.default_rng(tokens), of.kv, of.position
    qkv = of_dtype(rng.standard_normal((of.batch * tokens, (of.heads + 2 * kv) * of.size)), of_qkv)
    kept = Output((of.batch, 2 * kv, of.length, of.size), "float16")
    queries = Output((of.batch * tokens, of.heads * of.size), "float16")
    before = kept.array.copy()
    cos, sin = tables(of.length, of.size)
    weights = 1 + 0.1 * rng.standard_normal((2, of.size)).astype(np.float32)
    head_norms = (weights[0].copy(), weights[1].copy(), 1e-6) if normed else None
    here = slice(first, first + tokens)

    def check() -> None:
        x = as_floats(qkv).reshape(of.batch, tokens, -1, of.size)
        if normed:
            rms = np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(1e-6))
            of_queries, of_keys, _ = np.split(x / rms, [of.heads, of.heads + kv], 2)
            values = x[:, :, of.heads + kv :]
            x = np.concatenate([of_queries * weights[0], of_keys * weights[1], values], 2)
        c, s = cos[here, None], sin[here, None]
        size = np.abs(x * c) + np.abs(swapped(x) * s)
        right = x * c + swapped(x) * s
        bound = size * (4 * U + ((of.size + 6) * U + RSQRT if normed else 0))
        q, k, _ = np.split(right, [of.heads, of.heads + kv], 2)
        of_q, of_k, _ = np.split(bound, [of.heads, of.heads + kv], 2)
        close(queries.array.reshape(q.shape), q, of_q, "float16")
        new = kept.array[:, :, here].swapaxes(1, 2)
        close(new[:, :, :kv], k, of_k, "float16")
        v = x[:, :, of.heads + kv :]
        close(new[:, :, kv:], v, np.zeros_like(v), "float16")
        others = (np.delete(one, here, 2).tobytes() for one in (kept.array, before))
        assert next(others) == next(others), "the cache changed at another position"

    position = np.array([first])
    return Problem(
        lambda machine: rotary.launch(
            qkv, kept.array, position, cos, sin, queries.array, head_norms
        ),
        check, [queries, kept], [qkv, position, cos, sin],
    )  # fmt: skip


def choose(logits: np.ndarray, chosen: int, normed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(ids, shares) of the largest logits, in float64; of equal ones the first."""
    ids = np.argsort(-logits, -1, kind="stable")[:, :chosen]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    shares = np.take_along_axis(shares, ids, -1)
    return ids, shares / shares.sum(-1, keepdims=True) if normed else shares


def router_problem(
    m: int, width: int, experts: int, chosen: int, of_y: str = "float16", of_x: str = "float16",
    normed: bool = True, spoil: Callable[[np.ndarray, np.ndarray], None] = lambda h, of: None,
) -> Problem:  # fmt: skip
    """Residual, norm and the experts of each token. spoil(h, router) changes the operands first."""
    rng = np.random.default_rng(width + experts)
    h = (rng.standard_normal((m, width)) * 10.0 ** rng.uniform(-3, 3, (m, 1))).astype(np.float32)
    y = of_dtype(rng.standard_normal((m, width)), of_y)
    weight, epsilon = rng.standard_normal(width).astype(np.float32), 1e-5
    of = (rng.standard_normal((experts, width)) * (2 / width**0.5)).astype(np.float32)
    spoil(h, of)
    residual, x = Output((m, width), "float32"), Output((m, width), of_x)
    shares, ids = Output((m, chosen), "float32"), np.full((m, chosen), -1, np.int32)

    def check() -> None:
        wanted = h + as_floats(y).astype(np.float32)
        np.testing.assert_array_equal(residual.array, wanted)
        r = wanted.astype(np.float64)
        r = r / np.sqrt((r**2).mean(-1, keepdims=True) + np.float32(epsilon))
        right = r * weight
        bound = np.abs(right) * (width * U + RSQRT)
        close(x.array, right, bound, of_x)
        logits = right @ of.T.astype(np.float64)
        found = np.take_along_axis(logits, ids.astype(np.int64), -1)
        off = (width * U + RSQRT) * (np.abs(right) @ np.abs(of).T).max(-1, keepdims=True)
        best, of_best = choose(logits, chosen, normed)
        assert all(len({*row}) == chosen for row in ids.tolist()), "an expert comes twice"
        assert (np.abs(found - np.take_along_axis(logits, best, -1)) <= 2 * off).all()
        close(shares.array, of_best, of_best * (4 * off + experts * U + EXP2), "float32")

    return Problem(
        lambda machine: router.launch(
            h, y, weight, epsilon, of, residual.array, x.array, ids, shares.array, normed, machine
        ),
        check, [residual, x, shares], [h, y, weight, of],
    )  # fmt: skip


def choice_problem(logits: np.ndarray, chosen: int, normed: bool = True) -> Problem:
    """The experts of tokens, by their logits alone."""
    m = len(logits)
    shares, ids = Output((m, chosen), "float32"), np.full((m, chosen), -1, np.int32)

    def check() -> None:
        best, of_best = choose(logits.astype(np.float64), chosen, normed)
        np.testing.assert_array_equal(ids, best)
        close(shares.array, of_best, of_best * (logits.shape[1] * U + EXP2), "float32")

    return Problem(
        lambda machine: router.choose(logits, ids, shares.array, normed), check, [shares], [logits]
    )


def argmax_problem(
    m: int, count: int, spoil: Callable[[np.ndarray], None] = lambda logits: None
) -> Problem:
    rng = np.random.default_rng(count)
    logits, found = rng.standard_normal((m, count)).astype(np.float32), np.full(m, -1)
    spoil(logits)

    def check() -> None:
        np.testing.assert_array_equal(found, logits.argmax(-1))

    return Problem(lambda machine: argmax.launch(logits, found, machine), check, [], [logits])
