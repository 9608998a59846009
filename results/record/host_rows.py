"""What a call takes the host, as data: `results/<gpu slug>/host_time.json`.

The file has the keys `schema`, `env`, `torch` (its version) and `rows`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from results.record.schema import Environment, RecordError, build, plain

SCHEMA: Final = 1
NAME: Final = "host_time.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """An eager call and torch's own of the same shape and dtype: the host's time until it returns,
    the GPU not being waited for. Medians of many calls, quantiles over them, in turn.

    `torch_us` is torch.nn.Linear for QuantLinear, torch.matmul with `out` for a plan and for gemm;
    `x_torch` is the median over the rounds of our time over theirs.
    """

    api: str  # "QuantLinear", "gemm.plan", "gemm, out" (given one), "gemm"
    dtype: str  # of A and C
    format: str
    M: int
    N: int
    K: int
    us: float
    p20_us: float
    p80_us: float
    torch_us: float
    x_torch: float
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun:
    env: Environment
    torch: str
    rows: Sequence[HostRow]


def write(run: HostRun, path: Path) -> Path:
    """Write the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"schema": SCHEMA} | plain(asdict(run))
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> HostRun:
    """The inverse of `write`. RecordError, with the file's name, for anything else."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (schema := data.pop("schema", None)) != SCHEMA:
            raise RecordError(f"schema is {schema!r}, expected {SCHEMA}: measure again")
        env = build(Environment, data.pop("env", None), "env")
        rows = [build(HostRow, one, f"rows[{i}]") for i, one in enumerate(data.pop("rows", []))]
        return HostRun(env=env, rows=tuple(rows), **data)
    except (json.JSONDecodeError, TypeError, RecordError) as error:
        raise RecordError(f"{path}: {error}") from None
