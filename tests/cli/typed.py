"""A command line as a user types it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def typed(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m steps ...` in the tree at `cwd`, its output in pipes, with some variables set."""
    environment = os.environ | {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"} | variables
    return subprocess.run(
        [sys.executable, "-m", "steps", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
