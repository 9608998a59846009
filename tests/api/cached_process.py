"""A process of its own for test_kernel_cache.py: asks for a kernel of step 1 and says on stdout how
many kernels Numba compiled for it, and a digest of its machine code, as JSON.

    python -m tests.api.cached_process [ARCH] [--when FILE]

With --when it imports all it needs, then waits until that file is there.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

from numba.cuda import dispatcher

import steps.instructions  # noqa: F401  (before numba.cuda)
from steps.api.compile import compiled, signature_of
from steps.api.dry_run import launches
from steps.contract import Work
from steps.registry import find


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", nargs="?", default="sm_90a")
    parser.add_argument("--when", type=Path)
    asked = parser.parse_args()
    counted = []

    class Counted(dispatcher._Kernel):
        def __init__(self, *args, **options):
            counted.append(args)
            super().__init__(*args, **options)

    dispatcher._Kernel = Counted
    _, own = launches(Work(find(1), "A16", "q4_0"), (1, 64, 256))
    while asked.when and not asked.when.exists():
        time.sleep(0.005)
    code = compiled(own.kernel, signature_of(own.args), asked.arch)
    digest = hashlib.sha256(code.cubin).hexdigest()
    print(json.dumps({"compiled": len(counted), "name": code.name, "cubin": digest}))


if __name__ == "__main__":
    main()
