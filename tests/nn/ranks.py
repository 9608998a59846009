"""Several processes that share layers over gloo, on the CPU of this machine."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = timedelta(seconds=240)
"""How long a rank waits for the others, whose processes may start one after another."""


IMPORTED = (
    *("tests.nn.shard_cases", "tests.decoder.parallel_cases"),
    *("torch._dynamo", "torch._dynamo.backends.debugging", "torch._inductor.compile_fx"),
)
"""What ranks run, and what torch imports when they shard and compile. It takes seconds, so one
process does it, of which those of ranks are copies."""


def run_on_ranks(
    count: int, work: Callable[..., Any], folder: Path, *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """What work(*arguments) returned on each of `count` ranks. An error of a rank is raised."""
    import torch.multiprocessing as processes

    processes.set_forkserver_preload(list(IMPORTED))
    method = "spawn" if "cuda" in backend else "forkserver"  # imports may have begun with the GPU
    processes.start_processes(
        _rank, (count, work, folder, arguments, backend), count, start_method=method
    )
    return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(count)]


def each_case(cases: list[Callable[[], None]]) -> dict[str, str]:
    """The traceback of each case, or "" where it passed."""
    found = {}
    for case in cases:
        try:
            case()
            found[case.__name__] = ""
        except Exception:
            found[case.__name__] = traceback.format_exc()
    return found


def _rank(
    rank: int, count: int, work: Any, folder: Path, arguments: tuple[Any, ...], backend: str
) -> None:
    import torch
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), count)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=count, timeout=PATIENCE
    )
    found = work(*arguments)
    distributed.barrier()
    written = folder / f"{rank}.part"
    written.write_bytes(pickle.dumps(found))
    written.rename(folder / f"{rank}")
    until = time.monotonic() + PATIENCE.total_seconds()
    while not all((folder / f"{one}").exists() for one in range(count)):
        assert time.monotonic() < until, f"rank {rank} waited for the others"
        time.sleep(0.01)
    # Not by way of the interpreter's end, where a thread of gloo that is still there aborts the
    # process. All ranks are through their last exchange, and what they found is in files.
    os._exit(0)
