"""A process of the fuzzer that only pretends. It imports next to nothing, and so starts soon."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def pretend(index: int, line: Any, pipe: Any, ends: tuple[str, ...]) -> None:
    """Be at a case, report two products, and end in some way."""
    line.value = f"case {index}".encode()
    pipe.send(("product", "work"))
    pipe.send(("product", f"work {index}"))
    if ends[index] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif ends[index] == "exits":
        os._exit(3)
    elif ends[index] == "hangs":
        time.sleep(600)
    elif ends[index] == "wrong":
        pipe.send(("wrong", "case x", ["is off"]))
