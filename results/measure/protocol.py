"""The one timing protocol. Every figure of a step and of its peers goes through `sample`.

1. Compile and check first: a kernel whose output is wrong is not timed.
2. The weights are rotated over copies of at least four times the L2, so that every launch finds
   them in DRAM, as the layers of a model do. (Twice would be enough if the L2 were LRU; with random
   replacement a cyclic walk over r L2-sizes still hits with the probability h that solves
   h = exp(-r (1 - h)): 20 % at r = 2, 2 % at r = 4.)
3. Launches are captured in a CUDA graph that runs for milliseconds, so that neither the host's
   launch cost nor the resolution of an event is in a kernel's figure. Launch cost is apart.
4. Samples are taken until the mean is known to 0.3 % or the time is used up; reported are the
   median with the 20 % and 80 % quantiles. A kernel of a tenth of a second or more gets one warm-up
   and three samples.
5. Measured apart: `pack` (host), the activation pass, the kernel alone (it waits for the launch
   before it to end), and activation pass and kernel in one graph ("total": from float32 A to
   float32 C). A total begins when the product before it has ended, but its kernel may begin under
   its activation pass (`Launch.overlap`). Where it may, products in which every launch begins under
   the one before it are measured besides ("chain"), as the layers of a model can run.
6. The output, pre-filled with NaN, is checked again after the timed launches have written it.
7. A time below what the measured limits of this GPU allow is a failure, not a record.

The device is behind two small protocols, `Stopwatch` and `Replay`, so that the protocol itself is
tested with a fake clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from results.record.provenance import source_hash
from results.record.schema import Limits, Row

ROTATION: Final = 4  # copies of the weights fill this many L2s; see 2. above
SAMPLE_SECONDS: Final = 5e-3  # one replay: 0.1 % of it is the start of the graph (about 6 us)
MAX_LAUNCHES: Final = 512  # in one graph: loading and capturing one costs the host some 50 us
SLOW_SECONDS: Final = 0.05  # a launch this long is warm after one, and its total needs few samples
OVERLAP_CC: Final = (9, 0)  # the first compute capability on which launches can overlap
TOLERANCE: Final = 1.05  # a limit is itself a measurement, on a clock that moves by a few per cent


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Device time for one row: a third of a second by default, more where single launches are
    longer than their share of it."""

    kernel_seconds: float = 0.20
    total_seconds: float = 0.08
    activation_seconds: float = 0.02
    warm_seconds: float = 0.02
    min_samples: int = 3
    settled_samples: int = 8  # the standard error of fewer samples means little
    max_samples: int = 200
    relative_error: float = 0.003

    def scaled(self, factor: float) -> Budget:
        """The same protocol in `factor` times the device time."""
        return replace(
            self,
            kernel_seconds=self.kernel_seconds * factor,
            total_seconds=self.total_seconds * factor,
            activation_seconds=self.activation_seconds * factor,
            warm_seconds=self.warm_seconds * factor,
        )


# ----------------------------------------------------------------------------- what a device offers


class Replay(Protocol):
    """Some launches that can be run again and again as one."""

    launches: int
    how: str  # "graph" or "launches"

    def seconds(self) -> float:
        """Run them once; the device time they took together."""
        ...


class Captures(Protocol):
    """What `sample` needs of a device; a launch is whatever that device takes for one."""

    def capture(self, launches: Sequence[Any]) -> Replay: ...


class Stopwatch(Captures, Protocol):
    """A device on which a whole row can be timed: GpuStopwatch, or a fake in the tests."""

    l2_bytes: int

    def issue(self, launch: Any) -> float:
        """Launch without waiting; the host's seconds, compiling and loading left out."""
        ...

    def issue_and_wait(self, launch: Any) -> tuple[float, float]:
        """The same, and the host's seconds from the start of the launch to its end."""
        ...

    def duplicate(self, array: Any) -> Any: ...

    def wait(self) -> None: ...

    def sm_mhz(self, replay: Replay) -> float | None:
        """The SM clock while `replay` runs, if the machine tells."""
        ...


# ----------------------------------------------------------------------------------------- sampling


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per launch (or per group of launches that belong together)."""

    us: float  # median
    p20_us: float
    p80_us: float
    samples: int
    how: str


def sample(
    stopwatch: Captures,
    work: Callable[[int], Sequence[Any]],
    slots: int,
    seconds: float,
    budget: Budget = Budget(),
    *,
    min_samples: int | None = None,
    once: float | None = None,
) -> tuple[Timing, Replay]:
    """Time `work(slot)`, the launches of one repetition on one copy of the weights.

    slots   : how many copies there are; they are used in turn, all of them before any again.
    seconds : device time for the samples. At least `min_samples` are taken whatever it is.
    once    : about the seconds of one repetition, where it is known from an earlier one, which then
              was the warm-up of a slow kernel too.
    """
    at_least = budget.min_samples if min_samples is None else min_samples
    if once is None or once < SLOW_SECONDS:
        first = stopwatch.capture(work(0))
        once = min(first.seconds() for _ in range(3))
    once = max(once, 1e-7)

    replays = [
        Group(stopwatch, work, turn) for turn in turns(slots, math.ceil(SAMPLE_SECONDS / once))
    ]
    warm = 0.0
    while once < SLOW_SECONDS and warm < budget.warm_seconds:
        warm += max(replays[0].replay.seconds(), 1e-6)

    times: list[float] = []
    spent = 0.0
    while not _enough(times, spent, seconds, at_least, budget):
        group = replays[len(times) % len(replays)]
        took = group.replay.seconds()
        spent += took
        times.append(took / group.repetitions)
    p20, median, p80 = np.quantile(times, [0.2, 0.5, 0.8]) * 1e6
    timing = Timing(float(median), float(p20), float(p80), len(times), replays[0].replay.how)
    return timing, replays[0].replay


def turns(slots: int, repetitions: int) -> list[range]:
    """Which repetitions (slot = repetition % slots) go into which replay.

    A short kernel gets one replay over all slots, several times round; a long one gets a replay
    for every few slots, to be used in turn. In both cases every copy of the weights is read before
    any is read again.
    """
    repetitions = min(max(repetitions, 1), MAX_LAUNCHES)
    if repetitions >= slots:
        return [range(slots * (repetitions // slots))]
    return [range(at, min(at + repetitions, slots)) for at in range(0, slots, repetitions)]


class Group:
    """A replay captured when it is first needed: a slow kernel never gets to most of them."""

    def __init__(
        self, stopwatch: Captures, work: Callable[[int], Sequence[Any]], turn: range
    ) -> None:
        self.repetitions = len(turn)
        self._stopwatch, self._work, self._turn = stopwatch, work, turn
        self._replay: Replay | None = None

    @property
    def replay(self) -> Replay:
        if self._replay is None:
            launches = [launch for slot in self._turn for launch in self._work(slot)]
            self._replay = self._stopwatch.capture(launches)
        return self._replay


def _enough(
    times: Sequence[float], spent: float, seconds: float, at_least: int, budget: Budget
) -> bool:
    if len(times) < at_least:
        return False
    if spent >= seconds or len(times) >= budget.max_samples:
        return True
    if len(times) < budget.settled_samples:
        return False
    mean = statistics.fmean(times)
    return statistics.stdev(times) / math.sqrt(len(times)) <= budget.relative_error * mean


def overlapping(launch: Any, overlap: bool) -> Any:
    """The launch, allowed or not allowed to begin while the one before it runs."""
    return launch if launch.overlap == overlap else replace(launch, overlap=overlap)


def slots_for(weight_bytes: int, l2_bytes: int, rotation: int = ROTATION) -> int:
    """How many copies of the weights fill `rotation` times the L2."""
    return max(1, math.ceil(rotation * l2_bytes / max(weight_bytes, 1)))


# ------------------------------------------------------------------------------------------- limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of one product: packed weights, activations as the kernel reads them, C."""

    weights: int
    activations: int
    out: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.out

    def from_dram(self, l2_bytes: int) -> int:
        """The bytes that cannot come from the L2: the rotated weights, and what of A and C is
        larger than the whole L2. A lower bound, as a floor needs."""
        return self.weights + max(0, self.activations + self.out - l2_bytes)


def floor_us(operations: int, unit: str, dram_bytes: int, limits: Limits) -> float | None:
    """The least microseconds this GPU could need: the larger of bytes / bandwidth and
    operations / peak of the unit. None where neither limit was measured."""
    bandwidth = max(limits.copy_tbps or 0.0, limits.read_tbps or 0.0)
    peak = limits.tops.get(unit, 0.0)
    times = [dram_bytes / bandwidth * 1e-6] if bandwidth else []
    times += [operations / peak * 1e-6] if peak else []
    return max(times) if times else None


def impossible(kernel_us: float, floor: float | None) -> str | None:
    """A sentence if a time is below what the measured limits allow, else None."""
    if floor is None or kernel_us * TOLERANCE >= floor:
        return None
    return (
        f"{kernel_us:.4g} us is less than the {floor:.4g} us that the measured limits of this GPU "
        "allow: the timing, the counted work or the limit is wrong"
    )


# --------------------------------------------------------------------------------------------- rows


class Verdict(Protocol):
    """What a check says of an output (`reference.check.Check`)."""

    @property
    def ok(self) -> bool: ...
    @property
    def nmse_same_operands(self) -> float | None: ...
    @property
    def nmse_float(self) -> float | None: ...
    @property
    def verdict(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Weights as some steps read them, and what packing them cost; made once for all rows."""

    arrays: tuple[np.ndarray, ...]
    pack_us: float
    _copies: list[tuple[Any, ...]] = field(default_factory=list, repr=False)

    def copies(self, machine: Any, stopwatch: Stopwatch) -> Sequence[tuple[Any, ...]]:
        """Copies on the device, as many as fill the rotation; made when first asked for, one
        uploaded and the others from that, and kept as long as this is."""
        if not self._copies:
            original = tuple(machine.array(array) for array in self.arrays)
            slots = slots_for(self.nbytes, stopwatch.l2_bytes)
            more = [tuple(map(stopwatch.duplicate, original)) for _ in range(slots - 1)]
            self._copies.extend((original, *more))
        return self._copies

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def pack_weights(step: Any, blocks: np.ndarray) -> Packed:
    """Run step.pack on the host under a clock: the best of two, or one if that took a second."""
    best = math.inf
    for _ in range(2):
        start = time.perf_counter()
        arrays = tuple(step.pack(blocks))
        best = min(best, time.perf_counter() - start)
        if best > 1.0:
            break
    return Packed(arrays, best * 1e6)


def blank_row(
    step: Any,
    format_name: str,
    scheme: str,
    shape: tuple[int, int, int],
    output: str = "float32",
) -> Row:
    """What is known of a row before anything ran; `status` says so until it is replaced."""
    m, n, k = shape
    family = scheme[scheme.index("A") :]
    return Row(
        step=step.number,
        name=step.name,
        title=step.title,
        parent=step.parents.get(family),
        unit=step.unit.get(family, ""),
        scheme=scheme,
        format=format_name,
        M=m,
        N=n,
        K=k,
        output=output,
        accuracy=step.accuracy,
        status="failed",
        why="not run",
        source_hash=source_hash(step.number),
    )


def without_result(row: Row, status: Any, why: str) -> Row:
    """The row of work that has no figure: "unsupported", or "failed", and the sentence why."""
    return replace(row, status=status, why=" ".join(why.split()) or "no reason was given")


def measure(
    row: Row,
    *,
    machine: Any,
    stopwatch: Stopwatch,
    packed: Packed,
    activations: Callable[[], Any],
    launch: Callable[[tuple[Any, ...], tuple[Any, ...], Any], Any],
    check: Callable[[np.ndarray, Any], Verdict],
    limits: Limits | None = None,
    budget: Budget = Budget(),
    dtype: Any = np.float32,
) -> Row:
    """Check, time and check again: `row` (from blank_row) with its results.

    machine     : steps.api.machines.Gpu (`array`, `run`, `host`).
    packed      : the weights; rows of steps that read the same packing share its copies.
    activations : () -> steps.contract.Activations on that machine, made from float32 A.
    launch      : (weights, activation arrays, out) -> steps.contract.Launch.
    check       : (C on the host, Activations) -> verdict; called before and after the timing.
    dtype       : of C.
    The status is "failed", with the reason, for a wrong output or an impossible time; a CUDA error
    is raised, as nothing after it can be trusted.
    """
    shape = (row.M, row.N)
    blank = machine.array(np.full(shape, np.nan, dtype))
    copies = packed.copies(machine, stopwatch)
    inputs = activations()

    # --- check
    out = stopwatch.duplicate(blank)
    prepared = launch(copies[0], inputs.arrays, out)
    for each in inputs.launches:
        machine.run(each)
    stopwatch.wait()
    first = stopwatch.issue_and_wait(overlapping(prepared, False))
    before = check(machine.host(out), inputs)
    chained = prepared.overlap and (getattr(machine, "cc", None) or (0, 0)) >= OVERLAP_CC
    row = replace(
        row,
        output=np.dtype(dtype).name,
        pack_us=packed.pack_us,
        nmse_same_operands=before.nmse_same_operands,
        nmse_float=before.nmse_float,
        **resources(prepared),
    )
    if not before.ok:
        return without_result(row, "failed", before.verdict)

    # --- time
    out = blank  # so that the second check sees what the timed launches wrote
    launches = [launch(weights, inputs.arrays, out) for weights in copies]
    stopwatch.wait()
    times = _times(stopwatch, launches, tuple(inputs.launches), budget, first, chained)
    row = replace(row, **times)

    # --- check again
    after = check(machine.host(out), inputs)
    if not after.ok:
        return without_result(row, "failed", f"right before timing, wrong after: {after.verdict}")

    # --- judge
    kernel_us: float = times["kernel_us"]
    least_us = min(times[name] or kernel_us for name in ("kernel_us", "total_us", "chain_us"))
    traffic = Traffic(
        weights=packed.nbytes,
        activations=sum(int(array.nbytes) for array in inputs.arrays),
        out=np.dtype(dtype).itemsize * row.M * row.N,
    )
    operations = 2 * row.M * row.N * row.K
    floor = floor_us(
        operations, row.unit, traffic.from_dram(stopwatch.l2_bytes), limits or Limits()
    )
    row = replace(
        row,
        tflops=operations / kernel_us * 1e-6,
        gbps=traffic.total / kernel_us * 1e-3,
        limit_share=None if floor is None else floor / kernel_us,
    )
    if why := impossible(least_us, floor):
        return without_result(row, "failed", why)
    return replace(row, status="ok", why=None)


def measure_step(
    step: Any,
    family: Any,
    format_name: str,
    a: Any,
    n: int,
    *,
    machine: Any,
    stopwatch: Stopwatch,
    packed: Packed,
    check: Callable[[np.ndarray, Any], Verdict],
    limits: Limits | None = None,
    budget: Budget = Budget(),
    dtype: Any = np.float32,
) -> Row:
    """`measure` for a steps.contract.Step: one row of C[M, n] = a[M, K] @ W^T.

    a      : float32 [M, K] on the machine.
    packed : pack_weights(step, blocks[n, K/32]).
    check  : (C on the host, the Q8_1 bits or halves that were multiplied, None where it was A) ->
             verdict; at the largest shapes it may look at some rows of C only, as a float64 product
             takes long.
    dtype  : of C, one of the step's outputs.
    """
    from qformats import FORMATS
    from steps.components.activations.layouts import decode
    from steps.contract import Shape, scheme

    m, k = a.shape
    shape, fmt = Shape(m, n, k), FORMATS[format_name]
    output = np.dtype(dtype).name
    row = blank_row(step, format_name, scheme(format_name, family), (m, n, k), output)
    if why := step.supports(format_name, family, getattr(machine, "cc", None), output):
        return without_result(row, "unsupported", why)

    # One for all copies of the weights, as layers that run one after the other can share it.
    scratch = tuple(
        tuple(machine.array(np.zeros(*each)) for each in sizes(fmt, family, shape))
        for sizes in (step.scratch,)
        if sizes is not None
    )
    bits: list[tuple[tuple[np.ndarray, ...], Any]] = []  # those of the first check, decoded

    def checked(c: np.ndarray, inputs: Any) -> Verdict:
        if inputs.layout is None:
            return check(c, None)
        arrays = tuple(np.array(machine.host(array)) for array in inputs.arrays)
        if not bits or not all(map(np.array_equal, arrays, bits[0][0])):
            bits[:] = [(arrays, decode(inputs.layout, arrays, m, k))]
        return check(c, bits[0][1])

    return measure(
        row,
        machine=machine,
        stopwatch=stopwatch,
        packed=packed,
        activations=lambda: step.activations(family, a, machine),
        launch=lambda weights, arrays, out: step.launch(
            fmt, family, shape, weights, arrays, out, *scratch
        ),
        check=checked,
        limits=limits,
        budget=budget,
        dtype=dtype,
    )


def _times(
    stopwatch: Stopwatch,
    launches: Sequence[Any],
    activation: tuple[Any, ...],
    budget: Budget,
    issued: tuple[float, float],
    chained: bool,
) -> dict[str, Any]:
    """The timed fields of a row. `launches` has one launch per copy of the weights.

    issued: what `Stopwatch.issue_and_wait` said of the launch that was checked, which is the
            warm-up of a slow kernel too.
    """
    slots = len(launches)
    alone = [overlapping(launch, False) for launch in launches]
    first = tuple(overlapping(launch, False) for launch in activation)
    launch_us, once = launch_cost(stopwatch, alone[0], issued), issued[1]
    slow = once >= SLOW_SECONDS
    kernel, replay = sample(
        stopwatch, lambda i: (alone[i % slots],), slots, budget.kernel_seconds, budget, once=once
    )
    clock = None if slow else stopwatch.sm_mhz(replay)

    def products(before: tuple[Any, ...]) -> float:
        """Microseconds of a product: these launches, then the kernel as the step has it."""
        timing, _ = sample(
            stopwatch,
            lambda i: (*before, launches[i % slots]),
            slots,
            budget.total_seconds,
            budget,
            min_samples=1 if slow else None,
            once=once,
        )
        return timing.us

    activation_us, total_us = 0.0, kernel.us  # nothing to prepare: the kernel reads A as it is
    if activation:
        passes, _ = sample(stopwatch, lambda _: first, 1, budget.activation_seconds, budget)
        activation_us, total_us = passes.us, products(first)
    chain_us = products(tuple(overlapping(each, True) for each in first)) if chained else None
    return {
        "kernel_us": kernel.us,
        "p20_us": kernel.p20_us,
        "p80_us": kernel.p80_us,
        "samples": kernel.samples,
        "timing": kernel.how,
        "sm_mhz": clock,
        "activation_us": activation_us,
        "total_us": total_us,
        "chain_us": chain_us,
        "launch_us": launch_us,
    }


def launch_cost(stopwatch: Stopwatch, launch: Any, issued: tuple[float, float]) -> float:
    """Host microseconds of one prepared launch, the GPU not being waited for.

    The median of as many launches as the GPU finishes in about 10 ms, at least one and at most 30.
    Of a slow kernel it is the cost of its first launch, which is the higher one: its time on the
    GPU is ten thousand times as long.
    """
    cost, done = issued
    if done >= SLOW_SECONDS:
        return cost * 1e6
    count = min(30, max(1, int(0.01 / max(done, 1e-6))))
    costs = [stopwatch.issue(launch) for _ in range(count)]
    stopwatch.wait()
    return statistics.median(costs) * 1e6


def resources(launch: Any) -> dict[str, Any]:
    """Registers, local memory and shared memory of a compiled kernel, null where it cannot say.

    Local memory counts as spilled: no step keeps an array there on purpose.
    """

    def ask(name: str) -> int | None:
        try:
            answer = getattr(launch.kernel, name)()
        except Exception:  # not compiled for a GPU, or a dispatcher without the question
            return None
        values = list(answer.values()) if isinstance(answer, dict) else [answer]
        return int(max(values)) if values else None

    static = ask("get_shared_mem_per_block")
    return {
        "registers": ask("get_regs_per_thread"),
        "spill_bytes": ask("get_local_mem_per_thread"),
        "smem_bytes": None if static is None else static + launch.shared_bytes,
    }


Item = TypeVar("Item")
Other = TypeVar("Other")


def interleaved(outer: Iterable[Other], steps: Sequence[Item]) -> Iterator[tuple[Other, Item]]:
    """Every step at one (shape, format) before the next, alternately up and down the ladder.

    Steps that are compared are so measured within seconds of each other, and a GPU that slowly
    warms favours neither end.
    """
    for i, item in enumerate(outer):
        for step in steps if i % 2 == 0 else steps[::-1]:
            yield item, step


# ------------------------------------------------------------------------------------------ the GPU


class GpuStopwatch:
    """CUDA graphs and events on a stream of its own.

    `graphs=False`, or a capture that fails, leaves many launches between two events; the reason is
    then in `why_no_graph`, and every Timing says "launches".
    """

    def __init__(self, *, graphs: bool = True) -> None:
        from cuda.core import Device
        from numba import cuda

        from steps.api.launcher import load

        cuda.current_context()  # cuda.core and Numba then share the primary context
        device = cuda.get_current_device()
        self.l2_bytes = int(device.L2_CACHE_SIZE)
        self.graphs = graphs
        self.why_no_graph: str | None = None if graphs else "not wanted"
        self._cuda = cuda
        self._load = load
        self._device = Device(device.id)
        self._device.set_current()
        self._stream = self._device.create_stream()
        self._clock = _sm_clock(self._device)

    def capture(self, launches: Sequence[Any]) -> Replay:
        self.wait()  # operands are prepared on the default stream
        if self.graphs:
            try:
                return _GraphReplay(self, launches)
            except Exception as error:  # an older driver or cuda.core: timing is still possible
                self.graphs = False
                self.why_no_graph = f"{type(error).__name__}: {error}"
        return _LaunchReplay(self, launches)

    def issue(self, launch: Any) -> float:
        cost, _ = self._issue(launch)
        return cost

    def issue_and_wait(self, launch: Any) -> tuple[float, float]:
        cost, start = self._issue(launch)
        self.wait()
        return cost, time.perf_counter() - start

    def _issue(self, launch: Any) -> tuple[float, float]:
        loaded = self._load(launch)
        start = time.perf_counter()
        loaded(self._stream)
        return time.perf_counter() - start, start

    def _load_each(self, launches: Sequence[Any]) -> list[Any]:
        """Loaded, each distinct launch once: a graph repeats a few many times."""
        distinct = {id(launch): launch for launch in launches}
        loaded = {key: self._load(launch) for key, launch in distinct.items()}
        return [loaded[id(launch)] for launch in launches]

    def duplicate(self, array: Any) -> Any:
        twin = self._cuda.device_array_like(array)
        twin.copy_to_device(array)
        return twin

    def wait(self) -> None:
        self._cuda.synchronize()

    @property
    def clock(self) -> Callable[[], float] | None:
        """Asks for the SM clock in MHz, where NVML can be asked."""
        return self._clock

    def sm_mhz(self, replay: Replay) -> float | None:
        if self._clock is None or not isinstance(replay, _Timed):
            return None
        replay.start()  # the clock of a busy GPU is asked for: an idle one would say something else
        try:
            return self._clock()
        finally:
            self.wait()

    def between_events(self, run: Callable[[], None]) -> float:
        """Device seconds from the start of `run`'s work to its end."""
        begin, end = self._cuda.event(), self._cuda.event()
        begin.record(self._stream)
        run()
        end.record(self._stream)
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


class _Timed:
    """What both kinds of replay share: started, and timed between two events."""

    how = ""

    def __init__(self, stopwatch: GpuStopwatch, launches: Sequence[Any]) -> None:
        self.launches = len(launches)
        self._stopwatch = stopwatch

    def start(self) -> None:
        raise NotImplementedError

    def seconds(self) -> float:
        return self._stopwatch.between_events(self.start)


class _GraphReplay(_Timed):
    how = "graph"

    def __init__(self, stopwatch: GpuStopwatch, launches: Sequence[Any]) -> None:
        super().__init__(stopwatch, launches)
        # Kept, as a graph does not own the arrays it works on; loaded before the capture begins.
        self._loaded = stopwatch._load_each(launches)
        builder = stopwatch._device.create_graph_builder()
        builder.begin_building()
        try:
            for loaded in self._loaded:
                loaded(builder)
        finally:
            builder.end_building()
        self._graph = builder.complete()
        self._graph.upload(stopwatch._stream)

    def start(self) -> None:
        self._graph.launch(self._stopwatch._stream)


class _LaunchReplay(_Timed):
    how = "launches"

    def __init__(self, stopwatch: GpuStopwatch, launches: Sequence[Any]) -> None:
        super().__init__(stopwatch, launches)
        self._loaded = stopwatch._load_each(launches)

    def start(self) -> None:
        for loaded in self._loaded:
            loaded(self._stopwatch._stream)


def _sm_clock(device: Any) -> Callable[[], float] | None:
    """A function asking NVML for the SM clock in MHz, or None where NVML cannot be asked."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        handle = nvml.device_get_handle_by_pci_bus_id_v2(device.pci_bus_id)
        nvml.device_get_clock_info(handle, int(nvml.ClockType.SM))
    except Exception:
        return None

    def clock() -> float:
        return float(nvml.device_get_clock_info(handle, int(nvml.ClockType.SM)))

    return clock
