"""A run as data: who measured what, where, with which sources. One JSON file per GPU.

The file has five keys: `schema`, `env`, `rows`, `peers`, `as_called`. Charts and tables are
functions of this file and of nothing else, so everything they print is in it. Two rules:

* what was not measured is null, never a guess (`None` here, "-" in the tables);
* a row carries the hash of the code it was measured with (`source_hash`), its commit and its
  time, because a bench measures only what changed and keeps the other rows.
"""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal, TypeVar

from qformats import FILE_FORMATS, WEIGHT_FORMATS

SCHEMA: Final = 2

Status = Literal["ok", "unsupported", "failed"]
Size = tuple[int, int, int]
"""M, N, K of a product."""

FORMATS: Final = (*WEIGHT_FORMATS, *FILE_FORMATS)
"""The order of formats in a file; others (cuBLAS's float16) come last."""


# -------------------------------------------------------------------------------------------- types


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step, one weight format, one shape: a checked and timed result, or why there is none.

    Times are microseconds per product, medians over the rounds of one loop in which kernel,
    activation pass, total and cuBLAS take turns (results.measure.loop). `kernel_us` (`p20_us`,
    `p80_us`) is the kernel alone, `activation_us` the pass that prepares A (0 where A is read as
    it is), `total_us` (`total_p20_us`, `total_p80_us`) both, from A to C. `cublas_us` is cuBLAS
    float16 at the same shape, kernel only; `x_cublas` is the median over the rounds of cuBLAS over
    total. `pack_us` is the host's one-time repack of W. `tflops` = 2MNK / kernel_us; `gbps` counts
    weights, activations and C once; `limit_share` is the least possible time on this GPU over
    kernel_us (results.measure.protocol.floor_us). `x_parent` and `x_step1` compare kernel_us at the
    same format, shape, input and output.
    """

    step: int
    name: str
    title: str = ""
    branch: str = ""  # a key of steps.contract.BRANCHES
    parent: int | None = None  # of this row's family
    unit: str = ""  # the arithmetic unit the step is limited by: a key of Limits.tops
    scheme: str  # W{weight bits}A{16|8}
    format: str
    M: int
    N: int
    K: int
    home: bool = False  # the shape is one where the step is compared with its parent
    input: str = "float32"  # the dtype of A
    output: str = "float32"  # the dtype of C
    accuracy: str = "exact"  # or "fast": the step changes its weights (Step.accuracy)
    status: Status
    why: str | None = None  # a sentence unless status is "ok"
    kernel_us: float | None = None
    activation_us: float | None = None
    total_us: float | None = None
    cublas_us: float | None = None
    x_cublas: float | None = None
    pack_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    total_p20_us: float | None = None
    total_p80_us: float | None = None
    rounds: int | None = None  # of the loop
    timing: str | None = None  # "graph", or "launches" where capture was not possible
    sm_mhz: float | None = None  # the SM clock while this kernel ran, right after the loop
    tflops: float | None = None
    gbps: float | None = None
    limit_share: float | None = None
    x_parent: float | None = None
    x_step1: float | None = None
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
    def shape(self) -> Size:
        return self.M, self.N, self.K

    @property
    def key(self) -> tuple[Any, ...]:
        """What there is one row of in a run."""
        return (self.step, self.scheme, self.format, self.shape, self.input, self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The same product by someone else. `same_run` is false for figures recorded elsewhere."""

    peer: str  # "cublas_fp16", "ggml", "humming_w4a16", ...
    format: str
    M: int
    N: int
    K: int
    us: float
    same_run: bool
    source: str
    commit: str | None = None
    utc: str | None = None

    @property
    def shape(self) -> Size:
        return self.M, self.N, self.K

    @property
    def tflops(self) -> float:
        return 2 * self.M * self.N * self.K / self.us * 1e-6

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.peer, self.format, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsCalled:
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
    M: int
    N: int
    K: int
    step: int  # the step that was chosen
    us: float
    p20_us: float
    p80_us: float
    cublas_us: float
    x_cublas: float
    host_us: float | None
    torch_host_us: float | None
    rounds: int
    commit: str | None = None
    utc: str | None = None
    source_hash: str | None = None

    @property
    def shape(self) -> Size:
        return self.M, self.N, self.K

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
    env: Environment
    rows: tuple[Row, ...] = ()
    peers: tuple[Peer, ...] = ()
    as_called: tuple[AsCalled, ...] = ()


class RecordError(ValueError):
    """A result file that is not one: names the file's field and what was found there."""


# ----------------------------------------------------------------------------------- derived values


def with_ratios(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows with x_parent and x_step1 filled in from kernel_us at the same format, shape, input
    and output, measured in the same loop: GPUs of one model differ by more than two steps may.

    A step may exist in two families (A16 and A8). The parent's row of the same family is its
    measure where there is one, else the faster of the parent's rows: a claim is never made
    against the weaker of two candidates.
    """
    rows = tuple(rows)
    timed: dict[tuple[Any, ...], list[Row]] = {}

    def place(step: int, row: Row) -> tuple[Any, ...]:
        loop = row.commit, row.utc  # a loop's rows are stamped together
        return (step, row.format, row.shape, row.input, row.output, *loop)

    for row in rows:
        if row.status == "ok":
            timed.setdefault(place(row.step, row), []).append(row)

    def ratio(row: Row, other: int | None) -> float | None:
        if other is None or row.status != "ok" or row.kernel_us is None:
            return None
        candidates = timed.get(place(other, row), [])
        same = [c for c in candidates if c.family == row.family] or candidates
        times = [c.kernel_us for c in same if c.kernel_us is not None]
        return min(times) / row.kernel_us if times else None

    return tuple(replace(r, x_parent=ratio(r, r.parent), x_step1=ratio(r, 1)) for r in rows)


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


# ---------------------------------------------------------------------------------- JSON, both ways


def to_json(run: Run) -> str:
    """The file's text: one record per line, so that a diff of two runs can be read."""

    def lines(records: Iterable[Any]) -> str:
        text = ",\n".join("  " + _line(record) for record in records)
        return f"[\n{text}\n ]" if text else "[]"

    env = json.dumps(plain(asdict(run.env)), allow_nan=False, ensure_ascii=False, indent=2)
    env = env.replace("\n", "\n ")
    return (
        f'{{\n "schema": {SCHEMA},\n "env": {env},\n'
        f' "rows": {lines(run.rows)},\n "peers": {lines(run.peers)},\n'
        f' "as_called": {lines(run.as_called)}\n}}\n'
    )


@lru_cache(maxsize=1 << 14)
def _line(record: Any) -> str:
    """Remembered, as a bench writes all records after every loop."""
    return json.dumps(plain(asdict(record)), allow_nan=False, ensure_ascii=False)


def plain(value: Any) -> Any:
    """JSON's own types: six significant digits (more would be noise), NaN and Inf as null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


Record = TypeVar("Record")


def from_json(text: str) -> Run:
    """The inverse of to_json. RecordError for anything that is not a run."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"a result file must be JSON: {error}") from None
    if not isinstance(data, dict):
        raise RecordError(f"a result file must be a JSON object, not {type(data).__name__}")
    schema = data.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise RecordError(
            f"schema is {schema!r}; this version reads schema {SCHEMA}: measure again, or use the "
            "version of the project that wrote the file"
        )
    kinds = {"env": dict, "rows": list, "peers": list, "as_called": list}
    if unknown := set(data) - {"schema", *kinds}:
        raise RecordError(f"unknown keys {sorted(unknown)} in a result file")
    for key, kind in kinds.items():
        if not isinstance(data.get(key), kind):
            raise RecordError(f"{key!r} must be a JSON {'object' if kind is dict else 'array'}")

    def records(cls: type[Record], key: str) -> tuple[Record, ...]:
        return tuple(build(cls, one, f"{key}[{i}]") for i, one in enumerate(data[key]))

    run = Run(
        env=build(Environment, data["env"], "env"),
        rows=records(Row, "rows"),
        peers=records(Peer, "peers"),
        as_called=records(AsCalled, "as_called"),
    )
    validate(run)
    return run


def build(cls: type[Record], data: Any, where: str) -> Record:
    """An instance of a dataclass from parsed JSON, each value checked against its annotation."""
    if not isinstance(data, dict):
        raise RecordError(f"{where} must be a JSON object, not {data!r}")
    hints = _hints(cls)  # type: ignore[arg-type]
    if unknown := set(data) - set(hints):
        raise RecordError(f"{where} has unknown fields {sorted(unknown)}")
    values = {name: _value(hints[name], data[name], f"{where}.{name}") for name in data}
    try:
        return cls(**values)
    except TypeError as error:
        raise RecordError(f"{where}: {error}") from None


@lru_cache(maxsize=16)
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _value(inner, data, where)
    if origin is Literal:
        if data in arguments:
            return data
    elif origin is tuple:
        if isinstance(data, list) and len(data) == len(arguments):
            return tuple(_value(h, d, where) for h, d in zip(arguments, data, strict=True))
    elif origin is dict:
        if isinstance(data, dict):
            return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    elif hasattr(hint, "__dataclass_fields__"):
        return build(hint, data, where)
    elif hint is float:
        if isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data):
            return float(data)
    elif isinstance(data, hint) and not (hint is int and isinstance(data, bool)):
        return data
    raise RecordError(f"{where} is {data!r}, expected {getattr(hint, '__name__', hint)}")


def validate(run: Run) -> None:
    """What types cannot say. Raises RecordError naming the first record that lies."""
    for i, row in enumerate(run.rows):
        where = f"rows[{i}] (step {row.step}, {row.scheme}, {row.format}, {row.shape})"
        if not re.fullmatch(r"W\d+A\d+", row.scheme):
            raise RecordError(f"{where}: scheme must be like W4A16")
        if min(row.shape) < 1:
            raise RecordError(f"{where}: M, N and K must be positive")
        times = (row.kernel_us, row.total_us)
        if row.status == "ok" and min(us or 0.0 for us in times) <= 0:
            raise RecordError(f"{where}: an ok row needs a positive kernel_us and total_us")
        if row.status == "ok" and (why := total_below_kernel(row)):
            raise RecordError(f"{where}: {why}")
        if row.status != "ok" and not row.why:
            raise RecordError(f"{where}: a row that is {row.status} must say why")
    for i, peer in enumerate(run.peers):
        if peer.us <= 0 or min(peer.shape) < 1:
            raise RecordError(f"peers[{i}] ({peer.peer}): time and shape must be positive")
    for i, call in enumerate(run.as_called):
        measured = (call.us, call.cublas_us, call.x_cublas, call.rounds, *call.shape)
        host = [us for us in (call.host_us, call.torch_host_us) if us is not None]
        if min(*measured, *host) <= 0:
            raise RecordError(f"as_called[{i}] ({call.api}): times and shape must be positive")
    kinds: tuple[tuple[str, tuple[Row | Peer | AsCalled, ...]], ...] = (
        ("rows", run.rows),
        ("peers", run.peers),
        ("as_called", run.as_called),
    )
    for name, records in kinds:
        seen: set[tuple[Any, ...]] = set()
        for i, one in enumerate(records):
            if one.key in seen:
                raise RecordError(f"{name}[{i}] {one.key}: measured twice in one run")
            seen.add(one.key)


def in_order(run: Run) -> Run:
    """The run with its ratios, ordered for reading: shape, format, step, scheme, dtypes."""

    return replace(
        run,
        rows=rows_in_order(run.rows),
        peers=tuple(sorted(run.peers, key=lambda p: (*_place(p), p.peer))),
        as_called=tuple(
            sorted(run.as_called, key=lambda c: (*_place(c), c.api, c.accuracy, c.dtype))
        ),
    )


def rows_in_order(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The same of rows alone."""

    def place(r: Row) -> tuple[Any, ...]:
        return (*_place(r), r.step, r.family == "A8", r.output != "float32", r.input != "float32")

    return tuple(sorted(with_ratios(rows), key=place))


def _place(one: Row | Peer | AsCalled) -> tuple[Any, ...]:
    known = FORMATS.index(one.format) if one.format in FORMATS else len(FORMATS)
    return (one.N * one.K, one.N, one.M, known)
