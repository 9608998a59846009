"""What a user of a torch model gets, as data: `results/<gpu slug>/transformers.json`.

The file has the keys `schema`, `env`, `versions` (of torch and transformers), `model` (its shapes,
in words), `format`, `facts` (seconds of quantizing and packing, errors) and `rows`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from results.record.schema import Environment, RecordError, build, plain

SCHEMA: Final = 1
NAME: Final = "transformers.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A case and who ran it: the median over rounds in which all sides take turns.

    `ms` (`p20_ms`, `p80_ms`) is wall time from the call to the end of its last kernel;
    `tokens_per_s` are those read or written in it; `x_bfloat16` is the median over the rounds of
    bfloat16's time over this one; `first_s` is what the first call took, compiling included.
    """

    case: str
    side: str  # "bfloat16", "q4_0", "q4_0, fast"
    ms: float
    p20_ms: float
    p80_ms: float
    tokens_per_s: float
    x_bfloat16: float
    rounds: int
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    env: Environment
    versions: Mapping[str, str]
    model: str
    format: str
    facts: Mapping[str, float]
    rows: Sequence[ModelRow]


def write(run: ModelRun, path: Path) -> Path:
    """Write the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"schema": SCHEMA} | plain(asdict(run))
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> ModelRun:
    """The inverse of `write`. RecordError, with the file's name, for anything else."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (schema := data.pop("schema", None)) != SCHEMA:
            raise RecordError(f"schema is {schema!r}, expected {SCHEMA}: measure again")
        env = build(Environment, data.pop("env", None), "env")
        rows = [build(ModelRow, one, f"rows[{i}]") for i, one in enumerate(data.pop("rows", []))]
        return ModelRun(env=env, rows=tuple(rows), **data)
    except (json.JSONDecodeError, TypeError, RecordError) as error:
        raise RecordError(f"{path}: {error}") from None
