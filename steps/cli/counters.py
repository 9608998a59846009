"""The command `counters`: what the hardware counted in single launches, by Nsight Compute.

The launches are those of a bench: every lesson at its home shapes, the kernels of the top steps at
all others, from 16 bits to 16 bits where they read them. They go into `results/<gpu>/ncu.json`, one
line each. Nsight Compute must start the process that it examines, so this command line is started
again.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from reference import Problem
from results.measure.bench import Wanted, matrix, wanted_in
from results.record import store
from results.record.environment import environment
from steps.checks.cases import routing
from steps.cli.arguments import formats_of, home_shapes_of, machines, one_step, steps_of, work_of
from steps.cli.run import remark
from steps.cli.tools import NO_COUNTERS, ROOT, required, this
from steps.compile.parallel_compile import compile_ahead
from steps.product.operands import ARRAYS
from steps.registry import ladder

NAME: Final = "ncu.json"
FORMAT: Final = ("q4_0",)

WHAT: Final = (
    "Nsight Compute's counters of single launches with nothing else on the GPU; weights not "
    "rotated, but the caches flushed before each pass; clocks not locked, each launch apart from "
    "others, so that clocks are those of a GPU with nothing to do (sm_mhz) and not those of a run. "
    "sm_cycles_active_of_elapsed: cycles in which an SM had a block, the mean of all, of the "
    "cycles that the launch took. Stalls: warps in that state for each instruction issued, those "
    "below 0.05 left out."
)

WAVEFRONTS: Final = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op"
"""Cycles of shared memory, counted by instruction: one for 128 bytes without a conflict."""

METRICS: Final[Mapping[str, tuple[str, float]]] = {
    "duration_us": ("gpu__time_duration.sum", 1e-3),
    "sm_mhz": ("sm__cycles_elapsed.avg.per_second", 1e-6),
    "blocks": ("launch__grid_size", 1),
    "threads": ("launch__block_size", 1),
    "registers": ("launch__registers_per_thread", 1),
    "instructions": ("smsp__inst_executed.sum", 1),
    "sm_throughput_pct": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "dram_throughput_pct": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "l2_throughput_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "l1_throughput_pct": ("l1tex__throughput.avg.pct_of_peak_sustained_active", 1),
    "issue_slots_busy_pct": ("sm__inst_issued.avg.pct_of_peak_sustained_active", 1),
    "alu_pipe_pct": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active", 1),
    "fma_pipe_pct": ("sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "tensor_pipe_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "tensor_pipe_of_elapsed_pct": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        1,
    ),
    "warps_active_per_sm": ("sm__warps_active.avg.per_cycle_active", 1),
    "shared_bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu.sum", 1),
    # what `steps.simulator.trace` predicts
    "global_load_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", 1),
    "global_load_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", 1),
    "global_store_requests": ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum", 1),
    "global_store_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum", 1),
    "shared_load_wavefronts": (f"{WAVEFRONTS}_ld.sum", 1),
    "shared_store_wavefronts": (f"{WAVEFRONTS}_st.sum", 1),
    "ldmatrix_wavefronts": (f"{WAVEFRONTS}_ldsm.sum", 1),
    "async_store_wavefronts": (f"{WAVEFRONTS}_ldgsts.sum", 1),
    "dram_bytes": ("dram__bytes.sum", 1),
    "l2_bytes": ("lts__t_bytes.sum", 1),
}
"""A figure of a launch -> (the metric of Nsight Compute, by which it is to be multiplied)."""

ACTIVE, ELAPSED = "sm__cycles_active.avg", "sm__cycles_elapsed.max"
STALL: Final = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
STALLS: Final = "regex:smsp__average_warps_issue_stalled_.*_per_issue_active"
LEAST_STALL: Final = 0.05


def counters(args: Namespace) -> int:
    """Counters of the launches into `ncu.json`; 1 if Nsight Compute failed."""
    _, machine, _ = machines("gpu")
    gpu: Any = machine(0)
    wanted = launched(args, gpu.cc)
    if args.launch:
        launch_each(wanted, gpu)
        return 0
    tool = required("ncu")
    metrics = [*(metric for metric, _ in METRICS.values()), ACTIVE, ELAPSED, STALLS]
    command = [
        tool,
        *("--clock-control", "none"),  # as in every measurement here: clocks are not locked
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--metrics", ",".join(metrics), "--kernel-name", f"regex:{'|'.join(names(wanted))}"),
        *this("counters", *map(str, args.steps), "--launch"),
        *(["--format", ",".join(args.format)] if args.format else []),
    ]
    remark(f"{len(wanted)} launches under {tool}")
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        print(f"ncu ended with {ended.returncode}: {NO_COUNTERS}", file=sys.stderr)
        return 1
    env, found = environment(), figures(ended.stdout, wanted)
    if absent := uncounted(found):
        remark(f"this GPU or this ncu does not count {', '.join(absent)}")
    path: Path = args.out or store.path_for(env).with_name(NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(env.gpu, env.git.sha, found), encoding="utf-8")
    print(f"wrote {path}")
    return 0


def launched(args: Namespace, cc: tuple[int, int]) -> list[Wanted]:
    """One launch for each row of a bench, whatever it writes: 16 bits where it reads them."""
    asked = {step.number for step in steps_of(args.steps)}
    formats = formats_of(args.format) if args.format else FORMAT
    found: dict[Any, Wanted] = {}
    for one in matrix(ladder(), formats, cc):
        as_is = one.input == one.output != "bfloat16"
        if one.work.step.number in asked and as_is:
            found[one.work.step.number, one.work.family, one.work.format, one.size] = one
    return list(found.values())


def names(wanted: Iterable[Wanted]) -> list[str]:
    """Of the kernels, which an activation pass is not among."""
    kernels = (one.launched.launches()[-1].kernel for one in wanted)
    return sorted({kernel.__name__ for kernel in kernels})


def launch_each(wanted: Sequence[Wanted], gpu: Any) -> None:
    """Each once, in order, on A of normal numbers and weights that are drawn."""
    compile_ahead([one.launched for one in wanted], gpu, remark)
    rng, blocks, packed = np.random.default_rng(0), {}, {}
    for one in wanted:
        (m, n, k), step, name = one.size, one.work.step, one.work.format
        routed = routing(step, one.size)
        if (name, n, k) not in blocks:
            blocks[name, n, k] = Problem(1, n, k, name).blocks
        layout = step.pack, name, n, k
        if layout not in packed:
            experts = 1 if routed is None else routed.experts  # all of the same weights
            arrays = (np.tile(array, experts) for array in step.pack(blocks[name, n, k]))
            packed[layout] = [gpu.array(array) for array in arrays]
        tokens, ids = m, None
        if routed is not None:
            tokens = m // routed.chosen
            chosen = np.argsort(rng.random((tokens, routed.experts)), axis=1)[:, : routed.chosen]
            ids = gpu.array(chosen.astype(np.int32))
        a = gpu.array(rng.standard_normal((tokens, k), dtype=np.float32).astype(ARRAYS[one.input]))
        out = gpu.empty((m, n), ARRAYS[one.output])
        activations, own = one.launched.on(gpu, packed[layout], a, out, ids)
        for launched in (*activations.launches, own):
            gpu.run(launched)
        gpu.synchronize()


def launch(args: Namespace) -> int:
    """Compiles one step and launches it once on the GPU: what a profiler looks at."""
    _, machine, _ = machines("gpu")
    work = work_of(args, one_step(args.steps))
    shape = home_shapes_of(args, work.step)[0]
    launch_each([wanted_in(work, shape, work.output(args.dtype))], machine(0))
    m, n, k = shape
    print(f"launched {work} at M={m} N={n} K={k}")
    return 0


# --- what it says ---------------------------------------------------------------------------------


def figures(printed: str, wanted: Sequence[Wanted]) -> list[dict[str, Any]]:
    """The figures of each launch, of what Nsight Compute printed: a line of names, one of units,
    one for each launch. ValueError where these are not as many as were wanted."""
    lines = "".join(line for line in printed.splitlines(keepends=True) if line.startswith('"'))
    rows = [row for row in csv.DictReader(io.StringIO(lines)) if row["ID"]]
    if len(rows) != len(wanted):
        raise ValueError(f"ncu saw {len(rows)} launches of {len(wanted)}")
    found = []
    for row, one in zip(rows, wanted, strict=True):
        m, n, k = one.size
        facts: dict[str, Any] = {
            "step": one.work.step.number,
            "family": one.work.family,
            "format": one.work.format,
            **{"M": m, "N": n, "K": k},
            "output": one.output,
            "kernel": row["Kernel Name"].split("[")[0].split("::")[-1],
        }
        for name, (metric, factor) in METRICS.items():
            if (value := _number(row.get(metric))) is not None:
                value *= factor
                facts[name] = int(value) if value == int(value) else round(value, 2)
        active, elapsed = _number(row.get(ACTIVE)), _number(row.get(ELAPSED))
        if active is not None and elapsed:
            facts["sm_cycles_active_of_elapsed"] = round(active / elapsed, 3)
        for metric, text in sorted(row.items()):
            value = _number(text) or 0.0
            if (state := STALL.fullmatch(metric)) and value >= LEAST_STALL:
                facts[f"stall_{state[1]}_warps_per_issue"] = round(value, 2)
        found.append(facts)
    return found


def uncounted(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that no launch has a value of: Nsight Compute leaves unknown ones out, silently
    where they are of the kind smsp__sass."""
    return [
        metric for name, (metric, _) in METRICS.items() if not any(name in each for each in found)
    ]


def to_json(gpu: str | None, commit: str | None, found: Sequence[Mapping[str, Any]]) -> str:
    """The file: a line for each launch, so that two can be compared."""
    head = {"what": WHAT, "gpu": gpu, "commit": commit}
    lines = ",\n".join(f"  {json.dumps(each)}" for each in found)
    return f'{json.dumps(head, indent=1)[:-2]},\n "kernels": [\n{lines}\n ]\n}}\n'


def _number(text: str | None) -> float | None:
    """Of "1,234.5"; None of what is no number."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None
