"""An invented run shaped like a real one, to test charts and tables with. Not a result."""

from __future__ import annotations

from results.record.schema import (
    AsCalled,
    Clocks,
    Environment,
    Git,
    Limits,
    Peer,
    Row,
    Run,
    in_order,
)
from steps.contract import BRANCHES

LADDER = (
    # step, name, family, parent, unit, share of the unit's limit, title
    (1, "step01_naive_w4a16", "A16", None, "fp32", 0.018, "naive W4A16: one thread, one output"),
    (2, "step02_naive_w4a8", "A8", 1, "int32", 0.045, "naive W4A8: integer dot product"),
    (3, "step03_shared_tiled", "A16", 1, "fp32", 0.05, "shared-memory tiles"),
    (3, "step03_shared_tiled", "A8", 2, "int32", 0.12, "shared-memory tiles"),
    (4, "step04_dp4a_emulated", "A8", 3, "packed_int32", 0.13, "dot products packed"),
    (5, "step05_vectorized", "A8", 4, "packed_int32", 0.42, "128-bit accesses"),
    (6, "step06_dp4a", "A8", 5, "dp4a", 0.55, "dp4a: four products an instruction"),
    (7, "step07_mma_int8", "A8", 6, "tensor_int8", 0.093, "int8 tensor cores"),
    (8, "step08_ldmatrix", "A8", 7, "tensor_int8", 0.12, "ldmatrix: warp tiles"),
    (9, "step09_cp_async", "A8", 8, "tensor_int8", 0.157, "cp.async: a multi-stage ring"),
    (10, "step10_stream_k", "A8", 9, "tensor_int8", 0.171, "stream-K: an even share for every SM"),
    (11, "step11_mma_fp16", "A16", 9, "tensor_fp16", 0.58, "W4A16 on tensor cores"),
    (12, "step12_wgmma", "A16", 11, "tensor_fp16", 0.66, "W4A16 with wgmma"),
    (13, "step13_warp_specialized", "A16", 12, "tensor_fp16", 0.75, "producer and consumer warps"),
    (14, "step14_persistent", "A16", 13, "tensor_fp16", 0.83, "persistent blocks"),
    (15, "step15_wgmma_int8", "A8", 14, "tensor_int8", 0.73, "W4A8 with wgmma, one scale a row"),
    (17, "step17_decode", "A8", 2, "tensor_int8", 0.085, "decode: weights stream, one launch"),
    (18, "step18_decode_bulk", "A8", 17, "tensor_int8", 0.04, "decode on Hopper: bulk copies"),
)
BRANCH = dict.fromkeys(range(1, 7), "cuda_cores") | dict.fromkeys(range(7, 11), "int8")
BRANCH |= dict.fromkeys(range(11, 16), "float16") | {17: "decode", 18: "decode"}
HOMES = {10: ((128, 4096, 4096), (512, 4096, 14336))}
TOPS_OF_BRANCHES = {10: (8, 4096), 14: (8, 4096), 15: (8, 4096), 18: (1, 16)}
"""The steps measured at all shapes, and for which M."""
IN_HALF = tuple(range(11, 16))
ACCURACY = {15: "fast"}
ADDED = {"exact": 0.0, "fast": 1e-4}
FORMATS = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34}
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
COMMIT, UTC = "0123abcd", "2026-01-02T03:04:05Z"
CALLED = (
    # api, accuracy, dtype of A and C, step for many tokens, share of its step's speed
    ("gemm.plan", "exact", "float32", 14, 0.9),
    ("QuantLinear", "exact", "float32", 14, 0.85),
    ("QuantLinear", "exact", "float16", 14, 0.92),
    ("QuantLinear", "exact", "bfloat16", 14, 0.8),
    ("QuantLinear", "fast", "float16", 15, 0.93),
    ("QuantLinear", "fast", "bfloat16", 15, 0.9),
)
CALLED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)
SWEPT = 48
FEW = 16
"""Calls choose step 18 up to this M."""


def cublas_us(m: int, n: int, k: int) -> float:
    return max(2 * n * k / 3.6e6, 2 * m * n * k / 690e6)


def homes(step: int) -> tuple[tuple[int, int, int], ...]:
    return HOMES.get(step, BRANCHES[BRANCH[step]].homes)


def measured(step: int, shape: tuple[int, int, int]) -> bool:
    """As in a bench: every step at its home shapes and those of its children, step 1 at the first
    home of each branch, the top steps everywhere."""
    children = [number for number, _, _, parent, *_ in LADDER if parent == step]
    least, most = TOPS_OF_BRANCHES.get(step, (1, 0))
    return (
        any(shape in homes(number) for number in (step, *children))
        or (step == 1 and shape in [branch.homes[0] for branch in BRANCHES.values()])
        or least <= shape[0] <= most
    )


def make_row(
    entry, name: str, shape: tuple[int, int, int], wobble: float, output: str = "float32"
) -> Row:
    """A is of the dtype of C."""
    step, module, family, parent, unit, share, title = entry
    m, n, k = shape
    weights = n * k // 32 * FORMATS[name]
    moved = weights + m * k * (4 if family == "A16" else 1.25) + int(output[-2:]) // 8 * m * n
    operations = 2 * m * n * k
    reach = {10: 0.35, 11: 0.4, 17: 0.85, 18: 0.95} | dict.fromkeys(range(12, 16), 0.45)
    reach = reach.get(step, min(0.2, 3 * share))
    tokens = max(m, 16 if step >= 7 else 1)  # tiles are multiplied whole
    work = 2 * tokens * n * k / (TOPS[unit] * share * 1e6)
    us = max(moved / (TBPS * reach * 1e6), work, 2.5)
    us *= 0.96 if output == "float16" else 1.0
    us *= wobble * (1.06 if name.startswith("q5") else 1.0)
    activation = 0.0 if (family == "A16" and step < 11) or step == 17 else max(1.5, m * k * 5 / 3e6)
    return Row(
        step=step,
        name=module,
        title=title,
        parent=parent,
        unit=unit,
        branch=BRANCH[step],
        scheme=f"W{name[1]}{family}",
        format=name,
        M=m,
        N=n,
        K=k,
        home=shape in homes(step),
        input=output,
        output=output,
        accuracy=ACCURACY.get(step, "exact"),
        status="ok",
        kernel_us=us,
        activation_us=activation,
        total_us=us + activation,
        cublas_us=cublas_us(m, n, k),
        x_cublas=cublas_us(m, n, k) / (us + activation),
        pack_us=12000.0 * step,
        p20_us=us * 0.995,
        p80_us=us * 1.01,
        total_p20_us=(us + activation) * 0.995,
        total_p80_us=(us + activation) * 1.01,
        rounds=12,
        timing="graph",
        sm_mhz=1980.0,
        tflops=operations / us * 1e-6,
        gbps=moved / us * 1e-3,
        limit_share=share,
        nmse_same_operands=2e-13 * (1 + step),
        nmse_float=NMSE[name]
        + (ADDED[ACCURACY[step]] if step in ACCURACY else 3e-5 if family == "A8" else 0.0),
        registers=32 + 8 * step,
        spill_bytes=0,
        smem_bytes=2048 * step,
        source_hash=f"{step:012x}",
        commit=COMMIT,
        utc=UTC,
    )


def make_call(
    called, shape: tuple[int, int, int], name: str = "q4_0", wobble: float = 1.0
) -> AsCalled:
    """Of the sweep where its M is not tabled."""
    api, accuracy, dtype, step, share = called
    m, n, k = shape
    step = 18 if m <= FEW else step
    entry = next(one for one in LADDER if one[0] == step)
    theirs = cublas_us(*shape)
    row = make_row(entry, name, shape, wobble)
    us = (row.total_us or 0.0) / share
    tabled = m in CALLED_TOKENS
    return AsCalled(
        api=api,
        accuracy=accuracy,
        dtype=dtype,
        format=name,
        M=m,
        N=n,
        K=k,
        step=step,
        us=us,
        p20_us=us * 0.99,
        p80_us=us * 1.01,
        cublas_us=theirs,
        x_cublas=theirs / us,
        host_us=(6.0 if api == "gemm.plan" else 40.0) if tabled else None,
        torch_host_us=8.0 if tabled else None,
        rounds=30,
        commit=COMMIT,
        utc=UTC,
        source_hash=f"{step:012x}",
    )


def make_calls(sizes, formats) -> tuple[AsCalled, ...]:
    """Layers in 16 bits in all formats, the others in the first; every M of the sweep in that."""
    first = formats[0]
    swept = [m for m in range(1, SWEPT + 1) if m not in CALLED_TOKENS]
    found = []
    for called in CALLED:
        api, _, dtype, *_ = called
        layers = api == "QuantLinear" and dtype != "float32"
        for i, name in enumerate(formats if layers else [first]):
            tokens = [*CALLED_TOKENS]
            if api == "QuantLinear" and dtype == "float16" and name == first:
                tokens += swept
            found += [
                make_call(called, (m, n, k), name, 1 + 0.02 * i) for n, k in sizes for m in tokens
            ]
    return tuple(found)


def make_layers(sizes) -> list[Peer]:
    """Humming's figures, of another run."""
    return [
        Peer(
            peer=name,
            format=weights,
            M=m,
            N=n,
            K=k,
            us=factor * max(3.0 + n * k / 4e6, 2 * m * n * k / 600e6),
            same_run=False,
            source=f"invented {name}",
        )
        for name, weights, factor in (
            ("humming_w4a16", "int4_group32", 1.0),
            ("humming_w4a8", "int4_row", 0.8),
        )
        for n, k in sizes
        for m in CALLED_TOKENS
    ]


def make_run(shapes=SHAPES, formats=tuple(FORMATS), ladder=LADDER, peers: bool = True) -> Run:
    rows = tuple(
        make_row(entry, name, shape, 1 + 0.02 * i, output)
        for entry in ladder
        for i, name in enumerate(formats)
        for shape in shapes
        if measured(entry[0], shape)
        for output in (("float32", "float16") if entry[0] in IN_HALF else ("float32",))
    )
    sizes = dict.fromkeys((n, k) for _, n, k in shapes)
    calls = make_calls(sizes, formats) if peers else ()
    others = make_layers(sizes) if peers else []
    for m, n, k in shapes if peers else ():
        operations = 2 * m * n * k
        others.append(
            Peer(
                peer="cublas_fp16",
                format="f16",
                M=m,
                N=n,
                K=k,
                us=cublas_us(m, n, k),
                same_run=True,
                source="torch 9.9, kernel only",
                commit=COMMIT,
                utc=UTC,
            )
        )
        if (m, n) == (16, 4096) and k == 4096:
            continue  # published figures have holes
        others += [
            Peer(
                peer="ggml",
                format=name,
                M=m,
                N=n,
                K=k,
                us=max(n * k // 32 * size / 2.2e6, operations / (180e6 + 1e6 * i)),
                same_run=False,
                source="invented",
            )
            for i, (name, size) in enumerate(FORMATS.items())
            if name in formats
        ]
    env = Environment(
        gpu="NVIDIA H200",
        cc=(9, 0),
        sms=132,
        power_limit_w=700.0,
        clocks_mhz=Clocks(before=345.0, after=1980.0, max=1980.0),
        copy_tbps=TBPS,
        limits=Limits(copy_tbps=TBPS, read_tbps=4.35, tops=TOPS),
        git=Git(sha=COMMIT, dirty=False),
        utc=UTC,
    )
    return in_order(Run(env=env, rows=rows, peers=tuple(others), as_called=calls))
