"""`run`: what was measured on the GPU that the README shows, as if all code had changed since."""

from __future__ import annotations

from dataclasses import replace

import pytest

from results.record import store
from results.record.schema import Run

FORMATS = ("q4_0", "q5_1")
SWEPT = 48


@pytest.fixture(scope="session")
def run() -> Run:
    """Of it two formats, and the sweep up to `SWEPT` tokens: a test reads it in a second. All calls
    are of one commit, whichever were measured again since the sweep."""
    path = store.headline()
    assert path is not None
    whole = store.read(path)
    return replace(
        whole,
        rows=tuple(replace(r, source_hash="0" * 12) for r in whole.rows if r.format in FORMATS),
        as_called=tuple(
            replace(one, source_hash="0" * 12, commit="0" * 8)
            for one in whole.as_called
            if one.format in FORMATS and (one.M <= SWEPT or not one.swept)
        ),
    )
