"""An invented run of the ladder, to test charts and tables with: later steps are faster. Not a
result."""

from __future__ import annotations

from typing import Any

from qformats import FORMATS as CODECS
from qformats import WEIGHT_FORMATS
from results.record.schema import (
    AsCalled,
    Clocks,
    Environment,
    Git,
    Limits,
    Peer,
    Row,
    Run,
    Size,
    in_order,
    mnk,
)
from steps import ladder
from steps.contract import BRANCHES, Step, scheme

FORMATS = WEIGHT_FORMATS
TOPS_OF_BRANCHES = {10: (8, 4096), 14: (8, 4096), 15: (8, 4096), 18: (1, 16)}
"""The steps measured at all shapes, and for which M."""
NMSE = {"q4_0": 7.4e-3, "q4_1": 6.1e-3, "q5_0": 1.8e-3, "q5_1": 1.4e-3, "q8_0": 2.9e-5}
TOPS = {
    "fp32": 62.1,
    "int32": 31.5,
    "packed_int32": 63.0,
    "dp4a": 125.0,
    "tensor_int8": 1600.0,
    "tensor_fp16": 810.0,
}
SHAPES = tuple(
    (m, n, k)
    for m in (1, 8, 16, 128, 512, 4096)
    for n, k in ((4096, 4096), (4096, 14336), (14336, 4096))
)
TBPS = 4.26
STAMP = {"commit": "0123abcd", "utc": "2026-01-02T03:04:05Z"}
CALLED = (
    # api, accuracy, dtype of A and C, step for many tokens, times as fast as cuBLAS
    ("gemm.plan", "exact", "float32", 14, 0.9),
    ("QuantLinear", "exact", "float32", 14, 0.85),
    ("QuantLinear", "exact", "float16", 14, 1.1),
    ("QuantLinear", "exact", "bfloat16", 14, 1.0),
    ("QuantLinear", "fast", "float16", 15, 1.5),
    ("QuantLinear", "fast", "bfloat16", 15, 1.4),
)
CALLED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
SWEPT = 48
FEW = 16
"""Calls choose step 18 up to this M."""


def cublas_us(m: int, n: int, k: int) -> float:
    return 2 * n * k / 3.6e6 + 2 * m * n * k / 690e6


def measured(step: Step, shape: Size) -> bool:
    """As in a bench: every step at its home shapes and those of its children, step 1 at the first
    home of each branch, the last steps everywhere."""
    children = [each for each in ladder() if step.number in each.parents.values()]
    least, most = TOPS_OF_BRANCHES.get(step.number, (1, 0))
    return (
        any(shape in each.home_shapes for each in (step, *children))
        or (step.number == 1 and shape in [branch.homes[0] for branch in BRANCHES.values()])
        or least <= shape[0] <= most
    )


def make_row(step: Step, family: Any, name: str, shape: Size, output: str) -> Row:
    """A is of the dtype of C."""
    m, n, k = shape
    unit = step.unit[family]
    share = 0.01 + 0.045 * step.number
    operations, moved = 2 * m * n * k, n * k // 32 * CODECS[name].block_bytes + 4 * m * (k + n)
    least = max(operations / TOPS[unit], moved / TBPS) * 1e-6
    us = least / share * (1 + 0.02 * FORMATS.index(name)) * (0.96 if output == "float16" else 1.0)
    activation = 0.0 if family == "A16" else m * k / 1e6
    added = 1e-4 if step.accuracy == "fast" else 3e-5 if family == "A8" else 0.0
    return Row(
        step=step.number,
        name=step.name,
        title=step.title,
        parent=step.parents.get(family),
        unit=unit,
        branch=step.branch,
        scheme=scheme(name, family),
        format=name,
        **mnk(shape),
        home=shape in step.home_shapes,
        input=output,
        output=output,
        accuracy=step.accuracy,
        status="ok",
        kernel_us=us,
        activation_us=activation,
        total_us=us + activation,
        cublas_us=cublas_us(*shape),
        x_cublas=cublas_us(*shape) / (us + activation),
        p20_us=us * 0.995,
        p80_us=us * 1.01,
        total_p20_us=(us + activation) * 0.995,
        total_p80_us=(us + activation) * 1.01,
        rounds=12,
        tflops=operations / us * 1e-6,
        gbps=moved / us * 1e-3,
        limit_share=share,
        nmse_same_operands=2e-13 * (1 + step.number),
        nmse_float=NMSE[name] + added,
        registers=32 + 8 * step.number,
        source_hash=f"{step.number:012x}",
        **STAMP,
    )


def make_call(called: Any, shape: Size, name: str) -> AsCalled:
    """Of the sweep where its M is not tabled."""
    api, accuracy, dtype, step, faster = called
    us = cublas_us(*shape) / faster * (1 + 0.02 * FORMATS.index(name))
    step, tabled = 18 if shape[0] <= FEW else step, shape[0] in CALLED_TOKENS
    return AsCalled(
        api=api,
        accuracy=accuracy,
        dtype=dtype,
        format=name,
        **mnk(shape),
        step=step,
        us=us,
        p20_us=us * 0.99,
        p80_us=us * 1.01,
        cublas_us=cublas_us(*shape),
        x_cublas=cublas_us(*shape) / us,
        host_us=40.0 if tabled else None,
        torch_host_us=8.0 if tabled else None,
        rounds=30,
        source_hash=f"{step:012x}",
        **STAMP,
    )


def make_calls(sizes: Any, formats: Any) -> list[AsCalled]:
    """Layers in 16 bits in all formats, the others in the first; every M of the sweep in that."""
    found = []
    for called in CALLED:
        api, _, dtype, *_ = called
        layers = api == "QuantLinear" and dtype != "float32"
        for name in formats if layers else formats[:1]:
            tokens = {*CALLED_TOKENS}
            if layers and dtype == "float16" and name == formats[0]:
                tokens |= set(range(1, SWEPT + 1))
            found += [make_call(called, (m, n, k), name) for n, k in sizes for m in sorted(tokens)]
    return found


def make_peers(shapes: Any, formats: Any) -> list[Peer]:
    """cuBLAS beside us, llama.cpp and Humming of another run."""

    def peer(name: str, weights: str, shape: Size, times: float, ours: bool = False) -> Peer:
        us = cublas_us(*shape) * times
        stamp: dict[str, Any] = {"source": "invented", "same_run": ours}
        return Peer(peer=name, format=weights, **mnk(shape), us=us, **stamp, **STAMP)

    found = [peer("cublas_fp16", "f16", shape, 1.0, True) for shape in shapes]
    found += [peer("ggml", name, shape, 2.5) for name in formats for shape in shapes]
    for n, k in dict.fromkeys((n, k) for _, n, k in shapes):
        for m in CALLED_TOKENS:
            found.append(peer("humming_w4a16", "int4_group32", (m, n, k), 1.2))
            found.append(peer("humming_w4a8", "int4_row", (m, n, k), 0.8))
    return found


def make_run(shapes: Any = SHAPES, formats: Any = FORMATS, peers: bool = True) -> Run:
    rows = [
        make_row(step, family, name, shape, output)
        for step in ladder()
        for family in step.families
        for name in formats
        for shape in shapes
        if measured(step, shape)
        for output in (("float32", "float16") if 11 <= step.number <= 15 else ("float32",))
    ]
    sizes = tuple(dict.fromkeys((n, k) for _, n, k in shapes))
    env = Environment(
        gpu="NVIDIA H200",
        cc=(9, 0),
        sms=132,
        power_limit_w=700.0,
        clocks_mhz=Clocks(before=345.0, after=1980.0, max=1980.0),
        copy_tbps=TBPS,
        limits=Limits(copy_tbps=TBPS, read_tbps=4.35, tops=TOPS),
        git=Git(sha=STAMP["commit"], dirty=False),
        utc=STAMP["utc"],
    )
    calls = make_calls(sizes, formats) if peers else []
    others = make_peers(shapes, formats) if peers else []
    return in_order(Run(env=env, rows=tuple(rows), peers=tuple(others), as_called=tuple(calls)))
