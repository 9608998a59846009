"""What is recorded: who measured what, where, with which sources.

`results/<gpu slug>/run.json` is a `Run`: rows of steps, baselines, and what a caller gets. Charts
and tables are functions of it and of nothing else, so everything they print is in it. (Records of
whole models lie beside it: `results.render.models`.) Two rules:

* what was not measured is null, never a guess (`None` here, "-" in the tables);
* a row carries the hash of the code it was measured with (`source_hash`), its commit and its
  time, because a bench measures only what changed and keeps the other rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from qformats import FILE_FORMATS, WEIGHT_FORMATS
from results.record.codec import Count, Positive, Rule

Status = Literal["ok", "failed"]
Scheme = Annotated[str, Rule("like W4A16", lambda text: re.fullmatch(r"W\d+A\d+", text))]
Size = tuple[int, int, int]  # M, N, K of a product
FORMATS: Final = (*WEIGHT_FORMATS, *FILE_FORMATS)
"""The order of formats in a file; others (cuBLAS's float16) come last."""
DTYPES: Final = ("float32", "float16", "bfloat16")


class Sized:
    """A record of a product."""

    __slots__ = ()
    M: int
    N: int
    K: int

    @property
    def shape(self) -> Size:
        return self.M, self.N, self.K


def mnk(size: Size) -> dict[str, Any]:
    """M, N and K of a record, by name."""
    return dict(zip("MNK", size, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Sized):
    """One step, one weight format, one shape: a checked and timed result, or why there is none.

    Times are microseconds per product, medians over the rounds of one loop in which kernel,
    activation pass, total and cuBLAS take turns (results.measure.loop). `kernel_us` (`p20_us`,
    `p80_us`) is the kernel alone, `activation_us` the pass that prepares A (0 where A is read as
    it is), `total_us` (`total_p20_us`, `total_p80_us`) both, from A to C. `cublas_us` is cuBLAS
    float16 at the same shape, kernel only; `x_cublas` is the median over the rounds of cuBLAS over
    total. `tflops` = 2MNK / kernel_us; `gbps` counts weights, activations and C once; `limit_share`
    is the least possible time on this GPU over kernel_us (results.measure.protocol.floor_us).
    `x_parent` compares kernel_us at the same format, shape, input and output, or that of the
    parent's own dtypes (`with_ratios`).
    """

    step: int
    name: str
    title: str = ""
    branch: str = ""  # a key of steps.checks.select.branches()
    parent: int | None = None  # of this row's family
    unit: str = ""  # the arithmetic unit the step is limited by: a key of Limits.tops
    scheme: Scheme  # W{weight bits}A{16|8}
    format: str
    M: Count
    N: Count
    K: Count
    home: bool = False  # the shape is one where the step is compared with its parent
    input: str = "float32"  # the dtype of A
    output: str = "float32"  # the dtype of C
    accuracy: str = "exact"  # or "fast", "pruned": it changes its weights (Step.accuracy)
    status: Status
    why: str | None = None  # a sentence unless status is "ok"
    kernel_us: float | None = None
    activation_us: float | None = None
    total_us: float | None = None
    cublas_us: float | None = None
    x_cublas: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    total_p20_us: float | None = None
    total_p80_us: float | None = None
    rounds: int | None = None  # of the loop
    tflops: float | None = None
    gbps: float | None = None
    limit_share: float | None = None
    x_parent: float | None = None
    nmse_same_operands: float | None = None
    nmse_float: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    smem_bytes: int | None = None
    source_hash: str | None = None
    commit: str | None = None
    utc: str | None = None

    @property
    def family(self) -> str:
        """ "A16" or "A8": what the activations are."""
        return self.scheme[self.scheme.index("A") :]

    @property
    def key(self) -> tuple[Any, ...]:
        """What there is one row of in a run."""
        return (self.step, self.scheme, self.format, self.shape, self.input, self.output)

    def wrong(self) -> str | None:
        """A sentence if the row contradicts itself."""
        if self.status != "ok":
            return None if self.why else f"a row that is {self.status} must say why"
        if min(us or 0.0 for us in (self.kernel_us, self.total_us)) <= 0:
            return "an ok row needs a positive kernel_us and total_us"
        return total_below_kernel(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer(Sized):
    """The same product by someone else. `same_run` is false for figures recorded elsewhere."""

    peer: str  # "cublas_fp16", "ggml", "humming_w4a16", ...
    format: str
    M: Count
    N: Count
    K: Count
    us: Positive
    same_run: bool
    source: str
    commit: str | None = None
    utc: str | None = None

    @property
    def tflops(self) -> float:
        return 2 * self.M * self.N * self.K / self.us * 1e-6

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.peer, self.format, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsCalled(Sized):
    """What a caller gets: one call of an API, tensor in to tensor out, beside torch's.

    `us` is GPU time per call, casts, memsets and activation pass included; `cublas_us` is
    torch.matmul (for QuantLinear a torch.nn.Linear of the same dtype) with dequantized weights in
    the same loop; `x_cublas` is the median over the rounds of theirs over ours. `host_us` and
    `torch_host_us` are the host's time for one eager call, null in a row of the sweep.
    """

    api: str  # "gemm.plan" or "QuantLinear"
    accuracy: str
    dtype: str  # of A and C
    format: str
    M: Count
    N: Count
    K: Count
    step: int  # the step that was chosen
    us: Positive
    p20_us: Positive
    p80_us: Positive
    cublas_us: Positive
    x_cublas: Positive
    host_us: Positive | None
    torch_host_us: Positive | None
    rounds: Count
    commit: str | None = None
    utc: str | None = None
    source_hash: str | None = None

    @property
    def swept(self) -> bool:
        """Whether it belongs to the sweep over every M (results.measure.as_called), and not to the
        M that are tabled."""
        return self.host_us is None

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.api, self.accuracy, self.dtype, self.format, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """SM clock in MHz before and after the run, and the highest the GPU can be set to."""

    before: float | None = None
    after: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    sha: str | None = None
    dirty: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this GPU did at most, measured by results.measure.limits; null where it was not.

    `tops` maps a unit ("fp32", "int32", "packed_int32", "dp4a", "mma_s8", "mma_f16", ...) to 1e12
    operations per second, a multiply-add being two, so that it compares with a row's `tflops`.
    """

    copy_tbps: float | None = None  # read + written
    read_tbps: float | None = None
    tops: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine, its software and the command: what another machine needs to understand a row."""

    gpu: str | None = None
    cc: tuple[int, int] | None = None
    sms: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    cuda: str | None = None  # the toolkit whose compiler made the kernels
    numba: str | None = None
    numba_cuda: str | None = None
    numpy: str | None = None
    python: str | None = None
    power_limit_w: float | None = None
    power_draw_w: float | None = None  # right after the run
    clocks_mhz: Clocks = field(default_factory=Clocks)
    throttle: str | None = None  # clock event reasons after the run, as nvidia-smi's bit mask
    copy_tbps: float | None = None
    limits: Limits = field(default_factory=Limits)
    git: Git = field(default_factory=Git)
    command: str | None = None
    utc: str | None = None  # of the newest measurement

    @property
    def where(self) -> str:
        """What every title says: "NVIDIA H200 @ 700 W"."""
        gpu = self.gpu or "unknown GPU"
        return gpu if self.power_limit_w is None else f"{gpu} @ {self.power_limit_w:.0f} W"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    SCHEMA: ClassVar[int] = 3
    env: Environment
    rows: tuple[Row, ...] = ()
    peers: tuple[Peer, ...] = ()
    as_called: tuple[AsCalled, ...] = ()


# ----------------------------------------------------------------------------------- derived values


def with_ratios(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows with x_parent filled in from kernel_us at the same format, shape, input and output,
    measured in the same loop: GPUs of one model differ by more than two steps may.

    A step may exist in two families (A16 and A8). The parent's row of the same family is its
    measure where there is one, else the faster of the parent's rows: a claim is never made
    against the weaker of two candidates. Where the two were measured in no dtypes of A and C in
    common, the parent is compared in its own.
    """
    rows = tuple(rows)
    timed: dict[tuple[Any, ...], list[Row]] = {}

    def dtypes(row: Row) -> tuple[str, str]:
        return row.input, row.output

    def place(step: int, row: Row) -> tuple[Any, ...]:
        loop = row.commit, row.utc  # a loop's rows are stamped together
        return (step, row.format, row.shape, *loop)

    for row in rows:
        if row.status == "ok":
            timed.setdefault(place(row.step, row), []).append(row)

    def ratio(row: Row) -> float | None:
        if row.parent is None or row.status != "ok" or row.kernel_us is None:
            return None
        own, candidates = (timed.get(place(step, row), []) for step in (row.step, row.parent))
        # A lesson's alone, where its engineered kernel is in the loop too
        own = [one for one in own if one.name == row.name]
        if {dtypes(one) for one in own} & {dtypes(one) for one in candidates}:
            candidates = [one for one in candidates if dtypes(one) == dtypes(row)]
        same = [c for c in candidates if c.family == row.family] or candidates
        times = [c.kernel_us for c in same if c.kernel_us is not None]
        return min(times) / row.kernel_us if times else None

    return tuple(replace(r, x_parent=ratio(r)) for r in rows)


def total_below_kernel(row: Row) -> str | None:
    """A sentence if a total is less than its kernel beyond noise, else None.

    Both come from the same rounds, so noise is their own spread: the gap must exceed 2 % and the
    sum of the two distances between the 20 % and 80 % quantiles.
    """
    times = (row.kernel_us, row.p20_us, row.p80_us, row.total_us, row.total_p20_us)
    kernel, p20, p80, total, total_p20 = (time or 0.0 for time in times)
    spread = (p80 - p20) + ((row.total_p80_us or 0.0) - total_p20)
    if not total or kernel - total <= max(0.02 * kernel, spread):
        return None
    return (
        f"the total of {total:.4g} us is below the {kernel:.4g} us of the kernel in it: one of the "
        "two was not timed as it runs"
    )


def in_order(run: Run) -> Run:
    """The run with its ratios, ordered for reading: shape, format, step, scheme, dtypes."""

    def of_row(r: Row) -> tuple[Any, ...]:
        return (*_place(r), r.step, r.family, *map(DTYPES.index, (r.output, r.input)))

    return replace(
        run,
        rows=tuple(sorted(with_ratios(run.rows), key=of_row)),
        peers=tuple(sorted(run.peers, key=lambda p: (*_place(p), p.peer))),
        as_called=tuple(
            sorted(run.as_called, key=lambda c: (*_place(c), c.api, c.accuracy, c.dtype))
        ),
    )


def _place(one: Row | Peer | AsCalled) -> tuple[Any, ...]:
    known = FORMATS.index(one.format) if one.format in FORMATS else len(FORMATS)
    return (one.N * one.K, one.N, one.M, known)
