"""Which kernel multiplies: the one named, else the fastest measured, else a default.

    choice = choose(Request("q4_0", m, n, k, a="float16", c="float16"), machine)

A choice says all that a launch depends on: the kernel, how it reads A, what it writes. The
candidates are the engineered kernels (`steps.registry.kernels`). Lessons are candidates only where
no engineered kernel can do it, as before compute capability 8.0, and where one is named by number.

`make tune` measures kernels at many M on a GPU and writes a table (`steps.product.tuning_table`).
Of the candidates that the table has a time for, the fastest is chosen. A format that the table
lacks uses the times of the format stored most like it (`qformats.storage`). Where no candidate has
a time, a default is chosen: the kernel with the highest number, as each is meant to be faster than
the one before it. Kernels for few tokens (`Kernel.most_tokens`) come first up to that M, and beyond
it only where no other can. A new kernel is no default until it says so (`Kernel.chosen_untuned`).

Both families are considered unless one is named. Kernels that requantize the weights ("fast") are
considered only where that accuracy is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from qformats.storage import nearest_weight_format
from steps.blocks.chained import multiplies_twice
from steps.blocks.experts import RowsByIds
from steps.compile.dry_run import (
    OUT,
    REGION,
    WEIGHTS,
    A,
    ArrayType,
    DryRun,
    Placeholder,
    packed_types,
)
from steps.contract import (
    ACCURACIES,
    Activations,
    Family,
    Kernel,
    Launch,
    Machine,
    Shape,
    Size,
    Step,
    Work,
    array_dtype,
    known_accuracy,
    scheme,
)
from steps.kernels.parts.activations.layouts import GATED, Reading, inputs, reading_of
from steps.product import tuning_table as tuning
from steps.product.operands import one_of, require_grid
from steps.registry import kernel_of, kernels, ladder

MOST_OF_A_SIDE: Final = 2**31 - 1
"""M, N and K are int32 to a kernel."""


@dataclass(frozen=True, slots=True)
class Request:
    """A product that somebody wants: all that, with the machine, decides the kernel.

    C[M, N] = A[M, K] @ dequantize(W)[N, K]^T + bias[N].

    format    : of W, a name of `qformats.FORMATS`.
    a, c      : dtypes of A and C, "float32", "float16" or "bfloat16". A may also be "gated":
                float16 y[M, 2 K], K gates and K ups a row; A is then silu(gate) * up.
    bias      : the dtype of a bias, None for none.
    accuracy  : "exact", or "fast" to allow kernels that requantize W, see `steps.gemm`.
    family    : only kernels of this family, "A16" or "A8".
    step      : only the kernel of this number, a lesson's; whatever its accuracy.
    layouts   : names of the layouts that W is packed in; None: it is not packed yet.
    invariant : see `steps.contract.Shape`.
    caller_casts : whether the caller does what the kernel does not: casts A to what it reads and C
                from what it writes, and adds the bias. Otherwise only a kernel that does all of it
                will do.
    """

    format: str
    m: int
    n: int
    k: int
    a: str = "float32"
    c: str = "float32"
    bias: str | None = None
    accuracy: str = "exact"
    family: str | None = None
    step: int | None = None
    layouts: tuple[str, ...] | None = None
    invariant: bool = False
    caller_casts: bool = False

    def __post_init__(self) -> None:
        """ValueError for what is no product at all."""
        known_accuracy(self.accuracy)
        if self.family is not None:
            known_family(self.family)
        for name in ("m", "n", "k"):
            if getattr(self, name) > MOST_OF_A_SIDE:
                raise ValueError(
                    f"{name.upper()}={getattr(self, name)} and kernels count to {MOST_OF_A_SIDE}: "
                    "multiply a part at a time"
                )

    @property
    def shape(self) -> Shape:
        return Shape(self.m, self.n, self.k, self.invariant)


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel for a product, and why. `str` of it is a sentence.

    request: the product that it was chosen for.
    kernel : an engineered kernel, or a lesson (`Step` is a `Kernel`).
    family : in which it multiplies here.
    reading: how it reads A: the activation pass, and the dtype that this takes.
    writes : the dtype of C that it writes: the one wanted, or float32 where the caller casts
             (`Request.caller_casts`).
    bias   : the dtype of the bias that it adds; None where it adds none.
    why    : the reason, the end of the sentence.
    configuration: blocks, threads and shared memory of its launch; empty before there is one.
    """

    request: Request
    kernel: Kernel
    family: Family
    reading: Reading
    writes: str
    bias: str | None
    why: str = ""
    configuration: str = ""

    @classmethod
    def of(cls, kernel: Kernel, family: Family, request: Request, why: str = "") -> Choice:
        """The choice of this kernel. Where it reads, writes or adds less than the request wants,
        the caller does the rest. A bias that the caller adds is added to float32 C, which is then
        rounded once."""
        bias = request.bias if kernel.adds_bias else None
        writes = request.c if request.c in kernel.outputs and bias == request.bias else "float32"
        reads = reading_of(kernel, request.a, family, request.format, request.shape)
        return cls(request, kernel, family, reads, writes, bias, why)

    @classmethod
    def of_work(cls, work: Work, size: Size, a: str | None = None, c: str | None = None) -> Choice:
        """The choice of a step in a family. a, c: dtypes of A and C, by default the step's own;
        where the step does not read that A, float32."""
        a = a or inputs(work.step, work.family)[0]
        return cls.of(work.step, work.family, Request(work.format, *size, a, work.output(c)))

    @property
    def layout(self) -> str:
        """The name of the layout of W that the kernel reads."""
        return self.kernel.pack.__name__

    def __str__(self) -> str:
        asked, kernel = self.request, self.kernel
        launch = self.configuration and f", launched as {self.configuration}"
        return (
            f"step {kernel.number} ({kernel.title}) as {scheme(asked.format, self.family)} "
            f"for M={asked.m} N={asked.n} K={asked.k}{launch}: {self.why}"
        )

    def runs_on(self, cc: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs the kernel."""
        asked = self.request
        return self.kernel.supports(asked.format, self.family, cc, self.writes) is None

    def launched(self, own: Launch) -> Choice:
        """The same, with the configuration of its launch."""
        return replace(self, configuration=launch_configuration(own))

    def on(
        self, machine: Machine, weights: Sequence[Any], a: Any, out: Any, ids: Any = None
    ) -> tuple[Activations, Launch]:
        """The activations, and the kernel's own launch, on arrays of a machine. weights: the packed
        arrays, and behind them the bias if there is one. ids: where the kernel is of experts.
        ValueError for more thread blocks than
        CUDA launches."""
        asked = self.request
        if isinstance(self.reading.make, RowsByIds):
            activations = self.reading.make(a, machine, ids)
        else:
            activations = self.reading.make(a, machine)
        own = self.kernel.prepare(
            machine,
            FORMATS[asked.format],
            self.family,
            asked.shape,
            tuple(weights),
            activations.arrays,
            out,
        )
        for launch in (*activations.launches, own):
            require_grid(launch, asked.m, asked.n)
        return activations, own

    def launches(
        self, machine: DryRun | None = None, weights: Sequence[ArrayType] | None = None
    ) -> tuple[Launch, ...]:
        """All launches of the product in their order, the kernel's own last, on placeholders.

        machine: adds up the memory that is asked for. weights: types of the packed arrays. By
        default those of a small matrix: the dtypes are right, and no launch looks at the shapes.
        """
        asked = self.request
        a = Placeholder(
            A, (asked.m, self.reading.columns * asked.k), array_dtype(self.reading.dtype)
        )
        out = Placeholder(OUT, (asked.m, asked.n), array_dtype(self.writes))
        types = self.operand_types(weights)
        arrays = [
            Placeholder(WEIGHTS + i * REGION, shape, np.dtype(dtype))
            for i, (shape, dtype) in enumerate(types)
        ]
        activations, own = self.on(machine or DryRun(), arrays, a, out)
        return (*activations.launches, own)

    def operand_types(self, weights: Sequence[ArrayType] | None = None) -> tuple[ArrayType, ...]:
        """The types of the packed weights, and of the bias behind them if there is one."""
        asked = self.request
        packed = packed_types(self.kernel.pack, asked.format) if weights is None else weights
        return (*packed, *([((asked.n,), array_dtype(self.bias))] if self.bias else []))


def choose(request: Request, machine: Any) -> Choice:
    """The kernel for a product on a machine (its `name`, `cc`, `sms`).

    A step that is named is taken in the last of its families that reads A.
    With `invariant`, up to `Kernel.most_tokens` tokens, it is the highest kernel that heeds it,
    whatever the table says: which kernel it is must not depend on M either.
    Where the caller casts, a kernel that reads and writes the wanted dtypes is preferred, else it
    is one for float32.
    ValueError, with a kernel's own reason, where there is none.
    """
    known_accuracy(request.accuracy)
    if not request.caller_casts:
        return _choose(request, machine)
    strict = replace(request, caller_casts=False, bias=None)
    try:
        found = _choose(strict, machine)
    except ValueError:
        if request.a == request.c == "float32":
            raise
        found = _choose(replace(strict, a="float32", c="float32"), machine)
    return Choice.of(found.kernel, found.family, request, found.why)


def _choose(request: Request, machine: Any) -> Choice:
    cc: tuple[int, int] | None = machine.cc
    if request.invariant and (found := _invariant(request, cc)):
        return found
    if request.step is not None:
        one = kernel_of(request.step)
        if why := why_not(one, request, cc):
            raise ValueError(why)
        return Choice.of(one, families(one, request)[-1], request, "asked for by number")

    possible = supporting(request, cc)
    table = None
    if cc is not None:
        table = tuning.nearest(tuning.known(), machine.name, cc, machine.sms)
    entry = None
    if table is not None:
        size = request.m, request.n, request.k
        entry = table.entry(request.format, *size)
        entry = entry or table.entry(nearest_weight_format(request.format), *size)
    times = _times(entry, possible, request)
    if table and entry and times:
        us, best, family = min(times, key=lambda time: time[0])
        count = len({one.number for _, one, _ in times})
        why = f"fastest of {count} step{'s' * (count != 1)} measured at {entry.where} on the "
        why += f"{table.gpu} ({us:.3g} us)"
        if entry.format != request.format:
            why += f" in {entry.format}, stored most like {request.format}"
        if table.gpu != machine.name:
            why += f", the tuned GPU most like the {machine.name}"
        every = _times(entry, supporting(replace(request, accuracy=ACCURACIES[-1]), cc), request)
        return Choice.of(best, family, request, why + _passed_over(us, every, request.accuracy))

    untuned = defaults(possible)
    for_few = [one for one in untuned if request.m <= (one.most_tokens or 0)]
    for_any = [one for one in untuned if one.most_tokens is None]
    best = (for_few or for_any or untuned)[-1]
    limit = f" for M up to {best.most_tokens}" if for_few else ""
    packing = "" if request.layouts is None else " of this packing"
    why = f"the highest default step{packing}{limit} on the {machine.name}"
    if table is not None:
        why += f"; the table of the {table.gpu} has no time for it (run make tune)"
    elif cc is not None:
        why += "; no tuning table covers this GPU (run make tune)"
    return Choice.of(best, _measured_family(best, request), request, why)


def _invariant(request: Request, cc: tuple[int, int] | None) -> Choice | None:
    """The choice where a row must have the same bits at every M; None for too many tokens."""
    known = [one for one in kernels() if one.invariant]
    if request.m > max(one.most_tokens or 0 for one in known):
        return None
    found = [
        (one, family)
        for one in known
        for family in one.invariant
        if request.layouts is None or one.pack.__name__ in request.layouts
        if request.step in (None, one.number) and request.family in (None, family)
        if not why_not(one, replace(request, family=family), cc)
    ]
    if not found:
        raise ValueError(
            f"rows of {request.format} have the same bits at every M in {step_numbers(known)} "
            f"alone, in family {known[-1].invariant[0]}, and these cannot be taken here"
        )
    best, family = found[-1]
    why = f"a row has the same bits at every M up to {best.most_tokens} there"
    return Choice.of(best, family, request, why)


# --- what a kernel can do -------------------------------------------------------------------------


def known_family(name: str) -> Family:
    """ValueError for a name that is no family."""
    if name == "A16":
        return "A16"
    if name == "A8":
        return "A8"
    raise ValueError(f"family is {name!r}: it must be A16 or A8")


def reads(kernel: Kernel, family: Family, request: Request) -> bool:
    """Whether a kernel reads A as it is."""
    return ("float16" if request.a == GATED else request.a) in inputs(kernel, family)


def families(kernel: Kernel, request: Request) -> list[Family]:
    """The families in which a kernel can do what is asked."""
    wanted = [one for one in kernel.families if request.family in (None, one)]
    return [one for one in wanted if reads(kernel, one, request)]


def of_gemm(kernel: Kernel) -> bool:
    """Whether it is a kernel of `gemm`: lessons on experts, on pruned weights and on two products
    are not."""
    experts = isinstance(kernel.activations[kernel.families[-1]], RowsByIds)
    return not (experts or multiplies_twice(kernel)) and kernel.accuracy in ACCURACIES


def why_not(kernel: Kernel, request: Request, cc: tuple[int, int] | None) -> str | None:
    """None, or one sentence saying why a kernel cannot do what is asked on such a GPU."""
    family = known_family(request.family or kernel.families[-1])
    if isinstance(kernel, Step) and not of_gemm(kernel):
        if kernel.accuracy == "pruned":
            return f"step {kernel.number} prunes its weights, and is a lesson: gemm never does"
        if multiplies_twice(kernel):
            return f"step {kernel.number} multiplies by two matrices, and is a lesson: gemm by one"
        return f"step {kernel.number} multiplies experts, which ids choose: call steps.experts"
    if why := kernel.supports(request.format, family, cc, request.c):
        return why
    if kernel.most_k is not None and request.k > kernel.most_k:
        return (
            f"step {kernel.number} adds up products of int8 in int32, which holds "
            f"{kernel.most_k} of them, and K={request.k}: take an exact step, or parts of K"
        )
    if not families(kernel, request):
        where = f" in family {family}" if kernel.families[1:] else ""
        return (
            f"step {kernel.number} reads A as {one_of(inputs(kernel, family))}{where}, not "
            f"{request.a}"
        )
    if request.bias and not kernel.adds_bias:
        adding = step_numbers([one for one in kernels() if one.adds_bias])
        return f"step {kernel.number} adds no bias: take one of {adding}, or add it to C yourself"
    return None


def supporting(request: Request, cc: tuple[int, int] | None) -> list[Kernel]:
    """The kernels that can do what is asked, lowest number first: the engineered ones that can,
    else the lessons that can. ValueError where no lesson can either."""
    lowest, why = ACCURACIES.index(known_accuracy(request.accuracy)), ""
    for pool in (kernels, ladder):
        among = [
            one for one in pool() if request.layouts is None or one.pack.__name__ in request.layouts
        ]
        can = [one for one in among if why_not(one, request, cc) is None]
        if found := [one for one in can if ACCURACIES.index(one.accuracy) <= lowest]:
            return found
        # Of two reasons the first counts, as it is of the better kernels, but for a missing bias:
        # that the caller can add.
        only_lack_bias = [
            one for one in among if why_not(one, replace(request, bias=None), cc) is None
        ]
        if can:
            best = min(can, key=lambda one: ACCURACIES.index(one.accuracy))
            why = f"step {best.number} is not exact: ask for it with accuracy={best.accuracy!r}"
        elif only_lack_bias:
            add = "add" if only_lack_bias[1:] else "adds"
            why = f"{step_numbers(only_lack_bias)} {add} no bias: add it to C yourself"
        elif among and not why:
            why = why_not(among[-1], request, cc) or ""
    raise ValueError(f"no step can do this: {why or 'there is none'}")


def defaults(possible: Sequence[Kernel]) -> list[Kernel]:
    """Those that may be chosen without a measurement; ValueError where none may."""
    found = [one for one in possible if one.chosen_untuned]
    if not found:
        raise ValueError(
            f"only {step_numbers(possible)} can do this, never measured on such a GPU: name a "
            f"step, as in step={possible[-1].number}, or run make tune"
        )
    return found


def packing_kernel(request: Request, cc: tuple[int, int] | None) -> Kernel:
    """The kernel whose layout weights are packed in where no step is named: of the defaults, those
    of the lowest accuracy that is allowed, and of these the highest number. M does not count."""
    allowed = defaults(supporting(request, cc))
    return max(allowed, key=lambda one: (ACCURACIES.index(one.accuracy), one.number))


def packings(
    format_name: str, cc: tuple[int, int] | None, accuracy: str, k: int = 0
) -> tuple[Kernel, ...]:
    """A kernel for each layout that products of this accuracy need: first of exact kernels, then of
    fast ones if these are allowed and read another layout. k: K where it is known; kernels whose
    integer sums do not hold it are left out."""
    asked = Request(format_name, 1, 1, k)
    exact, lowest = (
        packing_kernel(replace(asked, accuracy=one), cc) for one in ("exact", accuracy)
    )
    return (exact,) if lowest.pack is exact.pack else (exact, lowest)


# --- times ----------------------------------------------------------------------------------------

Time = tuple[float, Kernel, Family]
"""Microseconds of a kernel in a family."""

BFLOAT16_FEW: Final = (1.07, 1.25)
BFLOAT16_MANY: Final = 1.1
"""Times of bfloat16 over those of float16: in a decode kernel, up to `FEW_TOKENS` and above, where
float16 meets scaled weights; and in others, which take a pass that makes A float16. For tables that
have no times of bfloat16. Medians over formats and shapes on an H200."""

BFLOAT16_PASS_US: Final = 2.0
"""What the pass takes at least, of any size."""


def _times(entry: tuning.Entry | None, possible: Sequence[Kernel], request: Request) -> list[Time]:
    """What an entry of the table says of some kernels. One that reads A in 16 bits takes no longer
    than from float32."""
    found: list[Time] = []
    if entry is None:
        return found
    dtype = "float16" if request.a == GATED else request.a
    for one in possible:
        for family in families(one, request):
            us = entry.us(one.number, family, dtype)
            if us is None:
                continue
            timed = tuning.time_key(one.number, family, dtype) in entry.times
            if family == "A16" and dtype == "bfloat16" and not timed:
                if one.most_tokens is None:
                    us = max(us * BFLOAT16_MANY, us + BFLOAT16_PASS_US)
                else:
                    us *= BFLOAT16_FEW[request.m > tuning.FEW_TOKENS]
            found.append((us, one, family))
    return found


def _measured_family(kernel: Kernel, request: Request) -> Family:
    """The family of a kernel that has no time for this product: the last that has a time in any
    table, else the last."""
    able, tables = families(kernel, request), tuning.known()
    measured = [one for one in able if any(table.has(kernel.number, one) for table in tables)]
    return (measured or able)[-1]


def _passed_over(us: float, times: Sequence[Time], accuracy: str) -> str:
    """The fastest kernel of the next lower accuracy, if it is faster, and how to get it."""
    lower = ACCURACIES[ACCURACIES.index(known_accuracy(accuracy)) + 1 :][:1]
    faster = [time for time in times if time[1].accuracy in lower and time[0] < us]
    if not faster:
        return ""
    fast, one, _ = min(faster, key=lambda time: time[0])
    return f"; with accuracy={one.accuracy!r} step {one.number} would take {fast:.3g} us"


def step_numbers(steps: Sequence[Kernel]) -> str:
    """ "step 2", "steps 7, 9 and 17"."""
    *first, last = (str(step.number) for step in steps)
    return f"steps {', '.join(first)} and {last}" if first else f"step {last}"


def launch_configuration(launch: Launch) -> str:
    """ "32x4 blocks of 256 threads with 65536 bytes of shared memory"."""
    grid = "x".join(map(str, launch.grid))
    threads = math.prod(launch.block)
    shared = launch.shared_bytes and f" with {launch.shared_bytes} bytes of shared memory"
    return f"{grid} blocks of {threads} threads{shared or ''}"
