"""What a caller gets: `gemm.plan` and `QuantLinear`, tensor in to tensor out, beside torch.

GPU time is that of whole calls in CUDA graphs, weights rotated as everywhere: casts, memsets and
activation passes are in it. Theirs is a product with the weights dequantized, in the same loop:

    gemm.plan     float32 or float16    torch.matmul in float16, of A and W rounded beforehand
    QuantLinear   any dtype             torch.nn.functional.linear in that dtype

Host time is what one eager call takes its thread, the GPU not being waited for.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from qformats import FORMATS
from reference import BENCH_SHAPES, nmse
from reference.product import unquantized
from reference.sampling import sample
from results.measure.loop import Contestant, ratio, round_robin
from results.measure.products import Data
from results.measure.protocol import Budget, slots_for
from results.measure.torch_graphs import TorchCaptures, release
from results.record.provenance import called_hash, remembered
from results.record.schema import AsCalled, Run
from steps.api.choice import (
    Choice,
    choose,
    choose_packed,
    packings,
    torch_cast_us,
    written_dtype,
)
from steps.checks.run import fatal
from steps.components.activations.layouts import reading_of
from steps.contract import Shape, Size, Work

FORMAT: Final = "q4_0"
TOKENS: Final = (1, 8, 16, 32, 64, 128, 512, 4096)
SHAPES: Final[tuple[Size, ...]] = tuple(
    (m, n, k) for n, k in dict.fromkeys((n, k) for _, n, k in BENCH_SHAPES) for m in TOKENS
)
BUDGET: Final = Budget(warm_seconds=0.2, seconds=1.0)
LOOP_SECONDS: Final = 4.0  # of one shape, about, with all that the host does

COMPARED: Final = 2**14
NMSE_LIMIT: Final = 1e-2
"""Against the product with the dequantized weights: the least exact way adds 1e-3 (requantized
weights, bfloat16 sums), and a wrong call has errors of the size of C."""

DRAINED: Final = 20  # eager calls between two waits, each timed by itself
DRAINS: Final = 5


@dataclass(frozen=True, slots=True)
class Way:
    """A way of calling: an API, the accuracy asked for, and the dtype of A and C."""

    api: str
    accuracy: str
    dtype: str

    def choice(self, size: Size, machine: Any) -> Choice:
        """The step that this call chooses here."""
        shape, input = Shape(*size), self.dtype
        if self.api == "gemm.plan":
            return choose(FORMAT, shape, machine, accuracy=self.accuracy, output=input, input=input)
        packed = [step.pack.__name__ for step in packings(FORMAT, machine.cc, self.accuracy)]
        cast_us = torch_cast_us(shape)
        return choose_packed(FORMAT, shape, packed, machine, self.accuracy, input, cast_us)

    def wanted(self, size: Size, machine: Any) -> tuple[Work, Size, str, str]:
        """What it launches, for `compile_ahead`: (work, M N K, dtype of C, dtype of A)."""
        choice = self.choice(size, machine)
        reads = reading_of(choice.step, self.dtype, choice.family)[1]
        return choice.work, size, written_dtype(choice.step, self.dtype), reads

    def __str__(self) -> str:
        return f"{self.api} {self.accuracy} {self.dtype}"


WAYS: Final = (
    Way("gemm.plan", "exact", "float32"),
    Way("gemm.plan", "exact", "float16"),
    Way("QuantLinear", "exact", "float32"),
    Way("QuantLinear", "exact", "float16"),
    Way("QuantLinear", "exact", "bfloat16"),
    Way("QuantLinear", "fast", "float16"),
)


Call = tuple[Size, Way]
"""A row that is to be measured."""


def missing(calls: Iterable[Call], run: Run, machine: Any) -> list[Call]:
    """Those that have no row measured with the code, and by the choice, of today."""
    now = remembered(called_hash)
    good = {(one.key, one.step, one.source_hash) for one in run.as_called}

    def fresh(size: Size, way: Way) -> bool:
        step = way.choice(size, machine).step.number
        key = (way.api, way.accuracy, way.dtype, FORMAT, size)
        return (key, step, now(way.api, step)) in good

    return [call for call in calls if not fresh(*call)]


class Calls:
    """Both sides of every way at one (N, K), with copies of the weights on the GPU."""

    def __init__(self, data: Data, stopwatch: Any, machine: Any) -> None:
        import torch

        self.torch, self.data, self.machine = torch, data, machine
        self.stopwatch = stopwatch
        self.captures = TorchCaptures(stopwatch)
        self.blocks = data.blocks(FORMAT)
        self.slots = slots_for(self.blocks.nbytes, stopwatch.l2_bytes)
        self.w = FORMATS[FORMAT].dequantize(self.blocks)
        self._layers: dict[str, list[Any]] = {}
        self._packed: dict[Any, list[Any]] = {}
        self._theirs: dict[str, list[Any]] = {}

    def a(self, m: int, dtype: str) -> Any:
        host = self.torch.from_numpy(np.array(self.data.a("float32")[:m]))
        return host.to("cuda", getattr(self.torch, dtype))

    def layers(self, accuracy: str) -> list[Any]:
        """QuantLinear with each copy of the weights."""
        from steps.nn.linear import QuantLinear

        if accuracy not in self._layers:
            first = QuantLinear.from_blocks(self.blocks, accuracy=accuracy).to("cuda")
            more = [copy.deepcopy(first) for _ in range(self.slots - 1)]
            self._layers[accuracy] = [first, *more]
        return self._layers[accuracy]

    def packed(self, work: Work) -> list[Any]:
        """What `pack` makes, with each copy of the weights."""
        from steps import pack

        if work.step.pack not in self._packed:
            first = pack(self.blocks, step=work.step.number, machine=self.machine)
            copies = [
                replace(first, arrays=tuple(map(self.stopwatch.duplicate, first.arrays)))
                for _ in range(self.slots - 1)
            ]
            self._packed[work.step.pack] = [first, *copies]
        return self._packed[work.step.pack]

    def theirs(self, dtype: str) -> list[Any]:
        """Dequantized weights for torch, each copy."""
        if dtype not in self._theirs:
            first = self.torch.from_numpy(self.w).to("cuda", getattr(self.torch, dtype))
            slots = slots_for(first.nbytes, self.stopwatch.l2_bytes)
            self._theirs[dtype] = [first, *(first.clone() for _ in range(slots - 1))]
        return self._theirs[dtype]

    def release(self) -> None:
        self._layers, self._packed, self._theirs = {}, {}, {}
        release()

    def ours(self, way: Way, m: int) -> tuple[list[Callable[[], Any]], int]:
        """(a call with each copy of the weights, the step chosen)."""
        a = self.a(m, way.dtype)
        if way.api == "QuantLinear":
            layers = self.layers(way.accuracy)
            step = way.choice((m, self.data.n, self.data.k), self.machine).step.number
            return [partial(layer, a) for layer in layers], step
        from steps import gemm

        choice = way.choice((m, self.data.n, self.data.k), self.machine)
        out = a.new_full((m, self.data.n), float("nan"))
        calls: list[Callable[[], Any]] = []
        step = 0
        for packed in self.packed(choice.work):
            options: dict[str, Any] = {"step": choice.step.number, "family": choice.family}
            options |= {"dtype": way.dtype, "input": way.dtype}
            plan = gemm.plan(m, packed, machine=self.machine, **options)  # type: ignore[attr-defined]
            step = plan.choice.step.number
            calls.append(partial(_called, plan, a, out))
        return calls, step

    def torchs(self, way: Way, m: int) -> list[Callable[[], Any]]:
        """The same by torch."""
        if way.api == "QuantLinear":
            a, linear = self.a(m, way.dtype), self.torch.nn.functional.linear
            return [partial(linear, a, w) for w in self.theirs(way.dtype)]
        a, matmul = self.a(m, "float16"), self.torch.matmul
        out = a.new_empty((m, self.data.n))
        return [partial(matmul, a, w.T, out=out) for w in self.theirs("float16")]


def _called(plan: Any, a: Any, out: Any) -> Any:
    plan(a, out)
    return out


def measure(
    wanted: Iterable[Call],
    machine: Any,
    stopwatch: Any,
    budget: Budget = BUDGET,
    report: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[AsCalled]]:
    """The rows of one shape after another; `say` hears of a call that is wrong or fails."""
    by_size: dict[Size, list[Way]] = {}
    for size, way in wanted:
        by_size.setdefault(size, []).append(way)
    calls: Calls | None = None
    for (m, n, k), ways in sorted(by_size.items(), key=lambda item: (item[0][1:], item[0][0])):
        report(f"calls at M={m} N={n} K={k}")
        if calls is None or (calls.data.n, calls.data.k) != (n, k):
            if calls is not None:
                calls.release()
            calls = Calls(Data(max(TOKENS), n, k), stopwatch, machine)
        try:
            rows = _loop(calls, m, ways, budget, say)
        except Exception as error:
            if fatal(error):
                raise
            say(f"calls at {(m, n, k)} were not measured: {type(error).__name__}: {error}")
            rows = []
        yield rows
        release()
    if calls is not None:
        calls.release()


def _loop(
    calls: Calls, m: int, ways: Sequence[Way], budget: Budget, say: Callable[[str], None]
) -> list[AsCalled]:
    """All ways at one shape in one loop."""
    torch, data, now = calls.torch, calls.data, remembered(called_hash)
    size = (m, data.n, data.k)
    rows, columns = sample(m, data.n, COMPARED)
    meant = unquantized(data.a("float32")[rows], calls.w[columns])
    entered: list[tuple[Way, int, Contestant, Contestant, tuple[Any, Any]]] = []
    theirs: dict[tuple[bool, str], tuple[Contestant, Any]] = {}

    def contestant(own: Sequence[Callable[[], Any]]) -> Contestant:
        result = calls.captures.warm_up(own[0])
        got = result[torch.from_numpy(rows).cuda()][:, torch.from_numpy(columns).cuda()]
        error = nmse(got.double().cpu().numpy(), meant)
        if not torch.isfinite(result).all() or not error <= NMSE_LIMIT:
            raise RuntimeError(f"it is wrong: NMSE {error:.1e}, the limit is {NMSE_LIMIT:.0e}")
        return Contestant(calls.captures, lambda slot: (own[slot],), len(own), budget)

    for way in ways:
        try:
            own, step = calls.ours(way, m)
            ours = contestant(own)
            key = (True, way.dtype) if way.api == "QuantLinear" else (False, "float16")
            if key not in theirs:
                others = calls.torchs(way, m)
                theirs[key] = contestant(others), others[0]
            entered.append((way, step, ours, theirs[key][0], (own[0], theirs[key][1])))
        except Exception as error:
            if fatal(error):
                raise
            say(f"{way} at {size} was not measured: {type(error).__name__}: {error}")

    every = dict.fromkeys(one for _, _, ours, other, _ in entered for one in (ours, other))
    round_robin(calls.stopwatch, list(every), budget)
    found = []
    for way, step, ours, other, eager in entered:
        timing, x = ours.timing, ratio(other, ours)
        assert x is not None
        found.append(
            AsCalled(
                api=way.api,
                accuracy=way.accuracy,
                dtype=way.dtype,
                format=FORMAT,
                M=m,
                N=data.n,
                K=data.k,
                step=step,
                us=timing.us,
                p20_us=timing.p20_us,
                p80_us=timing.p80_us,
                cublas_us=other.timing.us,
                x_cublas=x,
                host_us=host_us(eager[0], torch.cuda.synchronize),
                torch_host_us=host_us(eager[1], torch.cuda.synchronize),
                rounds=timing.rounds,
                source_hash=now(way.api, step),
            )
        )
    return found


def host_us(call: Callable[[], Any], drain: Callable[[], None]) -> float:
    """Microseconds of the host for one call: the median of many, the queue being drained, outside
    of what is timed, every `DRAINED` calls."""
    taken = []
    for _ in range(DRAINS):
        drain()
        for _ in range(DRAINED):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    drain()
    return statistics.median(taken) * 1e6
