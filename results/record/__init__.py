"""Measurements as data: the schema of a run, its file, its environment, and its provenance.

schema.py        Row, Peer, AsCalled, Environment, Run; JSON both ways, validated
model_rows.py    a whole model of torch: rows of their own in results/<gpu>/transformers.json
store.py         results/<gpu>/run.json: read, merged, written atomically
provenance.py    the code a row was measured with, as a hash; which rows are stale
environment.py   GPU, driver, software, commit and command
"""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
