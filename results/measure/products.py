"""A product C[M, N] = A[M, K] @ W[N, K]^T made ready to be timed: data, copies, launches, checks.

Data is shared as far as it goes: steps at one (N, K) have the same A and the same float weights in
every format, steps with one packing the same copies on the GPU, steps with one activation pass the
same quantized A, and those that read A alike, in one format, the float64 products. A is drawn in
float16's values, so that float32 and float16 inputs are the same numbers; bfloat16 has fewer bits,
and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import cpu_count
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from qformats.repack import prune
from reference import Check, Problem, Reference, check
from reference.bfloat16 import bfloat16_bits, bfloat16_values
from results.measure import cublas
from results.measure.loop import Contestant
from results.measure.protocol import Budget, Stopwatch, floor_us, impossible, slots_for
from results.record.schema import Limits, Row, total_below_kernel
from steps.checks.run import fatal
from steps.contract import Activations, Launch, Shape, Size, Work, array_dtype
from steps.kernels.parts.activations.layouts import decode, reading_of

COMPARED: Final = 2**16
"""Outputs compared before and after a row is timed, NaN being sought in all of them: the float64
reference would otherwise take longer than the timing. The check shapes compare every output."""

THREADS: Final = min(16, cpu_count() or 1)
"""For NumPy, which lets go of Python's lock: packing and float64 products."""


# --------------------------------------------------------------------------------------------- data


class Data:
    """A and W of all problems with one (N, K), of `tokens` tokens at most."""

    def __init__(
        self,
        tokens: int,
        n: int,
        k: int,
        distribution: str = "normal",
        seed: int = 0,
        given: Problem | None = None,
    ) -> None:
        """given: a problem whose blocks are taken, in its one format, such as a file's."""
        self.tokens, self.n, self.k = tokens, n, k
        self.distribution, self.seed = distribution, seed
        self._given = given
        self._a: dict[str, np.ndarray] = {}
        self._blocks: dict[str, np.ndarray] = {}
        self._packed: dict[tuple[Any, str], Packed] = {}
        self._halves: list[Any] = []

    @cached_property
    def _drawn(self) -> Problem:
        """What A and the float weights are drawn from; its format says nothing of them."""
        return Problem(self.tokens, self.n, self.k, "q4_0", self.distribution, self.seed)

    def a(self, dtype: str) -> np.ndarray:
        """Activations [tokens, K] as a caller has them: values of float16 in float32 or float16, or
        rounded to bfloat16, in uint16."""
        if not self._a:
            drawn = (self._given or self._drawn).a
            self._a["float16"] = drawn.astype(np.float16)
            self._a["float32"] = self._a["float16"].astype(np.float32)
        if dtype == "bfloat16" and dtype not in self._a:
            self._a[dtype] = bfloat16_bits(self._a["float32"])
        return self._a[dtype]

    @cached_property
    def w(self) -> np.ndarray:
        """Float weights [N, K]."""
        return self._drawn.w

    def floats(self, format_name: str) -> np.ndarray:
        """What the blocks of a format were quantized from: of formats that are only read, the
        blocks' own values."""
        if FORMATS[format_name].written:
            return self.w
        values: np.ndarray = FORMATS[format_name].dequantize(self.blocks(format_name))
        return values

    def blocks(self, format_name: str) -> np.ndarray:
        if self._given is not None:
            return self._given.blocks
        if format_name not in self._blocks:
            fmt = FORMATS[format_name]
            self._blocks[format_name] = (
                fmt.quantize(self.w)
                if fmt.written
                else Problem(1, self.n, self.k, format_name, seed=self.seed).blocks
            )
        return self._blocks[format_name]

    @property
    def knows_floats(self) -> bool:
        return self._given is None

    def packed(self, work: Work) -> Packed:
        """The weights as a step reads them, packed once for all steps that read them so."""
        key = (work.step.pack, work.format)
        if key not in self._packed:
            self._packed[key] = Packed(self._pack(work))
        return self._packed[key]

    def _pack(self, work: Work) -> tuple[np.ndarray, ...]:
        return tuple(work.step.pack(self.blocks(work.format)))

    def prepare(self, works: Iterable[Work]) -> None:
        """Quantize and pack what these works need, on several cores."""
        needed = {(work.step.pack, work.format): work for work in works}
        with ThreadPoolExecutor(THREADS) as pool:
            if self._given is None and any(FORMATS[name].written for _, name in needed):
                _ = self.w  # drawn once, before the threads ask for it
            list(pool.map(self.blocks, dict.fromkeys(name for _, name in needed)))
            list(pool.map(self.packed, needed.values()))

    def shared(self, m: int, machine: Any, stopwatch: Stopwatch) -> Shared:
        """What products of the first m tokens share."""
        return Shared(self, m, machine, stopwatch)

    def cublas_weights(self, l2_bytes: int) -> list[Any]:
        """Copies of the float weights in float16, as tensors of torch."""
        if not self._halves:
            self._halves.extend(cublas.copies(self.w, l2_bytes))
        return self._halves

    def release(self) -> None:
        """Free the copies on the GPU."""
        self._halves.clear()
        for packed in self._packed.values():
            packed.copies.clear()


@dataclass(frozen=True)
class PartOf(Problem):
    """The first `m` tokens of some data in one format; A of its `input`."""

    data: Data | None = None

    @property
    def _source(self) -> Data:
        if self.data is None or self.m > self.data.tokens:
            raise ValueError(f"the first {self.m} tokens of {self.data} do not exist")
        return self.data

    @cached_property
    def a(self) -> np.ndarray:
        a = self._source.a(self.input)[: self.m]
        return bfloat16_values(a) if self.input == "bfloat16" else a

    @cached_property
    def w(self) -> np.ndarray:
        return self._source.floats(self.format)

    @cached_property
    def blocks(self) -> np.ndarray:
        blocks = self._source.blocks(self.format)
        return prune(blocks) if self.pruned else blocks

    @property
    def knows_floats(self) -> bool:
        return self._source.knows_floats


@dataclass(slots=True, eq=False)
class Packed:
    """Weights as some steps read them, and their copies on the GPU."""

    arrays: tuple[np.ndarray, ...]
    copies: list[tuple[Any, ...]] = field(default_factory=list, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def on(self, machine: Any, stopwatch: Stopwatch) -> Sequence[tuple[Any, ...]]:
        """As many copies as fill the rotation: one uploaded, the others made of it there."""
        if not self.copies:
            original = tuple(machine.array(array) for array in self.arrays)
            slots = slots_for(self.nbytes, stopwatch.l2_bytes)
            more = [tuple(map(stopwatch.duplicate, original)) for _ in range(slots - 1)]
            self.copies.extend((original, *more))
        return self.copies


# ---------------------------------------------------------------------------------------- one shape


class Shared:
    """What all products of one (M, N, K) share on the machine."""

    beside_cublas = True

    def __init__(self, data: Data, m: int, machine: Any, stopwatch: Stopwatch) -> None:
        self.data, self.m, self.machine, self.stopwatch = data, m, machine, stopwatch
        self._a: dict[str, Any] = {}
        self._blank: dict[str, Any] = {}
        self._activations: dict[tuple[Any, ...], Any] = {}
        self._references: dict[tuple[Any, ...], Reference] = {}
        self._bits: dict[int, Any] = {}
        self.passes: dict[tuple[Any, ...], Contestant] = {}

    @property
    def shape(self) -> Size:
        return self.m, self.data.n, self.data.k

    def a(self, dtype: str) -> Any:
        if dtype not in self._a:
            self._a[dtype] = self.machine.array(self.data.a(dtype)[: self.m])
        return self._a[dtype]

    def nan_filled(self, dtype: str) -> Any:
        """A new C, all NaN."""
        if dtype not in self._blank:
            nan = 0x7FFF if dtype == "bfloat16" else np.nan
            blank = np.full((self.m, self.data.n), nan, array_dtype(dtype))
            self._blank[dtype] = self.machine.array(blank)
        return self.stopwatch.duplicate(self._blank[dtype])

    def activations(self, work: Work, input: str) -> tuple[tuple[Any, ...], Any]:
        """(what names it, `Activations`) of a step's pass, which has been run once."""
        reading = reading_of(work.step, input, work.family, work.format, Shape(*self.shape))
        if reading.source != input or reading.columns != 1:
            raise ValueError(f"{work} reads A as {reading.source}, not as {input}")
        key = (reading.make, work.family, input)
        if key not in self._activations:
            made = reading.make(self.a(input), self.machine)
            for launch in made.launches:
                self.machine.run(launch)
            self.stopwatch.wait()
            self._activations[key] = made
        return key, self._activations[key]

    def launches(
        self, work: Work, copies: Sequence[tuple[Any, ...]], activations: Activations, out: Any
    ) -> list[tuple[Launch, ...]]:
        """What multiplies, in each repetition in turn: by another copy of the weights."""
        step, family, fmt, shape = work.step, work.family, FORMATS[work.format], Shape(*self.shape)
        scratch = step.scratch_memory(self.machine, fmt, family, shape)
        return [
            (step.launch(fmt, family, shape, weights, activations.arrays, out, *scratch),)
            for weights in copies
        ]

    def in_order(self, work: Work, c: np.ndarray) -> np.ndarray:
        """C as the problem has it, of what the launches of a work wrote."""
        return c

    @property
    def operations(self) -> int:
        """Multiplications and additions of a product."""
        m, n, k = self.shape
        return 2 * m * n * k

    def bytes_read(self, packed: Packed) -> int:
        """Of the weights, by a product."""
        return packed.nbytes

    def multiplied(self, activations: Any) -> Any:
        """The bits that kernels multiply of these activations, read back once; None where it is A
        itself."""
        key = id(activations)
        if key not in self._bits:
            self._bits[key] = self._multiplied(activations)
        return self._bits[key]

    def _multiplied(self, activations: Any) -> Any:
        if activations.layout is None:
            return None
        host = tuple(np.array(self.machine.host(array)) for array in activations.arrays)
        return decode(activations.layout, host, self.m, self.data.k)

    def forget_bits(self) -> None:
        """They are to be read back anew: the timed launches may have changed them."""
        self._bits.clear()

    def reference(self, work: Work, input: str) -> Reference:
        """What is right; float16 A is one of its own for A16 alone, whose recipe differs, bfloat16
        A has numbers of its own."""
        dtype = input if work.family == "A16" or input == "bfloat16" else "float32"
        key = self._named(work, dtype)
        if key not in self._references:
            self._references[key] = Reference(self._problem(work, dtype), COMPARED)
        return self._references[key]

    def _named(self, work: Work, dtype: str) -> tuple[Any, ...]:
        """What tells references apart."""
        return work.format, dtype, work.step.accuracy == "pruned"

    def _problem(self, work: Work, dtype: str) -> Problem:
        given = (*self.shape, work.format, self.data.distribution, self.data.seed, dtype)
        return PartOf(*given, self.data, pruned=work.step.accuracy == "pruned")


class Product:
    """One work at one shape with one dtype of A and of C: checked, timed, checked, and a row."""

    def __init__(self, row: Row, work: Work, shared: Shared) -> None:
        self.row, self.work, self.shared = row, work, shared
        self.kernel: Contestant | None = None
        self.total: Contestant | None = None
        self._found: Check | None = None

    def first_run(self) -> None:
        """Compile, launch once, and keep the result for `check`."""
        step, family = self.work.step, self.work.family
        shared, machine = self.shared, self.shared.machine
        if why := step.supports(
            self.work.format, family, getattr(machine, "cc", None), self.row.output
        ):
            raise ValueError(why)
        self.packed = shared.data.packed(self.work)
        copies = self.packed.on(machine, shared.stopwatch)
        self.pass_key, self.activations = shared.activations(self.work, self.row.input)
        out = shared.nan_filled(self.row.output)
        first, *_ = shared.launches(self.work, copies[:1], self.activations, out)
        for launch in first:
            machine.run(launch)
        shared.stopwatch.wait()
        # Null in the simulator. Local memory counts as spilled: no step keeps an array there.
        used = machine.resources(first[-1]) if hasattr(machine, "resources") else {}
        self.row = replace(self.row, **used)
        self._c: Any = machine.host(out)
        shared.multiplied(self.activations)
        self._out = shared.nan_filled(self.row.output)
        self.launches = shared.launches(self.work, copies, self.activations, self._out)

    def last_run(self) -> None:
        """Keep what the timed launches wrote, for `check`."""
        self._c = self.shared.machine.host(self._out)
        self.shared.multiplied(self.activations)

    def check(self) -> Check:
        """Judge the result that was kept. Needs no GPU, so several are judged at once."""
        reference = self.shared.reference(self.work, self.row.input)
        bits = self.shared.multiplied(self.activations)
        try:
            c = self.shared.in_order(self.work, self._c)
            return check(c, reference.problem, self.work.family, bits, reference=reference)
        finally:
            del self._c

    def enter(self, budget: Budget) -> None:
        """Make its contestants; that of the activation pass is shared by products."""
        watch, before = self.shared.stopwatch, tuple(self.activations.launches)
        slots, passes = len(self.launches), self.shared.passes
        self.kernel = Contestant(watch, lambda slot: self.launches[slot], slots, budget)
        self.total = self.kernel  # where there is nothing to prepare, it reads A as it is
        if before:
            total = lambda slot: (*before, *self.launches[slot])  # noqa: E731
            self.total = Contestant(watch, total, slots, budget)
        if before and self.pass_key not in passes:
            passes[self.pass_key] = Contestant(watch, lambda _: before, 1, budget)

    @property
    def contestants(self) -> tuple[Contestant, ...]:
        own = dict.fromkeys((self.kernel, self.total))
        return tuple(each for each in own if each is not None)

    def timed(self, limits: Limits, l2_bytes: int) -> Row:
        """The row with its times, judged by what is possible."""
        assert self.kernel is not None
        assert self.total is not None
        kernel, total, row = self.kernel.timing, self.total.timing, self.row
        own = self.shared.passes.get(self.pass_key)
        weights = self.shared.bytes_read(self.packed)
        others = sum(int(array.nbytes) for array in self.activations.arrays)
        others += array_dtype(row.output).itemsize * row.M * row.N
        operations = self.shared.operations
        floor = floor_us(operations, row.unit, weights, others, l2_bytes, limits)
        row = replace(
            row,
            kernel_us=kernel.us,
            p20_us=kernel.p20_us,
            p80_us=kernel.p80_us,
            activation_us=own.timing.us if own else 0.0,
            total_us=total.us,
            total_p20_us=total.p20_us,
            total_p80_us=total.p80_us,
            rounds=total.rounds,
            tflops=operations / kernel.us * 1e-6,
            gbps=(weights + others) / kernel.us * 1e-3,
            limit_share=None if floor is None else floor / kernel.us,
        )
        why = impossible(min(kernel.us, total.us), floor) or total_below_kernel(row)
        return failed(row, why) if why else replace(row, status="ok", why=None)


def failed(row: Row, why: str) -> Row:
    """The row of work that has no figure, and the sentence why."""
    return replace(row, status="failed", why=" ".join(why.split()) or "no reason was given")


def attempt(act: Callable[[], Any], note: Callable[[str], None], what: str = "") -> Any:
    """What `act` gives. None where it fails, which is noted in a sentence; a CUDA error that takes
    the context with it is raised: nothing after it could be trusted."""
    try:
        return act()
    except Exception as error:
        if fatal(error):
            raise
        note(f"{what}: " * bool(what) + f"{type(error).__name__}: {error}")
        return None


def in_threads(judge: Callable[[Product], Any], products: Sequence[Product]) -> list[Any]:
    """Of each product what `judge` says, or the exception it raised; one thread for a format, as
    its products share a reference."""
    found: dict[int, Any] = {}

    def own(format_name: str) -> None:
        for i, product in enumerate(products):
            if product.work.format == format_name:
                try:
                    found[i] = judge(product)
                except Exception as error:
                    found[i] = error

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(own, dict.fromkeys(product.work.format for product in products)))
    return [found[i] for i in range(len(products))]
