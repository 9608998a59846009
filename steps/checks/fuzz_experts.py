"""Random products of experts for the fuzzer: what a case is, how cases are drawn, what is wrong.

    some = sharing(rng, simulated, 32)              cases of one request and the same weights
    found = complaints(case, machine, weights)      a sentence for each thing that is wrong

Of each case: slots that have an expert are within the a-priori bound of the float64 product of the
same operands, or equal to it where all are small integers; those of an id that is none are NaN, and
a NaN of A is in its own slots alone; nothing is written outside C; operands are unchanged; the same
product again has the same bits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from qformats.repack import TILE_ROWS
from reference import Halves, Problem
from reference.bfloat16 import bfloat16_bits, bfloat16_values
from reference.limits import bound
from reference.product import same_operands
from steps.checks.fuzz_cases import log_between, named_in, one_of
from steps.checks.select import UsageError
from steps.contract import FLOATS, array_dtype
from steps.kernels.experts.contract import GATES, IDS, ExpertsRequest
from steps.kernels.experts.few import KERNEL
from steps.kernels.experts.gates import gated
from steps.product.experts import choose, packed_arrays, require_product

ROUTING: Final = ("random", "one", "same", "skewed", "none")
"""How tokens choose: at random, repeats and ids out of range among them; all slots one expert; all
tokens the same experts; most of them the last; ids out of range alone."""

DATA: Final = ("normal", "integer")

FAR: Final = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**32, 2**63 - 1)}
"""Ids that are none; the lower half of one is 0."""

SANITIZED: Final = (
    "experts=8 format=q4_0 t=1 s=4 n=96 k=288 c=float16 gate=silu bias=float16",
    "experts=9 format=q5_1 t=5 s=3 n=160 k=160 a=bfloat16 c=bfloat16 routing=skewed",
    "experts=4 format=mxfp4 t=6 s=2 n=48 k=416 per_slot=1 router=float32 bias=bfloat16",
    "experts=4 format=q4_0 t=1 s=3 n=2112 k=96 per_slot=1 router=float32 ids=int64",
    "experts=3 format=q4_0 t=40 s=2 n=200 k=288 c=float16 router=float16",
    "experts=2 format=q8_0 t=24 s=1 n=320 k=160 a=bfloat16 c=bfloat16 gate=clamped",
)
"""Cases for the sanitizer: of each kernel, of few tokens and of many."""

SIMULATED: Final = 2**13  # slots times N times K of a case in the simulator, at most: a few seconds
GUARD: Final = 128  # values on each side of C that are watched
LARGEST: Final = 65000.0
"""Products below it are finite in float16."""

ROUNDED: Final = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # unit roundoff of C
WEIGHTS: Final = 2**21  # on a GPU, at most: the host packs them,
TERMS: Final = 2**26  # slots times N times K, which it multiplies in float64,
OUTPUTS: Final = 2**18  # and values of C, which it judges


@dataclass(frozen=True, slots=True)
class ExpertsCase:
    """One product, named by a line of these fields. t, s, bias, router ...: as of `ExpertsRequest`,
    "" for none. nan: whether a value of A is NaN. seed: of A, ids, bias and router; w: of weights.
    order: of the simulator's lanes."""

    experts: int
    format: str
    t: int
    s: int
    n: int
    k: int
    a: str = "float16"
    c: str = "float32"
    ids: str = "int32"
    per_slot: int = 0
    bias: str = ""
    gate: str = ""
    router: str = ""
    routing: str = "random"
    data: str = "normal"
    nan: int = 0
    order: int = 0
    seed: int = 0
    w: int = 0

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())

    @classmethod
    def parse(cls, line: str) -> ExpertsCase:
        """The case of a line; UsageError for one that names none."""
        one = cls(**named_in(line, cls))
        floats = (*FLOATS, "")
        choices = {
            "format": KERNEL.formats, "a": FLOATS, "c": FLOATS, "ids": IDS, "bias": floats,
            "gate": (*GATES, ""), "router": floats, "routing": ROUTING, "data": DATA,
        }  # fmt: skip
        for name, these in choices.items():
            if getattr(one, name) not in these:
                raise UsageError(f"{name}={getattr(one, name)} is none of {', '.join(these)}")
        try:
            require_product(one.request)
            Problem(1, one.n, one.k, one.format)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return one

    @property
    def request(self) -> ExpertsRequest:
        return ExpertsRequest(
            self.format, self.t, self.s, self.experts, self.n, self.k, self.a, self.c, self.ids,
            bool(self.per_slot), self.bias or None, self.gate or None, self.router or None,
        )  # fmt: skip

    def others(self, rng: np.random.Generator, simulated: bool, count: int) -> list[ExpertsCase]:
        """So many cases of the same request that share other weights."""
        shared = replace(self, data=one_of(rng, (*DATA, DATA[0])), w=int(rng.integers(10**6)))
        return [
            replace(
                shared, routing=one_of(rng, (ROUTING[0], *ROUTING)), nan=int(rng.random() < 0.2),
                order=int(rng.integers(-1, 3)) if simulated else 0, seed=int(rng.integers(10**6)),
            )
            for _ in range(count)
        ]  # fmt: skip


class ExpertsWeights:
    """The weights of cases that share them: blocks of each expert, and packed ones on a machine."""

    def __init__(self, case: ExpertsCase, machine: Any) -> None:
        self._machine = machine
        sizes = 1, case.n, case.k, case.format, case.data
        self.blocks = [Problem(*sizes, case.w + e).blocks for e in range(case.experts)]

    @cached_property
    def packed(self) -> tuple[np.ndarray, np.ndarray]:
        return packed_arrays(np.stack(self.blocks))

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        return tuple(self._machine.array(one.copy()) for one in self.packed)


class _Problem:
    """The other operands of a case, and what C is."""

    def __init__(self, case: ExpertsCase, weights: ExpertsWeights) -> None:
        asked, rng = case.request, np.random.default_rng([case.seed, case.t, case.k])
        self._case, self._weights, self.ids = case, weights, _routed(case, rng)
        problem = Problem(asked.a_rows, 1, case.k, case.format, case.data, case.seed, case.a)
        self.a = np.array(problem.given)
        self._values = np.array(problem.a, np.float32)
        self._spoiled = np.zeros(asked.a_rows, bool)
        if case.nan:
            row, column = int(rng.integers(asked.a_rows)), int(rng.integers(case.k))
            self._spoiled[row] = True
            self.a[row, column] = 0x7FC0 if case.a == "bfloat16" else np.nan
            self._values[row] = 0  # what is NaN needs no float64 product
        self.bias = self.router = None
        whole = case.data == "integer"
        if case.bias:
            drawn = rng.standard_normal((case.experts, case.n))
            self.bias = _of_dtype(np.rint(4 * drawn) if whole else drawn, case.bias)
        if case.router:
            drawn = rng.random((case.t, case.s))
            self.router = _of_dtype(np.rint(2 * drawn) if whole else drawn, case.router)

    def right(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(C, by how much it may be off, where it may be anything as a product is beyond float16),
        float64; NaN where C must be."""
        case, asked = self._case, self._case.request
        values = Halves.of_values(self._values)
        y, off = (np.full((asked.slots, asked.outputs), np.nan) for _ in range(2))
        rows = np.arange(asked.slots) // (1 if asked.per_slot else case.s)
        for e in np.unique(self.ids):
            own = np.flatnonzero((self.ids.reshape(-1) == e) & ~self._spoiled[rows])
            if not 0 <= e < case.experts or not own.size:
                continue
            c, size = same_operands(values.rows(rows[own]), self._weights.blocks[e])
            error = bound("A16", case.k, size, "f16_weights")
            if self.bias is not None:
                c = c + _floats(self.bias[e])
                error = error + 2.0**-23 * np.abs(c)
            if case.gate:
                c, error = _gated(case.gate, c, error)
            y[own], off[own] = c, error
        shape = case.t, case.s, asked.outputs
        y, off = y.reshape(shape), off.reshape(shape)
        beyond = (case.c == "float16") & (np.abs(y) + off > LARGEST)
        if self.router is not None:
            share = _floats(self.router)[..., None]
            # products may be in the dtype of C before they are added up
            off = off + (ROUNDED[case.c] + 2.0**-20) * (np.abs(y) + off)
            y, off, beyond = (y * share).sum(1), (off * share).sum(1), beyond.any(1)
            beyond |= (case.c == "float16") & (np.abs(y) + off > LARGEST)
        return y, off + ROUNDED[case.c] * (np.abs(y) + off) + 2.0**-25, beyond


def complaints(case: ExpertsCase, machine: Any, weights: ExpertsWeights | None = None) -> list[str]:
    """One sentence for each thing that is wrong with a case. weights: where cases share them."""
    weights = weights or ExpertsWeights(case, machine)
    problem, asked = _Problem(case, weights), case.request
    wanted, off, beyond = problem.right()
    others = {"ids": problem.ids, "bias": problem.bias, "router": problem.router}
    given = dict(zip(("weights", "row scales"), weights.packed, strict=True))
    given |= {name: x for name, x in others.items() if x is not None}
    arrays = [*weights.arrays, *(machine.array(x.copy()) for x in [*given.values()][2:])]
    a, found = machine.array(problem.a.copy()), []
    filled = array_dtype(case.c).type(0x7FC0 if case.c == "bfloat16" else np.nan)
    whole = np.full(wanted.size + 2 * GUARD, filled)
    whole[:GUARD] = whole[-GUARD:] = 7
    results = []
    for _ in range(2):
        around = machine.array(whole.copy())
        out = around[GUARD : GUARD + wanted.size].reshape(asked.out_shape)
        for launch in choose(asked, machine).on(machine, a, out, arrays):
            machine.run(launch)
        results.append(np.array(machine.host(around)))
    if any((c[:GUARD] != 7).any() or (c[-GUARD:] != 7).any() for c in results):
        found.append("values beside C are written")
    for (name, host), array in zip({**given, "A": problem.a}.items(), [*arrays, a], strict=True):
        if np.array(machine.host(array)).tobytes() != np.ascontiguousarray(host).tobytes():
            found.append(f"{name} changed")
    c, again = (_floats(one[GUARD:-GUARD]).reshape(wanted.shape) for one in results)
    found += _differences(case, np.where(beyond, wanted, c), wanted, off)
    if not np.array_equal(c, again, equal_nan=True):
        at = _first((c != again) & ~(np.isnan(c) & np.isnan(again)))
        found.append(f"again C has other bits, the first at {at}")
    return found


def _differences(
    case: ExpertsCase, c: np.ndarray, wanted: np.ndarray, off: np.ndarray
) -> list[str]:
    found, none = [], np.isnan(wanted)
    if (wrong := np.isnan(c) != none).any():
        at = _first(wrong)
        found.append(
            f"{np.count_nonzero(wrong)} of {c.size} outputs are NaN where they must not be, or are "
            f"not where they must, the first at {at}: got {c[at]:.9g}"
        )
    error = np.where(none, 0, np.abs(c - wanted))
    if case.data == "integer" and case.c == "float32" and not case.gate:
        off = np.zeros_like(off)  # float32 sums hold all of it
    if (wrong := ~none & (error > off)).any():
        at = _first(wrong)
        found.append(
            f"{np.count_nonzero(wrong)} of {c.size} outputs are beyond their bound, the first at "
            f"{at}: got {c[at]:.9g}, not {wanted[at]:.9g} by {off[at]:.3g} at most"
        )
    return found


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, np.argwhere(wrong)[0]))


def _gated(name: str, c: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a gate makes of products, and how far off it may be: its slope is below 1.2."""
    (gate, up), (off_gate, off_up) = (
        x.reshape(len(x), -1, 2, TILE_ROWS).transpose(2, 0, 1, 3).reshape(2, len(x), -1)
        for x in (c, error)
    )
    y = gated(name, gate, up)
    slope = 1.2 * (np.abs(up) + 1) * off_gate + (np.abs(gate) + 1) * off_up
    return y, slope + 1.2 * off_gate * off_up + 2.0**-19 * np.abs(y)


def _routed(case: ExpertsCase, rng: np.random.Generator) -> np.ndarray:
    shape, e, far = (case.t, case.s), case.experts, FAR[case.ids]
    ids = rng.integers(0, e, shape)
    if case.routing == "random":
        out = rng.random(shape)
        ids = np.where(out < 0.03, rng.choice((-1, e), shape), ids)
        ids = np.where(out > 0.99, rng.choice(far, shape), ids)
    elif case.routing == "one":
        ids[...] = ids[0, 0]
    elif case.routing == "same":
        ids[...] = ids[0]
    elif case.routing == "skewed":
        ids = np.where(rng.random(shape) < 0.7, e - 1, ids)
    else:
        ids = rng.choice((-1, e, *far), shape)
    return np.ascontiguousarray(ids.astype(case.ids))


def _of_dtype(x: np.ndarray, name: str) -> np.ndarray:
    return bfloat16_bits(x.astype(np.float32)) if name == "bfloat16" else x.astype(name)


def _floats(x: np.ndarray) -> np.ndarray:
    return (bfloat16_values(x) if x.dtype == np.uint16 else x).astype(np.float64)


# --- what is drawn --------------------------------------------------------------------------------


def sharing(rng: np.random.Generator, simulated: bool, count: int) -> list[ExpertsCase]:
    """So many cases of one request, with the same weights."""
    name = one_of(rng, KERNEL.formats)
    size = FORMATS[name].elements
    gate, router, per_slot = "", "", int(rng.random() < 0.5)
    if rng.random() < 0.5:
        gate = one_of(rng, ("", *GATES))
    elif rng.random() < 0.7:
        router = one_of(rng, FLOATS)
    most = 4 if simulated else 200
    e = log_between(rng, 1, 5 if simulated else 300)
    t, s = (
        log_between(rng, 1, 6 if simulated else most),
        log_between(rng, 1, 4 if simulated else 10),
    )
    terms, weights = (SIMULATED, SIMULATED) if simulated else (TERMS, WEIGHTS)
    room = max(size, min(weights // e, terms // (t * s)))
    k = size * log_between(rng, 1, max(1, min(16384, room) // size))
    n = log_between(rng, 1, max(1, min(4096, room // k, OUTPUTS // (t * s))))
    if gate:
        n = 2 * TILE_ROWS * max(1, n // (2 * TILE_ROWS))
    drawn = ExpertsCase(
        e, name, t, s, n, k, one_of(rng, FLOATS), one_of(rng, FLOATS), one_of(rng, IDS), per_slot,
        one_of(rng, ("", "", *FLOATS)), gate, router,
    )  # fmt: skip
    return drawn.others(rng, simulated, count)
