"""Which step is fastest at which shape on which GPU: the small table that `make tune` writes.

The table is `results/<gpu>/tuning.json`: for each format, (N, K) and M the time of every step that
was tried, from float32 A to float32 C, and from float16 to float16 and from bfloat16 to bfloat16
where the step reads and writes that. Between its entries `Tuning.entry` says which one counts:

* of the (N, K) the nearest, by |log2 N/N'| + |log2 K/K'|, as time grows with their product;
* of the M the two that it lies between: the time of a step that both have is a straight line from
  one to the other, of a step that the lower one lacks that of the upper one. Beyond 8 tokens M is
  rounded up to a multiple of 16 first: tiles are multiplied whole, so 17 tokens cost what 32 do.
  Below the first M and above the last the table goes on as it ends.

A step that is in the table and not in the ladder is passed over. The table is measured and written
by `results.measure.tune`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = 1
RESULTS: Final = Path(__file__).resolve().parents[2] / "results"
NAME: Final = "tuning.json"
FEW_TOKENS: Final = 8
"""Up to so many a product of a decode step costs more with each of them."""
TILE_TOKENS: Final = 16
"""By which the tiles of the other steps grow, up to 128 tokens."""


class TuningError(ValueError):
    """A file that is not a table; the text names it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One product and the microseconds that steps took for it: {"7 A8": 30.1, "14 A16": 9.2,
    "14 A16 float16": 8.1}, see `time_key`.

    below: the times are worked out between those of this M and those of `m`; None: measured.
    """

    format: str
    n: int
    k: int
    m: int
    times: Mapping[str, float]
    below: int | None = None

    def us(self, step: int, family: str, input: str = "float32") -> float | None:
        """The time of a step, None where it was not measured. Where A in 16 bits has none, that of
        float16, else that of float32."""
        instead = ("float32",) if input == "float32" else (input, "float16", "float32")
        keys = [time_key(step, family, one) for one in instead]
        return next((self.times[key] for key in keys if key in self.times), None)

    @property
    def steps(self) -> frozenset[int]:
        """The steps that were measured."""
        return frozenset(int(work.split()[0]) for work in self.times)

    @property
    def where(self) -> str:
        tokens = f"M={self.m}" if self.below is None else f"M={self.below} and {self.m},"
        return f"{tokens} N={self.n} K={self.k}"

    def between(self, below: Entry, m: int) -> Entry:
        """The entry at `m` tokens, which lie between those of an entry below and of this one."""
        share = (m - below.m) / (self.m - below.m)
        times = {
            key: us + (1 - share) * (below.times.get(key, us) - us)
            for key, us in self.times.items()
        }
        return replace(self, times=times, below=below.m)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The table of one GPU, and what of it is asked when a step is chosen."""

    gpu: str
    cc: tuple[int, int] | None
    sms: int | None
    entries: tuple[Entry, ...]

    def has(self, step: int, family: str) -> bool:
        """Whether there is any time of a step in a family."""
        return any(entry.us(step, family, "float16") is not None for entry in self.entries)

    def entry(self, format_name: str, m: int, n: int, k: int) -> Entry | None:
        """The entry that counts for a product (see above); None where the format has none."""
        own = [entry for entry in self.entries if entry.format == format_name]
        if not own:
            return None

        def far(size: tuple[int, int]) -> tuple[float, tuple[int, int]]:
            return abs(math.log2(n / size[0])) + abs(math.log2(k / size[1])), size

        size = min({(entry.n, entry.k) for entry in own}, key=far)
        near = sorted((entry for entry in own if (entry.n, entry.k) == size), key=lambda e: e.m)
        m = m if m <= FEW_TOKENS else -(-m // TILE_TOKENS) * TILE_TOKENS
        i = next((i for i, entry in enumerate(near) if entry.m >= m), len(near) - 1)
        return near[i].between(near[i - 1], m) if i and near[i - 1].m < m < near[i].m else near[i]


def time_key(step: int, family: str, input: str = "float32") -> str:
    """The name of a time in an entry: "7 A8", "14 A16 float16"."""
    return f"{step} {family}" if input == "float32" else f"{step} {family} {input}"


def nearest(
    tables: Iterable[Tuning], gpu: str, cc: tuple[int, int], sms: int | None
) -> Tuning | None:
    """The table of this GPU, else the one of the same compute capability whose number of
    multiprocessors is nearest; None where there is none."""
    alike = [table for table in tables if table.gpu == gpu or table.cc == cc]

    def far(table: Tuning) -> tuple[bool, float, str]:
        ratio = abs(math.log2((table.sms or 1) / (sms or 1)))
        return table.gpu != gpu, ratio, table.gpu

    return min(alike, key=far, default=None)


@lru_cache(maxsize=4)
def known(root: Path = RESULTS) -> tuple[Tuning, ...]:
    """Every table under root, read once."""
    return tuple(read(path) for path in sorted(root.glob(f"*/{NAME}")))


def read(path: Path) -> Tuning:
    """TuningError, with the file's name, for what is not a table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise TuningError(f"schema is {data['schema']!r}, this version reads {SCHEMA}")
        gpu, cc, sms = _machine(data["env"])
        return Tuning(gpu, cc, sms, tuple(_entry(row) for row in data["rows"]))
    except (ValueError, TypeError, KeyError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise TuningError(f"{path} is not a tuning table ({what}): run make tune again") from None


def _machine(env: Mapping[str, Any]) -> tuple[str, tuple[int, int] | None, int | None]:
    gpu, cc, sms = env["gpu"], env["cc"], env["sms"]
    if cc is not None and not (isinstance(cc, list) and [type(x) for x in cc] == [int, int]):
        raise ValueError(f"env.cc is {cc!r}, expected two whole numbers")
    if sms is not None and not (type(sms) is int and sms > 0):
        raise ValueError(f"env.sms is {sms!r}, expected a positive whole number")
    return str(gpu or "an unknown GPU"), None if cc is None else (cc[0], cc[1]), sms


def _entry(row: Mapping[str, Any]) -> Entry:
    times = {str(work): float(us) for work, us in row["us"].items()}
    entry = Entry(str(row["format"]), int(row["N"]), int(row["K"]), int(row["M"]), times)
    if min(entry.n, entry.k, entry.m, *times.values()) <= 0:
        raise ValueError(f"a size or a time that is not positive at {entry.where}")
    return entry
