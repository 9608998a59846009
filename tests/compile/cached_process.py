"""A process of its own for test_kernel_cache.py: loads a launch of step 1 as a process with a GPU
does, and prints as a line of JSON how many kernels Numba compiled for it, the CPU seconds that it
took after all imports, and the name and a digest of what the driver would have got; for each CC.

    python -m tests.compile.cached_process [CC ...] [--when FILE]

With --when it imports all it needs, then waits until that file is there.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from numba.cuda import dispatcher

from steps.contract import Work
from steps.driver import launcher
from steps.product.choice import Choice
from steps.registry import find


def pretend_gpu(cc: tuple[int, int], loaded: list[Any]) -> None:
    """Let `launcher.load` find a GPU; `loaded` is what it would load there."""

    def on_gpu(code: Any) -> Any:
        loaded.append(code)
        return SimpleNamespace(handle=0, attrs=SimpleNamespace(shared=0))

    device = SimpleNamespace(compute_capability=cc, id=0)
    launcher.cuda = SimpleNamespace(get_current_device=lambda: device)
    launcher.driver.cuKernelGetFunction = lambda handle: (0, handle)
    launcher.launch_function = lambda: None  # nothing is launched
    launcher._on_gpu = on_gpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cc", nargs="*", default=["9.0"])
    parser.add_argument("--when", type=Path)
    asked = parser.parse_args()
    counted: list[Any] = []

    class Counted(dispatcher._Kernel):
        def __init__(self, *args, **options):
            counted.append(args)
            super().__init__(*args, **options)

    dispatcher._Kernel = Counted
    while asked.when and not asked.when.exists():
        time.sleep(0.005)
    for cc in asked.cc:
        loaded: list[Any] = []
        counted.clear()
        major, minor = map(int, cc.split("."))
        pretend_gpu((major, minor), loaded)
        began = time.process_time()
        own = Choice.of_work(Work(find(1), "A16", "q4_0"), (1, 64, 256)).launches()[-1]
        launcher.load(own)
        seconds = time.process_time() - began
        (code,) = loaded
        digest = hashlib.sha256(code.cubin).hexdigest()
        print(json.dumps([len(counted), seconds, code.name, digest]))


if __name__ == "__main__":
    main()
