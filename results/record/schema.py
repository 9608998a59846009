"""A run as data: who measured what, where, with which sources. One JSON file per run.

The file is `results/<gpu slug>/<utc date>-<short sha>.json` with five keys: `schema`, `env`,
`rows`, `peers`, `duels`. Charts and tables are functions of this file and of nothing else, so
everything they print must be in it. Two rules keep it honest:

* what was not measured is null, never a guess (`None` here, "-" in the tables);
* a row carries the hash of the sources it was measured with (`source_hash`), so a row whose
  step has changed since can be shown as stale instead of as a fact.

Where the measuring machine has no `.git`, the commit is taken from the environment variable
LADDER_GIT_SHA, for example `LADDER_GIT_SHA=$(git describe --always --dirty --exclude='*')`; a
trailing `-dirty` means what git means by it.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import hashlib
import io
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

SCHEMA: Final = 2
READ: Final = (1, 2)
"""The schemas that this version reads: 1 has no `duels`, and no row in it says its `accuracy`."""
ROOT: Final = Path(__file__).resolve().parents[2]
GIT_SHA_VARIABLE: Final = "LADDER_GIT_SHA"

Status = Literal["ok", "unsupported", "failed"]
Pace = Literal["sustained", "burst"]


# -------------------------------------------------------------------------------------------- types


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step, one weight format, one shape: a checked and timed result, or why there is none.

    Times are in microseconds per product. `kernel_us` (median; `p20_us`, `p80_us` and `samples`
    belong to it) is the kernel alone, `activation_us` the pass that prepares A, `total_us` both in
    one CUDA graph, from float32 A to float32 C, begun when the product before it has ended;
    `chain_us` the same where every launch may begin under the one before it (`Launch.overlap`),
    null for steps that do not say so and on GPUs before compute capability 9.0; `launch_us` is the
    host's cost of one prepared launch (`steps.api.launcher`), which none of the others contains;
    `pack_us` the host's one-time repack of W.
    `tflops` = 2MNK / kernel_us; `gbps` counts weights, activations and C once; `limit_share` is
    the least possible time on this GPU (see measure.floor_us) over kernel_us.
    The ratios compare kernel_us at the same format and shape.
    """

    step: int
    name: str
    title: str = ""
    parent: int | None = None
    unit: str = ""  # the arithmetic unit the step is limited by: a key of Limits.tops
    scheme: str  # W{weight bits}A{16|8}
    format: str
    M: int
    N: int
    K: int
    output: str = "float32"  # the dtype of C
    accuracy: str = (
        "exact"  # or "fast", "coarse": a step that rounds more than its formats do (Step.accuracy)
    )
    status: Status
    why: str | None = None  # a sentence unless status is "ok"
    kernel_us: float | None = None
    activation_us: float | None = None
    total_us: float | None = None
    chain_us: float | None = None  # runs from before there was one lack it
    pack_us: float | None = None
    launch_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: int | None = None
    timing: str | None = None  # "graph", or "launches" where capture was not possible
    sm_mhz: float | None = None  # the SM clock right after this row was timed
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

    @property
    def family(self) -> str:
        """ "A16" or "A8": what the activations are."""
        return self.scheme[self.scheme.index("A") :]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.M, self.N, self.K


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The same product by someone else. `same_run` is false for figures of another run."""

    peer: str  # "cublas_fp16", "ggml", ...
    format: str
    M: int
    N: int
    K: int
    us: float
    same_run: bool
    source: str

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.M, self.N, self.K

    @property
    def tflops(self) -> float:
        return 2 * self.M * self.N * self.K / self.us * 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """A step's kernel and a rival's at one shape, timed in turn round by round (results.measure.ab).

    Microseconds are per product, medians over the rounds with their 20 % and 80 % quantiles.
    `x_rival` is the rival's time over ours in the same round, and the median of that: how many
    times as fast we are. Both are kernels alone: the activation pass is not in ours, nor the
    rounding of A and W in the rival's.
    """

    step: int
    name: str
    scheme: str
    format: str
    M: int
    N: int
    K: int
    output: str  # the dtype of our C; the rival's is what `source` says
    accuracy: str = "exact"
    rival: str  # "cublas_fp16": a peer's name
    pace: Pace
    overlap: bool = False  # whether our launches may begin under the one before (Launch.overlap)
    status: Literal["ok", "failed"]
    why: str | None = None  # a sentence unless status is "ok"
    rounds: int = 0
    us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    rival_us: float | None = None
    rival_p20_us: float | None = None
    rival_p80_us: float | None = None
    x_rival: float | None = None
    x_rival_p20: float | None = None
    x_rival_p80: float | None = None
    launches: int | None = None  # of ours in one graph; a round is one graph of either
    rival_launches: int | None = None
    pause_us: float = 0.0  # before each graph
    sm_mhz: float | None = None  # while ours runs, right after the rounds
    rival_sm_mhz: float | None = None
    source: str  # the rival's software and how it was timed
    source_hash: str | None = None

    @property
    def family(self) -> str:
        return self.scheme[self.scheme.index("A") :]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.M, self.N, self.K

    @property
    def key(self) -> tuple[Any, ...]:
        """What there may be one of in a run."""
        own = (self.step, self.scheme, self.format, self.shape, self.output)
        return (*own, self.rival, self.pace, self.overlap)

    @property
    def tflops(self) -> float | None:
        return None if self.us is None else 2 * self.M * self.N * self.K / self.us * 1e-6


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
    gpus: int = 1  # of one host, each of which measured all that is compared on some weights
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
    utc: str | None = None

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
    duels: tuple[Duel, ...] = ()


class RecordError(ValueError):
    """A result file that is not one: names the file's field and what was found there."""


# ---------------------------------------------------------------------------------- JSON, both ways


def to_json(run: Run) -> str:
    """The file's text: one row per line, so that a diff of two runs can be read."""

    def line(record: Any) -> str:
        return json.dumps(_plain(asdict(record)), allow_nan=False, ensure_ascii=False)

    def lines(records: Iterable[Any]) -> str:
        text = ",\n".join("  " + line(record) for record in records)
        return f"[\n{text}\n ]" if text else "[]"

    env = json.dumps(_plain(asdict(run.env)), allow_nan=False, ensure_ascii=False, indent=2)
    env = env.replace("\n", "\n ")
    return (
        f'{{\n "schema": {SCHEMA},\n "env": {env},\n'
        f' "rows": {lines(run.rows)},\n "peers": {lines(run.peers)},\n'
        f' "duels": {lines(run.duels)}\n}}\n'
    )


def _plain(value: Any) -> Any:
    """JSON's own types: six significant digits (more would be noise), NaN and Inf as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


Record = TypeVar("Record")


def from_json(text: str) -> Run:
    """The inverse of to_json, of older schemas too. RecordError for anything that is not one."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"a result file must be JSON: {error}") from None
    if not isinstance(data, dict):
        raise RecordError(f"a result file must be a JSON object, not {type(data).__name__}")
    schema = data.get("schema")
    if schema not in READ or isinstance(schema, bool):
        raise RecordError(
            f"schema is {schema!r}; this version reads schema {' and '.join(map(str, READ))}: "
            "measure again, or use the version of the project that wrote the file"
        )
    kinds = {"env": dict, "rows": list, "peers": list, "duels": list}
    if schema == 1:
        del kinds["duels"]
    if unknown := set(data) - {"schema", *kinds}:
        raise RecordError(f"unknown keys {sorted(unknown)} in a result file")
    for key, kind in kinds.items():
        if not isinstance(data.get(key), kind):
            raise RecordError(f"{key!r} must be a JSON {'object' if kind is dict else 'array'}")
    run = Run(
        env=_build(Environment, data["env"], "env"),
        rows=tuple(_build(Row, row, f"rows[{i}]") for i, row in enumerate(data["rows"])),
        peers=tuple(_build(Peer, row, f"peers[{i}]") for i, row in enumerate(data["peers"])),
        duels=tuple(
            _build(Duel, row, f"duels[{i}]") for i, row in enumerate(data.get("duels", []))
        ),
    )
    validate(run)
    return run


def _build(cls: type[Record], data: Any, where: str) -> Record:
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
        return _build(hint, data, where)
    elif hint is float:
        if isinstance(data, int | float) and not isinstance(data, bool) and math.isfinite(data):
            return float(data)
    elif isinstance(data, hint) and not (hint is int and isinstance(data, bool)):
        return data
    raise RecordError(f"{where} is {data!r}, expected {getattr(hint, '__name__', hint)}")


def validate(run: Run) -> None:
    """What types cannot say. Raises RecordError naming the first row that lies."""
    seen: set[tuple[Any, ...]] = set()
    for i, row in enumerate(run.rows):
        where = f"rows[{i}] (step {row.step}, {row.scheme}, {row.format}, {row.shape})"
        if not re.fullmatch(r"W\d+A\d+", row.scheme):
            raise RecordError(f"{where}: scheme must be like W4A16")
        if min(row.shape) < 1:
            raise RecordError(f"{where}: M, N and K must be positive")
        if row.status == "ok" and (row.kernel_us is None or row.kernel_us <= 0):
            raise RecordError(f"{where}: an ok row needs a positive kernel_us")
        if row.status != "ok" and not row.why:
            raise RecordError(f"{where}: a row that is {row.status} must say why")
        key = (row.step, row.scheme, row.format, row.shape, row.output)
        if key in seen:
            raise RecordError(f"{where}: measured twice in one run")
        seen.add(key)
    for i, peer in enumerate(run.peers):
        if peer.us <= 0 or min(peer.shape) < 1:
            raise RecordError(f"peers[{i}] ({peer.peer}): time and shape must be positive")
    for i, duel in enumerate(run.duels):
        where = f"duels[{i}] (step {duel.step}, {duel.format}, {duel.shape}, {duel.pace})"
        times = (duel.us, duel.rival_us, duel.x_rival)
        if not re.fullmatch(r"W\d+A\d+", duel.scheme) or min(duel.shape) < 1:
            raise RecordError(f"{where}: scheme must be like W4A16, and the shape positive")
        if duel.status == "ok" and (duel.rounds < 1 or min(us or 0.0 for us in times) <= 0):
            raise RecordError(f"{where}: an ok duel needs rounds and positive times")
        if duel.status != "ok" and not duel.why:
            raise RecordError(f"{where}: a duel that is {duel.status} must say why")
        if duel.key in seen:
            raise RecordError(f"{where}: fought twice in one run")
        seen.add(duel.key)


# ------------------------------------------------------------------------------ reading and writing


def read(path: Path | str) -> Run:
    """Raises RecordError with the file's name in it."""
    path = Path(path)
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def slug(gpu: str | None) -> str:
    """ "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", (gpu or "unknown-gpu").lower()).strip("-")


def path_for(run: Run, root: Path = ROOT / "results") -> Path:
    """Where this run belongs: results/<gpu slug>/<utc date>-<short sha>.json."""
    if run.env.utc is None:
        raise RecordError("a run without env.utc has no date to be filed under")
    sha = (run.env.git.sha or "nogit")[:8]
    return root / slug(run.env.gpu) / f"{run.env.utc[:10]}-{sha}.json"


def write(run: Run, root: Path = ROOT / "results", *, path: Path | None = None) -> Path:
    """Write the run whole or not at all, and return where.

    Without `path` the run gets a new file: an existing one of that name is another run, so `-2`,
    `-3` ... is appended. With `path` that file is replaced: this is how a long run, having got
    its path from its first write, adds its later rows.
    """
    text = to_json(run)
    from_json(text)  # never write what could not be read back
    home = path or path_for(run, root)
    home.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the rename stays on one file system and is therefore atomic.
    handle, name = tempfile.mkstemp(dir=home.parent, prefix=f".{home.stem}-", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        if path is not None:
            temporary.replace(home)
            return home
        attempt = 1
        while True:
            candidate = home if attempt == 1 else home.with_stem(f"{home.stem}-{attempt}")
            if _move_without_replacing(temporary, candidate):
                return candidate
            attempt += 1
    finally:
        temporary.unlink(missing_ok=True)


def _move_without_replacing(source: Path, target: Path) -> bool:
    """False, and nothing changed, if target exists. A hard link is the one atomic way to say so."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: the race is open there, but stays tiny
        if target.exists():
            return False
        os.replace(source, target)  # noqa: PTH105
    return True


def runs(root: Path = ROOT / "results") -> list[Path]:
    """Every run under root, oldest first by its own clock (a checkout has no useful file times)."""
    found = [(read(path).env.utc or "", path) for path in sorted(root.glob("*/[0-9]*.json"))]
    return [path for _, path in sorted(found, key=lambda pair: pair[0])]


def latest(root: Path = ROOT / "results") -> Path | None:
    """The newest run, or None where nothing was measured yet."""
    found = runs(root)
    return found[-1] if found else None


def headline(root: Path = ROOT / "results") -> Path | None:
    """The run that the README and the charts show: of those with most good rows the newest.

    So one step measured again, or a laptop's short run, does not replace the whole ladder.
    """

    def size(path: Path) -> int:
        return sum(row.status == "ok" for row in read(path).rows)

    return max(reversed(runs(root)), key=size, default=None)


# ----------------------------------------------------------------------------------- derived values


def with_ratios(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows with x_parent and x_step1 filled in from kernel_us at the same format and shape, and
    with the same dtype of C.

    A step may exist in two families (A16 and A8). The parent's row of the same family is its
    measure where there is one, else the faster of the parent's rows: a claim is never made
    against the weaker of two candidates.
    """
    rows = tuple(rows)
    timed: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.status == "ok":
            timed.setdefault((row.step, row.format, row.shape, row.output), []).append(row)

    def ratio(row: Row, other: int | None) -> float | None:
        if other is None or row.status != "ok" or row.kernel_us is None:
            return None
        candidates = timed.get((other, row.format, row.shape, row.output), [])
        same = [c for c in candidates if c.family == row.family] or candidates
        times = [c.kernel_us for c in same if c.kernel_us is not None]
        return min(times) / row.kernel_us if times else None

    return tuple(replace(r, x_parent=ratio(r, r.parent), x_step1=ratio(r, 1)) for r in rows)


# ------------------------------------------------------------------------------------ source hashes

# A change of what only the simulator or the offline compiler needs cannot change what a GPU ran.
_NOT_ON_THE_GPU: Final = {
    "_arrays.py",
    "_asynchronous.py",
    "_cuda.py",
    "_multiply.py",
    "_scheduler.py",
    "banks.py",
    "compile.py",
    "errors.py",
    "simulator.py",
}
_FORMATS: Final = ("carriers.py", "device.py", "device_carriers.py", "device_files.py", "repack.py")
# Nor can one of what describes a launch, or of what hands it to a machine.
_HOST_ONLY: Final = {"step.py", "machines.py"}


def step_sources(step: int, root: Path = ROOT) -> tuple[Path, ...]:
    """What a step's machine code is made from: its file, the modules of `steps` that it imports,
    itself or through one of them (another step's too), the formats' side, the vocabulary."""
    sources = sorted((root / "steps").glob(f"step{step:02d}_*.py"))
    for path in sources:  # which grows meanwhile
        sources += [other for other in _imported(path) if other not in sources]
    sources += [root / "qformats" / name for name in _FORMATS]
    sources += [
        path
        for path in sorted((root / "steps" / "instructions").glob("*.py"))
        if path.name not in _NOT_ON_THE_GPU
    ]
    return tuple(path for path in sources if path.exists())


def _imported(path: Path) -> list[Path]:
    """The other files of its folder, `steps`, that a module imports, wherever in it, by name."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:  # a file being edited
        return []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ("steps" if node.level else "", node.module)))
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    files = {f"{name.split('.')[1]}.py" for name in names if name.startswith("steps.")}
    return [path.with_name(f) for f in sorted(files - _HOST_ONLY) if path.with_name(f).is_file()]


def source_hash(step: int, root: Path = ROOT) -> str | None:
    """12 hex digits over the code of step_sources, or None if the step has no file (any more).

    Comments, docstrings and blank lines are left out: a row goes stale with the code, not with
    its prose. The text is hashed rather than the syntax tree, whose dump differs between Python
    versions: the run may be made under one and checked under another.
    """
    sources = step_sources(step, root)
    if not any(path.name.startswith("step") for path in sources):
        return None
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0")
        digest.update(code_only(path.read_text(encoding="utf-8")).encode() + b"\0")
    return digest.hexdigest()[:12]


@lru_cache(maxsize=256)
def code_only(source: str) -> str:
    """Python source without comments, docstrings, blank lines and trailing blanks.

    Text that is not Python (a file being edited) is its own code: it equals no recorded hash.
    """
    lines = source.splitlines()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        tree = ast.parse(source)
    except (SyntaxError, tokenize.TokenError):
        return source
    for token in tokens:
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_stale(row: Row, root: Path = ROOT) -> bool:
    """Whether the row's step has other code now than when it was measured (or no record of it)."""
    return row.source_hash is None or row.source_hash != source_hash(row.step, root)


def stale_steps(run: Run, root: Path = ROOT) -> frozenset[int]:
    """The steps of a run that cannot be taken as facts about the code in this tree."""
    measured: list[Row | Duel] = [*run.rows, *run.duels]
    now = {step: source_hash(step, root) for step in {one.step for one in measured}}
    return frozenset(
        one.step for one in measured if one.source_hash is None or one.source_hash != now[one.step]
    )


# -------------------------------------------------------------------------------------- environment

_SMI_FIELDS: Final = (
    "driver_version",
    "power.limit",
    "power.draw",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
)


def nvidia_smi(
    query: tuple[str, ...] = _SMI_FIELDS,
    device: str = "0",
    run: Callable[..., Any] = subprocess.run,
) -> dict[str, str]:
    """Fields of one GPU as nvidia-smi prints them; those it does not know are absent."""
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    try:
        done = run(
            [*command, f"--id={device}"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split("\n")[0].split(",")]
    if len(values) != len(query):
        return {}
    return {k: v for k, v in zip(query, values, strict=True) if v and not v.startswith("[")}


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(root: Path = ROOT, environ: Mapping[str, str] | None = None) -> Git:
    """The commit measured: LADDER_GIT_SHA where it is set, else git's answer, else nulls."""
    given = (os.environ if environ is None else environ).get(GIT_SHA_VARIABLE)
    if given:
        return Git(sha=given.removesuffix("-dirty"), dirty=given.endswith("-dirty"))

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        return Git(sha=git("rev-parse", "--short=8", "HEAD"), dirty=bool(git("status", "--short")))
    except (OSError, subprocess.SubprocessError):
        return Git()


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def command_line() -> str:
    """How this process was called, of a path from the root its name alone: where a file lay on the
    machine that measured is nobody else's business."""
    return shlex.join(re.sub(r"^(--[\w-]+=)?/.*/", r"\1", one) for one in sys.orig_argv)


def environment(command: str | None = None, *, root: Path = ROOT) -> Environment:
    """This machine before a run. Never raises: a part that cannot be asked is null."""
    device = _device_facts()
    smi = nvidia_smi(device=str(device.pop("pci_bus_id", None) or "0"))
    return Environment(
        **device,
        driver=smi.get("driver_version"),
        cuda=_version("nvidia-nvvm") or _version("nvidia-cuda-nvcc-cu12") or _runtime_version(),
        numba=_version("numba"),
        numba_cuda=_version("numba-cuda"),
        numpy=_version("numpy"),
        python=platform.python_version(),
        power_limit_w=_number(smi.get("power.limit")),
        clocks_mhz=Clocks(
            before=_number(smi.get("clocks.sm")), max=_number(smi.get("clocks.max.sm"))
        ),
        git=git_state(root),
        command=command if command is not None else command_line(),
        utc=utc_now(),
    )


def finished(env: Environment, limits: Limits | None = None) -> Environment:
    """The environment after the run: clocks and throttle reasons now, and the measured limits."""
    smi = nvidia_smi(device=str(_device_facts().get("pci_bus_id") or "0"))
    limits = limits or env.limits
    return replace(
        env,
        clocks_mhz=replace(env.clocks_mhz, after=_number(smi.get("clocks.sm"))),
        power_draw_w=_number(smi.get("power.draw")),
        throttle=smi.get("clocks_throttle_reasons.active"),
        limits=limits,
        copy_tbps=limits.copy_tbps,
    )


def _device_facts() -> dict[str, Any]:
    """What the CUDA driver says of the current GPU; empty without one."""
    with contextlib.suppress(Exception):  # no driver, no GPU, no numba: nothing is known then
        from numba import cuda

        device = cuda.get_current_device()
        name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
        facts: dict[str, Any] = {
            "gpu": name,
            "cc": tuple(device.compute_capability),
            "sms": int(device.MULTIPROCESSOR_COUNT),
            "l2_bytes": int(device.L2_CACHE_SIZE),
        }
        with contextlib.suppress(Exception):
            facts["memory_bytes"] = int(cuda.current_context().get_memory_info().total)
        with contextlib.suppress(Exception):
            from cuda.core import Device

            facts["pci_bus_id"] = Device(device.id).pci_bus_id
        return facts
    return {}


def _runtime_version() -> str | None:
    with contextlib.suppress(Exception):
        from numba import cuda

        return ".".join(map(str, cuda.runtime.get_version()))
    return None


ROW_FIELDS: Final = tuple(f.name for f in fields(Row))
