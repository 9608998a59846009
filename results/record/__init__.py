"""Measurements as data: the schema of a run, its file, its environment, and its provenance.

codec.py         what a result file is: declared by a dataclass, JSON both ways, checked
schema.py        the records: Row, Peer, AsCalled, Environment, Run
store.py         results/<gpu>/: found, read, merged, written atomically
provenance.py    the code a row was measured with, as a hash; which rows are stale
environment.py   GPU, driver, software, commit and command
"""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
