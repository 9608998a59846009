"""The host's time for one eager call: QuantLinear, a plan and gemm, beside torch's own.

    python -m results.measure.host_time [--json]      # --json: into results/<gpu>/

A call is timed until it returns; it has queued its work by then, and the GPU is not waited for. The
queue is drained between batches of calls, outside of what is timed, so that no call waits for room
in it. Ours and theirs take turns, batch by batch, in one process. All calls are under no_grad:

    QuantLinear(x)              torch.nn.Linear(x) of the same shape and dtype, no bias
    plan(a, out)                torch.matmul(a, w.T, out=out)
    gemm(a, handle, out=out)    the same
    gemm(a, handle)             the same; C is a new tensor
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from qformats import WEIGHT_FORMATS, quantize
from results.record import host_rows, store
from results.record.environment import environment, finished
from results.record.host_rows import HostRow, HostRun
from steps.contract import FLOATS

N: Final = 4096
K: Final = 4096
TOKENS: Final = (1, 512)
BATCH: Final = 20  # calls between two waits for the GPU
ROUNDS: Final = 25
WARM_UP: Final = 5  # calls, which compile, load and choose algorithms

Call = Callable[[], Any]


def in_turn(calls: Sequence[Call], drain: Call, rounds: int = ROUNDS) -> list[list[list[float]]]:
    """[call][round][of BATCH calls] microseconds until a call returned."""
    taken: list[list[list[float]]] = [[] for _ in calls]
    for call in calls:
        for _ in range(WARM_UP):
            call()
    for _ in range(rounds):
        for call, of_call in zip(calls, taken, strict=True):
            drain()
            batch = []
            for _ in range(BATCH):
                start = time.perf_counter()
                call()
                batch.append((time.perf_counter() - start) * 1e6)
            of_call.append(batch)
    drain()
    return taken


def rows_of(
    labels: Sequence[str],
    taken: Sequence[Sequence[Sequence[float]]],
    shape: tuple[int, int, int],
    dtype: str,
    format_name: str,
) -> list[HostRow]:
    """A row for each label; labels, and what was taken, are of ours and theirs by turns."""
    found = []
    for api, ours, theirs in zip(labels, taken[::2], taken[1::2], strict=True):
        every = np.concatenate([np.array(batch) for batch in ours])
        p20, median, p80 = (float(us) for us in np.quantile(every, [0.2, 0.5, 0.8]))
        of_rounds = [
            statistics.median(one) / statistics.median(other)
            for one, other in zip(ours, theirs, strict=True)
        ]
        found.append(
            HostRow(
                api=api,
                dtype=dtype,
                format=format_name,
                M=shape[0],
                N=shape[1],
                K=shape[2],
                us=median,
                p20_us=p20,
                p80_us=p80,
                torch_us=float(np.median([us for batch in theirs for us in batch])),
                x_torch=statistics.median(of_rounds),
                calls=every.size,
            )
        )
    return found


def measure(format_name: str = "q4_0", say: Callable[[str], None] = print) -> list[HostRow]:
    """All rows, on the current GPU."""
    import torch

    from steps import gemm, pack
    from steps.nn.linear import QuantLinear

    rng = np.random.default_rng(0)
    w = rng.standard_normal((N, K), dtype=np.float32) / np.float32(K**0.5)
    blocks = quantize(w, format_name)
    layer, handle = QuantLinear.from_blocks(blocks).to("cuda"), pack(blocks)
    found: list[HostRow] = []
    for dtype in FLOATS:
        kind = getattr(torch, dtype)
        linear = torch.nn.Linear(K, N, bias=False, device="cuda", dtype=kind)
        for m in TOKENS:
            a = torch.from_numpy(rng.standard_normal((m, K), dtype=np.float32)).to("cuda", kind)
            out, other = a.new_empty((m, N)), a.new_empty((m, N))
            plan = gemm.plan(m, handle, input=dtype, dtype=dtype)  # type: ignore[attr-defined]
            matmul = partial(torch.matmul, a, linear.weight.T, out=other)
            ours: dict[str, Call] = {
                "QuantLinear": partial(layer, a),
                "gemm.plan": partial(plan, a, out),
                "gemm, out": partial(gemm, a, handle, out=out, dtype=dtype),
                "gemm": partial(gemm, a, handle, dtype=dtype),
            }
            theirs = [partial(linear, a), matmul, matmul, matmul]
            calls = [one for pair in zip(ours.values(), theirs, strict=True) for one in pair]
            with torch.no_grad():
                taken = in_turn(calls, torch.cuda.synchronize)
            of_shape = rows_of(list(ours), taken, (m, N, K), dtype, format_name)
            for row in of_shape:
                say(
                    f"M={m} {dtype} {row.api}: {row.us:.1f} us, torch {row.torch_us:.1f} us, "
                    f"{row.x_torch:.2f}x"
                )
            found += of_shape
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="results.measure.host_time")
    parser.add_argument("--format", choices=WEIGHT_FORMATS, default="q4_0")
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=Path(),
        metavar="FILE",
        help=f"write the results there (default results/<gpu>/{host_rows.NAME})",
    )
    options = parser.parse_args(arguments)
    try:
        import torch
    except ModuleNotFoundError:
        print("torch is not installed: pip install torch", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("torch finds no CUDA GPU: nothing is measured", file=sys.stderr)
        return 2
    env = environment()
    rows = measure(options.format)
    run = HostRun(env=finished(env), torch=torch.__version__, rows=rows)
    if options.json is not None:
        default = store.path_for(env).with_name(host_rows.NAME)
        print(host_rows.write(run, default if options.json == Path() else options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
