"""What a caller gets: `gemm.plan` and `QuantLinear`, tensor in to tensor out, beside torch.

GPU time is that of whole calls in CUDA graphs, weights rotated as everywhere: casts, memsets and
activation passes are in it. Theirs is a product with the weights dequantized, in the same loop:

    gemm.plan     torch.matmul in float16, of A and W rounded beforehand
    QuantLinear   a torch.nn.Linear of its dtype

Two sets of calls are measured. `TABLED` has a few M in all formats, with the host's time for one
eager call, for which the GPU is not waited. `SWEEP` has every other M up to `SWEPT`, in one format:
together they show time against M.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from qformats import FORMATS, WEIGHT_FORMATS
from reference import BENCH_SHAPES, nmse
from reference.product import unquantized
from reference.sampling import sample
from results.measure.bench import Bench
from results.measure.loop import Contestant, ratio, round_robin
from results.measure.products import THREADS, Data, attempt
from results.measure.protocol import Budget, slots_for
from results.measure.torch_graphs import TorchCaptures, release
from results.record.provenance import called_hash, remembered
from results.record.schema import AsCalled, Run, mnk
from steps.contract import Kernel, Size
from steps.product.choice import Choice, Request, choose, packings

DEVICE: Final = "cuda"
FORMAT: Final = "q4_0"  # of plans, of float32 and of the sweep
TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
SWEPT: Final = 128
WEIGHTS: Final = tuple(dict.fromkeys((n, k) for _, n, k in BENCH_SHAPES))  # (N, K)
BUDGET: Final = Budget(replay_seconds=1.5e-3, warm_seconds=0.2, seconds=0.8)
SWEEP_BUDGET: Final = Budget(replay_seconds=7e-4, warm_seconds=0.1, seconds=0.4, min_rounds=6)
"""Of the sweep: the start of its graphs is 1 % of them."""
TOGETHER: Final = 16  # M of the sweep in one loop: neighbours are compared with each other
COUNTERS: Final = 1 << 22  # bytes: 8 KB for each of some 200 captures of a loop, twice over
COMPARED: Final = 2**11
NMSE_LIMIT: Final = 1e-2
"""Against the product with the dequantized weights: the least exact way adds 1e-3 (requantized
weights, bfloat16 sums), and a wrong call has errors of the size of C."""

DRAINED: Final = 10  # eager calls between two waits, each timed by itself
DRAINS: Final = 5


@dataclass(frozen=True, slots=True)
class Way:
    """A way of calling: an API, the accuracy asked for, the dtype of A and C, the format of W."""

    api: str
    accuracy: str
    dtype: str
    format: str = FORMAT

    def choice(self, size: Size, machine: Any) -> Choice:
        """The step that this call chooses here."""
        request = Request(self.format, *size, self.dtype, self.dtype, accuracy=self.accuracy)
        if self.api == "QuantLinear":
            packed = packings(self.format, machine.cc, self.accuracy)
            layouts = tuple(one.pack.__name__ for one in packed)
            request = replace(request, layouts=layouts, caller_casts=True)
        return choose(request, machine)

    def __str__(self) -> str:
        return f"{self.api} {self.accuracy} {self.dtype} {self.format}"


Call = tuple[Size, Way]  # a row that is to be measured
LAYERS: Final = tuple(
    Way("QuantLinear", accuracy, dtype, name)
    for name in WEIGHT_FORMATS
    for dtype in ("float16", "bfloat16")
    for accuracy in ("exact", "fast")
)
WAYS: Final = (
    *(Way("gemm.plan", "exact", dtype) for dtype in ("float32", "float16", "bfloat16")),
    Way("QuantLinear", "exact", "float32"),
    *LAYERS,
)
SWEEP_WAYS: Final = tuple(way for way in LAYERS if way.format == FORMAT and way.dtype == "float16")

TABLED: Final[tuple[Call, ...]] = tuple(
    ((m, n, k), way) for n, k in WEIGHTS for m in TOKENS for way in WAYS
)
SWEEP: Final[tuple[Call, ...]] = tuple(
    ((m, n, k), way)
    for n, k in WEIGHTS
    for m in range(1, SWEPT + 1)
    if m not in TOKENS
    for way in SWEEP_WAYS
)


def missing(calls: Iterable[Call], run: Run, machine: Any) -> list[Call]:
    """Those that have no row measured with the code, and by the choice, of today."""
    now = remembered(called_hash)
    good = {(one.key, one.step, one.source_hash) for one in run.as_called}

    def fresh(size: Size, way: Way) -> bool:
        step = way.choice(size, machine).kernel.number
        key = (way.api, way.accuracy, way.dtype, way.format, size)
        return (key, step, now(way.api, step)) in good

    return [call for call in calls if not fresh(*call)]


def in_loops(calls: Iterable[Call]) -> list[list[Call]]:
    """By the weights: a loop for each M that is tabled, then the sweep, some M at a time."""
    by_size: dict[Size, list[Call]] = {}
    for call in calls:
        by_size.setdefault(call[0], []).append(call)
    loops = []
    for weights in sorted({size[1:] for size in by_size}):
        sizes = sorted(size for size in by_size if size[1:] == weights)
        loops += [by_size[size] for size in sizes if size[0] in TOKENS]
        swept = [size for size in sizes if size[0] not in TOKENS]
        for first in range(0, len(swept), TOGETHER):
            together = swept[first : first + TOGETHER]
            loops.append([call for size in together for call in by_size[size]])
    return loops


class Calls:
    """Both sides of every way at one (N, K), with copies of the weights on the GPU."""

    def __init__(self, data: Data, stopwatch: Any, machine: Any) -> None:
        import torch

        self.torch, self.data, self.machine = torch, data, machine
        self.stopwatch = stopwatch
        self.captures = TorchCaptures(stopwatch)
        self._a: dict[tuple[int, str], Any] = {}
        self._weights: dict[tuple[Any, ...], list[Any]] = {}

    def prepare(self, ways: Iterable[Way]) -> None:
        """Quantize and pack what these need, on several cores."""
        ways = list(ways)
        layers = {(way.format, way.accuracy) for way in ways if way.api == "QuantLinear"}
        with ThreadPoolExecutor(THREADS) as pool:
            _ = self.data.w  # drawn once, before the threads ask for it
            list(pool.map(self.data.blocks, {way.format for way in ways}))
            list(pool.map(lambda key: self.layers(*key), layers))

    def begin_loop(self) -> None:
        """Set zeros aside for the counters of all captures: one that finds none would hold a
        memset."""
        from steps.nn.operator import reserve_counters

        reserve_counters(self.torch.empty(0, device=DEVICE).device, COUNTERS)

    def a(self, m: int, dtype: str) -> Any:
        """The same tensor for all who multiply it."""
        if (m, dtype) not in self._a:
            host = self.torch.from_numpy(np.array(self.data.a("float32")[:m]))
            self._a[m, dtype] = host.to(DEVICE, getattr(self.torch, dtype))
        return self._a[m, dtype]

    def _copies(self, key: Any, nbytes: int, first: Callable[[], Any], again: Any) -> list[Any]:
        """As many as fill the rotation: one that is made, the others `again` of it; kept by a key
        until the weights are released."""
        if key not in self._weights:
            made = first()
            slots = slots_for(nbytes, self.stopwatch.l2_bytes)
            self._weights[key] = [made, *(again(made) for _ in range(slots - 1))]
        return self._weights[key]

    def layers(self, format_name: str, accuracy: str) -> list[Any]:
        """QuantLinear with each copy of the weights."""
        from steps.nn.linear import QuantLinear

        blocks = self.data.blocks(format_name)
        return self._copies(
            (format_name, accuracy),
            blocks.nbytes,
            lambda: QuantLinear.from_blocks(blocks, accuracy=accuracy).to(DEVICE),
            copy.deepcopy,
        )

    def packed(self, kernel: Kernel, format_name: str) -> list[Any]:
        """What `pack` makes, with each copy of the weights."""
        from steps import pack

        blocks, twin = self.data.blocks(format_name), self.stopwatch.duplicate
        return self._copies(
            (kernel.pack, format_name),
            blocks.nbytes,
            lambda: pack(blocks, step=kernel.number, machine=self.machine),
            lambda one: replace(one, arrays=tuple(map(twin, one.arrays))),
        )

    def theirs(self, dtype: str) -> list[Any]:
        """torch.nn.Linear with each copy of the dequantized weights. Their values do not change
        its time, so all formats share it."""

        def first() -> Any:
            values = FORMATS[FORMAT].dequantize(self.data.blocks(FORMAT))
            return linear(self.torch.from_numpy(values).to(DEVICE, kind))

        def linear(values: Any) -> Any:
            one = self.torch.nn.Linear(self.data.k, self.data.n, bias=False, device="meta")
            one.weight = self.torch.nn.Parameter(values, requires_grad=False)
            return one

        kind = getattr(self.torch, dtype)
        nbytes = kind.itemsize * self.data.n * self.data.k
        return self._copies(("torch", dtype), nbytes, first, lambda one: linear(one.weight.clone()))

    def meant(self, format_name: str, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The product with the dequantized weights, float64[rows, columns]."""
        w = FORMATS[format_name].dequantize(self.data.blocks(format_name)[columns])
        return unquantized(self.data.a("float32")[rows], w)

    def ours(self, way: Way, m: int) -> tuple[list[Callable[[], Any]], int]:
        """(a call with each copy of the weights, the step chosen)."""
        a = self.a(m, way.dtype)
        choice = way.choice((m, self.data.n, self.data.k), self.machine)
        if way.api == "QuantLinear":
            layers = self.layers(way.format, way.accuracy)
            return [partial(layer, a) for layer in layers], choice.kernel.number
        from steps import gemm

        out = a.new_full((m, self.data.n), float("nan"))
        calls: list[Callable[[], Any]] = []
        for packed in self.packed(choice.kernel, way.format):
            options: dict[str, Any] = {"step": choice.kernel.number, "family": choice.family}
            options |= {"dtype": way.dtype, "input": way.dtype}
            plan = gemm.plan(m, packed, machine=self.machine, **options)  # type: ignore[attr-defined]
            calls.append(partial(_called, plan, a, out))
        return calls, choice.kernel.number

    def torchs(self, way: Way, m: int) -> list[Callable[[], Any]]:
        """The same by torch."""
        if way.api == "QuantLinear":
            a = self.a(m, way.dtype)
            return [partial(linear, a) for linear in self.theirs(way.dtype)]
        a, matmul = self.a(m, "float16"), self.torch.matmul
        out = a.new_empty((m, self.data.n))
        return [partial(matmul, a, one.weight.T, out=out) for one in self.theirs("float16")]

    def end_loop(self) -> None:
        """Forget the operands of a loop."""
        self._a.clear()
        release()

    def release(self) -> None:
        """Forget the weights too."""
        self._weights.clear()
        self.end_loop()


def _called(plan: Any, a: Any, out: Any) -> Any:
    plan(a, out)
    return out


def measure(
    bench: Bench,
    wanted: Iterable[Call],
    budget: Budget | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[list[AsCalled]]:
    """The rows of one loop after another; `bench.say` hears of a call that is wrong or fails.
    budget: not that of the set."""
    say = bench.say
    wanted = list(wanted)
    calls: Calls | None = None
    for loop in in_loops(wanted):
        (m, n, k), _ = loop[0]
        last = loop[-1][0][0]
        report(f"calls at M={m} N={n} K={k}" if m == last else f"calls at M={m}-{last} N={n} K={k}")
        if calls is None or (calls.data.n, calls.data.k) != (n, k):
            if calls is not None:
                calls.release()
            own = [call for call in wanted if call[0][1:] == (n, k)]
            calls = Calls(
                Data(max(size[0] for size, _ in own), n, k), bench.stopwatch, bench.machine
            )
            calls.prepare(way for _, way in own)
        measured = partial(_loop, calls, loop, budget, say)
        if found := attempt(measured, say, f"calls at M={m} N={n} K={k} were not measured"):
            yield found
        calls.end_loop()
    if calls is not None:
        calls.release()


@dataclass(frozen=True, slots=True)
class Entered:
    """A call in a loop: both contestants, and one eager call of each."""

    size: Size
    way: Way
    step: int
    ours: Contestant
    theirs: Contestant
    eager: tuple[Callable[[], Any], Callable[[], Any]]


def _loop(
    calls: Calls,
    wanted: Sequence[Call],
    budget: Budget | None,
    say: Callable[[str], None],
) -> list[AsCalled]:
    """All ways at one M, or those of a few M of the sweep, in one loop."""
    now, swept = remembered(called_hash), wanted[0][0][0] not in TOKENS
    budget = budget or (SWEEP_BUDGET if swept else BUDGET)
    calls.begin_loop()
    entered: list[Entered] = []
    torchs: dict[tuple[int, str, str], tuple[Contestant, Any]] = {}

    def enter(size: Size, way: Way) -> Entered:
        m = size[0]
        own, step = calls.ours(way, m)
        ours = _contestant(calls, own, m, way.format, budget)
        key = (m, way.api, way.dtype if way.api == "QuantLinear" else "float16")
        if key not in torchs:
            others = calls.torchs(way, m)
            other = _contestant(calls, others, m, FORMAT, budget)
            torchs[key] = other, others[0]
        theirs, eager = torchs[key]
        return Entered(size, way, step, ours, theirs, (own[0], eager))

    with calls.torch.no_grad():
        for size, way in wanted:
            if one := attempt(partial(enter, size, way), say, f"{way} at {size} was not measured"):
                entered.append(one)
        every = [one for each in entered for one in (each.ours, each.theirs)]
        round_robin(calls.stopwatch, list(dict.fromkeys(every)), budget)
        eager = {} if swept else dict.fromkeys(call for one in entered for call in one.eager)
        host = {call: host_us(call, calls.torch.cuda.synchronize) for call in eager}
        return [
            AsCalled(
                **asdict(one.way),
                **mnk(one.size),
                **asdict(one.ours.timing),
                step=one.step,
                cublas_us=one.theirs.timing.us,
                x_cublas=ratio(one.theirs.times, one.ours.times),
                host_us=host.get(one.eager[0]),
                torch_host_us=host.get(one.eager[1]),
                source_hash=now(one.way.api, one.step),
            )
            for one in entered
        ]


def _contestant(
    calls: Calls,
    own: Sequence[Callable[[], Any]],
    m: int,
    format_name: str,
    budget: Budget,
) -> Contestant:
    """It takes part if its first result is right."""
    torch = calls.torch
    rows, columns = sample(m, calls.data.n, COMPARED)
    result = calls.captures.warm_up(own[0])
    at = [torch.from_numpy(each).to(DEVICE) for each in (rows, columns)]
    got = result[at[0]][:, at[1]]
    error = nmse(got.double().cpu().numpy(), calls.meant(format_name, rows, columns))
    if not torch.isfinite(result).all() or not error <= NMSE_LIMIT:
        raise RuntimeError(f"it is wrong: NMSE {error:.1e}, the limit is {NMSE_LIMIT:.0e}")
    return Contestant(calls.captures, lambda slot: (own[slot],), len(own), budget)


def host_us(call: Callable[[], Any], drain: Callable[[], None]) -> float:
    """Microseconds of the host until an eager call returns, the median of many. It has queued its
    work by then, and the GPU is not waited for: `drain` does so between batches, outside of what is
    timed, so that no call waits for room in the queue."""
    taken = []
    for _ in range(DRAINS):
        drain()
        for _ in range(DRAINED):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    drain()
    return float(np.median(taken)) * 1e6
