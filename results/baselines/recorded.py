"""Figures of others that were measured in another run: `results/baselines/*.json`.

Each file names the baseline, the GPU, what was measured, when and by which protocol; figures of
another GPU say nothing here. A file for a GPU of yours, such as of llama.cpp's `test-backend-ops
perf -o MUL_MAT`, looks like the ones that are here, and a bench takes it from then on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from results.record import ROOT
from results.record.codec import RecordError
from results.record.schema import Peer, Size, mnk

FOLDER: Final = ROOT / "results" / "baselines"
KIND: Final = {"cublas_fp16": "kernel", "ggml": "total"}
"""What a baseline's time is: of its kernel alone, or from float32 A to float32 C."""


def recorded(
    gpu: str | None,
    shapes: Iterable[Size] | None = None,
    formats: Iterable[str] | None = None,
    folder: Path = FOLDER,
) -> tuple[Peer, ...]:
    """The figures of this very GPU, in the files' order; `shapes` and `formats` (of the baseline's
    weights) keep only those, None keeps all. RecordError for a file without its provenance."""
    wanted_shapes = None if shapes is None else set(shapes)
    wanted_formats = None if formats is None else set(formats)
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
    return tuple(
        peer
        for peer in peers
        if (wanted_shapes is None or peer.shape in wanted_shapes)
        and (wanted_formats is None or peer.format in wanted_formats)
    )
