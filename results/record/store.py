"""Where result files are kept, `results/<gpu slug>/`: a run is merged, and each written atomically.

Figures of others, of another run, are in `results/baselines/`.

A bench measures what is missing or stale and merges it into the file after every loop, so a bench
that is killed loses one loop at most. History is git's.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from results.record import ROOT
from results.record.codec import RecordError, from_json, to_json
from results.record.schema import AsCalled, Environment, Peer, Row, Run, in_order, mnk

RESULTS: Final = ROOT / "results"
NAME: Final = "run.json"
BASELINES: Final = RESULTS / "baselines"


def read(path: Path | str) -> Run:
    """A run. RecordError, with the file's name, for anything else."""
    try:
        return from_json(Run, Path(path).read_text(encoding="utf-8"))
    except (RecordError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from None


def write(run: Run, path: Path) -> Path:
    """Write the file whole or not at all, in place of what was there."""
    text = to_json(run)
    from_json(Run, text)  # never write what could not be read back
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the rename stays on one file system and is therefore atomic.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        return path
    finally:
        temporary.unlink(missing_ok=True)


def slug(gpu: str | None) -> str:
    """ "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", (gpu or "unknown-gpu").lower()).strip("-")


def path_for(env: Environment, root: Path = RESULTS) -> Path:
    """Where the run of this GPU is kept."""
    return root / slug(env.gpu) / NAME


Record = TypeVar("Record", Row, Peer, AsCalled)


def merge(
    run: Run,
    *,
    env: Environment | None = None,
    rows: Iterable[Row] = (),
    peers: Iterable[Peer] = (),
    as_called: Iterable[AsCalled] = (),
) -> Run:
    """The run with these records in place of those it had of the same key; ratios worked out anew.
    A figure measured beside ours is not replaced by one recorded elsewhere."""

    def joined(old: Iterable[Record], new: Iterable[Record]) -> tuple[Record, ...]:
        found: dict[tuple[Any, ...], Record] = {one.key: one for one in old}
        found.update({one.key: one for one in new})
        return tuple(found.values())

    measured = {peer.key for peer in run.peers if peer.same_run}
    peers = [peer for peer in peers if peer.same_run or peer.key not in measured]
    return in_order(
        replace(
            run,
            env=env or run.env,
            rows=joined(run.rows, rows),
            peers=joined(run.peers, peers),
            as_called=joined(run.as_called, as_called),
        )
    )


def recorded(gpu: str | None, folder: Path = BASELINES) -> list[Peer]:
    """Figures of others that were measured in another run on this very GPU, in the order of their
    files: those of another GPU say nothing here. Each names the baseline, what was measured, when
    and by which protocol; RecordError for one that does not. A file for a GPU of yours, such as of
    llama.cpp's `test-backend-ops perf -o MUL_MAT`, looks like those that are there, and a bench
    takes it from then on."""
    peers = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        try:
            if data["gpu"] != gpu:
                continue
            source = f"{data['peer']}; {data['date']}; {data['protocol']} ({path.name})"
            peers += [
                Peer(
                    peer=data["baseline"],
                    format=row["format"],
                    **mnk((row["M"], row["N"], row["K"])),
                    us=float(row["us"]),
                    same_run=False,
                    source=source,
                    commit=data.get("commit"),
                )
                for row in data["rows"]
            ]
        except KeyError as error:
            raise RecordError(
                f"{path} has no {error}: recorded figures need their provenance"
            ) from None
    return peers


def headline(root: Path = RESULTS) -> Path | None:
    """The run that the README and the charts show."""
    return next((path for path, _ in ranked(root)), None)


def ranked(root: Path = RESULTS) -> list[tuple[Path, Run]]:
    """Every run, first those with most good rows and of such the newest. So a laptop's short run
    does not replace the whole ladder."""

    def place(one: tuple[Path, Run]) -> tuple[int, str]:
        return sum(row.status == "ok" for row in one[1].rows), one[1].env.utc or ""

    found = ((path, read(path)) for path in sorted(root.glob(f"*/{NAME}")))
    return sorted(found, key=place, reverse=True)
