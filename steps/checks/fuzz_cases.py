"""Random products for the fuzzer: what a case is, the line that names it, and how cases are drawn.

A line holds all that a case is made of, so a failure is repeated by
`python -m steps fuzz --case "<line>"` on any machine that can run the step.

    some = works(kernels, cc)                   kernels, formats, dtypes of A and C
    cases = sharing(rng, work, simulated, 32)   products that share weights, of one of them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import numpy as np

from qformats import FORMATS, WEIGHT_FORMATS
from qformats.repack import prune
from qformats.storage import storage_format
from reference import PrequantizedProblem, Problem
from reference.bfloat16 import rounded_to_bfloat16
from steps.blocks.chained import multiplies_twice
from steps.checks.cases import require_depth
from steps.checks.select import ALL_FORMATS, UsageError, select
from steps.contract import Family, Kernel
from steps.kernels.parts.activations.layouts import inputs
from steps.product.choice import of_gemm
from steps.registry import find, kernel_of

ROWS: Final = ("plain", "nan", "inf", "zeros", "ones", "small", "tiny", "large")
"""Kinds of rows of A: as drawn; with one NaN, one infinity; all zero; all the same; times 1e-7,
1e-38; with a largest value between 1e30 and 1e35."""

WEIGHTS: Final = ("drawn", "most")
"""Kinds of weights: of a `Problem`; or with every code at its most."""

VIA: Final = ("step", "gemm", "plan", "graph")
"""How a product is repeated: the step's own launches, `gemm`, a plan, a plan in a CUDA graph."""

DATA: Final = ("normal", "uniform", "llm", "integer")

LARGE: Final = {"float32": (30.0, 35.0), "float16": (3.0, 4.8), "bfloat16": (30.0, 35.0)}
"""Powers of ten between which the largest value of a "large" row is, by the dtype of A."""

DEEP: Final = 160_000
"""A K that is a multiple of all blocks and beyond what an int32 sum of int8 products holds."""


def named_in(line: str, cls: type) -> dict[str, Any]:
    """The fields of a case that a line names, of a dataclass of numbers and words of which the
    first six have no default; UsageError for a line of anything else."""
    known = {one.name: one for one in fields(cls)}
    found: dict[str, Any] = {}
    for word in line.split():
        name, separator, value = word.partition("=")
        if name not in known or not separator:
            raise UsageError(f"{word!r} is none of {'=, '.join(known)}=")
        try:
            found[name] = int(value) if known[name].type == "int" else value
        except ValueError:
            raise UsageError(f"{word!r} is not a whole number") from None
    if lacking := [name for name in list(known)[:6] if name not in found]:
        raise UsageError(f"the case lacks {', '.join(lacking)}")
    return found


@dataclass(frozen=True, slots=True)
class FuzzCase:
    """One product. `rows`: kinds of ROWS, joined by commas; row m of A is of kind m, in turns.

    lesson: whether the lesson's own kernel multiplies, where it teaches an engineered one. seed, w:
    seeds of A and of the weights. a, c: dtypes of A and C. offset: elements (of A in 16 bits:
    chunks of eight) by which A begins behind an aligned address, and chunks of 16 bytes by which C
    does, and stream: whether a stream of its own is used; both where a GPU repeats the product.
    order: of the simulator's lanes.
    """

    step: int
    family: Family
    format: str
    m: int
    n: int
    k: int
    a: str = "float32"
    c: str = "float32"
    data: str = "normal"
    rows: str = "plain"
    weights: str = "drawn"
    via: str = "step"
    offset: int = 0
    stream: int = 0
    order: int = 0
    seed: int = 0
    w: int = 0
    lesson: int = 0

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())

    @classmethod
    def parse(cls, line: str) -> FuzzCase:
        """The case of a line; UsageError for one that names no case."""
        one = cls(**named_in(line, cls))
        try:
            step = one.kernel
        except ValueError as error:
            raise UsageError(str(error)) from None
        if why := step.supports(one.format, one.family, None, one.c):
            raise UsageError(why)
        require_depth(one.format, one.k)
        via = VIA[:1] if one.lesson else VIA  # callers name a step, and get the engineered kernel
        choices = {"a": inputs(step, one.family), "data": DATA, "weights": WEIGHTS, "via": via}
        asked = [(name, getattr(one, name)) for name in choices]
        for name, value in [*asked, *(("rows", kind) for kind in one.kinds)]:
            if value not in (these := choices.get(name, ROWS)):
                raise UsageError(f"{name}={value} is none of {', '.join(these)}")
        return one

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of rows, in turns."""
        return tuple(self.rows.split(","))

    def kind_of(self, m: int) -> str:
        """The kind of a row."""
        return self.kinds[m % len(self.kinds)]

    @property
    def as_drawn(self) -> bool:
        """Whether A and W are a `Problem`'s own."""
        return self.rows == "plain" and self.weights == "drawn"

    @property
    def kernel(self) -> Kernel:
        """The kernel that multiplies; ValueError for a number that no step has."""
        return find(self.step) if self.lesson else kernel_of(self.step)

    def blocks(self) -> np.ndarray:
        """The weights, structured [N, K/32] or [N, K/256]: those of all cases that differ in A and
        in calls alone."""
        pruned = self.kernel.accuracy == "pruned"
        if self.weights == "most":  # as large as codes can make them, and all alike
            made = FORMATS[self.format].quantize(np.full((self.n, self.k), -0.125, np.float32))
            return prune(made) if pruned else made
        return Problem(1, self.n, self.k, self.format, self.data, self.w, pruned=pruned).blocks

    def problem(self, blocks: np.ndarray | None = None) -> GivenProblem:
        """The product; blocks: the weights, where they are made already."""
        blocks = self.blocks() if blocks is None else blocks
        a = Problem(self.m, self.n, self.k, self.format, self.data, self.seed, self.a).a
        if self.as_drawn:
            return GivenProblem(a, blocks, self.a, self.data)
        return GivenProblem(self._activations(a.astype(np.float32)), blocks, self.a)

    def _activations(self, x: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([self.seed, self.m, self.k])
        for m in range(self.m):
            kind, at = self.kind_of(m), rng.integers(self.k)
            if kind == "nan":
                x[m, at] = np.nan
            elif kind == "inf":
                x[m, at] = rng.choice([np.inf, -np.inf])
            elif kind == "zeros":
                x[m] = 0
            elif kind == "ones":
                x[m] = rng.choice([1.0, -0.37, 100.0])
            elif kind == "small":
                x[m] *= np.float32(1e-7)
            elif kind == "tiny":
                x[m] *= np.float32(1e-38)
            elif kind == "large":
                largest = 10.0 ** rng.uniform(*LARGE[self.a])
                x[m] *= np.float32(largest / max(1e-3, float(np.abs(x[m]).max())))
        return rounded_to_bfloat16(x) if self.a == "bfloat16" else x.astype(self.a)


class GivenProblem(PrequantizedProblem):
    """A product of an A and blocks that are there; a: float32 or float16, or float32 of bfloat16's
    numbers. distribution: what both were drawn from; of "integer" the product is exact."""

    def __init__(
        self, a: np.ndarray, blocks: np.ndarray, input: str, distribution: str = "normal"
    ) -> None:
        super().__init__(len(a), blocks, input=input)
        object.__setattr__(self, "distribution", distribution)
        self.__dict__["a"] = a


def cases(
    seed: int, steps: Sequence[Kernel], cc: tuple[int, int] | None, count: int = 1
) -> Iterator[FuzzCase]:
    """Cases without end, small ones where there is no GPU (`cc`). As many as `count` follow each
    other that differ in A and in calls alone."""
    some = works(steps, cc)
    numbers = sorted({work.step for work in some})
    rng = np.random.default_rng(seed)
    while True:
        number, lesson = one_of(rng, numbers), int(rng.random() < LESSONS)
        own = [work for work in some if work.step == number]
        own = [work for work in own if work.lesson == lesson] or own
        yield from sharing(rng, one_of(rng, own), cc is None, count)


def works(steps: Sequence[Kernel], cc: tuple[int, int] | None) -> list[FuzzCase]:
    """What the kernels and their lessons multiply on such a GPU: each kernel, family, format and
    dtypes, as a case without a shape. Those that `gemm` does not call are lessons; one on experts
    multiplies one. UsageError where there is nothing."""
    select(steps, ALL_FORMATS, None, cc)
    both = [(step, lesson) for step in steps if (lesson := find(step.number))]
    return [
        FuzzCase(
            *(one.number, family, name, 1, 1, 1, a, c),
            lesson=which or int(not of_gemm(one)),
        )
        for step, lesson in both
        for which, one in enumerate([step] if lesson is step else [step, lesson])
        for family in one.families
        for name in one.formats
        for c in one.outputs
        if one.supports(name, family, cc, c) is None
        for a in inputs(one, family)
    ]


def dealt(works: Sequence[FuzzCase], index: int, hands: int, seed: int) -> list[FuzzCase]:
    """What one of some processes multiplies. All works with the same code are in one hand, so that
    no kernel is compiled twice; where there are more hands than that, some hold the same."""
    alike: dict[Any, list[FuzzCase]] = {}
    for work in works:
        stored = storage_format(FORMATS[work.format]).name
        key = (work.step, work.lesson, work.family, stored, work.a, work.c)
        alike.setdefault(key, []).append(work)
    groups = list(alike.values())
    np.random.default_rng(seed).shuffle(groups)
    return [work for group in groups[index % len(groups) :: hands] for work in group]


def sharing(
    rng: np.random.Generator, work: FuzzCase, simulated: bool, count: int
) -> list[FuzzCase]:
    """So many cases of a work that have the same weights."""
    size, twice = FORMATS[work.format].elements, multiplies_twice(work.kernel)
    if simulated:
        most_k = 96 if twice else 288
        n, k = log_between(rng, 1, 140), size * log_between(rng, 1, max(1, most_k // size))
        n = min(n, SIMULATED_LIMIT // k)
    else:
        n = log_between(rng, 1, 5000)
        most_k = min(2048 if twice else 16384, GPU_WEIGHTS // n)  # twice: K x K weights besides
        k = size * log_between(rng, 1, max(1, most_k // size))
    deep = rng.random() < DEEP_SHARE and (not simulated or work.kernel.accuracy == "fast")
    if deep and not twice:
        n, k = min(n, 8), DEEP
    data, weights = one_of(rng, DATA), "drawn"
    if data != "integer" and work.format in WEIGHT_FORMATS and rng.random() < 0.1:
        weights = "most"
    shared = replace(work, n=n, k=k, data=data, weights=weights, w=int(rng.integers(10**6)))
    return [_product(rng, shared, simulated) for _ in range(count)]


def _product(rng: np.random.Generator, shared: FuzzCase, simulated: bool) -> FuzzCase:
    n, k = shared.n, shared.k
    if k == DEEP:
        m = log_between(rng, 1, 4)
    elif simulated:
        weights = (n + k) * k if multiplies_twice(shared.kernel) else n * k
        m = log_between(rng, 1, min(40, max(1, SIMULATED_LIMIT // weights)))
    else:
        m = log_between(rng, 1, max(1, min(600, GPU_VALUES // k, GPU_OUTPUTS // n)))
    plain = rng.random() < 0.4 or shared.data == "integer"
    some = rng.choice(ROWS, size=rng.integers(1, 5))
    via = one_of(rng, VIA[:3] if simulated else VIA)
    alone = shared.lesson or rng.random() < 0.5
    return replace(
        shared,
        m=m,
        rows="plain" if plain else ",".join(some),
        via="step" if alone else via,
        offset=0 if simulated else int(rng.integers(4)),
        stream=0 if simulated else int(rng.integers(2)),
        order=int(rng.integers(-1, 3)) if simulated else 0,
        seed=int(rng.integers(10**6)),
    )


LESSONS: Final = 0.2  # the share of cases of an engineered kernel that its lesson multiplies
DEEP_SHARE: Final = 0.02  # the share of weights with `DEEP` columns
SIMULATED_LIMIT: Final = 2**13  # the most M * N * K of a case in the simulator: about a second
GPU_WEIGHTS: Final = 2**21  # the most weights of a case on a GPU: the host packs them
GPU_VALUES: Final = 2**19  # the most values of A: the host draws them and quantizes them, too
GPU_OUTPUTS: Final = 2**19  # the most values of C, each of which is judged by the host


def log_between(rng: np.random.Generator, low: int, high: int) -> int:
    """From low to high, small ones as likely as large ones."""
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 0.999))))


def one_of(rng: np.random.Generator, some: Sequence[Any]) -> Any:
    """Each as likely."""
    return some[int(rng.integers(len(some)))]
